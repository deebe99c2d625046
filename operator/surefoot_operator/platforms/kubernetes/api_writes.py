"""Writes a job's status, pods, pod groups, secrets, services and events through the API server.

Called by `platform`. Every write is safe to repeat: it succeeds if the object already exists and belongs to this job,
or is already deleted. An object of the same name that belongs to another owner is an error.
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
# Builds the JSON Patch that writes a job's status by compare-and-swap. Pure. It tests the status' serial and the
# membership's generation and state, and not resourceVersion, so that an edited label or spec does not invalidate a
# plan.

Object = dict[str, Any]


_UNWRITTEN = StatusPrecondition(0, None, None)
"""The precondition for a job whose status was never written."""


def read_precondition(stored: Object) -> StatusPrecondition:
    """Reads from a stored job the values that a status write must compare."""
    status = stored.get("status") or {}
    membership = status.get("membership") or {}
    return StatusPrecondition(status.get("serial", 0), membership.get("generation"), membership.get("state"))


def build_status_patch(stored: Object, body: Object, precondition: StatusPrecondition) -> list[Object]:
    """Builds the patch that replaces the status if the stored one still meets the precondition.

    Args:
        stored: The job as last read.
        body: The new status.
        precondition: The values to compare, from the status that the plan has read.
    """
    tests = [_test_operation("/metadata/uid", stored["metadata"]["uid"])]
    # in a JSON Patch `test`, a missing member equals null, but the object around it must exist
    if "status" not in stored and precondition == _UNWRITTEN:
        tests.append(_test_operation("/status", None))
    else:
        tests.append(_test_operation("/status/serial", precondition.serial or None))
        if precondition.generation is None:
            tests.append(_test_operation("/status/membership", None))
        else:
            tests.append(_test_operation("/status/membership/generation", precondition.generation))
            tests.append(_test_operation("/status/membership/state", precondition.state))
    return [*tests, {"op": "add", "path": "/status", "value": body}]


def _test_operation(path: str, value: Any) -> Object:
    return {"op": "test", "path": path, "value": value}


def add_printer_columns(new: JobStatus, workers: Sequence[ObservedWorker], stored: Object, now: float) -> Object:
    """Converts the status to JSON and adds the fields that printer columns and autoscalers read.

    Args:
        new: The status to write.
        workers: The job's workers.
        stored: The job as last read.
        now: Unix time, in seconds.
    """
    body = status_to_json(new)
    old = stored.get("status", {})
    desired_count, spares = stored["spec"].get("replicas", 1), stored["spec"].get("spares", 0)
    ready_count = sum(worker.phase == "Running" and not worker.deleting for worker in workers)
    live_count = sum(worker.phase not in ("Succeeded", "Failed") for worker in workers)
    # an autoscaler compares these with `replicas`, which counts no spares
    ready_count, live_count = (
        count - min(spares, max(0, count - desired_count)) for count in (ready_count, live_count)
    )
    body |= {
        # written even at their defaults: a job with empty columns looks like one without an operator
        "phase": new.phase,
        "step": new.step,
        "restarts": new.restarts,
        "replicas": live_count,
        "readyReplicas": ready_count,
        "ready": f"{ready_count}/{desired_count}",
        "selector": api_objects.job_selector(stored["metadata"]["uid"]),
    }
    if new.last_complete is not None:
        is_same_checkpoint = old.get("lastComplete") == body["lastComplete"] and "checkpointTime" in old
        body["checkpointTime"] = old["checkpointTime"] if is_same_checkpoint else format_time(now)
    return body


def format_time(now: float) -> str:
    """Formats a Unix time in seconds as a Kubernetes time."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- api writes ------------------------------------------------------------------------------------------------------


