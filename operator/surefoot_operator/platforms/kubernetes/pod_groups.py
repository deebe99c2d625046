"""Builds, reads and changes a job's PodGroup, and marks its pods.

Pure; called by `platform`, `api_writes` and `pods`.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import GANG_SCHEDULERS, Gang, TrainingJob
from surefoot_operator.job_snapshot import ObservedPodGroup, PodGroup
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]


def path(gang: Gang, namespace: str = "", name: str = "") -> str:
    """The path of all pod groups, of a namespace's, or of one."""
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{GANG_SCHEDULERS[gang].api_version}{place}/podgroups" + (f"/{name}" if name else "")


def build_pod_group(job: api_objects.JobIdentity, group: PodGroup) -> Object:
    """Builds the PodGroup of a job, which goes with it."""
    timeout = group.schedule_timeout_seconds
    return {
        "apiVersion": GANG_SCHEDULERS[group.gang].api_version,
        "kind": "PodGroup",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner(job.name, job.uid)],
        },
        "spec": {
            "minMember": group.min_members,
            **({} if timeout is None else {"scheduleTimeoutSeconds": timeout}),
        },
    }


def pod_group_patch(stored: Object, wanted: Object) -> list[Object]:
    """Builds the JSON Patch from a stored PodGroup to the wanted one.

    It tests the version that was read, so that a call that is carried out late undoes no newer one.
    """
    metadata = stored["metadata"]
    tests = [
        {"op": "test", "path": f"/metadata/{name}", "value": metadata[name]} for name in ("uid", "resourceVersion")
    ]
    marks = {**(metadata.get("labels") or {}), **wanted["metadata"]["labels"]}
    spec = {**(stored.get("spec") or {}), **wanted["spec"]}
    changes = {"/metadata/labels": (metadata.get("labels"), marks), "/spec": (stored.get("spec"), spec)}
    return [
        *tests,
        *({"op": "add", "path": place, "value": new} for place, (old, new) in changes.items() if old != new),
    ]


def observe_pod_group(gang: Gang, stored: Object) -> ObservedPodGroup:
    """Translates a stored PodGroup."""
    metadata, spec = stored["metadata"], stored.get("spec") or {}
    return ObservedPodGroup(
        PodGroup(gang, int(spec.get("minMember") or 0), spec.get("scheduleTimeoutSeconds")),
        str(metadata["uid"]),
        metadata.get("deletionTimestamp") is not None,
    )


def plan_fields(stored: Object) -> tuple[Any, ...]:
    """All of a stored PodGroup that a plan depends on.

    Schedulers write when they looked last, again and again; that shall wake no job.
    """
    metadata = stored["metadata"]
    found = (metadata["uid"], metadata.get("deletionTimestamp"), metadata.get("labels"))
    return (*found, metadata.get("ownerReferences"), stored.get("spec"))


def join_pod_group(pod: Object, job: TrainingJob) -> None:
    """Puts a worker's pod into its job's group.

    And before the scheduler that reads the group, unless the template names one.
    """
    policy = job.spec.scheduling_policy
    if policy is None:
        return
    scheduler = GANG_SCHEDULERS[policy.gang]
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"] = {**(metadata.get("labels") or {}), scheduler.group_label: job.name}
    if not spec.get("schedulerName"):
        spec["schedulerName"] = scheduler.scheduler_name
