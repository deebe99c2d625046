"""Watches the jobs, worker pods, memory servers, nodes and node leases of a cluster, for all jobs of this operator.

Created by the controller and read by each job's platform. A change that no plan depends on (a node's heartbeat, an own
status write) notifies no job.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from surefoot.task_set import TaskSet
from surefoot_operator import metrics
from surefoot_operator.api.spec import GANG_SCHEDULERS, Gang, NodeSignals
from surefoot_operator.errors import PlatformError, ReadForbidden
from surefoot_operator.job_snapshot import ObservedNode
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods, observations, watched_objects
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness, NodeLeases
from surefoot_operator.platforms.kubernetes.views.watched_objects import WatchedObjects

log = logging.getLogger(__name__)


# ---- derived values --------------------------------------------------------------------------------------------------
# Caches values that are derived from mirrored API objects. A cluster has thousands of nodes, a job is observed twice a
# second, and hardly any object changes in between.

T = TypeVar("T")
Object = dict[str, Any]


class DerivedCache(Generic[T]):
    """Caches one derived value for each object of one kind.

    The cluster cache replaces objects and never modifies them, so the same object has the same value.
    """

    def __init__(self) -> None:
        self._cache: dict[str, tuple[Object, Hashable, T]] = {}

    def derive_all(
        self, items: Iterable[Object], derive: Callable[[Object], T], extra_key: Callable[[Object], Hashable]
    ) -> list[T]:
        """Returns the derived value of each object; computes it only for objects that have changed.

        Args:
            items: All objects of the kind; cached values of others are dropped.
            derive: Derives the value of an object.
            extra_key: Returns everything else that an object's value depends on.
        """
        old, self._cache = self._cache, {}
        values: list[T] = []
        for item in items:
            uid, extra = item["metadata"]["uid"], extra_key(item)
            cached = old.get(uid)
            is_unchanged = cached is not None and cached[0] is item and cached[1] == extra
            value = cached[2] if cached is not None and is_unchanged else derive(item)
            self._cache[uid] = (item, extra, value)
            values.append(value)
        return values


# ---- cluster views ---------------------------------------------------------------------------------------------------
# Derives the nodes and memory servers that jobs observe. Jobs with equal settings get the same tuple until something in
# it changes: if each of a thousand jobs derived its own, they would have a million values, and compare as many at each
# change.

Items = Mapping[tuple[str, str], Object]

MAX_VIEWS = 64
"""Views that are cached; jobs with the same topology key and node signals share one."""


class _FilteredView:
    """The nodes and memory servers that jobs with one topology key and one set of node signals observe."""

    def __init__(self, topology_key: str, signals: NodeSignals) -> None:
        self._topology_key, self._signals = topology_key, signals
        self._derived_nodes = DerivedCache[ObservedNode]()
        self._node_inputs: tuple[object, ...] = ()
        """The inputs from which `nodes` was derived."""
        self._server_inputs: tuple[object, ...] = ()
        """The inputs from which `servers` was derived."""
        self.nodes: tuple[ObservedNode, ...] = ()
        """All nodes, sorted by name."""
        self.servers: tuple[MemoryServerAddress, ...] = ()
        """The addresses of all memory servers."""

    def refresh_nodes(self, items: Iterable[Object], changes: int, kubelets: KubeletLiveness) -> None:
        """Derives the nodes again if a node or the liveness of a kubelet has changed."""
        if self._node_inputs and self._node_inputs[0] == changes and self._node_inputs[1] is kubelets:
            return
        self._node_inputs = (changes, kubelets)
        observed = self._derived_nodes.derive_all(
            items,
            lambda node: observations.observe_node(node, kubelets, self._topology_key, self._signals),
            lambda node: (node["metadata"]["name"] in kubelets.silent, node["metadata"]["name"] in kubelets.renewed),
        )
        new_nodes = observations.confirm_node_failures(sorted(observed, key=lambda node: node.name))
        self.nodes = self.nodes if new_nodes == self.nodes else new_nodes

    def refresh_servers(
        self,
        existing_pods: Iterable[Object],
        deleted_pods: Iterable[Object],
        changes: int,
        access: MemoryTierCredentials,
    ) -> None:
        """Derives the memory servers again if a server's pod, a node or the credentials have changed."""
        inputs = (changes, id(self.nodes), access.user, access.password, access.authority)
        if inputs == self._server_inputs:
            return
        self._server_inputs = inputs
        addresses = memory_tier_pods.choose_server_addresses(
            existing_pods, deleted_pods, {node.name: node.domain for node in self.nodes}, access
        )
        self.servers = self.servers if addresses == self.servers else addresses


