"""Implements the Fabric protocol for one job on Kubernetes.

Touches the network through `cluster_cache` and `api_writes`. The reconciler calls it through the protocol; the controller
makes it and owns the cache.
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
from surefoot_operator.api.status import JobStatus, stamp
from surefoot_operator.api.status_json import status_from_json
from surefoot_operator.errors import (
    InvariantViolation,
    JobRejected,
    PlatformError,
    SpecError,
    StatusConflict,
    ViewRefused,
)
from surefoot_operator.job_snapshot import ObservedPodGroups, ObservedPurge, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryTierCredentials
from surefoot_operator.platforms.interface import PlatformSnapshot, WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, api_writes, pod_groups, pods
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.platforms.kubernetes.pods import purge_pod
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache, DerivedCache, Listener
from surefoot_operator.platforms.kubernetes.views.watched_objects import WatchedObjects
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker, Event
from surefoot_operator.rejected_calls import RefusedCall

log = logging.getLogger(__name__)


# ---- shared objects --------------------------------------------------------------------------------------------------
# Makes what a job's workers share: the Secret and the headless Service. Behind a new leader nobody remembers that they
# are there, and no right to read Secrets is asked for. A quota that is used up, or an admission webhook, refuses to
# make anew even what exists: a lost worker's replacement must not wait for them. Touches the network through
# `api_writes`.

_PATHS = {"Secret": "secrets", "Service": "services"}


class SharedObjects:
    """Makes one job's shared objects, and asks again for each later worker whether they are there."""

    def __init__(self, api: Api, job: api_objects.JobIdentity) -> None:
        self._api, self._job = api, job
        self._there: dict[tuple[str, str], float] = {}
        """When the last request began that made or found each of them."""
        self._rejected: set[tuple[str, str]] = set()

    def knows(self, bodies: Collection[dict[str, Any]]) -> bool:
        """Whether this leader has made or found all of them."""
        return all(_key(body) in self._there for body in bodies)

    async def make(self, bodies: Collection[dict[str, Any]]) -> None:
        """Makes what is not there yet, side by side.

        Raises:
            FabricError: one could not be made, or its name is another's.
        """
        await api_writes.side_by_side(*map(self._make, bodies))

    async def repair(self, bodies: Collection[dict[str, Any]], asked_seconds: float) -> None:
        """Makes anew what somebody removed; a refusal is counted, and told once.

        The server is asked though this leader made them: others may delete them at any time. One request that began
        after `asked_seconds` (monotonic) answers for all workers that waited for it.
        """
        await api_writes.side_by_side(*(self._repair(body, asked_seconds) for body in bodies))

    async def _repair(self, body: dict[str, Any], asked_seconds: float) -> None:
        kind, name = key = _key(body)
        if self._there.get(key, -math.inf) >= asked_seconds:
            return
        try:
            await self._ask(body)
            self._rejected.discard(key)
        except PlatformError as error:
            metrics.shared_object_failures.labels(_PATHS[kind]).inc()
            if key not in self._rejected:
                self._rejected.add(key)
                log.warning(
                    "%s %s of job %s could not be made anew: %s; pods that refer to it wait if it is gone",
                    kind, name, self._job, error,
                )  # fmt: skip

    async def _make(self, body: dict[str, Any]) -> None:
        if _key(body) not in self._there:
            await self._ask(body)

    async def _ask(self, body: dict[str, Any]) -> None:
        began = time.monotonic()
        await api_writes.create(self._api, _PATHS[body["kind"]], body, self._job)
        self._there[_key(body)] = began


def _key(body: dict[str, Any]) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]


# ---- template dry run ------------------------------------------------------------------------------------------------
# Validates a job's pod template by a server-side dry run. Without strict validation the server silently drops a field
# that does not exist, and a job would run without its limits or tolerations. Owned by `platform`; touches the network
# through `api_writes`.

_UNSUPPORTED = "does not support dry run"
"""Of an admission webhook with side effects. The server says 400 then, and nothing of the pod is wrong."""
_ANSWERED = (403, 409)
"""Whoever answers so has read the pod and found no fault in it."""


