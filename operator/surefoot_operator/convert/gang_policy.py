"""Converts how other systems have a job's pods placed together.

Pure; called by `pytorch_job` and `train_job`. Kubeflow's operator is told once which gang scheduler it serves, so a manifest may ask for a
gang without a word of whose: then a person has to say it, and nothing is guessed.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.gang_schedulers import GANG_SCHEDULERS
from surefoot_operator.api.yaml_names import NOT_YET
from surefoot_operator.convert.job_draft import Draft
from surefoot_operator.convert.manifest import Manifest

_POLICY = ("spec", "runPolicy", "schedulingPolicy")
_LEFT = NOT_YET["SchedulingPolicy"]


def of_run_policy(draft: Draft, scheduler_name: object) -> None:
    """Converts a Kubeflow job's `runPolicy.schedulingPolicy`, its priority class excepted.

    Args:
        scheduler_name: what the pods' template says; with the queue, which Volcano alone has, it tells whose gang it is.
    """
    manifest = draft.manifest
    if manifest.peek(*_POLICY) is None:
        return
    named = [gang for gang, one in GANG_SCHEDULERS.items() if one.scheduler_name == scheduler_name]
    gang = next(iter(named), None)
    if draft.is_queued_by_kueue and gang != "Volcano":
        why = "the label kueue.x-k8s.io/queue-name names the queue that admits the pods"
        manifest.leave(*_POLICY, "queue", why=why)
    elif manifest.peek(*_POLICY, "queue") is not None:
        gang = "Volcano"
    timeout = (*_POLICY, "scheduleTimeoutSeconds")
    if gang is not None:
        draft.put(gang, "schedulingPolicy", "gang")
        if gang == "Volcano":
            draft.put(manifest.take(*_POLICY, "queue", to="spec.schedulingPolicy.queue"), "schedulingPolicy", "queue")
    elif any(manifest.peek(*_POLICY, name) is not None for name in ("minAvailable", "minResources")):
        draft.to_do.append("spec.schedulingPolicy: name the gang scheduler, Volcano or Coscheduling; nothing here does")
    if gang == "Coscheduling":
        draft.move(timeout, "schedulingPolicy", "scheduleTimeoutSeconds")
    else:
        draft.move(timeout, "runPolicy", "schedulingDeadlineSeconds")
    for name, why in _LEFT.items():
        manifest.leave(*_POLICY, name, why=why)


def of_runtime(draft: Draft, runtime: Manifest) -> None:
    """Converts a training runtime's `podGroupPolicy`, which names its scheduler."""
    path = ("spec", "podGroupPolicy")
    named: dict[str, Any] = runtime.peek(*path) if isinstance(runtime.peek(*path), dict) else {}
    if "volcano" in named:
        draft.put("Volcano", "schedulingPolicy", "gang")
        runtime.leave(*path, "volcano", "networkTopology", why="the group of a TrainingJob says nothing of topology")
        runtime.take(*path, "volcano", to="spec.schedulingPolicy.gang")
    elif "coscheduling" in named:
        draft.put("Coscheduling", "schedulingPolicy", "gang")
        seconds = runtime.take(
            *path, "coscheduling", "scheduleTimeoutSeconds", to="spec.schedulingPolicy.scheduleTimeoutSeconds"
        )
        draft.put(seconds, "schedulingPolicy", "scheduleTimeoutSeconds")
        runtime.take(*path, "coscheduling", to="spec.schedulingPolicy.gang")
