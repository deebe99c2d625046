"""Where copies lie: one's own node first, never two in one failure domain, evenly over nodes and their servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import endpoint
from surefoot.protocol.checkpoints.placement import RankTargets, groups, targets
from surefoot.protocol.identities import HolderEndpoint, ServerId


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=9), st.integers(1, 4))
def test_groups_are_disjoint_whole_and_large_enough(domains: set[str], replicas: int) -> None:
    cut = groups(sorted(domains), replicas)
    assert sorted(d for group in cut for d in group) == sorted(domains)
    wanted = min(replicas, len(domains))
    assert all(wanted <= len(group) < 2 * max(1, wanted) for group in cut)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_copies_never_share_a_domain_and_begin_at_home(
    workers: int, holders: int, replicas: int, per_domain: int, servers: int
) -> None:
    places = [
        endpoint(f"n{i}", f"i{server}", f"d{i // per_domain}", server)
        for i in range(holders)
        for server in range(servers)
    ]
    chosen = targets({i: f"n{i}" for i in range(workers)}, places, replicas, 3)
    domains = len({p.domain for p in places})
    for index, by_rank in chosen.items():
        assert len(by_rank) == (3 if servers > 1 else 1)
        for picks in by_rank:
            assert len(picks) == len({p.domain for p in picks}) == min(replicas, domains)
            if index < holders:
                assert picks[0].holder.node == f"n{index}"


def test_without_holders_there_are_no_targets() -> None:
    assert targets({0: "n0", 1: "n1"}, [], 2) == {0: ((),), 1: ((),)}


def test_load_is_even_where_every_node_has_a_worker_and_a_holder() -> None:
    for count in (2, 3, 4, 5, 8):
        chosen = targets({i: f"n{i}" for i in range(count)}, [endpoint(f"n{i}") for i in range(count)], 2)
        load = Counter(p.holder.node for (picks,) in chosen.values() for p in picks)
        assert max(load.values()) - min(load.values()) <= 1, (count, load)


def servers_of(nodes: int, servers: int) -> list[HolderEndpoint]:
    return [endpoint(f"n{i}", f"i{server}", server=server) for i in range(nodes) for server in range(servers)]


def loads(chosen: Mapping[int, RankTargets]) -> Counter[ServerId]:
    return Counter(p.server_id for by_rank in chosen.values() for picks in by_rank for p in picks)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 9))
def test_ranks_are_spread_evenly_over_each_nodes_servers(nodes: int, servers: int, ranks: int) -> None:
    chosen = targets({i: f"n{i}" for i in range(nodes)}, servers_of(nodes, servers), 2, ranks)
    load = loads(chosen)
    for node in range(nodes):
        ours = [load[ServerId(f"n{node}", server)] for server in range(servers)]
        assert max(ours) - min(ours) <= 1, "copies of others' ranks go on where its own ended"


@pytest.mark.parametrize("away", range(4))
def test_a_server_that_is_away_moves_its_own_ranks_alone(away: int) -> None:
    """Also the last one, by whose number the others' turns are counted: the other node still has it."""
    nodes, every = {0: "n0", 1: "n1"}, servers_of(2, 4)
    left = [e for e in every if e.server_id != ServerId("n0", away)]
    before, after = targets(nodes, every, 2, 8), targets(nodes, left, 2, 8)
    for index in nodes:
        for rank in range(8):
            for was, now in zip(before[index][rank], after[index][rank], strict=True):
                assert now == was or was.server_id == ServerId("n0", away)
                assert now.holder.node == was.holder.node
    load = loads(after)
    assert max(load[e.server_id] for e in left if e.holder.node == "n0") <= 6, "and not all of them to one"


def test_the_answer_does_not_depend_on_the_order_of_the_question() -> None:
    places = [endpoint(f"n{i}") for i in range(5)]
    nodes = {i: f"n{i}" for i in range(5)}
    assert targets(nodes, places, 2) == targets(dict(reversed(nodes.items())), places[::-1], 2)
