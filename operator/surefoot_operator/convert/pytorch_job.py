"""Converts Kubeflow's PyTorchJob (kubeflow.org/v1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot_operator.convert import gang_policy
from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.job_draft import Draft
from surefoot_operator.convert.trainer_template import RESTARTS, trainer_template

_ROLES = ("Master", "Worker")
_RUN_POLICY = {
    "activeDeadlineSeconds": "activeDeadlineSeconds",
    "ttlSecondsAfterFinished": "ttlSecondsAfterFinished",
    "backoffLimit": "backoffLimit",
}
_LEFT = {
    "rdzvBackend": "agents give the ranks their rendezvous",
    "rdzvHost": "agents give the ranks their rendezvous",
    "rdzvPort": "agents give the ranks their rendezvous",
    "rdzvId": "agents give the ranks their rendezvous",
    "rdzvConf": "agents give the ranks their rendezvous",
    "standalone": "agents give the ranks their rendezvous",
    "metrics": "no autoscaler changes a job's size; `kubectl scale` does",
}
PERMANENT_EXIT_CODES = [
    {"name": "permanent", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(1, 65))}},
    {"name": "permanent-too", "action": "FailJob", "onExitCodes": {"operator": "In", "values": list(range(65, 128))}},
]
"""Kubeflow's `ExitCode`: 1 to 127 are final, 128 and above are tried again."""


def convert(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    for name, field in _RUN_POLICY.items():
        draft.move(("spec", "runPolicy", name), "runPolicy", field)
    draft.move(("spec", "runPolicy", "suspend"), "suspend")
    clean_pod_policy(draft, ("spec", "runPolicy", "cleanPodPolicy"))
    manifest.leave("spec", "runPolicy", "managedBy", why="it names a controller of PyTorchJobs")
    for name, why in _LEFT.items():
        manifest.leave("spec", "elasticPolicy", name, why=why)
    draft.move(("spec", "elasticPolicy", "minReplicas"), "elasticPolicy", "minReplicas")
    draft.move(("spec", "elasticPolicy", "maxReplicas"), "elasticPolicy", "maxReplicas")
    draft.move(("spec", "elasticPolicy", "maxRestarts"), "failurePolicy", "maxRestarts")
    ranks = manifest.take("spec", "nprocPerNode", to="spec.nprocPerNode")
    ranks = manifest.take("spec", "elasticPolicy", "nProcPerNode", to="spec.nprocPerNode") or ranks
    _replicas(draft, ranks)


def clean_pod_policy(draft: Draft, path: tuple[str, ...]) -> None:
    """Takes `Running` and `All` over; `None` has no counterpart."""
    policy = draft.manifest.peek(*path)
    if policy in ("Running", "All"):
        draft.manifest.take(*path, to="spec.runPolicy.cleanPodPolicy")
        draft.put(policy, "runPolicy", "cleanPodPolicy")
    elif policy is not None:
        draft.manifest.leave(*path, why="pods that have ended stay for their logs, those that run are ended")


def _replicas(draft: Draft, ranks: object) -> None:
    manifest = draft.manifest
    root = ("spec", "pytorchReplicaSpecs")
    templates = {role: manifest.take(*root, role, "template", to="spec.template") for role in _ROLES}
    there = [role for role in _ROLES if templates[role] is not None]
    if not there:
        raise NotConvertible("spec.pytorchReplicaSpecs: a Master or a Worker with a template is needed")
    asked = [manifest.take(*root, role, "replicas", to="spec.replicas") for role in there]
    asked = [1 if number is None else number for number in asked]
    first = there[0]
    trainer = trainer_template(templates[first], ("pytorch",), ".".join((*root, first, "template")))
    if len(there) > 1 and templates["Master"] != templates["Worker"]:
        draft.to_do.append("spec.template is the Master's; the Worker's is another, and all workers are alike here")
    numbers = [trainer.number(number) for number in asked]
    replicas = sum(n for n in numbers if n is not None) if None not in numbers else asked[numbers.index(None)]
    for role in there:
        _restart_policy(draft, (*root, role, "restartPolicy"))
    priority = manifest.take(
        "spec", "runPolicy", "schedulingPolicy", "priorityClass", to="spec.template.spec.priorityClassName"
    )
    if priority is not None:
        trainer.template["spec"].setdefault("priorityClassName", priority)
    draft.accept(trainer)
    gang_policy.of_run_policy(draft, trainer.template["spec"].get("schedulerName"))
    if priority is not None and draft.spec.get("schedulingPolicy", {}).get("gang") == "Volcano":
        draft.put(priority, "schedulingPolicy", "priorityClass")
    draft.size(trainer, replicas, ranks)


def _restart_policy(draft: Draft, path: tuple[str, ...]) -> None:
    policy = draft.manifest.peek(*path)
    if policy == "Never":
        draft.manifest.take(*path, to="spec.failurePolicy.maxRestarts")
        draft.put(0, "failurePolicy", "maxRestarts")
    elif policy == "ExitCode":
        draft.manifest.take(*path, to="spec.failurePolicy.rules")
        draft.put(PERMANENT_EXIT_CODES, "failurePolicy", "rules")
    else:
        draft.manifest.leave(*path, why=RESTARTS)
