"""What jobs see of nodes and holders is made once for all of them, and again only of what changed."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.memory.connection_pool import TierAccess
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views import cluster_cache
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.platforms.kubernetes.views.observations import LEASE_SECONDS, Leases

NODES, JOBS = 30, 40


class Cluster:
    """So many nodes, each with a holder; jobs look at them again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.version, self.access = ClusterCache(cast(Api, None)), 0, TierAccess(password="p")
        self.made = self.placed = 0
        node, places = cluster_cache.observations.observe_node, cluster_cache.memory_tier_pods.server_addresses

        def counted(*given: Any) -> Any:
            self.made += 1
            return node(*given)

        def placed(*given: Any) -> Any:
            self.placed += 1
            return places(*given)

        monkeypatch.setattr(cluster_cache.observations, "observe_node", counted)
        monkeypatch.setattr(cluster_cache.memory_tier_pods, "server_addresses", placed)
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
        self.cache.nodes._event("MODIFIED", {"metadata": metadata, "spec": spec, "status": {"conditions": [said]}})

    def holder(self, number: int, address: str = "10.0.0.1", event: str = "MODIFIED") -> None:
        self.version += 1
        metadata = {"name": f"h{number}", "namespace": "s", "uid": f"h{number}", "resourceVersion": str(self.version)}
        server = {"name": "redis", "containerID": "c1", "state": {"running": {}}}
        status = {"podIP": address, "phase": "Running", "containerStatuses": [server]}
        spec = {"nodeName": f"n{number:03d}", "containers": [{"name": "redis"}]}
        self.cache.holders._event(event, {"metadata": metadata, "spec": spec, "status": status})

    def look(self, key: str = "rack", signals: NodeSignals = KNOWN_SIGNALS) -> Any:
        """What every job sees, which is one and the same."""
        seen = [self.cache.around(key, signals, self.access) for _ in range(JOBS)]
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
    cluster.cache.listen("nodes", lambda old, new: woken.append(new))
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
    assert cluster.look(api_objects.HOSTNAME)[0][4].path == ()
    assert cluster.look("rack")[0][4].path == ("r1",)
    for number in range(3 * cluster_cache.MOST_VIEWS):
        cluster.look(f"key-{number}")
    assert len(cluster.cache._views._views) == cluster_cache.MOST_VIEWS


def test_who_was_heard_is_told_by_one_value_until_it_changes() -> None:
    leases = Leases()

    def renewed(node: str, *moments: float) -> None:
        for old, new in zip((None, *moments), moments, strict=False):
            before = None if old is None else {"metadata": {"name": node}, "spec": {"renewTime": str(old)}}
            leases.changed(before, {"metadata": {"name": node}, "spec": {"renewTime": str(new)}}, new)

    for node in ("a", "b"):
        renewed(node, 0.0, 1.0)
    first = leases.heard(0.0, 1.0)
    assert (first.renewed, first.silent) == (frozenset("ab"), frozenset())
    for second in range(2, 20):
        renewed("a", second - 1.0, float(second))
        assert leases.heard(0.0, float(second)) is first
    later = leases.heard(0.0, 1.0 + LEASE_SECONDS + 0.001)
    assert (later.renewed, later.silent) == (frozenset("a"), frozenset("b"))
    renewed("b", 26.0, 27.0)
    assert leases.heard(0.0, 27.0) == first


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_of_who_was_heard_is_what_looking_again_would_say(seed: int) -> None:
    """Renewals, silences, leases that come and go, and outages, in any order."""
    chance, leases = random.Random(seed), Leases()
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
            leases.changed(old, None, now)
        elif kind < 0.8:
            there[name] = there.get(name, 0) + chance.choice((0, 1))
            leases.changed(old, {"metadata": {"name": name}, "spec": {"renewTime": str(there[name])}}, now)
        heard_at = max(heard_at, now - chance.choice((0.0, 0.0, 3.0)))  # what was heard stays heard
        anew = Leases()
        anew._known, anew._renewals = leases._known, leases._renewals
        assert leases.heard(since, heard_at) == anew.heard(since, heard_at)
