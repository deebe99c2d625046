"""Implements the Platform protocol for one job on Kubernetes.

Reads from `cluster_cache` and writes through `api_writes`. The reconciler calls it through the protocol; the controller
creates it and owns the cache.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.parse import parse_job, with_metadata
from surefoot_operator.api.spec import FINALIZER, Gang, TrainingJob
from surefoot_operator.api.status import JobStatus, precondition_of
from surefoot_operator.api.status_json import status_from_json
from surefoot_operator.errors import (
    InvariantViolation,
    JobRejected,
    PlatformError,
    ReadForbidden,
    SpecError,
    StatusConflict,
)
from surefoot_operator.job_snapshot import ObservedPodGroups, ObservedPurge, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryTierCredentials
from surefoot_operator.platforms.interface import PlatformSnapshot, WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, api_writes, pod_groups, pods
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.platforms.kubernetes.pods import build_purge_pod
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache, DerivedCache, Listener
from surefoot_operator.platforms.kubernetes.views.watched_objects import WatchedObjects
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker, Event
from surefoot_operator.rejected_calls import RejectedCall

log = logging.getLogger(__name__)


# ---- shared objects --------------------------------------------------------------------------------------------------
# Creates the objects that a job's workers share: the Secret and the headless Service. A new leader does not know
# whether they exist, and the operator asks for no permission to read Secrets, so it creates them again. A used-up quota
# or an admission webhook rejects this even for objects that exist: a lost worker's replacement must not wait for it.

_PATHS = {"Secret": "secrets", "Service": "services"}
"""Kind → name of the kind in API paths."""


class SharedObjects:
    """Creates one job's shared objects, and checks for each later worker that they still exist."""

    def __init__(self, api: Api, job: api_objects.JobIdentity) -> None:
        self._api, self._job = api, job
        self._confirmed_seconds: dict[tuple[str, str], float] = {}
        """(kind, name) → start of the last request that created or found the object, on the monotonic clock."""
        self._logged_failures: set[tuple[str, str]] = set()
        """(kind, name) of the objects whose rejection was logged already."""

    def has_created(self, bodies: Collection[dict[str, Any]]) -> bool:
        """Whether this leader has created or found all of these objects."""
        return all(_kind_and_name(body) in self._confirmed_seconds for body in bodies)

    async def create_missing(self, bodies: Collection[dict[str, Any]]) -> None:
        """Creates concurrently those of the objects that this leader has not created or found yet.

        Raises:
            PlatformError: An object could not be created, or its name belongs to another owner.
        """
        await api_writes.run_concurrently(*map(self._create_unless_confirmed, bodies))

    async def recreate_deleted(self, bodies: Collection[dict[str, Any]], asked_seconds: float) -> None:
        """Creates the objects again in case they were deleted; counts a failure and logs it once.

        Called although this leader has created them, because any client may delete them.

        Args:
            bodies: The objects.
            asked_seconds: Monotonic time; an object that was created or found by a later request is not requested
                again, so one request serves all workers that wait for it.
        """
        await api_writes.run_concurrently(*(self._repair_one(body, asked_seconds) for body in bodies))

    async def _repair_one(self, body: dict[str, Any], asked_seconds: float) -> None:
        kind, name = key = _kind_and_name(body)
        if self._confirmed_seconds.get(key, -math.inf) >= asked_seconds:
            return
        try:
            await self._create_or_find(body)
            self._logged_failures.discard(key)
        except PlatformError as error:
            metrics.shared_object_failures.labels(_PATHS[kind]).inc()
            if key not in self._logged_failures:
                self._logged_failures.add(key)
                log.warning(
                    "cannot create %s %s of job %s again: %s; if it was deleted, pods that refer to it cannot start",
                    kind, name, self._job, error,
                )  # fmt: skip

    async def _create_unless_confirmed(self, body: dict[str, Any]) -> None:
        if _kind_and_name(body) not in self._confirmed_seconds:
            await self._create_or_find(body)

    async def _create_or_find(self, body: dict[str, Any]) -> None:
        start_seconds = time.monotonic()
        await api_writes.create_or_find(self._api, _PATHS[body["kind"]], body, self._job)
        self._confirmed_seconds[_kind_and_name(body)] = start_seconds


def _kind_and_name(body: dict[str, Any]) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]