class ClusterViews:
    """Derives nodes and memory servers from mappings that the cluster cache owns.

    The cache reports each change of the mappings by `record_node_change` and `record_server_change`.

    Args:
        nodes: The nodes that exist.
        server_pods: The pods of memory servers that exist.
        deleted_pods: Node → the last such pod there that was deleted.
    """

    def __init__(self, nodes: Items, server_pods: Items, deleted_pods: Mapping[str, Object]) -> None:
        self._nodes, self._servers, self._gone = nodes, server_pods, deleted_pods
        self._views: dict[tuple[str, NodeSignals], _FilteredView] = {}
        self._node_changes = self._server_changes = 0

    def record_node_change(self, old: Object | None, new: Object | None) -> None:
        """Records a change of a node, if it concerns a field that is read."""
        if old is None or new is None or _node_fields(old) != _node_fields(new):
            self._node_changes += 1

    def record_server_change(self) -> None:
        """Records a change of a memory server's pod."""
        self._server_changes += 1

    def nodes_and_servers(
        self, kubelets: KubeletLiveness, topology_key: str, signals: NodeSignals, access: MemoryTierCredentials
    ) -> tuple[tuple[ObservedNode, ...], tuple[MemoryServerAddress, ...]]:
        """Returns the nodes sorted by name, and the memory servers; the same tuples as before if nothing has changed.

        Args:
            kubelets: Which kubelets have renewed their lease.
            topology_key: Node label of the highest level over which copies are spread.
            signals: The node signals to which the job reacts.
            access: Credentials of the memory servers.
        """
        view = self._views.get((topology_key, signals))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                del self._views[next(iter(self._views))]
            view = self._views[topology_key, signals] = _FilteredView(topology_key, signals)
        view.refresh_nodes(self._nodes.values(), self._node_changes, kubelets)
        view.refresh_servers(self._servers.values(), self._gone.values(), self._server_changes, access)
        return view.nodes, view.servers


def _node_fields(node: Object) -> tuple[Any, ...]:
    return node["metadata"].get("labels"), node.get("spec"), node.get("status")


# ---- cluster cache ---------------------------------------------------------------------------------------------------

KUBELET_POLL_SECONDS = 1.0
"""Time between two checks for kubelets that have stopped renewing their lease."""
SYNC_TIMEOUT_SECONDS = 20.0
"""Time limit for the first list of all kinds."""

DELETED_RETENTION_SECONDS = 600.0
"""Time for which a deleted memory server is still observed; every job observes at least once a minute."""

NOT_WATCHED_MESSAGE = "this operator does not use {gang}: add it to the chart's value operator.gangSchedulers"
"""Why a gang scheduler is unavailable that the installation does not list."""

Listener = Callable[[Object | None, Object | None], None]


