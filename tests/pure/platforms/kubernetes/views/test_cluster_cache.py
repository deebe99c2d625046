"""Tests of `platforms.kubernetes.views.cluster_cache`."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, cast

import pytest

from support.fakes.fake_api import FakeApi
from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.spec import ROLLBACK, NodeSignals
from surefoot_operator.memory.connection_pool import MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views import cluster_cache
from surefoot_operator.platforms.kubernetes.views import cluster_cache as caching
from surefoot_operator.platforms.kubernetes.views.cluster_cache import (
    DELETED_RETENTION_SECONDS,
    ClusterCache,
    DerivedCache,
)
from surefoot_operator.platforms.kubernetes.views.observations import MAX_LEASE_AGE_SECONDS, NodeLeases

# ---- cluster views ---------------------------------------------------------------------------------------------------
# What jobs see of nodes and holders is made once for all of them, and again only of what changed.

NODES, JOBS = 30, 40


class Cluster:
    """So many nodes, each with a holder; jobs look at them again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.version, self.access = ClusterCache(cast(Api, None)), 0, MemoryTierCredentials(password="p")
        self.made = self.placed = 0
        node, places = cluster_cache.observations.observe_node, cluster_cache.memory_tier_pods.choose_server_addresses

        def counted(*given: Any) -> Any:
            self.made += 1
            return node(*given)

        def placed(*given: Any) -> Any:
            self.placed += 1
            return places(*given)

        monkeypatch.setattr(cluster_cache.observations, "observe_node", counted)
        monkeypatch.setattr(cluster_cache.memory_tier_pods, "choose_server_addresses", placed)
        for number in range(NODES):
            self.node(number)
            self.holder(number)

    def node(self, number: int, beat: int = 0, message: str = "", **spec: Any) -> None:
        self.version += 1
        name = f"n{number:03d}"
        said = {"type": "Ready", "status": "True", "message": message, "lastHeartbeatTime": str(beat)}
        metadata = {
            "name": name,
            "uid": name,
            "resourceVersion": str(self.version),
            "labels": {"rack": f"r{number % 3}"},
        }
        self.cache.nodes._apply_event(
            "MODIFIED", {"metadata": metadata, "spec": spec, "status": {"conditions": [said]}}
        )

    def holder(self, number: int, address: str = "10.0.0.1", event: str = "MODIFIED") -> None:
        self.version += 1
        metadata = {"name": f"h{number}", "namespace": "s", "uid": f"h{number}", "resourceVersion": str(self.version)}
        server = {"name": "redis", "containerID": "c1", "state": {"running": {}}}
        status = {"podIP": address, "phase": "Running", "containerStatuses": [server]}
        spec = {"nodeName": f"n{number:03d}", "containers": [{"name": "redis"}]}
        self.cache.servers._apply_event(event, {"metadata": metadata, "spec": spec, "status": status})

    def look(self, key: str = "rack", signals: NodeSignals = KNOWN_SIGNALS) -> Any:
        """What every job sees, which is one and the same."""
        seen = [self.cache.nodes_and_servers(key, signals, self.access) for _ in range(JOBS)]
        for nodes, places in seen[1:]:
            assert nodes is seen[0][0]
            assert places is seen[0][1]
        return seen[0]

    def cost(self) -> tuple[int, int]:
        """Nodes translated, and times that holders were looked for, since the last question."""
        spent, self.made, self.placed = (self.made, self.placed), 0, 0
        return spent


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_many_jobs_cost_what_one_costs_and_a_change_what_changed(cluster: Cluster) -> None:
    nodes, places = cluster.look()
    assert (len(nodes), len(places), cluster.cost()) == (NODES, NODES, (NODES, 1))
    assert (places[4].domain, nodes[4].path) == ("n004", ("r1",))
    for number in range(NODES):
        cluster.node(number, beat=1)
    assert cluster.look()[0] is nodes
    assert cluster.cost() == (0, 0), "heartbeats change nothing that is read"
    cluster.node(7, unschedulable=True)
    cordoned, same = cluster.look()
    assert (cordoned[7].schedulable, cordoned[8]) == (False, nodes[8])
    assert same is places
    assert cluster.cost()[0] <= NODES  # each node that had a heartbeat is another object since
    cluster.holder(3, "10.0.0.9")
    assert cluster.look()[1][3].host == "10.0.0.9"
    assert cluster.cost() == (0, 1)


