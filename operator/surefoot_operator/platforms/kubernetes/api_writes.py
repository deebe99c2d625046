"""Writes pods, their groups, secrets, events; each is safe to repeat.

Called by `platform`. An object that exists already as ours, or is deleted already, is success; one that
belongs to somebody else is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Mapping
from typing import Any

from surefoot_operator.api.spec import FINALIZER, KIND, Gang
from surefoot_operator.api.yaml_names import API_VERSION
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused
from surefoot_operator.platforms.kubernetes.status_patch import timestamp
from surefoot_operator.policy.core.actions import DeleteWorker, Event

Object = dict[str, Any]


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
    except ApiRefused as error:
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
        raise FabricError(f"{kind} {job.namespace}/{name} does not belong to job {job.name}; delete or rename it")
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
    except ApiRefused as error:
        if error.code in (404, 409):
            return None
        raise
    return None if worker.force or found.get("kind") != "Pod" else found


async def hold(api: Api, stored: Object, held: bool) -> Object:
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
    except ApiRefused as error:
        if error.code not in (404, 409):
            raise


async def keep_group(api: Api, gang: Gang, body: Object, stored: Object | None, job: api_objects.JobIdentity) -> Object:
    """Creates a job's pod group, or changes it from what was `stored`."""
    groups, one = pod_groups.path(gang, job.namespace), pod_groups.path(gang, job.namespace, job.name)
    if stored is None:
        try:
            return await api.post(groups, body)
        except ApiRefused as error:
            if error.code != 409:
                raise
        stored = await api.get(one)
    if api_objects.is_of(stored, job):
        return await api.patch(one, pod_groups.operations(stored, body))
    owner = api_objects.controller_of(stored)
    if owner is None or owner[0] != job.name:
        raise FabricError(
            f"PodGroup {job} of {body['apiVersion']} does not belong to the job of its name; delete or rename it"
        )
    # an older job of this name had it, and the garbage collector has not come to it yet
    await api.delete(one, _exactly(str(stored["metadata"]["uid"])))
    return await api.post(groups, body)


async def remove_group(api: Api, gang: Gang, uid: str, job: api_objects.JobIdentity) -> None:
    """Deletes exactly that pod group."""
    try:
        await api.delete(pod_groups.path(gang, job.namespace, job.name), _exactly(uid))
    except ApiRefused as error:
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
    except ApiRefused as error:
        if error.code != 409:
            raise
