"""Builds and reads a job's PodGroup, the object by which gang schedulers place all workers or none.

Pure; called by `platform`, `api_writes` and `pods`.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import GANG_SCHEDULERS, Gang, TrainingJob
from surefoot_operator.job_snapshot import ObservedPodGroup, PodGroup
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]


def pod_group_path(gang: Gang, namespace: str = "", name: str = "") -> str:
    """Returns the API path of all pod groups, of those in a namespace, or of one."""
    namespace_path = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{GANG_SCHEDULERS[gang].api_version}{namespace_path}/podgroups" + (f"/{name}" if name else "")


def build_pod_group(job: api_objects.JobIdentity, group: PodGroup) -> Object:
    """Builds the PodGroup of a job; it is deleted together with the job."""
    timeout = group.schedule_timeout_seconds
    return {
        "apiVersion": GANG_SCHEDULERS[group.gang].api_version,
        "kind": "PodGroup",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "labels": api_objects.job_labels(job.name, job.uid),
            "ownerReferences": [api_objects.owner_reference(job.name, job.uid)],
        },
        "spec": {
            "minMember": group.min_members,
            **({} if timeout is None else {"scheduleTimeoutSeconds": timeout}),
        },
    }


def build_pod_group_patch(stored: Object, desired: Object) -> list[Object]:
    """Builds the JSON Patch that changes a stored PodGroup to the desired one.

    It tests the resourceVersion that was read, so that a delayed call does not undo a newer one.
    """
    metadata = stored["metadata"]
    tests = [
        {"op": "test", "path": f"/metadata/{name}", "value": metadata[name]} for name in ("uid", "resourceVersion")
    ]
    labels = {**(metadata.get("labels") or {}), **desired["metadata"]["labels"]}
    spec = {**(stored.get("spec") or {}), **desired["spec"]}
    changes = {"/metadata/labels": (metadata.get("labels"), labels), "/spec": (stored.get("spec"), spec)}
    return [
        *tests,
        *({"op": "add", "path": path, "value": new} for path, (old, new) in changes.items() if old != new),
    ]


def observe_pod_group(gang: Gang, stored: Object) -> ObservedPodGroup:
    """Converts a stored PodGroup to the form that plans read."""
    metadata, spec = stored["metadata"], stored.get("spec") or {}
    return ObservedPodGroup(
        PodGroup(gang, int(spec.get("minMember") or 0), spec.get("scheduleTimeoutSeconds")),
        str(metadata["uid"]),
        metadata.get("deletionTimestamp") is not None,
    )


def plan_fields(stored: Object) -> tuple[Any, ...]:
    """Returns the fields of a stored PodGroup that a plan depends on.

    Schedulers update the other fields all the time; such updates must not cause a reconcile.
    """
    metadata = stored["metadata"]
    identity = (metadata["uid"], metadata.get("deletionTimestamp"), metadata.get("labels"))
    return (*identity, metadata.get("ownerReferences"), stored.get("spec"))


def add_pod_to_group(pod: Object, job: TrainingJob) -> None:
    """Adds a worker's pod to its job's group, and selects the gang scheduler unless the template names a scheduler."""
    policy = job.spec.scheduling_policy
    if policy is None:
        return
    scheduler = GANG_SCHEDULERS[policy.gang]
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"] = {**(metadata.get("labels") or {}), scheduler.group_label: job.name}
    if not spec.get("schedulerName"):
        spec["schedulerName"] = scheduler.scheduler_name