def test_words_of_a_condition_are_told_although_they_wake_nobody(cluster: Cluster) -> None:
    woken: list[Any] = []
    cluster.cache.add_listener("nodes", lambda old, new: woken.append(new))
    before = cluster.look()[0]
    cluster.cost()
    cluster.node(5, message="other words of a node that is well")
    assert cluster.look()[0] is before, "no job's view of it has changed"
    assert (cluster.cost()[0], woken) == (1, [])


def test_a_holder_that_went_and_another_password_are_seen(cluster: Cluster) -> None:
    cluster.look()
    cluster.holder(3, event="DELETED")
    assert not cluster.look()[1][3].running
    cluster.access.password = "another"
    assert {place.admin_password for place in cluster.look()[1]} == {"another"}


def test_who_asks_otherwise_sees_otherwise_and_no_way_of_asking_is_kept_for_ever(cluster: Cluster) -> None:
    assert cluster.look(api_objects.HOSTNAME_LABEL)[0][4].path == ()
    assert cluster.look("rack")[0][4].path == ("r1",)
    for number in range(3 * cluster_cache.MAX_VIEWS):
        cluster.look(f"key-{number}")
    assert len(cluster.cache._views._views) == cluster_cache.MAX_VIEWS


def test_who_was_heard_is_told_by_one_value_until_it_changes() -> None:
    leases = NodeLeases()

    def renewed(node: str, *moments: float) -> None:
        for old, new in zip((None, *moments), moments, strict=False):
            before = None if old is None else {"metadata": {"name": node}, "spec": {"renewTime": str(old)}}
            leases.record_change(before, {"metadata": {"name": node}, "spec": {"renewTime": str(new)}}, new)

    for node in ("a", "b"):
        renewed(node, 0.0, 1.0)
    first = leases.classify_nodes(0.0, 1.0)
    assert (first.renewed, first.silent) == (frozenset("ab"), frozenset())
    for second in range(2, 20):
        renewed("a", second - 1.0, float(second))
        assert leases.classify_nodes(0.0, float(second)) is first
    later = leases.classify_nodes(0.0, 1.0 + MAX_LEASE_AGE_SECONDS + 0.001)
    assert (later.renewed, later.silent) == (frozenset("a"), frozenset("b"))
    renewed("b", 26.0, 27.0)
    assert leases.classify_nodes(0.0, 27.0) == first


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_of_who_was_heard_is_what_looking_again_would_say(seed: int) -> None:
    """Renewals, silences, leases that come and go, and outages, in any order."""
    chance, leases = random.Random(seed), NodeLeases()
    now = since = heard_at = 0.0
    there: dict[str, int] = {}
    for _ in range(400):
        now += chance.choice((0.1, 1.0, 5.0, 30.0))
        name = f"n{chance.randrange(5)}"
        old = {"metadata": {"name": name}, "spec": {"renewTime": str(there.get(name))}} if name in there else None
        kind = chance.random()
        if kind < 0.1:
            since = now
        elif kind < 0.2 and old is not None:
            del there[name]
            leases.record_change(old, None, now)
        elif kind < 0.8:
            there[name] = there.get(name, 0) + chance.choice((0, 1))
            leases.record_change(old, {"metadata": {"name": name}, "spec": {"renewTime": str(there[name])}}, now)
        heard_at = max(heard_at, now - chance.choice((0.0, 0.0, 3.0)))  # what was heard stays heard
        anew = NodeLeases()
        anew._unchanged_since, anew._renewals = leases._unchanged_since, leases._renewals
        assert leases.classify_nodes(since, heard_at) == anew.classify_nodes(since, heard_at)


# ---- cache wakes -----------------------------------------------------------------------------------------------------
# Whom an event of the cluster wakes: those whom it concerns, and nobody where no plan would read what changed.
#
# Each kubelet writes its node's and its pods' status again and again: at a thousand jobs each such write was compared a
# thousand times.

JOBS_CACHE_WAKES = 20