# ---- template dry run ------------------------------------------------------------------------------------------------
# Validates a job's pod template by a server-side dry run. Without strict validation the server silently drops a
# misspelt field, and the job would run without its limits or tolerations.

_DRY_RUN_UNSUPPORTED = "does not support dry run"
"""Part of the message of an admission webhook with side effects. The code is 400, but the pod may be valid."""
_VALID_POD_CODES = (403, 409)
"""Codes with which a server rejects a pod whose fields it has found valid, such as for a used-up quota."""


class TemplateDryRun:
    """Validates one job's template once for each metadata.generation of the job.

    A dry run without a result is repeated with the next pod.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._valid_generation = 0
        """metadata.generation whose template is valid; 0: none was validated yet."""
        self._invalid_template: tuple[int, ApiError] | None = None
        """(metadata.generation, error) of the last template that is invalid."""

    async def validate_template(self, namespace: str, pod: dict[str, Any], generation: int) -> None:
        """Validates a pod of a template, unless that was done before. Must not be called concurrently.

        Args:
            namespace: Namespace of the job.
            pod: A pod that was built from the template.
            generation: metadata.generation of the job.

        Raises:
            ApiError: The pod is invalid; the error is permanent.
        """
        if self._invalid_template is not None and self._invalid_template[0] == generation:
            raise self._invalid_template[1]
        if self._valid_generation == generation:
            return
        try:
            await api_writes.dry_run_pod(self._api, namespace, pod)
        except ApiUnreachable:
            return  # the pod is created anyway: a webhook that hangs only in dry runs must not block the job
        except ApiError as error:
            if error.is_permanent and _DRY_RUN_UNSUPPORTED not in str(error):
                self._invalid_template = generation, error
                raise
            if not error.is_permanent and error.code not in _VALID_POD_CODES:
                return  # the server has a problem of its own, which proves nothing about the pod
            if error.is_permanent:
                log.warning(
                    "creating pods in namespace %s without validation, because a webhook does not support dry run: %s",
                    namespace,
                    error,
                )
        self._valid_generation = generation


# ---- platform --------------------------------------------------------------------------------------------------------

Object = dict[str, Any]

_MAX_PATCH_ATTEMPTS = 3
"""Attempts to write a status whose precondition is still met, before the error is raised."""


class KubernetesPlatform:
    """Implements the Platform protocol for one job on Kubernetes.

    Args:
        cache: The cluster's objects, shared by all jobs.
        namespace: Namespace of the job.
        name: Name of the job.
        uid: UID of the job; a later job of the same name is another one.
        access: Credentials for the memory servers; None: they need none.
        settings: Settings of the workers' pods; None: the defaults.
    """

    def __init__(
        self,
        cache: ClusterCache,
        namespace: str,
        name: str,
        uid: str,
        access: MemoryTierCredentials | None = None,
        settings: pods.PodSettings | None = None,
    ) -> None:
        self._cache, self._api = cache, cache.api.with_job(uid)
        self._job_identity = api_objects.JobIdentity(namespace, name, uid)
        self._last_valid_job: TrainingJob | None = None
        """The job with its newest valid spec."""
        self._access, self._settings = access or MemoryTierCredentials(), settings or pods.PodSettings()
        self._last_workers = DerivedCache[ObservedWorker]()
        self._last_status: tuple[object, JobStatus] | None = None
        """The stored status that was parsed last, and the result."""
        self._foreign_pods = frozenset[str]()
        """UIDs of pods with this job's labels that another controller owns; they were logged already."""
        self._changed = asyncio.Event()
        """Set whenever something that a plan reads has changed."""
        self._closed = False
        self._shared_objects = SharedObjects(self._api, self._job_identity)
        self._prepare_lock = asyncio.Lock()
        """Lets one worker at a time validate the template and create the shared objects."""
        self._template_dry_run = TemplateDryRun(self._api)
        self._listeners: dict[str, Listener] = {
            "trainingjobs": self._on_job_change,
            "pods": self._on_change,
            "servers": self._on_change,
            "nodes": self._on_change,
            "podgroups": self._on_change,
        }
        for kind, listener in self._listeners.items():
            cache.add_listener(kind, listener, self._listener_key(kind))

    def last_valid_job(self) -> TrainingJob | None:
        """Returns the job with its newest valid spec; None: there is none, or the job was deleted."""
        try:
            return self._parse_job(self._read_stored_job())[0]
        except PlatformError:
            return None

    async def observe(self) -> PlatformSnapshot:
        """Observes the job and its surroundings in the cache, which includes this operator's own writes."""
        stored = self._read_fresh_job()
        job, rejection = self._parse_job(stored)
        signals = job.spec.health_policy.node_signals or KNOWN_SIGNALS
        nodes, servers = self._cache.nodes_and_servers(job.spec.checkpoint.memory.topology_key, signals, self._access)
        job_pods = self._own_pods()
        return PlatformSnapshot(
            job=job,
            status=self._parse_status(stored),
            workers=self._observe_workers(job_pods),
            purges=_observe_purges(job_pods),
            nodes=nodes,
            rejected_calls=self.rejected_calls(),
            servers=servers,
            spec_rejection=rejection,
            free_nodes=None,
            pod_groups=self._observe_pod_groups(),
        )

    def rejected_calls(self) -> tuple[RejectedCall, ...]:
        """Returns the calls that were rejected in the last minutes; makes no call, so it works during an outage."""
        return self._api.rejected_calls.rejected_for_job(self._job_identity.uid, time.monotonic())

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        stored = self._read_stored_job()
        job, _ = self._parse_job(stored)
        pod = pods.build_pod(job, worker, environment, self._settings)
        shared = (pods.build_secret(job, environment), pods.build_service(job))
        generation = None if self._parse_status(stored).lineage else job.metadata_generation
        if self._shared_objects.has_created(shared) or self._is_secret_in_use(pod):
            # the shared objects exist: a lost worker's replacement must not wait for a check of them
            prepared = self._prepare_creation(
                pod, generation, partial(self._shared_objects.recreate_deleted, shared, time.monotonic())
            )
            await api_writes.run_concurrently(self._create_pod(pod), prepared)
        else:
            await self._prepare_creation(pod, generation, partial(self._shared_objects.create_missing, shared))
            await self._create_pod(pod)

    async def delete_worker(self, worker: DeleteWorker) -> None:
        terminating_pod = await api_writes.delete_pod(self._api, self._job_identity.namespace, worker)
        if terminating_pod is not None:
            self._cache.workers.apply_write_result(terminating_pod)
        else:
            self._cache.workers.remove_deleted(self._job_identity.namespace, worker.name, worker.uid)

    async def apply_pod_group(self, action: ApplyPodGroup) -> None:
        group, watched = action.group, self._watched_groups(action.group.gang)
        stored = watched.items.get((self._job_identity.namespace, self._job_identity.name))
        body = pod_groups.build_pod_group(self._job_identity, group)
        watched.apply_write_result(
            await api_writes.apply_pod_group(self._api, group.gang, body, stored, self._job_identity)
        )

    async def delete_pod_group(self, action: DeletePodGroup) -> None:
        watched = self._watched_groups(action.gang)
        await api_writes.delete_pod_group(self._api, action.gang, action.uid, self._job_identity)
        watched.remove_deleted(self._job_identity.namespace, self._job_identity.name, action.uid)

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        stored, precondition = self._read_stored_job(), precondition_of(old)
        written = replace(new, serial=old.serial + 1)
        last_error: PlatformError | None = None
        for _ in range(_MAX_PATCH_ATTEMPTS):
            body = api_writes.add_printer_columns(written, self._observe_workers(self._own_pods()), stored, time.time())
            try:
                operations = api_writes.build_status_patch(stored, body, precondition)
                self._cache.jobs.apply_write_result(await self._api.patch(f"{self._path}/status", operations))
                return written
            except ApiError as error:
                if error.code not in (409, 422):
                    raise
                last_error = error
            # the precondition failed, or the patch did not fit the stored object, or the status itself is invalid:
            # read the stored job to find out which
            stored = await self._api.get(self._path)
            self._cache.jobs.apply_write_result(stored)
            if stored["metadata"]["uid"] != self._job_identity.uid:
                raise PlatformError(f"job {self._job_identity} was deleted and created again under its name")
            if api_writes.read_precondition(stored) != precondition:
                raise StatusConflict(
                    f"the status of job {self._job_identity} was changed by another writer: it is"
                    f" {api_writes.read_precondition(stored)}, this write expects {precondition};"
                    " nothing was written, observe again"
                ) from last_error
        assert last_error is not None
        raise last_error

    async def set_finalizer(self, is_present: bool) -> None:
        try:
            self._cache.jobs.apply_write_result(
                await api_writes.set_finalizer(self._api, self._read_stored_job(), is_present)
            )
        except ApiError as error:
            if error.code == 404 and not is_present:
                return
            if error.code in (409, 422):  # another client changed the finalizers: the next attempt needs the new ones
                self._cache.jobs.apply_write_result(await self._api.get(self._path))
            raise

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        job, _ = self._parse_job(self._read_stored_job())
        pod = await api_writes.create_or_find(
            self._api, "pods", build_purge_pod(job, attempt, environment, self._settings), self._job_identity
        )
        self._cache.workers.apply_write_result(pod)

    async def delete_job(self) -> None:
        await api_writes.delete_job(self._api, self._job_identity)

    async def record_events(self, events: Sequence[Event]) -> None:
        if not events:
            return
        # the last events of a job may be recorded after it was deleted, so it may be missing here
        stored = self._cache.jobs.items.get((self._job_identity.namespace, self._job_identity.name), {})
        generation = api_writes.read_precondition(stored).generation or 0
        for event in events:
            await api_writes.record_job_event(self._api, self._job_identity, event, generation, time.time())

    async def watch_changes(self) -> AsyncIterator[None]:
        """Yields when something that a plan reads has changed, until `close`."""
        self._changed.set()  # something may have changed between the last observation and this call
        while True:
            await self._changed.wait()
            if self._closed:
                return
            self._changed.clear()
            yield

    async def close(self) -> None:
        """Stops listening to the cache; the controller closes the cache and its connections."""
        if not self._closed:
            for kind, listener in self._listeners.items():
                self._cache.remove_listener(kind, listener, self._listener_key(kind))
        self._closed = True
        self._changed.set()

    def _is_secret_in_use(self, pod: Object) -> bool:
        """Whether another pod of this job refers to this pod's Secret, which then was created before that pod."""
        secret = pod["metadata"]["labels"][api_objects.SECRET_LABEL]
        return any(
            other["metadata"]["labels"].get(api_objects.SECRET_LABEL) == secret
            and api_objects.is_controlled_by(other, self._job_identity)
            for other in self._cache.pods_of(self._job_identity.uid)
        )

    async def _prepare_creation(
        self, pod: Object, generation: int | None, share_objects: Callable[[], Awaitable[None]]
    ) -> None:
        """Validates the pod template, and creates or checks the objects that the workers share.

        Args:
            pod: The pod to create.
            generation: metadata.generation of the job; None: the job has trained, so its template is valid.
            share_objects: Creates or checks the shared objects.
        """
        async with self._prepare_lock:  # workers that are created concurrently share these objects
            if generation is not None:
                await self._template_dry_run.validate_template(self._job_identity.namespace, pod, generation)
            await share_objects()

    async def _create_pod(self, pod: Object) -> None:
        self._cache.workers.apply_write_result(
            await api_writes.create_or_find(self._api, "pods", pod, self._job_identity)
        )

    # ---- reading the cache ------------------------------------------------------------------------------------------

    def _read_fresh_job(self) -> Object:
        """Returns the stored job; raises PlatformError if the cache is out of date."""
        try:
            self._cache.check_fresh()
        except ReadForbidden as view_error:
            view_error.status = self._parse_status(self._read_stored_job())
            raise
        return self._read_stored_job()

    @property
    def _path(self) -> str:
        return api_objects.jobs_path(self._job_identity.namespace, self._job_identity.name)

    def _read_stored_job(self) -> Object:
        stored = self._cache.jobs.items.get((self._job_identity.namespace, self._job_identity.name))
        if stored is None or stored["metadata"]["uid"] != self._job_identity.uid:
            raise PlatformError(
                f"there is no job {self._job_identity} with uid {self._job_identity.uid}; was it deleted?"
            )
        return stored

    def _parse_job(self, stored: Object) -> tuple[TrainingJob, str]:
        """Returns the job with its newest valid spec, and why a newer spec is invalid (empty: there is none)."""
        metadata, last_valid = stored["metadata"], self._last_valid_job
        if last_valid is not None and last_valid.metadata_generation == metadata.get("generation", 1):
            self._last_valid_job = with_metadata(last_valid, metadata)
            return self._last_valid_job, ""
        try:
            self._last_valid_job = parse_job(stored)
            return self._last_valid_job, ""
        except SpecError as error:
            rejection = f"the job's spec is invalid: {error}"
            if last_valid is None:
                generation, status = metadata.get("generation", 1), self._parse_status(stored)
                raise JobRejected(rejection, generation, status, _is_being_deleted(metadata)) from error
            return with_metadata(last_valid, metadata), rejection

    def _parse_status(self, stored: Object) -> JobStatus:
        stored_status = stored.get("status", {})
        if self._last_status is not None and self._last_status[0] is stored_status:
            return self._last_status[1]  # cached objects are replaced and never modified, so the status is the same
        try:
            self._last_status = (stored_status, status_from_json(stored_status))
            return self._last_status[1]
        except InvariantViolation as error:
            rejection = (
                f"the job's status was edited and cannot be read: {error}. The operator does not overwrite it; restore"
                " the former status, or create a new job with checkpoint.restoreFrom"
            )
            metadata = stored["metadata"]
            raise JobRejected(rejection, metadata.get("generation", 1), None, _is_being_deleted(metadata)) from error

    def _observe_workers(self, pods: Sequence[Object]) -> tuple[ObservedWorker, ...]:
        workers = [pod for pod in pods if api_objects.role_of(pod) != api_objects.PURGE]
        return tuple(self._last_workers.derive_all(workers, observations.observe_worker, lambda pod: None))

    def _observe_pod_groups(self) -> ObservedPodGroups:
        key = (self._job_identity.namespace, self._job_identity.name)
        stored = ((gang, watched.items.get(key)) for gang, watched in self._cache.groups.items())
        observed = (
            pod_groups.observe_pod_group(gang, group)
            for gang, group in stored
            if group is not None and api_objects.is_controlled_by(group, self._job_identity)
        )
        return ObservedPodGroups(tuple(observed), self._cache.unavailable_schedulers())

    def _watched_groups(self, gang: Gang) -> WatchedObjects:
        watched = self._cache.groups.get(gang)
        if watched is None:
            raise PlatformError(self._cache.unavailable_schedulers()[gang])
        return watched

    def _own_pods(self) -> list[Object]:
        """Returns this job's pods; logs once each pod that has its labels but another controller, and ignores it."""
        labelled_pods = self._cache.pods_of(self._job_identity.uid)
        strangers = {
            pod["metadata"]["uid"]: pod
            for pod in labelled_pods
            if not api_objects.is_controlled_by(pod, self._job_identity)
        }
        for uid in strangers.keys() - self._foreign_pods:
            metadata = strangers[uid]["metadata"]
            log.warning(
                "ignoring pod %s/%s, which has the labels of job %s but is not controlled by it",
                metadata.get("namespace"), metadata["name"], self._job_identity,
            )  # fmt: skip
        self._foreign_pods = frozenset(strangers)
        return [pod for pod in labelled_pods if pod["metadata"]["uid"] not in strangers]

    # ---- changes of the cache ---------------------------------------------------------------------------------------

    def _on_change(self, _old: Object | None, _new: Object | None) -> None:
        self._changed.set()

    def _listener_key(self, kind: str) -> str:
        """Returns this job's UID for kinds whose other objects do not concern it; empty: all objects do."""
        return self._job_identity.uid if kind in ("trainingjobs", "pods", "podgroups") else ""

    def _on_job_change(self, old: Object | None, new: Object | None) -> None:
        """Reports a change of the job, unless only its status has changed, which this operator writes itself."""
        if old is None or new is None or _spec_fields(old) != _spec_fields(new):
            self._changed.set()


def _observe_purges(pods: Sequence[Object]) -> tuple[ObservedPurge, ...]:
    purges = (observations.observe_purge(pod) for pod in pods if api_objects.role_of(pod) == api_objects.PURGE)
    return tuple(purge for purge in purges if purge is not None)


def _is_being_deleted(metadata: Object) -> bool:
    """Whether the job is being deleted and waits for this operator's finalizer."""
    return FINALIZER in (metadata.get("finalizers") or ()) and "deletionTimestamp" in metadata


def _spec_fields(job: Object) -> tuple[Any, ...]:
    """Returns the fields of a job that users and controllers change; metadata.generation ignores annotations."""
    metadata = job["metadata"]
    return tuple(metadata.get(name) for name in ("uid", "generation", "deletionTimestamp", "finalizers", "annotations"))
