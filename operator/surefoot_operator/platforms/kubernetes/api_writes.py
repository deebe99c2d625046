"""Writes pods, their groups, secrets, events; each is safe to repeat.

Called by `platform`. An object that exists already as ours, or is deleted already, is success; one that
belongs to somebody else is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from surefoot_operator.api.spec import API_VERSION, FINALIZER, KIND, Gang
from surefoot_operator.api.status import JobStatus, StatusPrecondition
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import ObservedWorker
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.policy.core.actions import DeleteWorker, Event

# ---- status patch ----------------------------------------------------------------------------------------------------
# Builds the JSON Patch that compares and swaps a job's status. Pure. It tests our own serial and the world's epoch and
# state, not resourceVersion: an edited label or spec does not invalidate a plan.

Object = dict[str, Any]


_NOTHING = StatusPrecondition(0, None, None)
"""Of a job that nobody has written to."""


def stored_stamp(stored: Object) -> StatusPrecondition:
    """The stamp of a job as stored."""
    found = stored.get("status") or {}
    world = found.get("membership") or {}
    return StatusPrecondition(found.get("serial", 0), world.get("generation"), world.get("state"))


def status_patch(stored: Object, body: Object, test: StatusPrecondition) -> list[Object]:
    """Builds the patch that replaces the status if its stamp matches.

    `stored`: the job as last read.
    """
    tests = [_test("/metadata/uid", stored["metadata"]["uid"])]
    # a missing member equals null; the mapping around it must be there
    if "status" not in stored and test == _NOTHING:
        tests.append(_test("/status", None))
    else:
        tests.append(_test("/status/serial", test.serial or None))
        if test.generation is None:
            tests.append(_test("/status/world", None))
        else:
            tests += [_test("/status/world/epoch", test.generation), _test("/status/world/state", test.state)]
    return [*tests, {"op": "add", "path": "/status", "value": body}]


def _test(path: str, value: Any) -> Object:
    return {"op": "test", "path": path, "value": value}


def add_printer_columns(new: JobStatus, workers: Sequence[ObservedWorker], stored: Object, now: float) -> Object:
    """Adds to the status what columns and autoscalers read.

    `now` in Unix seconds.
    """
    body = status_to_json(new)
    old = stored.get("status", {})
    wanted, spares = stored["spec"].get("replicas", 1), stored["spec"].get("spares", 0)
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in workers)
    live = sum(worker.phase not in ("Succeeded", "Failed") for worker in workers)
    # an autoscaler compares these with `replicas`, which counts no spares
    ready, live = (count - min(spares, max(0, count - wanted)) for count in (ready, live))
    body |= {
        # at their defaults too: a column without a value looks like a job that nobody looks after
        "phase": new.phase,
        "step": new.step,
        "restarts": new.restarts,
        "replicas": live,
        "readyReplicas": ready,
        "ready": f"{ready}/{wanted}",
        "selector": api_objects.selector(stored["metadata"]["uid"]),
    }
    if new.last_complete is not None:
        same = old.get("lastComplete") == body["lastComplete"] and "checkpointTime" in old
        body["checkpointTime"] = old["checkpointTime"] if same else timestamp(now)
    return body


def timestamp(now: float) -> str:
    """Formats Unix seconds as a Kubernetes time."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- api writes ------------------------------------------------------------------------------------------------------


async def side_by_side(*writes: Awaitable[None]) -> None:
    """Waits for all of them, and raises the first one's error then."""
    for problem in await asyncio.gather(*writes, return_exceptions=True):
        if isinstance(problem, BaseException):
            raise problem


async def create(api: Api, kind: str, body: Object, job: api_objects.JobIdentity) -> Object:
    """Creates a pod, service or secret, or finds this job's existing one."""
    name = body["metadata"]["name"]
    try:
        return await api.post(api_objects.core_path(job.namespace, kind), body)
    except ApiError as error:
        if error.code != 409:
            raise
    if kind == "secrets":
        return body  # named by a digest of its content, so it has that content; and we need no right to read secrets
    path = api_objects.core_path(job.namespace, kind, name)
    found = await api.get(path)
    given = found["metadata"].get("labels") or {}
    if given.get(api_objects.JOB_UID) != job.uid:
        if (
            kind == "services"
            and api_objects.job_labels(job.name, given.get(api_objects.JOB_UID, "")).items() <= given.items()
        ):
            # the garbage collector may miss what was made beside a deletion while the API server was away
            await api.delete(path, _exactly(str(found["metadata"]["uid"])))
            return await api.post(api_objects.core_path(job.namespace, kind), body)
        raise PlatformError(f"{kind} {job.namespace}/{name} does not belong to job {job.name}; delete or rename it")
    return found


