"""Where copies lie: one's own node first, never two in one failure domain, in different racks, evenly over servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import endpoint
from support.operations import counted
from surefoot.protocol.checkpoints.placement import RankTargets, Topology, assign_targets, replica_groups
from surefoot.protocol.identities import MemoryServerEndpoint, MemoryServerId


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=9), st.integers(1, 4))
def test_groups_are_disjoint_whole_and_large_enough(domains: set[str], replicas: int) -> None:
    cut = replica_groups(sorted(domains), replicas)
    assert sorted(d for group in cut for d in group) == sorted(domains)
    wanted = min(replicas, len(domains))
    assert all(wanted <= len(group) < 2 * max(1, wanted) for group in cut)


def named_by_rack(rack: int, node: int) -> str:
    return f"rack{rack}-node{node:02}"


def named_by_subnet(rack: int, node: int) -> str:
    return f"ip-10-0-{rack}-{node + 10}.ec2.internal"


def named_by_node(rack: int, node: int) -> str:
    return f"node{node:02}-rack{rack}"


NAMINGS = (named_by_rack, named_by_subnet, named_by_node, lambda rack, node: f"{hash((rack, node)) & 0xFFFFFFFF:x}")


@st.composite
def racks(draw: st.DrawFn) -> dict[str, str]:
    """Nodes of some racks, with the rack of each."""
    name = draw(st.sampled_from(NAMINGS))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    return {name(rack, node): f"r{rack}" for rack, size in enumerate(sizes) for node in range(size)}


@given(racks(), st.integers(2, 4), st.text("abc", max_size=4), st.randoms())
def test_groups_cross_racks_wherever_their_sizes_allow(
    rack_of: dict[str, str], replicas: int, salt: str, rng: Random
) -> None:
    """No group has two nodes of a rack with at most 1/R of the nodes; of a larger one only where every group has one."""
    topology = Topology(salt, {node: (rack,) for node, rack in rack_of.items()})
    shuffled = rng.sample(sorted(rack_of), len(rack_of))
    cut = replica_groups(shuffled, replicas, topology)
    assert sorted(node for group in cut for node in group) == sorted(rack_of)
    assert cut == replica_groups(rack_of, replicas, topology)
    there = [Counter(rack_of[node] for node in group) for group in cut]
    for rack, size in Counter(rack_of.values()).items():
        if size <= len(cut):
            assert all(group[rack] <= 1 for group in there)
        else:
            assert all(group[rack] >= 1 for group in there)


@given(racks(), st.integers(2, 3), st.integers(1, 3))
def test_where_the_zone_is_shared_the_rack_differs(rack_of: dict[str, str], replicas: int, zones: int) -> None:
    """Racks of at most 1/R of their zone's nodes, zones of any size: one large zone is like no zone."""
    path = {node: (f"z{int(rack[1:]) % zones}", rack) for node, rack in rack_of.items()}
    for group in replica_groups(rack_of, replicas, Topology("job", path)) if zones == 1 else ():
        largest = max(Counter(rack_of.values()).values())
        assert largest > len(rack_of) // replicas or len({rack_of[node] for node in group}) == len(group)
    for index, (picks,) in assign_targets(
        dict(enumerate(rack_of)), [endpoint(n) for n in rack_of], replicas, 1, Topology("", path)
    ).items():
        assert picks[0].instance.node == list(rack_of)[index]
        assert len({p.instance.node for p in picks}) == min(replicas, len(rack_of))


def test_one_large_zone_does_not_bring_copies_into_one_rack() -> None:
    """Twenty nodes of one zone have nobody in the other, and still have other racks."""
    path = {f"a{i}": ("zone-a", f"rack-{i % 4}") for i in range(20)} | {
        "b0": ("zone-b", "rack-b"),
        "b1": ("zone-b", "rack-b"),
    }
    cut = replica_groups(path, 2, Topology("job", path))
    assert sum({path[node][0] for node in group} == {"zone-a", "zone-b"} for group in cut) == 2
    assert all(len({path[node] for node in group}) == 2 for group in cut)


@pytest.mark.parametrize("name", NAMINGS[:3])
@pytest.mark.parametrize("labelled", [False, True])
def test_no_naming_brings_both_copies_into_one_rack(name: Callable[[int, int], str], labelled: bool) -> None:
    """Four racks of 18, as of NVL72: unlabelled, as few of a rack are together as chance brings; labelled, none."""
    rack_of = {name(rack, node): f"r{rack}" for rack in range(4) for node in range(18)}
    path = {node: (rack,) for node, rack in rack_of.items()} if labelled else {}
    alike = [sum(len({rack_of[node] for node in group}) == 1 for group in replica_groups(rack_of, 2, Topology(f"job-{n}", path)))
             for n in range(50)]  # fmt: skip
    assert max(alike) <= (0 if labelled else 18), alike
    assert sum(alike) / 50 < 10.5, "a quarter of 36 by chance"


