"""Builds, reads and changes a job's PodGroup, and marks its pods.

Pure; called by `platform`, `api_writes` and `pods`. Two schedulers read a PodGroup, each of its own API and with fields of its
own; a field that a group of the other one has would be refused or dropped.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.spec import GANG_SCHEDULERS, Gang, TrainingJob
from surefoot_operator.job_snapshot import PodGroup, PodGroupSeen
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]

_SAID = 400
"""Characters of a scheduler's words that people are told."""
_FIELDS: dict[Gang, dict[str, str]] = {
    "Volcano": {"queue": "queue", "priority_class": "priorityClassName"},
    "Coscheduling": {"schedule_timeout_seconds": "scheduleTimeoutSeconds"},
}
"""What each reads beside `minMember`: our name -> the API's."""


def path(gang: Gang, namespace: str = "", name: str = "") -> str:
    """The path of all pod groups, of a namespace's, or of one."""
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{GANG_SCHEDULERS[gang].api_version}{place}/podgroups" + (f"/{name}" if name else "")


def body(job: api_objects.JobIdentity, group: PodGroup) -> Object:
    """Builds the PodGroup of a job, which goes with it."""
    given = {theirs: getattr(group, ours) for ours, theirs in _FIELDS[group.gang].items()}
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
            **{theirs: value for theirs, value in given.items() if value is not None},
        },
    }


def operations(stored: Object, wanted: Object) -> list[Object]:
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


def seen(gang: Gang, stored: Object) -> PodGroupSeen:
    """Translates a stored PodGroup."""
    metadata, spec = stored["metadata"], stored.get("spec") or {}
    given = {ours: spec.get(theirs) for ours, theirs in _FIELDS[gang].items()}
    return PodGroupSeen(
        PodGroup(gang, int(spec.get("minMember") or 0), **given),
        str(metadata["uid"]),
        metadata.get("deletionTimestamp") is not None,
        _message(stored),
    )


def marks(stored: Object) -> tuple[Any, ...]:
    """All of a stored PodGroup that a plan depends on.

    Schedulers write when they looked last, again and again; that shall wake no job.
    """
    metadata = stored["metadata"]
    found = (metadata["uid"], metadata.get("deletionTimestamp"), metadata.get("labels"))
    return (*found, metadata.get("ownerReferences"), stored.get("spec"), _message(stored))


def mark(pod: Object, job: TrainingJob) -> None:
    """Puts a worker's pod into its job's group.

    And before the scheduler that reads the group, unless the template names one.
    """
    policy = job.spec.scheduling_policy
    if policy is None:
        return
    scheduler = GANG_SCHEDULERS[policy.gang]
    metadata, spec = pod["metadata"], pod["spec"]
    metadata[scheduler.marked_in] = {**(metadata.get(scheduler.marked_in) or {}), scheduler.mark: job.name}
    if not spec.get("schedulerName"):
        spec["schedulerName"] = scheduler.scheduler_name


def _message(stored: Object) -> str:
    """Volcano's last word, where it is that the group cannot be placed; coscheduling says it on the pods."""
    told = [c for c in (stored.get("status") or {}).get("conditions") or () if isinstance(c, dict)]
    last = max(told, key=lambda c: str(c.get("lastTransitionTime") or ""), default=None)
    if last is None or last.get("type") != "Unschedulable" or last.get("status") != "True":
        return ""
    return str(last.get("message") or last.get("reason") or "")[:_SAID]