async def try_pod(api: Api, namespace: str, body: Object) -> None:
    """Has the server validate a pod strictly, without creating it."""
    await api.post(api_objects.core_path(namespace, "pods"), body, {"dryRun": "All", "fieldValidation": "Strict"})


async def delete_pod(api: Api, namespace: str, worker: DeleteWorker) -> Object | None:
    """Deletes exactly that pod.

    Returns the pod while it terminates, None where it is gone or its name is another pod's now.
    """
    options = _exactly(worker.uid)
    if worker.force:
        options["gracePeriodSeconds"] = 0
    try:
        found = await api.delete(api_objects.core_path(namespace, "pods", worker.name), options)
    except ApiError as error:
        if error.code in (404, 409):
            return None
        raise
    return None if worker.force or found.get("kind") != "Pod" else found


async def set_finalizer(api: Api, stored: Object, held: bool) -> Object:
    """Adds or removes our finalizer by compare-and-swap. Raises ApiRefused.

    `stored`: the job as last read; if its finalizers changed since, the server refuses.
    """
    metadata = stored["metadata"]
    there: list[str] = metadata.get("finalizers") or []
    if (FINALIZER in there) == held:
        return stored
    path = "/metadata/finalizers"
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "test", "path": path, "value": there or None},
    ]
    left = [*there, FINALIZER] if held else [name for name in there if name != FINALIZER]
    operations.append({"op": "add", "path": path, "value": left})
    return await api.patch(api_objects.jobs_path(metadata["namespace"], metadata["name"]), operations)


async def delete_job(api: Api, job: api_objects.JobIdentity) -> None:
    """Deletes exactly this job, not another of its name."""
    options = {**_exactly(job.uid), "propagationPolicy": "Background"}
    try:
        await api.delete(api_objects.jobs_path(job.namespace, job.name), options)
    except ApiError as error:
        if error.code not in (404, 409):
            raise


async def apply_pod_group(
    api: Api, gang: Gang, body: Object, stored: Object | None, job: api_objects.JobIdentity
) -> Object:
    """Creates a job's pod group, or changes it from what was `stored`."""
    groups, one = pod_groups.path(gang, job.namespace), pod_groups.path(gang, job.namespace, job.name)
    if stored is None:
        try:
            return await api.post(groups, body)
        except ApiError as error:
            if error.code != 409:
                raise
        stored = await api.get(one)
    if api_objects.is_of(stored, job):
        return await api.patch(one, pod_groups.pod_group_patch(stored, body))
    owner = api_objects.controller_of(stored)
    if owner is None or owner[0] != job.name:
        raise PlatformError(
            f"PodGroup {job} of {body['apiVersion']} does not belong to the job of its name; delete or rename it"
        )
    # an older job of this name had it, and the garbage collector has not come to it yet
    await api.delete(one, _exactly(str(stored["metadata"]["uid"])))
    return await api.post(groups, body)


async def remove_group(api: Api, gang: Gang, uid: str, job: api_objects.JobIdentity) -> None:
    """Deletes exactly that pod group."""
    try:
        await api.delete(pod_groups.path(gang, job.namespace, job.name), _exactly(uid))
    except ApiError as error:
        if error.code not in (404, 409):
            raise


def _exactly(uid: str) -> Object:
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}


async def record(api: Api, job: api_objects.JobIdentity, event: Event, epoch: int, now: float) -> None:
    """Creates one core/v1 Event.

    Its name is a digest of its content: recorded twice in one epoch, it is one event.
    """
    said = "\0".join((job.uid, str(epoch), event.reason, event.message))
    involved = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
    }
    await _record(api, involved, api_objects.job_labels(job.name, job.uid), said, event, now)


async def record_of_pod(api: Api, namespace: str, pod: str, event: Event, now: float) -> None:
    """Creates one Event of the operator's own pod; recorded twice, it is one."""
    involved = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod}
    await _record(api, involved, {}, f"{event.reason}\0{event.message}", event, now)


async def _record(api: Api, involved: Object, marks: Mapping[str, str], said: str, event: Event, now: float) -> None:
    name = f"{involved['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    namespace, at = involved["namespace"], timestamp(now)
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(marks)},
        "involvedObject": involved,
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:1024],  # the API's own limit
        "source": {"component": api_objects.OPERATOR},
        "reportingComponent": api_objects.OPERATOR,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    try:
        await api.post(api_objects.core_path(namespace, "events"), body)
    except ApiError as error:
        if error.code != 409:
            raise
