"""Converts SageMaker HyperPod's HyperPodPyTorchJob (sagemaker.amazonaws.com/v1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot_operator.convert.conversion_errors import NotConvertible
from surefoot_operator.convert.job_draft import Draft
from surefoot_operator.convert.pytorch_job import clean_pod_policy
from surefoot_operator.convert.trainer_template import trainer_template

_ELASTIC = {
    "minReplicas": "minReplicas",
    "maxReplicas": "maxReplicas",
    "replicaIncrementStep": "replicaIncrementStep",
    "faultyScaleDownTimeoutInSeconds": "faultyScaleDownTimeoutSeconds",
    "scaleUpSnoozeTimeInSeconds": "scaleUpSnoozeSeconds",
}
_ELASTIC_LEFT = {
    "gracefulShutdownTimeoutInSeconds": "a world halts at a saved step, within the template's grace period",
    "scalingTimeoutInSeconds": "the world changes when its workers are there; runPolicy.schedulingDeadlineSeconds bounds it",
}
_ONE_GROUP = "a TrainingJob is one group of equal workers"
_MONITOR_LEFT = "steps and heartbeats tell, no log line does"


def convert(draft: Draft, _: Mapping[str, Mapping[str, Any]]) -> None:
    """Fills the draft from its manifest."""
    manifest = draft.manifest
    draft.describe()
    policy = ("spec", "runPolicy")
    draft.move((*policy, "jobMaxRetryCount"), "runPolicy", "backoffLimit")
    draft.move((*policy, "ttlSecondsAfterFinished"), "runPolicy", "ttlSecondsAfterFinished")
    draft.move((*policy, "suspend"), "suspend")
    clean_pod_policy(draft, (*policy, "cleanPodPolicy"))
    draft.move((*policy, "restartPolicy", "evalPeriodSeconds"), "failurePolicy", "evalPeriodSeconds")
    draft.move((*policy, "restartPolicy", "maxFullJobRestarts"), "failurePolicy", "maxRestarts")
    manifest.leave(
        *policy, "restartPolicy", "numRestartBeforeFullJobRestart", why="trainers restart in place where a worker lives"
    )
    manifest.leave(*policy, "workerMaxRetryCount", why="restarts count for the job, not for a worker")
    for name, field in _ELASTIC.items():
        draft.move(("spec", "elasticPolicy", name), "elasticPolicy", field)
    draft.move(
        ("spec", "elasticPolicy", "replicaDiscreteValues"), "elasticPolicy", "replicaDiscreteValues", whole=False
    )
    for name, why in _ELASTIC_LEFT.items():
        manifest.leave("spec", "elasticPolicy", name, why=why)
    _monitoring(draft)
    ranks = manifest.take("spec", "nprocPerNode", to="spec.nprocPerNode")
    _replicas(draft, ranks)


def _monitoring(draft: Draft) -> None:
    """Its limits in seconds are those of steps here; its patterns are left."""
    seconds: dict[str, list[int]] = {"startup": [], "step": []}
    for root in (("spec", "runPolicy", "logMonitoringConfiguration"), ("spec", "logMonitoringConfiguration")):
        for place in range(draft.manifest.length(*root)):
            start = draft.manifest.take(
                *root, place, "expectedStartCutOffInSeconds", to="spec.runPolicy.startupDeadlineSeconds"
            )
            again = draft.manifest.take(
                *root, place, "expectedRecurringFrequencyInSeconds", to="spec.healthPolicy.stepTimeoutSeconds"
            )
            seconds["startup"] += [start] if isinstance(start, int) else []
            seconds["step"] += [again] if isinstance(again, int) else []
            draft.manifest.leave(*root, place, why=_MONITOR_LEFT)
    if seconds["startup"]:
        draft.put(max(seconds["startup"]), "runPolicy", "startupDeadlineSeconds")
    if seconds["step"]:
        draft.put(max(seconds["step"]), "healthPolicy", "stepTimeoutSeconds")


def _replicas(draft: Draft, ranks: object) -> None:
    manifest, root = draft.manifest, ("spec", "replicaSpecs", 0)
    template = manifest.take(*root, "template", to="spec.template")
    if not isinstance(template, dict):
        raise NotConvertible("spec.replicaSpecs: one with a template is needed")
    trainer = trainer_template(template, ("pytorch", "ptjob", "trainer"), "spec.replicaSpecs[0].template")
    replicas = manifest.take(*root, "replicas", to="spec.replicas")
    most = manifest.take(*root, "maxReplicas", to="spec.elasticPolicy.maxReplicas")
    least = trainer.number(replicas if replicas is not None else 1)
    if trainer.number(most) is not None and "elasticPolicy" not in draft.spec and least is not None:
        draft.put({"minReplicas": least, "maxReplicas": trainer.number(most)}, "elasticPolicy")
    manifest.leave(*root, "name", why=_ONE_GROUP)
    for place in range(1, manifest.length("spec", "replicaSpecs")):
        manifest.leave("spec", "replicaSpecs", place, why=f"{_ONE_GROUP}; apply this one beside it")
    for path in (("spec",), root):
        draft.claims(manifest, *path)
    draft.move((*root, "spares"), "spares")
    draft.accept(trainer)
    draft.size(trainer, 1 if replicas is None else replicas, ranks)
