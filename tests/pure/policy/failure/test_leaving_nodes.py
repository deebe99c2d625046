"""A node that fails a job again and again is left where that costs less, and where chance did not choose it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from support.builders import BEGAN, running, with_worker
from surefoot_operator.api.spec import FailurePolicy
from surefoot_operator.api.status import ExcludedNode, Incident
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.failure.failure_detection import Loss
from surefoot_operator.policy.membership.node_exclusion import MOST_CHANCE, leaving, odds_by_chance
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 300


def died(node: str, at: float, **other: Any) -> Incident:
    """Found at once, and 9 s later there was the next step."""
    times = {"claimed_seconds": at, "sealed_seconds": at, "assigned_seconds": at, "first_step_seconds": at + 9.0}
    return replace(Incident("trainer-failed", "it died", 1, node, 1, at, **times, world_before=3), **other)


def failing(*past: Incident, **other: Any) -> Observed:
    """The program on n1 just failed; three workers on n0, n1 and n2, and a free node."""
    seen = with_worker(running(failure_policy=FailurePolicy()), 1, phase="Failed", exit_code=1)
    seen = replace(seen, now=NOW, sessions=tuple(replace(s, heard_seconds=NOW) for s in seen.sessions))
    return replace(seen, status=replace(seen.status, incidents=past), **{"free_nodes": 1, **other})


def on(*nodes: str, **other: Any) -> tuple[Incident, ...]:
    return tuple(died(node, NOW - 10.0 * (len(nodes) - place), **other) for place, node in enumerate(nodes))


def left(seen: Observed) -> list[ExcludedNode]:
    return list(plan(seen).status.excluded_nodes)


def test_a_node_with_all_failures_is_left_once_chance_would_hardly_choose_it() -> None:
    """Six of six on one of three nodes: three times a third to the sixth."""
    assert left(failing(*on(*["n1"] * 4))) == []
    (found,) = left(failing(*on(*["n1"] * 5)))
    assert (found.name, found.until_seconds) == ("n1", NOW + 3600)
    assert "6 of this job's 6 failures within 3600 s were there" in found.reason
    assert "one of 3 nodes in 0.4% of jobs" in found.reason
    assert "would cost 53.8 s, and leaving it 9.0 s" in found.reason
    assert found.cost_share == 1.0  # six times nine seconds in fifty


@pytest.mark.parametrize(
    "past",
    [on("n1", "n1", "n0", "n1", "n1", "n2"), on(*["n0"] * 8), on(*["n1"] * 5, kind="planned")],
    ids=["others fail too", "another node failed", "planned changes"],
)
def test_nothing_is_left_for_what_the_node_did_not_do(past: tuple[Incident, ...]) -> None:
    assert left(failing(*past)) == []


def test_a_failure_that_follows_its_rank_moves_nobody_again() -> None:
    loss = Loss("trainer-failed", "rank 1 ended with code 1", NOW, 1, "n1", rank=1)
    found = leaving(gather(failing(*on(*["n1"] * 7, rank=1))), loss)
    assert found is not None
    before = died("n7", NOW - 90, rank=1)
    assert leaving(gather(failing(before, *on(*["n1"] * 7, rank=1))), loss) is None
    # of another size of world the ranks were others
    assert leaving(gather(failing(replace(before, world_before=5), *on(*["n1"] * 7, rank=1))), loss) is not None


def test_a_change_that_costs_more_is_not_made() -> None:
    at = NOW - 100
    dear = replace(died("n0", at, kind="planned"), first_step_seconds=at + 60.0)
    assert left(failing(*on(*["n1"] * 5), dear)) == []


def test_no_node_is_left_without_another_place() -> None:
    assert left(failing(*on(*["n1"] * 5), free_nodes=0)) == []
    assert left(failing(*on(*["n1"] * 5), free_nodes=None)) != []  # a cluster whose free nodes nobody knows


def test_one_node_at_a_time() -> None:
    seen = failing(*on(*["n1"] * 5))
    other = ExcludedNode("n0", "it failed", NOW + 5, 0.1)
    assert left(replace(seen, status=replace(seen.status, excluded_nodes=(other,)))) == [other]
    over = replace(other, until_seconds=NOW - 1)
    assert [e.name for e in left(replace(seen, status=replace(seen.status, excluded_nodes=(over,))))] == ["n1"]


def test_a_world_becomes_no_smaller_for_failures_that_cost_less_than_its_workers() -> None:
    """After two minutes a node that others want left is left with fewer workers; this one only for more than a third."""
    for share, reason in ((0.2, ""), (0.5, "leaves node n1")):
        seen = running(least=1)
        bad = ExcludedNode("n1", "5 failures", NOW + 1000, share)
        seen = replace(seen, status=replace(seen.status, excluded_nodes=(bad,)), free_nodes=0)
        asked = with_worker(seen, 1, attempt=2, phase="Pending", node=None, created_seconds=NOW - 500)
        asked = replace(asked, workers=(*seen.workers, *(w for w in asked.workers if w.attempt == 2)))
        asked = replace(asked, now=NOW, sessions=tuple(replace(s, heard_seconds=NOW) for s in asked.sessions))
        assert reason in plan(asked).reason
        assert ("leaves" in plan(asked).reason) == bool(reason)


def test_its_worker_is_asked_for_elsewhere() -> None:
    seen = running(least=None)
    bad = ExcludedNode("n1", "5 failures", BEGAN + 1000, 0.2)
    seen = replace(
        seen, status=replace(seen.status, excluded_nodes=(bad,)), nodes=(*seen.nodes, NodeSeen("n3", "n3", True))
    )
    assert [a for a in plan(seen).actions if isinstance(a, CreateWorker)] == [CreateWorker(1, 2, ("n1",))]


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_odds_bound_what_chance_does(nodes: int) -> None:
    """Every way in which six failures fall on nodes alike, counted."""
    most = Counter(max(Counter(fell).values()) for fell in product(range(nodes), repeat=6))
    for times in range(1, 7):
        really = sum(ways for worst, ways in most.items() if worst >= times) / nodes**6
        assert really <= odds_by_chance(times, 6, nodes) + 1e-12


def test_the_odds_of_docs() -> None:
    assert odds_by_chance(5, 5, 4) < MOST_CHANCE < odds_by_chance(4, 4, 4)
    assert odds_by_chance(4, 4, 8) < MOST_CHANCE < odds_by_chance(3, 3, 8)
    assert odds_by_chance(3, 3, 16) < MOST_CHANCE
    assert odds_by_chance(8, 8, 1) == 1.0