async def run_concurrently(*writes: Awaitable[None]) -> None:
    """Runs writes concurrently; waits for all, then raises the first error, if any."""
    for result in await asyncio.gather(*writes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def create_or_find(api: Api, kind: str, body: Object, job: api_objects.JobIdentity) -> Object:
    """Creates a pod, service or secret, or returns the existing one of this job.

    Raises:
        PlatformError: An object of that name exists and does not belong to this job.
    """
    name = body["metadata"]["name"]
    try:
        return await api.post(api_objects.core_path(job.namespace, kind), body)
    except ApiError as error:
        if error.code != 409:
            raise
    if kind == "secrets":
        # its name is a digest of its content, so the content is equal; the operator needs no permission to read secrets
        return body
    path = api_objects.core_path(job.namespace, kind, name)
    existing = await api.get(path)
    labels = existing["metadata"].get("labels") or {}
    if labels.get(api_objects.JOB_UID_LABEL) != job.uid:
        if (
            kind == "services"
            and api_objects.job_labels(job.name, labels.get(api_objects.JOB_UID_LABEL, "")).items() <= labels.items()
        ):
            # a service of an earlier job of this name: the garbage collector may miss an object that was created while
            # its owner was being deleted and the API server was unavailable
            await api.delete(path, _delete_options(str(existing["metadata"]["uid"])))
            return await api.post(api_objects.core_path(job.namespace, kind), body)
        raise PlatformError(
            f"{kind} {job.namespace}/{name} exists and does not belong to job {job.name}; delete or rename it"
        )
    return existing


async def dry_run_pod(api: Api, namespace: str, body: Object) -> None:
    """Makes the API server validate a pod strictly, without creating it (server-side dry run)."""
    await api.post(api_objects.core_path(namespace, "pods"), body, {"dryRun": "All", "fieldValidation": "Strict"})


async def delete_pod(api: Api, namespace: str, worker: DeleteWorker) -> Object | None:
    """Deletes a worker's pod, if it still has the worker's UID.

    Returns the pod while it terminates; None if it no longer exists or its name belongs to another pod now.
    """
    options = _delete_options(worker.uid)
    if worker.force:
        options["gracePeriodSeconds"] = 0
    try:
        deleted = await api.delete(api_objects.core_path(namespace, "pods", worker.name), options)
    except ApiError as error:
        if error.code in (404, 409):
            return None
        raise
    return None if worker.force or deleted.get("kind") != "Pod" else deleted


async def set_finalizer(api: Api, stored: Object, is_present: bool) -> Object:
    """Adds or removes the operator's finalizer by compare-and-swap.

    Args:
        api: The API server.
        stored: The job as last read.
        is_present: Whether the job must have the finalizer.

    Raises:
        ApiError: The finalizers have changed since `stored` was read, among other reasons.
    """
    metadata = stored["metadata"]
    finalizers: list[str] = metadata.get("finalizers") or []
    if (FINALIZER in finalizers) == is_present:
        return stored
    path = "/metadata/finalizers"
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "test", "path": path, "value": finalizers or None},
    ]
    new_finalizers = [*finalizers, FINALIZER] if is_present else [name for name in finalizers if name != FINALIZER]
    operations.append({"op": "add", "path": path, "value": new_finalizers})
    return await api.patch(api_objects.jobs_path(metadata["namespace"], metadata["name"]), operations)


async def delete_job(api: Api, job: api_objects.JobIdentity) -> None:
    """Deletes the job with this UID, and not another one of its name."""
    options = {**_delete_options(job.uid), "propagationPolicy": "Background"}
    try:
        await api.delete(api_objects.jobs_path(job.namespace, job.name), options)
    except ApiError as error:
        if error.code not in (404, 409):
            raise


async def apply_pod_group(
    api: Api, gang: Gang, body: Object, stored: Object | None, job: api_objects.JobIdentity
) -> Object:
    """Creates a job's pod group, or patches the existing one.

    Args:
        api: The API server.
        gang: The gang scheduler whose group it is.
        body: The PodGroup to create or to change the existing one to.
        stored: The existing group as last read; None: there is none.
        job: The job that must own it.

    Raises:
        PlatformError: A group of that name does not belong to a job of that name, among other reasons.
    """
    groups_path, group_path = (
        pod_groups.pod_group_path(gang, job.namespace),
        pod_groups.pod_group_path(gang, job.namespace, job.name),
    )
    if stored is None:
        try:
            return await api.post(groups_path, body)
        except ApiError as error:
            if error.code != 409:
                raise
        stored = await api.get(group_path)
    if api_objects.is_controlled_by(stored, job):
        return await api.patch(group_path, pod_groups.build_pod_group_patch(stored, body))
    owner = api_objects.controller_of(stored)
    if owner is None or owner[0] != job.name:
        raise PlatformError(
            f"PodGroup {job} of {body['apiVersion']} exists and does not belong to the job of that name; delete or"
            " rename it"
        )
    # it belongs to an earlier job of this name, and the garbage collector has not deleted it yet
    await api.delete(group_path, _delete_options(str(stored["metadata"]["uid"])))
    return await api.post(groups_path, body)


async def delete_pod_group(api: Api, gang: Gang, uid: str, job: api_objects.JobIdentity) -> None:
    """Deletes the pod group with this UID."""
    try:
        await api.delete(pod_groups.pod_group_path(gang, job.namespace, job.name), _delete_options(uid))
    except ApiError as error:
        if error.code not in (404, 409):
            raise


def _delete_options(uid: str) -> Object:
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}


async def record_job_event(api: Api, job: api_objects.JobIdentity, event: Event, generation: int, now: float) -> None:
    """Creates one core/v1 Event about a job.

    Its name is a digest of its content, so an event that is recorded twice in one generation exists once.
    """
    identity = "\0".join((job.uid, str(generation), event.reason, event.message))
    involved = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": job.namespace,
        "name": job.name,
        "uid": job.uid,
    }
    await _post_event(api, involved, api_objects.job_labels(job.name, job.uid), identity, event, now)


async def record_pod_event(api: Api, namespace: str, pod: str, event: Event, now: float) -> None:
    """Creates one Event about the operator's own pod; an event that is recorded twice exists once."""
    involved = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod}
    await _post_event(api, involved, {}, f"{event.reason}\0{event.message}", event, now)


async def _post_event(
    api: Api, involved_object: Object, labels: Mapping[str, str], identity: str, event: Event, now: float
) -> None:
    name = f"{involved_object['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    namespace, time_text = involved_object["namespace"], format_time(now)
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "involvedObject": involved_object,
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:1024],  # the API's own limit
        "source": {"component": api_objects.OPERATOR},
        "reportingComponent": api_objects.OPERATOR,
        "firstTimestamp": time_text,
        "lastTimestamp": time_text,
        "count": 1,
    }
    try:
        await api.post(api_objects.core_path(namespace, "events"), body)
    except ApiError as error:
        if error.code != 409:
            raise