def node(version: int, **other: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": str(version)}
    metadata = {"name": "n0", "uid": "node-n0", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": other, "status": {"conditions": [condition]}}


def holder(version: int, ready: str = "True", **other: Any) -> dict[str, Any]:
    server = {"name": "redis", "containerID": "c1", "state": {"running": {}}, **other}
    status = {
        "podIP": "10.0.0.1", "phase": "Running", "containerStatuses": [server],
        "conditions": [{"type": "Ready", "status": ready, "lastProbeTime": str(version)}],
    }  # fmt: skip
    port = {"name": api_objects.MEMORY_SERVER_CONTAINER, "containerPort": 6379}
    spec = {"nodeName": "n0", "containers": [{"name": "redis", "ports": [port]}, {"name": "companion"}]}
    return {"metadata": {"name": "h", "namespace": "s", "uid": "h", "resourceVersion": str(version)}, "spec": spec, "status": status}  # fmt: skip


def worker(job: str, version: int) -> dict[str, Any]:
    metadata = {"name": f"w-{job}", "namespace": "d", "uid": f"w-{job}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {api_objects.JOB_UID_LABEL: job}}, "spec": {}, "status": {}}


class ClusterCacheWakes:
    def __init__(self) -> None:
        self.cache = ClusterCache(FakeApi().api)
        self.fabrics = [KubernetesPlatform(self.cache, "d", f"job-{n}", f"uid-{n}") for n in range(JOBS_CACHE_WAKES)]

    def woken(self) -> list[int]:
        """Who was woken since the last question."""
        found = [n for n, fabric in enumerate(self.fabrics) if fabric._changed.is_set()]
        for fabric in self.fabrics:
            fabric._changed.clear()
        return found


EVERYBODY = list(range(JOBS_CACHE_WAKES))


def test_a_kubelets_heartbeat_wakes_nobody_and_is_compared_once(monkeypatch: Any) -> None:
    compared = []
    marks = caching.observations.node_plan_fields
    monkeypatch.setitem(cast(Any, caching._PLAN_FIELDS), "nodes", lambda one: compared.append(one) or marks(one))
    cluster = ClusterCacheWakes()
    cluster.cache.nodes._apply_event("ADDED", node(1))
    assert cluster.woken() == EVERYBODY
    cluster.cache.nodes._apply_event("MODIFIED", node(2))
    assert cluster.woken() == []
    assert len(compared) == 2
    cluster.cache.nodes._apply_event("MODIFIED", node(3, unschedulable=True))
    assert cluster.woken() == EVERYBODY


def test_a_holders_pod_wakes_whoever_reads_what_changed_of_it() -> None:
    cluster = ClusterCacheWakes()
    cluster.cache.servers._apply_event("ADDED", holder(1))
    assert cluster.woken() == EVERYBODY
    cluster.cache.servers._apply_event("MODIFIED", holder(2, restartCount=0))
    assert cluster.woken() == []
    for version, changed in enumerate((holder(3, "False"), holder(4), holder(5, containerID="c2")), 3):
        changed["metadata"]["resourceVersion"] = str(version)
        cluster.cache.servers._apply_event("MODIFIED", changed)
        assert cluster.woken() == EVERYBODY
    cluster.cache.servers._apply_event("DELETED", holder(6))
    assert cluster.woken() == EVERYBODY


def test_a_pod_and_a_job_wake_their_own_reconciler_alone() -> None:
    cluster = ClusterCacheWakes()
    cluster.cache.workers._apply_event("ADDED", worker("uid-7", 1))
    assert cluster.woken() == [7]
    cluster.cache.workers._apply_event(
        "MODIFIED", worker("uid-8", 2) | {"metadata": worker("uid-8", 2)["metadata"] | {"name": "w-uid-7"}}
    )
    assert cluster.woken() == [7, 8], "one that changes hands concerns both"
    cluster.cache.jobs._apply_event(
        "ADDED", {"metadata": {"name": "job-3", "namespace": "d", "uid": "uid-3", "resourceVersion": "3"}}
    )
    assert cluster.woken() == [3]


def test_what_a_person_asks_beside_the_spec_wakes_as_well() -> None:
    """An annotation makes no new generation."""
    cluster = ClusterCacheWakes()
    metadata = {"name": "job-3", "namespace": "d", "uid": "uid-3", "resourceVersion": "3", "generation": 1}
    cluster.cache.jobs._apply_event("ADDED", {"metadata": metadata})
    cluster.woken()
    cluster.cache.jobs._apply_event(
        "MODIFIED", {"metadata": {**metadata, "resourceVersion": "4"}, "status": {"step": 1}}
    )
    assert cluster.woken() == []
    asked = {**metadata, "resourceVersion": "5", "annotations": {ROLLBACK: "1/30"}}
    cluster.cache.jobs._apply_event("MODIFIED", {"metadata": asked})
    assert cluster.woken() == [3]


def test_nobody_is_listened_for_once_he_is_gone() -> None:
    cluster = ClusterCacheWakes()
    asyncio.run(cluster.fabrics[0].close())
    cluster.woken()
    cluster.cache.nodes._apply_event("ADDED", node(1))
    assert cluster.woken() == EVERYBODY[1:]
    assert ("pods", "uid-0") not in cluster.cache._listeners


# ---- derived cache ---------------------------------------------------------------------------------------------------
# What is remembered of a cluster's objects: no longer than they stand, and each job's pods without a search.


def pod(name: str, job: str | None, version: int = 1, uid: str = "") -> dict[str, Any]:
    marks = {} if job is None else {api_objects.JOB_UID_LABEL: job}
    metadata = {"name": name, "namespace": "n", "uid": uid or name, "resourceVersion": str(version), "labels": marks}
    return {"metadata": metadata}


def test_what_was_made_of_an_object_is_made_again_only_for_another() -> None:
    made: list[str] = []

    def make(found: dict[str, Any]) -> str:
        made.append(found["metadata"]["name"])
        return found["metadata"]["resourceVersion"]  # type: ignore[no-any-return]

    memo = DerivedCache[str]()
    first, second = pod("a", "j"), pod("b", "j")
    assert memo.derive_all([first, second], make, lambda _: None) == ["1", "1"]
    assert memo.derive_all([first, second], make, lambda _: None) == ["1", "1"]
    assert made == ["a", "b"]
    assert memo.derive_all([pod("a", "j", 2), second], make, lambda _: None) == ["2", "1"]
    assert memo.derive_all([second], make, lambda _: None) == ["1"]
    assert memo.derive_all([first], make, lambda _: None) == ["1"]
    assert made == ["a", "b", "a", "a"]  # nothing is kept of what was gone
    memo.derive_all([first], make, lambda _: "something else")
    assert made[-1] == "a"
    assert len(made) == 5


def names(cache: ClusterCache, job: str) -> list[str]:
    return sorted(found["metadata"]["name"] for found in cache.pods_of(job))


def test_a_job_has_its_pods_and_only_them_at_every_moment() -> None:
    cache = ClusterCache(None)  # type: ignore[arg-type] -- nothing is asked of the server
    for found in (pod("a", "one"), pod("b", "one"), pod("c", "two"), pod("d", None)):
        cache.workers.apply_write_result(found)
    assert (names(cache, "one"), names(cache, "two"), names(cache, "three")) == (["a", "b"], ["c"], [])
    newer = pod("b", "one", 2)
    cache.workers.apply_write_result(newer)
    assert any(found["metadata"]["resourceVersion"] == "2" for found in cache.pods_of("one"))
    assert len(cache.pods_of("one")) == 2
    cache.workers.apply_write_result(pod("b", "two", 3))  # somebody changed its label
    assert (names(cache, "one"), names(cache, "two")) == (["a"], ["b", "c"])
    cache.workers.apply_write_result(pod("a", "one", 4, uid="another"))
    assert [found["metadata"]["uid"] for found in cache.pods_of("one")] == ["another"]
    cache.workers.remove_deleted("n", "a", "another")
    assert names(cache, "one") == []


# ---- gone holders ----------------------------------------------------------------------------------------------------
# Holders that are gone are shown for a while, and not for ever: each node of an autoscaler has a new name.


def pod_gone_holders(number: int, version: int) -> dict[str, Any]:
    metadata = {"name": f"h{number}", "namespace": "s", "uid": f"u{number}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"nodeName": f"node-{number}"}, "status": {}}


def test_a_holder_that_is_gone_is_forgotten_after_a_while_or_when_another_comes() -> None:
    cache = ClusterCache(cast(Api, None))
    for number in range(2000):
        cache.servers._apply_event("ADDED", pod_gone_holders(number, 100 + 2 * number))
        cache.servers._apply_event("DELETED", pod_gone_holders(number, 101 + 2 * number))
    assert len(cache.deleted_server_pods) == 2000
    cache.servers._apply_event("ADDED", pod_gone_holders(7, 10_000))
    now = time.monotonic()
    cache.drop_expired_server_pods(now)
    assert len(cache.deleted_server_pods) == 1999, "every job has yet to see that they are gone"
    cache.drop_expired_server_pods(now + DELETED_RETENTION_SECONDS + 1)
    assert cache.deleted_server_pods == {}
    cache.servers._apply_event("DELETED", pod_gone_holders(7, 10_001))
    assert list(cache.deleted_server_pods) == ["node-7"]
