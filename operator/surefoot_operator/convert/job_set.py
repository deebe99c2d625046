"""Converts a JobSet (jobset.x-k8s.io/v1alpha2) by its group that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.job_draft import Draft
from surefoot_operator.convert.trainer_template import trainer_template

CONTAINERS = ("trainer", "pytorch", "node")
_NAMES = ("trainer", "worker", "node", "train", "pytorch")
_JOB_LEFT = {
    "backoffLimit": "restarts count for the job, not for a pod",
    "backoffLimitPerIndex": "restarts count for the job, not for a pod",
    "podReplacementPolicy": "a lost worker is replaced at once, fenced by its epoch",
    "podFailurePolicy": "failurePolicy.rules match exit codes",
    "ttlSecondsAfterFinished": "it is the job's",
}
_LEFT = {
    "successPolicy": "a job is complete when all its ranks are",
    "startupPolicy": "all workers start together",
    "network": "agents give each rank its address",
    "coordinator": "agents give each rank its address",
    "managedBy": "it names a controller of JobSets",
}


def convert(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    draft.move(("spec", "suspend"), "suspend")
    draft.move(("spec", "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.move(("spec", "failurePolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    manifest.leave("spec", "failurePolicy", "rules", why="failurePolicy.rules match exit codes")
    manifest.leave("spec", "failurePolicy", "restartStrategy", why="trainers restart in place where a worker lives")
    for name, why in _LEFT.items():
        manifest.leave("spec", name, why=why)
    draft.claims(manifest, "spec")
    place = group_that_trains(draft)
    root = ("spec", "replicatedJobs", place)
    template = manifest.take(*root, "template", "spec", "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible(f"spec.replicatedJobs[{place}]: a pod template is needed")
    trainer = trainer_template(template, CONTAINERS, f"spec.replicatedJobs[{place}].template.spec.template")
    groups = manifest.take(*root, "replicas", to="spec.replicas")
    pods = manifest.take(*root, "template", "spec", "parallelism", to="spec.replicas")
    for name in ("completions", "completionMode"):
        manifest.leave(*root, "template", "spec", name, why="a job is complete when all its ranks are")
    manifest.leave(*root, "template", "metadata", why="it is of Jobs; the pods' own labels and annotations are kept")
    draft.move((*root, "template", "spec", "activeDeadlineSeconds"), "runPolicy", "activeDeadlineSeconds")
    for name, why in _JOB_LEFT.items():
        manifest.leave(*root, "template", "spec", name, why=why)
    for name in ("name", "groupName"):
        manifest.leave(*root, name, why="a TrainingJob is one group of equal workers")
    manifest.leave(*root, "dependsOn", why="put what has to end first into an init container, or apply it before")
    draft.accept(trainer)
    number = [trainer.number(1 if said is None else said) for said in (groups, pods)]
    known = number[0] is not None and number[1] is not None
    draft.size(trainer, (number[0] or 1) * (number[1] or 1) if known else f"{groups} × {pods}", None)


def group_that_trains(draft: Draft) -> int:
    """Finds the place of the one group of pods that trains.

    That is the only one, else the one that is called so, else the one with the most pods.

    Raises:
        NotConvertible: there is none.
    """
    manifest, root = draft.manifest, ("spec", "replicatedJobs")
    count = manifest.length(*root)
    if not count:
        raise NotConvertible("spec.replicatedJobs: a group of pods is needed")
    rank = []
    for place in range(count):
        told = manifest.peek(*root, place, "replicas"), manifest.peek(*root, place, "template", "spec", "parallelism")
        groups, pods = (one if isinstance(one, int) else 1 for one in told)
        named = str(manifest.peek(*root, place, "name") or "").rstrip("s")
        rank.append((_NAMES.index(named) if named in _NAMES else len(_NAMES), -groups * pods, place))
    chosen = min(rank)[-1]
    for place in range(count):
        if place != chosen:
            manifest.leave(*root, place, why="a TrainingJob is one group of equal workers; apply this one beside it")
    if count > 1:
        name = manifest.peek(*root, chosen, "name")
        draft.to_do.append(
            f"spec.template is that of {name!s:.60}, one of {count} groups: see that it is the one that trains"
        )
    return chosen