class ClusterCache:
    """Mirrors the objects of a cluster that plans depend on.

    Args:
        api: The API server.
        server_namespace: The only namespace whose pods count as memory servers; empty: any. A memory server receives
        the
            administrator's password, so users who may create pods in other namespaces must not be able to create one.
        gangs: Gang schedulers whose pod groups are watched. If the cluster does not serve a group's kind, jobs that do
            not use that scheduler are planned nevertheless.
    """

    def __init__(self, api: Api, server_namespace: str = "", gangs: Collection[Gang] = ()) -> None:
        self.api = api
        self._listeners: dict[tuple[str, str], list[Listener]] = {}
        """(kind, job UID) → listeners to the changes of that job's objects; an empty UID: of all objects."""
        self.jobs = self._watch_kind(f"{api_objects.JOBS_API_PATH}/trainingjobs", "")
        self.workers = self._watch_kind("/api/v1/pods", api_objects.JOB_UID_LABEL)
        pods_path = api_objects.core_path(server_namespace, "pods") if server_namespace else "/api/v1/pods"
        self.servers = self._watch_kind(pods_path, api_objects.MEMORY_SERVER_SELECTOR, "servers")
        self.nodes = self._watch_kind("/api/v1/nodes", "")
        leases_path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self.leases = WatchedObjects(api, leases_path, "", self._on_lease_change, trim=watched_objects.trim_lease)
        self._watched_by_kind = {
            "trainingjobs": self.jobs,
            "workers": self.workers,
            "servers": self.servers,
            "nodes": self.nodes,
            "leases": self.leases,
        }
        self._watched = tuple(self._watched_by_kind.values())
        self.groups: dict[Gang, WatchedObjects] = {
            gang: self._watch_kind(pod_groups.pod_group_path(gang), api_objects.JOB_UID_LABEL, optional=True)
            for gang in gangs
        }
        self._kubelets = NodeLeases()
        self._notified = KubeletLiveness()
        self.deleted_server_pods: dict[str, Object] = {}
        """Node → the last memory server's pod there that was deleted, until a new one exists or the retention ends."""
        self._deleted_seconds: dict[str, float] = {}
        """Node → monotonic time at which that pod was deleted."""
        self._views = ClusterViews(self.nodes.items, self.servers.items, self.deleted_server_pods)
        self.add_listener("servers", self._on_server_change)
        self._pods_by_job: dict[str, dict[str, Object]] = {}
        self.add_listener("pods", self._on_pod_change)
        self._tasks = TaskSet(_log_task_failure)

    async def start(self) -> None:
        """Starts the watches; returns once jobs and pods are listed and the server has answered for nodes and leases.

        The lists of nodes and leases may be rejected: they are retried, and until then no job is planned and each one
        reports the reason (`check_fresh`). Without the lists of jobs and pods, the operator would give wrong answers to
        agents and to eviction requests.

        Raises:
            PlatformError: The lists were not complete within `SYNC_TIMEOUT_SECONDS`.
        """
        for watched in (*self._watched, *self.groups.values()):
            self._tasks.start(watched.run(), f"watch {watched.path}")
        self._tasks.start(self._poll_kubelets(), "judge leases")
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_SECONDS):
                for watched in self._watched:
                    await (watched.has_answered if watched in (self.nodes, self.leases) else watched.has_listed).wait()
        except TimeoutError:
            unlisted = [watched for watched in self._watched if not watched.has_listed.is_set()]
            await self.close()
            rejections = "; ".join(watched.rejection for watched in unlisted if watched.rejection)
            paths = ", ".join(watched.path for watched in unlisted)
            hint = "; install the CustomResourceDefinition" if " (404 " in self.jobs.rejection else ""
            problem = rejections or "the API server did not answer"
            raise PlatformError(f"{problem}: {paths} could not be listed in {SYNC_TIMEOUT_SECONDS:g} s{hint}") from None
        for kind, watched in self._watched_by_kind.items():
            metrics.watch_age_seconds.labels(kind).set_function(watched.age_seconds)

    async def close(self) -> None:
        """Ends the watches; the connections to the API server stay open."""
        for kind in self._watched_by_kind:
            metrics.watch_age_seconds.remove_by_labels({"kind": kind})  # does nothing for a kind that was never listed
        await self._tasks.close()

    def add_listener(self, kind: str, listener: Listener, job: str = "") -> None:
        """Calls a listener with the old and the new state at each later change.

        Args:
            kind: `trainingjobs`, `pods`, `podgroups`, `servers` or `nodes`. For the last three, changes of fields that
                no plan reads are not reported.
            listener: Called with None for an object that does not exist.
            job: UID of the job whose objects are meant (the job itself, its pods or pod groups); empty: all objects.
        """
        self._listeners.setdefault((kind, job), []).append(listener)

    def remove_listener(self, kind: str, listener: Listener, job: str = "") -> None:
        """Undoes a call of `listen` with the same arguments."""
        listeners = self._listeners[kind, job]
        listeners.remove(listener)
        if not listeners:
            del self._listeners[kind, job]

    def with_write_check(self, may_write: Callable[[], None]) -> ClusterCache:
        """Returns a copy with the same watches that calls `may_write` before each write; see `Api.with_write_check`."""
        cache = copy.copy(self)
        cache.api = self.api.with_write_check(may_write)
        return cache

    def check_fresh(self) -> None:
        """Raises an error if no plan may be made.

        Raises:
            ViewRefused: The API server rejects a watch.
            PlatformError: A watch is out of date, or this replica may not write.
        """
        self.api.check_allowed()
        for watched in self._watched:
            if not watched.is_synced:
                if watched.rejection:
                    raise ReadForbidden(f"{watched.rejection}; without this watch Surefoot plans nothing")
                raise PlatformError(
                    f"the API server does not answer the watch of {watched.path}; nothing is planned until it does"
                )

    @property
    def is_complete(self) -> bool:
        """Whether all kinds were listed."""
        return all(watched.has_listed.is_set() for watched in self._watched)

    def seconds_since_answer(self) -> dict[str, float]:
        """Returns for each kind the seconds since the API server last answered its watch, even with an error."""
        now = time.monotonic()
        return {kind: now - watched.answered_seconds for kind, watched in self._watched_by_kind.items()}

    def pods_of(self, job: str) -> list[Object]:
        """Returns the pods with this job's UID in their labels, whether the job controls them or not."""
        return list(self._pods_by_job.get(job, {}).values())

    def unavailable_schedulers(self) -> Mapping[Gang, str]:
        """Returns the gang schedulers whose pod groups cannot be used, each with the reason."""
        reasons = {gang: NOT_WATCHED_MESSAGE.format(gang=gang) for gang in GANG_SCHEDULERS if gang not in self.groups}
        return reasons | {gang: watched.rejection for gang, watched in self.groups.items() if watched.rejection}

    def nodes_and_servers(
        self, topology_key: str, signals: NodeSignals, access: MemoryTierCredentials
    ) -> tuple[tuple[ObservedNode, ...], tuple[MemoryServerAddress, ...]]:
        """Returns nodes and memory servers, in tuples that all jobs with equal arguments share."""
        return self._views.nodes_and_servers(self.kubelet_liveness(), topology_key, signals, access)

    def kubelet_liveness(self) -> KubeletLiveness:
        """Returns which kubelets have renewed their lease lately, and which have not."""
        return self._kubelets.classify_nodes(self.leases.contact_since_seconds, self.leases.last_contact_seconds)

    def _watch_kind(self, path: str, selector: str, kind: str = "", optional: bool = False) -> WatchedObjects:
        kind = kind or path.rsplit("/", 1)[-1]

        fields_of = _PLAN_FIELDS.get(kind)

        def on_event(old: Object | None, new: Object | None) -> None:
            if kind == "nodes":
                self._views.record_node_change(old, new)
            # compared here once, not by each of a thousand jobs: kubelets update their nodes' status all the time
            if fields_of is not None and old is not None and new is not None and fields_of(old) == fields_of(new):
                return
            jobs = dict.fromkeys(("", *(_job_of(kind, item) for item in (old, new) if item is not None)))
            for job in jobs:
                for listener in list(self._listeners.get((kind, job), ())):
                    listener(old, new)

        return WatchedObjects(
            self.api, path, selector, on_event, optional, _TRIM_FUNCTIONS.get(kind, watched_objects.trim_managed_fields)
        )

    def _on_lease_change(self, old: Object | None, new: Object | None) -> None:
        self._kubelets.record_change(old, new, time.monotonic())

    def _on_pod_change(self, old: Object | None, new: Object | None) -> None:
        for pod, exists in ((old, False), (new, True)):
            job = api_objects.job_uid_label_of(pod) if pod is not None else None
            if pod is None or job is None:
                continue
            pods = self._pods_by_job.setdefault(job, {})
            if exists:
                pods[pod["metadata"]["uid"]] = pod
            else:
                pods.pop(pod["metadata"]["uid"], None)
                if not pods:
                    del self._pods_by_job[job]

    def _on_server_change(self, old: Object | None, new: Object | None) -> None:
        self._views.record_server_change()
        pod = new or old
        node = observations.node_of(pod) if pod is not None else None
        if node is None:
            return
        if new is None and pod is not None:
            self.deleted_server_pods[node] = pod
            self._deleted_seconds[node] = time.monotonic()
        elif new is not None:
            self._forget_deleted_server(node)

    def _forget_deleted_server(self, node: str) -> None:
        if self.deleted_server_pods.pop(node, None) is not None:
            self._views.record_server_change()
        self._deleted_seconds.pop(node, None)

    def drop_expired_server_pods(self, now: float) -> None:
        """Drops deleted memory servers that every job has observed by now.

        In a cluster that scales, new nodes have new names, so the list would otherwise grow forever.
        """
        for node in [
            node
            for node, deleted_seconds in self._deleted_seconds.items()
            if now - deleted_seconds > DELETED_RETENTION_SECONDS
        ]:
            self._forget_deleted_server(node)

    async def _poll_kubelets(self) -> None:
        while True:
            liveness, notified = self.kubelet_liveness(), self._notified
            for name in (liveness.silent ^ notified.silent) | (liveness.renewed ^ notified.renewed):
                node = self.nodes.items.get(("", name))
                if name not in liveness.silent ^ notified.silent and (
                    node is None or not observations.lease_outweighs_conditions(node)
                ):
                    continue  # a kubelet that renews its lease changes nothing on a node that is ready anyway
                for listener in list(self._listeners.get(("nodes", ""), ())):
                    listener(None, node)
            self._notified = liveness
            self.drop_expired_server_pods(time.monotonic())
            await asyncio.sleep(KUBELET_POLL_SECONDS)  # a missing renewal causes no event, so it must be polled


def _job_of(kind: str, item: Object) -> str:
    """Returns the UID of the job that an object is or belongs to; empty: the object concerns all jobs."""
    if kind == "trainingjobs":
        return str(item["metadata"]["uid"])
    return (api_objects.job_uid_label_of(item) or "") if kind in ("pods", "podgroups") else ""


_PLAN_FIELDS: Mapping[str, Callable[[Object], object]] = {
    "nodes": observations.node_plan_fields,
    "servers": observations.server_plan_fields,
    "podgroups": pod_groups.plan_fields,
}
"""Kind → function that returns the fields of an object that a plan can depend on."""


_TRIM_FUNCTIONS: Mapping[str, Callable[[Object], Object]] = {
    "pods": watched_objects.trim_worker_pod,
    "servers": watched_objects.trim_server_pod,
    "nodes": watched_objects.trim_node,
}
"""Kind → function that returns an object with only the fields to store."""


def _log_task_failure(name: str, error: BaseException) -> None:
    """Logs a watch that ended because of a bug; its objects become out of date, so that planning stops."""
    log.error(
        "the task %r failed and is not restarted: no job is planned until this operator is restarted",
        name,
        exc_info=error,
    )
