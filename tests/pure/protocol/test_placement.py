"""Where copies lie: one's own node first, never two in one failure domain, evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from support.builders import endpoint
from surefoot.protocol.checkpoints.placement import groups, targets


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=9), st.integers(1, 4))
def test_groups_are_disjoint_whole_and_large_enough(domains: set[str], replicas: int) -> None:
    cut = groups(sorted(domains), replicas)
    assert sorted(d for group in cut for d in group) == sorted(domains)
    wanted = min(replicas, len(domains))
    assert all(wanted <= len(group) < 2 * max(1, wanted) for group in cut)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_copies_never_share_a_domain_and_begin_at_home(
    workers: int, holders: int, replicas: int, per_domain: int
) -> None:
    places = [endpoint(f"n{i}", domain=f"d{i // per_domain}") for i in range(holders)]
    chosen = targets({i: f"n{i}" for i in range(workers)}, places, replicas)
    domains = len({p.domain for p in places})
    for index, picks in chosen.items():
        assert len(picks) == len({p.domain for p in picks}) == min(replicas, domains)
        if index < holders:
            assert picks[0].holder.node == f"n{index}"


def test_without_holders_there_are_no_targets() -> None:
    assert targets({0: "n0", 1: "n1"}, [], 2) == {0: (), 1: ()}


def test_load_is_even_where_every_node_has_a_worker_and_a_holder() -> None:
    for count in (2, 3, 4, 5, 8):
        chosen = targets({i: f"n{i}" for i in range(count)}, [endpoint(f"n{i}") for i in range(count)], 2)
        load = Counter(p.holder.node for picks in chosen.values() for p in picks)
        assert max(load.values()) - min(load.values()) <= 1, (count, load)


def test_the_answer_does_not_depend_on_the_order_of_the_question() -> None:
    places = [endpoint(f"n{i}") for i in range(5)]
    nodes = {i: f"n{i}" for i in range(5)}
    assert targets(nodes, places, 2) == targets(dict(reversed(nodes.items())), places[::-1], 2)
