"""Watches jobs, worker pods, holders, nodes and node leases of a cluster.

Touches the network through `watched_objects`. Made by the controller, read by each job's fabric. A change that no plan
depends on (a heartbeat, our own status write) wakes no job.
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
from surefoot_operator.errors import PlatformError, ViewRefused
from surefoot_operator.job_snapshot import ObservedNode
from surefoot_operator.memory.connection_pool import MemoryServerAddress, MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods, observations, watched_objects
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness, NodeLeases
from surefoot_operator.platforms.kubernetes.views.watched_objects import WatchedObjects

log = logging.getLogger(__name__)


# ---- values derived once an object -----------------------------------------------------------------------------------
# Caches values derived from cached API objects. Called by `platform`: a cluster has thousands of nodes, a job is
# observed twice a second, and hardly anything has changed.

T = TypeVar("T")
Object = dict[str, Any]


class DerivedCache(Generic[T]):
    """Keeps a value for each object of one kind.

    The cluster cache replaces objects and never changes one, so the same object has the same value.
    """

    def __init__(self) -> None:
        self._cache: dict[str, tuple[Object, Hashable, T]] = {}

    def all(
        self, found: Iterable[Object], make: Callable[[Object], T], besides: Callable[[Object], Hashable]
    ) -> list[T]:
        """Returns `make` of each object, computed only for changed ones.

        `besides`: what else its value depends on. Values of objects that are gone are dropped.
        """
        old, self._cache = self._cache, {}
        made: list[T] = []
        for one in found:
            uid, other = one["metadata"]["uid"], besides(one)
            known = old.get(uid)
            same = known is not None and known[0] is one and known[1] == other
            value = known[2] if known is not None and same else make(one)
            self._cache[uid] = (one, other, value)
            made.append(value)
        return made


# ---- cluster views ---------------------------------------------------------------------------------------------------
# Keeps what all jobs see of nodes and holders. Owned by the cache, asked for by each job's fabric. It is made once:
# jobs that ask alike get the same tuple until something in it changes. Made by each for itself, the nodes of a thousand
# jobs were a million values, and as many comparisons at each change.

Items = Mapping[tuple[str, str], Object]

MAX_VIEWS = 64
"""Ways of looking at nodes that are kept: jobs with the same topology key and node signals share one."""


class _FilteredView:
    """Nodes and holders, as jobs with one topology key and one set of signals see them."""

    def __init__(self, topology_key: str, signals: NodeSignals) -> None:
        self._topology_key, self._signals = topology_key, signals
        self._each = DerivedCache[ObservedNode]()
        self._nodes_of: tuple[object, ...] = ()
        self._places_of: tuple[object, ...] = ()
        self.nodes: tuple[ObservedNode, ...] = ()
        self.places: tuple[MemoryServerAddress, ...] = ()

    def refresh_nodes(self, items: Iterable[Object], changes: int, heard: KubeletLiveness) -> None:
        """Looks at the nodes again if one changed, or a kubelet fell silent."""
        if self._nodes_of and self._nodes_of[0] == changes and self._nodes_of[1] is heard:
            return
        self._nodes_of = (changes, heard)
        found = self._each.all(
            items,
            lambda one: observations.observe_node(one, heard, self._topology_key, self._signals),
            lambda one: (one["metadata"]["name"] in heard.silent, one["metadata"]["name"] in heard.renewed),
        )
        seen = observations.without_mass_doubt(sorted(found, key=lambda one: one.name))
        self.nodes = self.nodes if seen == self.nodes else seen

    def refresh_servers(
        self, there: Iterable[Object], gone: Iterable[Object], changes: int, access: MemoryTierCredentials
    ) -> None:
        """Looks for the holders again if one changed, a node did, or there is another password."""
        of = (changes, id(self.nodes), access.user, access.password, access.authority)
        if of == self._places_of:
            return
        self._places_of = of
        found = memory_tier_pods.server_addresses(there, gone, {node.name: node.domain for node in self.nodes}, access)
        self.places = self.places if found == self.places else found


class ClusterViews:
    """Nodes and holders as jobs see them, of what is mapped.

    `gone`: pods of holders that were deleted. Whoever owns the mappings tells of each change.
    """

    def __init__(self, nodes_there: Items, holders_there: Items, gone: Mapping[str, Object]) -> None:
        self._nodes, self._servers, self._gone = nodes_there, holders_there, gone
        self._views: dict[tuple[str, NodeSignals], _FilteredView] = {}
        self._node_changes = self._server_changes = 0

    def node_changed(self, old: Object | None, new: Object | None) -> None:
        """Takes note of a node whose kept fields changed."""
        if old is None or new is None or _node_fields(old) != _node_fields(new):
            self._node_changes += 1

    def server_changed(self) -> None:
        """Takes note that some holder's pod is another."""
        self._server_changes += 1

    def nodes_and_servers(
        self, heard: KubeletLiveness, topology_key: str, signals: NodeSignals, access: MemoryTierCredentials
    ) -> tuple[tuple[ObservedNode, ...], tuple[MemoryServerAddress, ...]]:
        """Returns nodes by name, and the holders on them.

        The same tuples as before while they are the same.
        """
        view = self._views.get((topology_key, signals))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                del self._views[next(iter(self._views))]
            view = self._views[topology_key, signals] = _FilteredView(topology_key, signals)
        view.refresh_nodes(self._nodes.values(), self._node_changes, heard)
        view.refresh_servers(self._servers.values(), self._gone.values(), self._server_changes, access)
        return view.nodes, view.places