@given(st.integers(2, 150), st.integers(2, 3), st.integers(0, 149), st.text("abc", max_size=3))
def test_a_node_that_goes_moves_few_others(count: int, replicas: int, gone: int, salt: str) -> None:
    """Some group at each fork of its branch; of 2,000 nodes 8 on average, where a list cut anew moves half of all."""
    names = [named_by_rack(n % 4, n) for n in range(count)]
    left = [name for n, name in enumerate(names) if n != gone % count]
    before, after = (replica_groups(there, replicas, Topology(salt)) for there in (names, left))
    assert len(set(before) - set(after)) <= 2 * count.bit_length() + 8


@pytest.mark.parametrize("racks_there", [2, 4, 50])
def test_a_node_that_goes_moves_few_others_where_racks_are_known(racks_there: int) -> None:
    path = {f"n{i}": (f"r{i % racks_there}",) for i in range(600)}
    moved = []
    for salt in range(10):
        topology = Topology(str(salt), path)
        left = [node for node in path if node != f"n{salt * 7}"]
        moved.append(len(set(replica_groups(path, 2, topology)) - set(replica_groups(left, 2, topology))))
    assert max(moved) <= 40, "of 300 groups"
    assert sum(moved) / 10 <= 15


@pytest.mark.gate_only
def test_thousands_of_nodes_are_grouped_at_once() -> None:
    """Whatever racks there are: the calls grow with the nodes, not with their square."""

    def calls(count: int, racks_there: int) -> int:
        path = {f"n{i}": (f"r{i % racks_there if i % 3 else 0}",) for i in range(count)}
        return counted(lambda: replica_groups(path, 2, Topology("job", path)))

    for racks_there in (1, 2, 3, 40):
        assert calls(2000, racks_there) < 13 * calls(200, racks_there)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_copies_never_share_a_domain_and_begin_at_home(
    workers: int, holders: int, replicas: int, per_domain: int, servers: int
) -> None:
    places = [
        endpoint(f"n{i}", f"i{server}", f"d{i // per_domain}", server)
        for i in range(holders)
        for server in range(servers)
    ]
    chosen = assign_targets({i: f"n{i}" for i in range(workers)}, places, replicas, 3)
    domains = len({p.domain for p in places})
    for index, by_rank in chosen.items():
        assert len(by_rank) == (3 if servers > 1 else 1)
        for picks in by_rank:
            assert len(picks) == len({p.domain for p in picks}) == min(replicas, domains)
            if index < holders:
                assert picks[0].instance.node == f"n{index}"


def test_without_holders_there_are_no_targets() -> None:
    assert assign_targets({0: "n0", 1: "n1"}, [], 2) == {0: ((),), 1: ((),)}


def test_load_is_even_where_every_node_has_a_worker_and_a_holder() -> None:
    for count in (2, 3, 4, 5, 8):
        chosen = assign_targets({i: f"n{i}" for i in range(count)}, [endpoint(f"n{i}") for i in range(count)], 2)
        load = Counter(p.instance.node for (picks,) in chosen.values() for p in picks)
        assert max(load.values()) - min(load.values()) <= 1, (count, load)


def servers_of(nodes: int, servers: int) -> list[MemoryServerEndpoint]:
    return [endpoint(f"n{i}", f"i{server}", server=server) for i in range(nodes) for server in range(servers)]


def loads(chosen: Mapping[int, RankTargets]) -> Counter[MemoryServerId]:
    return Counter(p.server_id for by_rank in chosen.values() for picks in by_rank for p in picks)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 9))
def test_ranks_are_spread_evenly_over_each_nodes_servers(nodes: int, servers: int, ranks: int) -> None:
    chosen = assign_targets({i: f"n{i}" for i in range(nodes)}, servers_of(nodes, servers), 2, ranks)
    load = loads(chosen)
    for node in range(nodes):
        ours = [load[MemoryServerId(f"n{node}", server)] for server in range(servers)]
        assert max(ours) - min(ours) <= 1, "copies of others' ranks go on where its own ended"


@pytest.mark.parametrize("away", range(4))
def test_a_server_that_is_away_moves_its_own_ranks_alone(away: int) -> None:
    """Also the last one, by whose number the others' turns are counted: the other node still has it."""
    nodes, every = {0: "n0", 1: "n1"}, servers_of(2, 4)
    left = [e for e in every if e.server_id != MemoryServerId("n0", away)]
    before, after = assign_targets(nodes, every, 2, 8), assign_targets(nodes, left, 2, 8)
    for index in nodes:
        for rank in range(8):
            for was, now in zip(before[index][rank], after[index][rank], strict=True):
                assert now == was or was.server_id == MemoryServerId("n0", away)
                assert now.instance.node == was.instance.node
    load = loads(after)
    assert max(load[e.server_id] for e in left if e.instance.node == "n0") <= 6, "and not all of them to one"


def test_the_answer_does_not_depend_on_the_order_of_the_question() -> None:
    places = [endpoint(f"n{i}") for i in range(5)]
    nodes = {i: f"n{i}" for i in range(5)}
    assert assign_targets(nodes, places, 2) == assign_targets(dict(reversed(nodes.items())), places[::-1], 2)