class TemplateDryRun:
    """Validates one job's template once for each generation of its spec.

    Without an answer it tries again with the next pod.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._proved = 0
        self._wrong: tuple[int, ApiError] | None = None

    async def give(self, namespace: str, pod: dict[str, Any], generation: int) -> None:
        """Validates a pod. Raises ApiRefused, lasting, if it is invalid.

        One call at a time.
        """
        if self._wrong is not None and self._wrong[0] == generation:
            raise self._wrong[1]
        if self._proved == generation:
            return
        try:
            await api_writes.try_pod(self._api, namespace, pod)
        except ApiUnreachable:
            return  # the pod itself is asked for then: a webhook that only hangs on dry runs keeps no job from beginning
        except ApiError as error:
            if error.permanent and _UNSUPPORTED not in str(error):
                self._wrong = generation, error
                raise
            if not error.permanent and error.code not in _ANSWERED:
                return  # a server in trouble says nothing of the pod; it is asked again with the next
            if error.permanent:
                log.warning("creating pods of %s without validation, the dry run failed: %s", namespace, error)
        self._proved = generation


# ---- platform --------------------------------------------------------------------------------------------------------

Object = dict[str, Any]

_PATCH_TRIES = 3


class KubernetesPlatform:
    """The fabric of one job; `access` holds the credentials for holders."""

    def __init__(
        self,
        cache: ClusterCache,
        namespace: str,
        name: str,
        uid: str,
        access: MemoryTierCredentials | None = None,
        settings: pods.PodSettings | None = None,
    ) -> None:
        self._cache, self._api = cache, cache.api.about(uid)
        self._me = api_objects.JobIdentity(namespace, name, uid)
        self._good: TrainingJob | None = None
        """The newest spec that could be read."""
        self._access, self._settings = access or MemoryTierCredentials(), settings or pods.PodSettings()
        self._last_workers = DerivedCache[ObservedWorker]()
        self._last_status: tuple[object, JobStatus] | None = None
        """The stored status that was read last, and what it says."""
        self._strangers = frozenset[str]()
        self._changed = asyncio.Event()
        self._closed = False
        self._shared = SharedObjects(self._api, self._me)
        self._preparing = asyncio.Lock()
        self._proof = TemplateDryRun(self._api)
        self._listeners: dict[str, Listener] = {
            "trainingjobs": self._on_job_change,
            "pods": self._on_change,
            "servers": self._on_change,
            "nodes": self._on_change,
            "podgroups": self._on_change,
        }
        for kind, listener in self._listeners.items():
            cache.listen(kind, listener, self._own(kind))

    def readable(self) -> TrainingJob | None:
        """Returns the job by its newest readable spec, if any."""
        try:
            return self._job(self._stored())[0]
        except PlatformError:
            return None

    async def observe(self) -> PlatformSnapshot:
        """Reads the cache, which includes our own writes."""
        stored = self._fresh()
        job, refusal = self._job(stored)
        signals = job.spec.health_policy.node_signals or KNOWN_SIGNALS
        around, places = self._cache.nodes_and_servers(job.spec.checkpoint.memory.topology_key, signals, self._access)
        bearing = self._pods()
        return PlatformSnapshot(
            job=job,
            status=self._status(stored),
            workers=self._workers(bearing),
            purges=_purges(bearing),
            nodes=around,
            refused_calls=self.refused_calls(),
            servers=places,
            rejection=refusal,
            free_nodes=None,
            pod_groups=self._pod_groups(),
        )

    def refused_calls(self) -> tuple[RefusedCall, ...]:
        """Of the last minutes; answers without a call, so that it can be asked while nothing else works."""
        return self._api.refused.of_job(self._me.uid, time.monotonic())

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        stored = self._stored()
        job, _ = self._job(stored)
        pod = pods.build_pod(job, worker, environment, self._settings)
        shared = (pods.build_secret(job, environment), pods.build_service(job))
        generation = None if self._status(stored).lineage else job.metadata_generation
        if self._shared.knows(shared) or self._is_referred_to(pod):
            # a lost worker's replacement waits for nothing that is there already
            prepared = self._prepare(pod, generation, partial(self._shared.repair, shared, time.monotonic()))
            await api_writes.side_by_side(self._make(pod), prepared)
        else:
            await self._prepare(pod, generation, partial(self._shared.make, shared))
            await self._make(pod)

    async def delete_worker(self, worker: DeleteWorker) -> None:
        left = await api_writes.delete_pod(self._api, self._me.namespace, worker)
        if left is not None:
            self._cache.workers.apply_write_result(left)
        else:
            self._cache.workers.remove(self._me.namespace, worker.name, worker.uid)

    async def apply_pod_group(self, wanted: ApplyPodGroup) -> None:
        group, feed = wanted.group, self._group_feed(wanted.group.gang)
        stored = feed.items.get((self._me.namespace, self._me.name))
        body = pod_groups.build_pod_group(self._me, group)
        feed.apply_write_result(await api_writes.apply_pod_group(self._api, group.gang, body, stored, self._me))

    async def remove_group(self, removed: DeletePodGroup) -> None:
        feed = self._group_feed(removed.gang)
        await api_writes.remove_group(self._api, removed.gang, removed.uid, self._me)
        feed.remove(self._me.namespace, self._me.name, removed.uid)

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        stored, tested = self._stored(), stamp(old)
        written = replace(new, serial=old.serial + 1)
        problem: PlatformError | None = None
        for _ in range(_PATCH_TRIES):
            body = api_writes.add_printer_columns(written, self._workers(self._pods()), stored, time.time())
            try:
                operations = api_writes.status_patch(stored, body, tested)
                self._cache.jobs.apply_write_result(await self._api.patch(f"{self._path}/status", operations))
                return written
            except ApiError as error:
                if error.code not in (409, 422):
                    raise
                problem = error
            # either the test failed, or we guessed the stored shape wrongly, or the status itself is refused
            stored = await self._api.get(self._path)
            self._cache.jobs.apply_write_result(stored)
            if stored["metadata"]["uid"] != self._me.uid:
                raise PlatformError(f"job {self._me} was deleted and created again under its name")
            if api_writes.stored_stamp(stored) != tested:
                raise StatusConflict(
                    f"job {self._me}: the stored status is {api_writes.stored_stamp(stored)}, this write expects"
                    f" {tested}: observe again"
                ) from problem
        assert problem is not None
        raise problem

    async def set_finalizer(self, held: bool) -> None:
        try:
            self._cache.jobs.apply_write_result(await api_writes.set_finalizer(self._api, self._stored(), held))
        except ApiError as error:
            if error.code == 404 and not held:
                return
            if error.code in (409, 422):  # somebody else changed the finalizers: the next try knows them
                self._cache.jobs.apply_write_result(await self._api.get(self._path))
            raise

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        job, _ = self._job(self._stored())
        made = await api_writes.create(
            self._api, "pods", purge_pod(job, attempt, environment, self._settings), self._me
        )
        self._cache.workers.apply_write_result(made)

    async def delete_job(self) -> None:
        await api_writes.delete_job(self._api, self._me)

    async def record(self, events: Sequence[Event]) -> None:
        if not events:
            return
        stored = self._cache.jobs.items.get((self._me.namespace, self._me.name), {})
        epoch = (
            api_writes.stored_stamp(stored).generation or 0
        )  # the last words on a job may be said when it is gone already
        for event in events:
            await api_writes.record(self._api, self._me, event, epoch, time.time())

    async def watch_changes(self) -> AsyncIterator[None]:
        """Yields when something that a plan reads has changed."""
        self._changed.set()  # something may have changed between the last look and this watch
        while True:
            await self._changed.wait()
            if self._closed:
                return
            self._changed.clear()
            yield

    async def close(self) -> None:
        """Stops listening; the controller closes cache and connections."""
        if not self._closed:
            for kind, listener in self._listeners.items():
                self._cache.remove_listener(kind, listener, self._own(kind))
        self._closed = True
        self._changed.set()

    def _is_referred_to(self, pod: Object) -> bool:
        """Whether another pod of this job refers to this one's Secret: it was made before that pod."""
        secret = pod["metadata"]["labels"][api_objects.SECRET]
        return any(
            other["metadata"]["labels"].get(api_objects.SECRET) == secret and api_objects.is_of(other, self._me)
            for other in self._cache.pods_of(self._me.uid)
        )

    async def _prepare(self, pod: Object, generation: int | None, share: Callable[[], Awaitable[None]]) -> None:
        """Proves the template of a job that had no world yet, and makes what its workers share."""
        async with self._preparing:  # workers made side by side share them
            if generation is not None:
                await self._proof.give(self._me.namespace, pod, generation)
            await share()

    async def _make(self, pod: Object) -> None:
        self._cache.workers.apply_write_result(await api_writes.create(self._api, "pods", pod, self._me))

    # ---- looking ----------------------------------------------------------------------------------------------------

    def _fresh(self) -> Object:
        """The stored job. Raises FabricError where the view of the cluster is not of now."""
        try:
            self._cache.check_fresh()
        except ViewRefused as refusal:
            refusal.status = self._status(self._stored())
            raise
        return self._stored()

    @property
    def _path(self) -> str:
        return api_objects.jobs_path(self._me.namespace, self._me.name)

    def _stored(self) -> Object:
        found = self._cache.jobs.items.get((self._me.namespace, self._me.name))
        if found is None or found["metadata"]["uid"] != self._me.uid:
            raise PlatformError(f"there is no job {self._me} with uid {self._me.uid}; was it deleted?")
        return found

    def _job(self, stored: Object) -> tuple[TrainingJob, str]:
        """The newest spec that could be read, and why a newer one cannot."""
        metadata, good = stored["metadata"], self._good
        if good is not None and good.metadata_generation == metadata.get("generation", 1):
            self._good = with_metadata(good, metadata)
            return self._good, ""
        try:
            self._good = parse_job(stored)
            return self._good, ""
        except SpecError as error:
            refusal = f"the job's spec is invalid: {error}"
            if good is None:
                generation, status = metadata.get("generation", 1), self._status(stored)
                raise JobRejected(refusal, generation, status, _is_being_deleted(metadata)) from error
            return with_metadata(good, metadata), refusal

    def _status(self, stored: Object) -> JobStatus:
        found = stored.get("status", {})
        if self._last_status is not None and self._last_status[0] is found:
            return self._last_status[1]  # what is cached is replaced, and never changed
        try:
            self._last_status = (found, status_from_json(found))
            return self._last_status[1]
        except InvariantViolation as error:
            sentence = (
                f"the job's status was edited and cannot be read: {error}. It is not overwritten;"
                " restore the former status, or create the job anew with checkpoint.restoreFrom"
            )
            metadata = stored["metadata"]
            raise JobRejected(sentence, metadata.get("generation", 1), None, _is_being_deleted(metadata)) from error

    def _workers(self, pods: Sequence[Object]) -> tuple[ObservedWorker, ...]:
        workers = [pod for pod in pods if api_objects.part_of(pod) != api_objects.PURGE]
        return tuple(self._last_workers.all(workers, observations.observe_worker, lambda pod: None))

    def _pod_groups(self) -> ObservedPodGroups:
        key = (self._me.namespace, self._me.name)
        stored = ((gang, feed.items.get(key)) for gang, feed in self._cache.groups.items())
        found = (
            pod_groups.observe_pod_group(gang, one)
            for gang, one in stored
            if one is not None and api_objects.is_of(one, self._me)
        )
        return ObservedPodGroups(tuple(found), self._cache.unavailable_groups())

    def _group_feed(self, gang: Gang) -> WatchedObjects:
        feed = self._cache.groups.get(gang)
        if feed is None:
            raise PlatformError(self._cache.unavailable_groups()[gang])
        return feed

    def _pods(self) -> list[Object]:
        """This job's own; a stranger that bears its labels is told of once and counts for nothing."""
        bearing = self._cache.pods_of(self._me.uid)
        strangers = {pod["metadata"]["uid"]: pod for pod in bearing if not api_objects.is_of(pod, self._me)}
        for uid in strangers.keys() - self._strangers:
            metadata = strangers[uid]["metadata"]
            log.warning(
                "pod %s/%s has labels of job %s but another controller: ignoring it",
                metadata.get("namespace"), metadata["name"], self._me,
            )  # fmt: skip
        self._strangers = frozenset(strangers)
        return [pod for pod in bearing if pod["metadata"]["uid"] not in strangers]

    # ---- hearing ----------------------------------------------------------------------------------------------------

    def _on_change(self, _old: Object | None, _new: Object | None) -> None:
        self._changed.set()

    def _own(self, kind: str) -> str:
        """Of jobs, pods and pod groups this job's own are listened for; holders and nodes are everybody's."""
        return self._me.uid if kind in ("trainingjobs", "pods", "podgroups") else ""

    def _on_job_change(self, old: Object | None, new: Object | None) -> None:
        """Our own status writes are no news."""
        if old is None or new is None or _spec_fields(old) != _spec_fields(new):
            self._changed.set()


def _purges(pods: Sequence[Object]) -> tuple[ObservedPurge, ...]:
    found = (observations.observe_purge(pod) for pod in pods if api_objects.part_of(pod) == api_objects.PURGE)
    return tuple(one for one in found if one is not None)


def _is_being_deleted(metadata: Object) -> bool:
    """Whether its deletion waits for this operator."""
    return FINALIZER in (metadata.get("finalizers") or ()) and "deletionTimestamp" in metadata


def _spec_fields(job: Object) -> tuple[Any, ...]:
    """All of a job that people and others change; annotations make no new generation."""
    metadata = job["metadata"]
    return tuple(metadata.get(name) for name in ("uid", "generation", "deletionTimestamp", "finalizers", "annotations"))