def _node_fields(node: Object) -> tuple[Any, ...]:
    return node["metadata"].get("labels"), node.get("spec"), node.get("status")


# ---- cluster cache ---------------------------------------------------------------------------------------------------

JUDGE_SECONDS = 1.0
SYNC_SECONDS = 20.0

DELETED_RETENTION_SECONDS = 600.0
"""A holder that is gone is shown for so long: jobs that run look every few seconds, those at rest once a minute."""

NOT_WATCHED = "this operator does not use {gang}: add it to the chart's value operator.gangSchedulers"

Listener = Callable[[Object | None, Object | None], None]


class ClusterCache:
    """Mirrors the objects of a cluster that plans depend on.

    `holders_in`: the only namespace whose pods count as holders; empty: any. A holder receives the administrator's
    password, so nobody who may create pods elsewhere must be able to create one. `gangs`: schedulers whose pod groups
    are watched; a cluster that does not serve them, or not yet, keeps no job without them from being planned.
    """

    def __init__(self, api: Api, holders_in: str = "", gangs: Collection[Gang] = ()) -> None:
        self.api = api
        self._listeners: dict[tuple[str, str], list[Listener]] = {}
        """By kind, and by the job whose objects alone are listened for; empty: everybody's."""
        self.jobs = self._feed(f"{api_objects.JOBS}/trainingjobs", "")
        self.workers = self._feed("/api/v1/pods", api_objects.JOB_UID)
        pods = api_objects.core_path(holders_in, "pods") if holders_in else "/api/v1/pods"
        self.servers = self._feed(pods, api_objects.HOLDER_SELECTOR, "servers")
        self.nodes = self._feed("/api/v1/nodes", "")
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self.leases = WatchedObjects(api, leases, "", self._renewed, kept=watched_objects.trim_lease)
        self._named = {
            "trainingjobs": self.jobs,
            "workers": self.workers,
            "servers": self.servers,
            "nodes": self.nodes,
            "leases": self.leases,
        }
        self._feeds = tuple(self._named.values())
        self.groups: dict[Gang, WatchedObjects] = {
            gang: self._feed(pod_groups.path(gang), api_objects.JOB_UID, optional=True) for gang in gangs
        }
        self._kubelets = NodeLeases()
        self._notified = KubeletLiveness()
        self.gone_servers: dict[str, Object] = {}
        """Node -> the last holder's pod there that is gone, until another comes, or for GONE_SECONDS."""
        self._deleted_seconds: dict[str, float] = {}
        self._views = ClusterViews(self.nodes.items, self.servers.items, self.gone_servers)
        self.listen("servers", self._server)
        self._by_job: dict[str, dict[str, Object]] = {}
        self.listen("pods", self._pod)
        self._tasks = TaskSet(_report)

    async def start(self) -> None:
        """Returns once jobs and pods were listed, and nodes answered for. Raises FabricError after a timeout.

        Nodes and leases may be refused: they are asked for again, no job is planned meanwhile (`check_fresh`), and each
        says why. Without pods agents and evictions would be answered by what is not known.
        """
        for feed in (*self._feeds, *self.groups.values()):
            self._tasks.start(feed.run(), f"watch {feed.path}")
        self._tasks.start(self._judge(), "judge leases")
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                for feed in self._feeds:
                    await (feed.answered if feed in (self.nodes, self.leases) else feed.synced).wait()
        except TimeoutError:
            missing = [feed for feed in self._feeds if not feed.synced.is_set()]
            await self.close()
            refusals = "; ".join(feed.rejection for feed in missing if feed.rejection)
            paths = ", ".join(feed.path for feed in missing)
            hint = "; is the CRD installed?" if " (404 " in self.jobs.rejection else ""
            raise PlatformError(f"{refusals or 'no answer'}: {paths} not listed in {SYNC_SECONDS:g} s{hint}") from None
        for kind, feed in self._named.items():
            metrics.watch_age_seconds.labels(kind).set_function(feed.age_seconds)

    async def close(self) -> None:
        """Ends the watches, but not the API's connections."""
        for kind in self._named:
            metrics.watch_age_seconds.remove_by_labels({"kind": kind})  # also if it was not listed yet
        await self._tasks.close()

    def listen(self, kind: str, listener: Listener, job: str = "") -> None:
        """Calls `listener` with each later change: old and new state.

        `kind`: `trainingjobs`, `pods`, `podgroups`, `holders` or `nodes`. `job`: only the job with this uid, its pods
        and pod groups. Of the last three kinds, changes that no plan reads are left out.
        """
        self._listeners.setdefault((kind, job), []).append(listener)

    def remove_listener(self, kind: str, listener: Listener, job: str = "") -> None:
        heard = self._listeners[kind, job]
        heard.remove(listener)
        if not heard:
            del self._listeners[kind, job]

    def guarded(self, may_write: Callable[[], None]) -> ClusterCache:
        """Shares what is watched.

        `may_write` is called before each write through `api`, as `Api.guarded` does.
        """
        made = copy.copy(self)
        made.api = self.api.with_write_check(may_write)
        return made

    def check_fresh(self) -> None:
        """Raises FabricError if no plan may be made.

        A watch is stale or refused, or nothing may be written.
        """
        self.api.check_allowed()
        for feed in self._feeds:
            if not feed.is_synced:
                if feed.rejection:
                    raise ViewRefused(f"{feed.rejection}; without this view Surefoot plans nothing")
                raise PlatformError(
                    f"the watch of {feed.path} is stale: the API server does not answer; nothing is planned"
                )

    @property
    def complete(self) -> bool:
        """Whether everything was listed."""
        return all(feed.synced.is_set() for feed in self._feeds)

    def silences(self) -> dict[str, float]:
        """Seconds since the API server last answered a watch, be it with a refusal, by kind."""
        now = time.monotonic()
        return {kind: now - feed.answered_at for kind, feed in self._named.items()}

    def pods_of(self, job: str) -> list[Object]:
        """The pods with this job's uid as label, whoever made them."""
        return list(self._by_job.get(job, {}).values())

    def unavailable_groups(self) -> Mapping[Gang, str]:
        """Gang schedulers whose pod groups are not served here, and why."""
        off = {gang: NOT_WATCHED.format(gang=gang) for gang in GANG_SCHEDULERS if gang not in self.groups}
        return off | {gang: feed.rejection for gang, feed in self.groups.items() if feed.rejection}

    def nodes_and_servers(
        self, topology_key: str, signals: NodeSignals, access: MemoryTierCredentials
    ) -> tuple[tuple[ObservedNode, ...], tuple[MemoryServerAddress, ...]]:
        """Returns nodes and holders, in tuples that all who ask alike share."""
        return self._views.nodes_and_servers(self.kubelet_liveness(), topology_key, signals, access)

    def kubelet_liveness(self) -> KubeletLiveness:
        """Which kubelets renewed their lease, and which are silent."""
        return self._kubelets.classify(self.leases.contact_since_seconds, self.leases.last_contact_seconds)

    def _feed(self, path: str, selector: str, kind: str = "", optional: bool = False) -> WatchedObjects:
        kind = kind or path.rsplit("/", 1)[-1]

        read = _READ.get(kind)

        def heard(old: Object | None, new: Object | None) -> None:
            if kind == "nodes":
                self._views.node_changed(old, new)
            # compared once, and not by each of a thousand jobs: every kubelet writes its node's status all the time
            if read is not None and old is not None and new is not None and read(old) == read(new):
                return
            jobs = dict.fromkeys(("", *(_job_of(kind, one) for one in (old, new) if one is not None)))
            for job in jobs:
                for listener in list(self._listeners.get((kind, job), ())):
                    listener(old, new)

        return WatchedObjects(
            self.api, path, selector, heard, optional, _KEPT.get(kind, watched_objects.trim_managed_fields)
        )

    def _renewed(self, old: Object | None, new: Object | None) -> None:
        self._kubelets.record_change(old, new, time.monotonic())

    def _pod(self, old: Object | None, new: Object | None) -> None:
        for pod, there in ((old, False), (new, True)):
            job = api_objects.job_of(pod) if pod is not None else None
            if pod is None or job is None:
                continue
            pods = self._by_job.setdefault(job, {})
            if there:
                pods[pod["metadata"]["uid"]] = pod
            else:
                pods.pop(pod["metadata"]["uid"], None)
                if not pods:
                    del self._by_job[job]

    def _server(self, old: Object | None, new: Object | None) -> None:
        self._views.server_changed()
        found = new or old
        node = observations.node_of(found) if found is not None else None
        if node is None:
            return
        if new is None and found is not None:
            self.gone_servers[node] = found
            self._deleted_seconds[node] = time.monotonic()
        elif new is not None:
            self._forget_gone(node)

    def _forget_gone(self, node: str) -> None:
        if self.gone_servers.pop(node, None) is not None:
            self._views.server_changed()
        self._deleted_seconds.pop(node, None)

    def forget_gone_servers(self, now: float) -> None:
        """Drops deleted holders that every job has observed by now.

        Nodes of a cluster that scales have new names each time; without this the list grows for ever.
        """
        for node in [node for node, at in self._deleted_seconds.items() if now - at > DELETED_RETENTION_SECONDS]:
            self._forget_gone(node)

    async def _judge(self) -> None:
        while True:
            heard, told = self.kubelet_liveness(), self._notified
            for name in (heard.silent ^ told.silent) | (heard.renewed ^ told.renewed):
                found = self.nodes.items.get(("", name))
                if name not in heard.silent ^ told.silent and (
                    found is None or not observations.is_contradicted(found)
                ):
                    continue  # one kubelet more that is well is no news
                for listener in list(self._listeners.get(("nodes", ""), ())):
                    listener(None, found)
            self._notified = heard
            self.forget_gone_servers(time.monotonic())
            await asyncio.sleep(JUDGE_SECONDS)  # silence announces itself to nobody


def _job_of(kind: str, found: Object) -> str:
    """The job that an object is, or belongs to; empty: none alone."""
    if kind == "trainingjobs":
        return str(found["metadata"]["uid"])
    return (api_objects.job_of(found) or "") if kind in ("pods", "podgroups") else ""


_READ: Mapping[str, Callable[[Object], object]] = {
    "nodes": observations.plan_fields,
    "servers": observations.server_plan_fields,
    "podgroups": pod_groups.plan_fields,
}
"""Kind -> all that a plan can depend on of one such object."""


_KEPT: Mapping[str, Callable[[Object], Object]] = {
    "pods": watched_objects.trim_worker_pod,
    "servers": watched_objects.trim_server_pod,
    "nodes": watched_objects.trim_node,
}


def _report(name: str, error: BaseException) -> None:
    """A watch that ended by an error of ours: its feed goes stale, and the log says why."""
    log.error("%s ended by an error and is not restarted", name, exc_info=error)
