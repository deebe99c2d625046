"""Tests of `policy.membership.node_exclusion`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from support.builders import BEGAN, running, session, with_session, with_worker, worker
from support.paces import paced
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import FailurePolicy, HealthPolicy, NumericsPolicy
from surefoot_operator.api.status import ExcludedNode, Incident, JobStatus, ReplacedStraggler
from surefoot_operator.job_snapshot import JobSnapshot, ObservedNode
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.membership.node_exclusion import (
    MAX_CHANCE_PROBABILITY,
    WARMUP_SECONDS,
    chance_probability,
    find_exclusion_reason,
    suspect_nodes,
)
from surefoot_operator.policy.membership.planned_change import MOVE_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- leaving stragglers ----------------------------------------------------------------------------------------------
# A straggler's node is left where that pays: it still works, and a smaller world may lose more than all wait for it.
#
# With spares, with a loss or a rollback under way, and beside the sums of waiting and growing.

NOW = BEGAN + 100
SLOW = (0.32, 0.32, 0.96)
SMALL, LARGE = 0.3, 0.5
"""Of each step, what all wait for worker 2: less than the third that it does, and more."""


def asked(least: int | None = None, **spec: Any) -> JobSnapshot:
    """Worker 2 of three is slow, and no other worker is there yet."""
    seen = paced(*SLOW, least=least, **{"health_policy": HealthPolicy(on_straggler="Replace"), **spec})
    return replace(seen, free_nodes=1)


def left(wait_share: float, least: int | None = 2, created: float = NOW, warm: bool = False) -> JobSnapshot:
    """Its node is being left; the second attempt of worker 2 was made then."""
    seen = asked(least)
    there = ReplacedStraggler(2, 2, "n2", NOW, NOW + 1000, wait_share)
    return replace(
        seen,
        status=replace(seen.status, replaced_stragglers=(there,), next_attempt=3),
        workers=(*seen.workers, worker(2, 2, node="n3", phase="Running", created_seconds=created)),
        sessions=(*seen.sessions, session(2, 2, now=NOW, node="n3", warm=warm, stopped=1)),
        nodes=(*seen.nodes, ObservedNode("n3", "n3", True)),
    )


def late(wait_share: float) -> JobSnapshot:
    return left(wait_share, created=NOW - MOVE_SECONDS)


def moves(seen: JobSnapshot) -> bool:
    return any(isinstance(action, Barrier) for action in plan(seen).actions)


def claimed(seen: JobSnapshot, reason: str = "node n1 is gone") -> JobSnapshot:
    world = seen.status.membership
    assert world is not None
    world = replace(world, generation=2, state="Claimed", reason=reason, changed_seconds=NOW - 60)
    sessions = tuple(replace(s, stopped=2) for s in seen.sessions)
    holders = tuple(replace(h, fence=2, read_generation=2) for h in seen.servers)
    return replace(seen, status=replace(seen.status, membership=world), sessions=sessions, servers=holders)


def members(seen: JobSnapshot) -> list[tuple[int, int]]:
    world = plan(seen).status.membership
    assert world is not None
    assert world.state == "Committed", plan(seen).reason
    return [(m.index, m.attempt) for m in world.members]


def decided(seen: JobSnapshot) -> JobStatus:
    made = plan(seen)
    check_plan(made, seen)
    return made.status


def test_what_all_wait_for_it_is_kept_with_the_decision() -> None:
    (moved,) = decided(asked()).replaced_stragglers
    assert moved.wait_ratio == 0.64


def test_the_world_moves_at_once_when_its_replacement_is_warm() -> None:
    for share in (0.0, SMALL, LARGE):
        assert moves(left(share, warm=True))
        assert members(claimed(left(share, warm=True))) == [(0, 1), (1, 1), (2, 2)]


def test_a_world_goes_on_without_it_only_where_it_costs_more_than_it_does() -> None:
    assert not moves(left(LARGE))
    assert moves(late(LARGE))
    assert members(claimed(late(LARGE))) == [(0, 1), (1, 1)]
    assert not moves(late(SMALL))
    assert members(claimed(late(SMALL))) == [(0, 1), (1, 1), (2, 1)]
    assert not moves(late(0.0)), "of a straggler whose wait was not measured nobody knows what it costs"


def test_a_node_that_is_unfit_as_well_is_left_whatever_it_costs() -> None:
    seen = late(SMALL)
    status = replace(seen.status, unhealthy_nodes=(ExcludedNode("n2", "its GPU fell off the bus", NOW + 1000),))
    assert moves(replace(seen, status=status))
    signalled = replace(
        seen, nodes=tuple(replace(n, evacuation_reason="drained") if n.name == "n2" else n for n in seen.nodes)
    )
    assert moves(signalled)


def test_after_another_ones_loss_the_straggler_is_better_than_nobody() -> None:
    """Worker 1 is lost: of a job of two at least, one would be left without the straggler."""
    for share in (SMALL, LARGE):
        seen = with_session(left(share), 1, connected=False, since_seconds=NOW - 50, last_message_seconds=NOW - 50)
        gone = replace(seen, workers=tuple(w for w in seen.workers if w.index != 1))
        gone = replace(gone, nodes=tuple(n for n in gone.nodes if n.name != "n1"))
        assert members(claimed(gone)) == [(0, 1), (2, 1)]


def test_a_move_waits_for_no_sums_of_growing() -> None:
    """Incidents so near each other that no growing would pay: the move keeps the size, and is none."""
    seen = left(LARGE, warm=True)
    found = tuple(
        Incident("node-lost", "node n9 is gone", 1, "n9", 1, at, at, at, at, at, at + 9.0, world_size_before=3)
        for at in (NOW - 60, NOW - 40, NOW - 20)
    )
    assert moves(replace(seen, status=replace(seen.status, incidents=found)))


def with_spare(seen: JobSnapshot) -> JobSnapshot:
    return replace(
        seen,
        workers=(*seen.workers, worker(3)),
        sessions=(*seen.sessions, session(3, now=NOW, warm=True, stopped=1)),
        nodes=(*seen.nodes, ObservedNode("n3", "n3", True)),
        free_nodes=0,
    )


def test_a_spare_takes_its_rank_where_no_node_is_free() -> None:
    seen = with_spare(asked(spares=1))
    after = replace(seen, status=decided(seen))
    assert [one.node for one in after.status.replaced_stragglers] == ["n2"]
    assert moves(after)
    assert members(claimed(after)) == [(0, 1), (1, 1), (3, 1)]


def failed_on(node: str) -> tuple[Incident, ...]:
    return tuple(
        Incident(
            "trainer-failed", "rank 3 ended with code 1", 3, node, 1, at, at, at, at, at, at + 9.0, world_size_before=3
        )
        for at in (NOW - 60, NOW - 40)
    )


def test_no_rank_moves_to_a_spare_where_most_failures_were() -> None:
    """There it may fail again, which costs more than a slow step."""
    seen = with_spare(asked(spares=1))
    seen = replace(seen, status=replace(seen.status, incidents=failed_on("n3")))
    assert list(suspect_nodes(build_facts(seen))) == ["n3"]
    status = decided(seen)
    assert status.replaced_stragglers == ()
    assert status.stragglers[0].action == "it stays for now: no other node is free"


def test_a_rollback_goes_first_and_takes_nothing_from_its_budget() -> None:
    """The loss is no number in the round that would move the straggler: the claim goes back, and the next world moves."""
    policy = HealthPolicy(on_straggler="Replace", numerics=NumericsPolicy())
    seen = asked(health_policy=policy, failure_policy=FailurePolicy(max_restarts=2))
    for one in seen.sessions:
        odd = {
            "anomaly_step": 42,
            "anomaly_since_step": 41,
            "anomaly_kind": "not-finite",
            "anomaly_text": "the loss of step 42 is nan",
        }
        seen = with_session(seen, one.index, **odd)
    status = decided(seen)
    assert status.membership is not None
    assert (status.membership.generation, status.membership.state) == (2, "Claimed")
    assert "rolling back" in status.membership.reason
    assert [one.node for one in status.replaced_stragglers] == ["n2"]
    assert status.rollback is not None


def test_while_an_incident_is_open_nothing_is_begun() -> None:
    seen = asked()
    open_one = Incident(
        "numerics", "the loss is nan: going back to step 30", None, None, 1, NOW - 3, NOW - 3, world_size_before=3
    )
    status = decided(replace(seen, status=replace(seen.status, incidents=(open_one,))))
    assert status.replaced_stragglers == ()
    assert status.stragglers[0].action == "it stays until the job trains"


def test_right_after_a_restart_nobody_is_moved() -> None:
    """Who has just come to a node has nothing in its caches."""
    seen = asked()
    for ago, moved in ((WARMUP_SECONDS - 1, []), (WARMUP_SECONDS, ["n2"])):
        began = NOW - ago
        over = replace(failed_on("n1")[0], claimed_seconds=began - 3, first_step_seconds=began)
        status = decided(replace(seen, status=replace(seen.status, incidents=(over,))))
        assert [one.node for one in status.replaced_stragglers] == moved
        assert ("less than 180 s ago" in status.stragglers[0].action) == (not moved)


# ---- leaving nodes ---------------------------------------------------------------------------------------------------
# A node that fails a job again and again is left where that costs less, and where chance did not choose it.

NOW_LEAVING_NODES = BEGAN + 300


def died(node: str, at: float, **other: Any) -> Incident:
    """Found at once, and 9 s later there was the next step."""
    times = {"claimed_seconds": at, "fenced_seconds": at, "committed_seconds": at, "first_step_seconds": at + 9.0}
    return replace(Incident("trainer-failed", "it died", 1, node, 1, at, **times, world_size_before=3), **other)


def failing(*past: Incident, **other: Any) -> JobSnapshot:
    """The program on n1 just failed; three workers on n0, n1 and n2, and a free node."""
    seen = with_worker(running(failure_policy=FailurePolicy()), 1, phase="Failed", exit_code=1)
    seen = replace(
        seen,
        now_seconds=NOW_LEAVING_NODES,
        sessions=tuple(replace(s, last_message_seconds=NOW_LEAVING_NODES) for s in seen.sessions),
    )
    return replace(seen, status=replace(seen.status, incidents=past), **{"free_nodes": 1, **other})


def on(*nodes: str, **other: Any) -> tuple[Incident, ...]:
    return tuple(
        died(node, NOW_LEAVING_NODES - 10.0 * (len(nodes) - place), **other) for place, node in enumerate(nodes)
    )


def left_leaving_nodes(seen: JobSnapshot) -> list[ExcludedNode]:
    return list(plan(seen).status.excluded_nodes)


def test_a_node_with_all_failures_is_left_once_chance_would_hardly_choose_it() -> None:
    """Six of six on one of three nodes: three times a third to the sixth."""
    assert left_leaving_nodes(failing(*on(*["n1"] * 4))) == []
    (found,) = left_leaving_nodes(failing(*on(*["n1"] * 5)))
    assert (found.name, found.until_seconds) == ("n1", NOW_LEAVING_NODES + 3600)
    assert "6 of this job's 6 failures within 3600 s were on this node" in found.reason
    assert "one of 3 nodes in 0.4% of jobs" in found.reason
    assert "would cost 53.8 s, and excluding it 9.0 s" in found.reason
    assert found.lost_time_ratio == 1.0  # six times nine seconds in fifty


@pytest.mark.parametrize(
    "past",
    [on("n1", "n1", "n0", "n1", "n1", "n2"), on(*["n0"] * 8), on(*["n1"] * 5, kind="planned")],
    ids=["others fail too", "another node failed", "planned changes"],
)
def test_nothing_is_left_for_what_the_node_did_not_do(past: tuple[Incident, ...]) -> None:
    assert left_leaving_nodes(failing(*past)) == []


def test_a_failure_that_follows_its_rank_moves_nobody_again() -> None:
    loss = Failure("trainer-failed", "rank 1 ended with code 1", NOW_LEAVING_NODES, 1, "n1", rank=1)
    found = find_exclusion_reason(build_facts(failing(*on(*["n1"] * 7, rank=1))), loss)
    assert found is not None
    before = died("n7", NOW_LEAVING_NODES - 90, rank=1)
    assert find_exclusion_reason(build_facts(failing(before, *on(*["n1"] * 7, rank=1))), loss) is None
    # of another size of world the ranks were others
    assert (
        find_exclusion_reason(
            build_facts(failing(replace(before, world_size_before=5), *on(*["n1"] * 7, rank=1))), loss
        )
        is not None
    )


def test_a_change_that_costs_more_is_not_made() -> None:
    at = NOW_LEAVING_NODES - 100
    dear = replace(died("n0", at, kind="planned"), first_step_seconds=at + 60.0)
    assert left_leaving_nodes(failing(*on(*["n1"] * 5), dear)) == []


def test_no_node_is_left_without_another_place() -> None:
    assert left_leaving_nodes(failing(*on(*["n1"] * 5), free_nodes=0)) == []
    assert (
        left_leaving_nodes(failing(*on(*["n1"] * 5), free_nodes=None)) != []
    )  # a cluster whose free nodes nobody knows


def test_one_node_at_a_time() -> None:
    seen = failing(*on(*["n1"] * 5))
    other = ExcludedNode("n0", "it failed", NOW_LEAVING_NODES + 5, 0.1)
    assert left_leaving_nodes(replace(seen, status=replace(seen.status, excluded_nodes=(other,)))) == [other]
    over = replace(other, until_seconds=NOW_LEAVING_NODES - 1)
    assert [e.name for e in left_leaving_nodes(replace(seen, status=replace(seen.status, excluded_nodes=(over,))))] == [
        "n1"
    ]


def test_a_world_becomes_no_smaller_for_failures_that_cost_less_than_its_workers() -> None:
    """After two minutes a node that others want left is left with fewer workers; this one only for more than a third."""
    for share, reason in ((0.2, ""), (0.5, "is moved off node n1")):
        seen = running(least=1)
        bad = ExcludedNode("n1", "5 failures", NOW_LEAVING_NODES + 1000, share)
        seen = replace(seen, status=replace(seen.status, excluded_nodes=(bad,)), free_nodes=0)
        asked = with_worker(seen, 1, attempt=2, phase="Pending", node=None, created_seconds=NOW_LEAVING_NODES - 500)
        asked = replace(asked, workers=(*seen.workers, *(w for w in asked.workers if w.attempt == 2)))
        asked = replace(
            asked,
            now_seconds=NOW_LEAVING_NODES,
            sessions=tuple(replace(s, last_message_seconds=NOW_LEAVING_NODES) for s in asked.sessions),
        )
        assert reason in plan(asked).reason
        assert ("is moved off" in plan(asked).reason) == bool(reason)


def test_its_worker_is_asked_for_elsewhere() -> None:
    seen = running(least=None)
    bad = ExcludedNode("n1", "5 failures", BEGAN + 1000, 0.2)
    seen = replace(
        seen, status=replace(seen.status, excluded_nodes=(bad,)), nodes=(*seen.nodes, ObservedNode("n3", "n3", True))
    )
    assert [a for a in plan(seen).actions if isinstance(a, CreateWorker)] == [CreateWorker(1, 2, ("n1",))]


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_odds_bound_what_chance_does(nodes: int) -> None:
    """Every way in which six failures fall on nodes alike, counted."""
    most = Counter(max(Counter(fell).values()) for fell in product(range(nodes), repeat=6))
    for times in range(1, 7):
        really = sum(ways for worst, ways in most.items() if worst >= times) / nodes**6
        assert really <= chance_probability(times, 6, nodes) + 1e-12


def test_the_odds_of_docs() -> None:
    assert chance_probability(5, 5, 4) < MAX_CHANCE_PROBABILITY < chance_probability(4, 4, 4)
    assert chance_probability(4, 4, 8) < MAX_CHANCE_PROBABILITY < chance_probability(3, 3, 8)
    assert chance_probability(3, 3, 16) < MAX_CHANCE_PROBABILITY
    assert chance_probability(8, 8, 1) == 1.0


# ---- node exclusion --------------------------------------------------------------------------------------------------
# Nodes that fail one job again and again are left in order, as far as the job allows.


def failing_node_exclusion(most: int, *past: str, seconds_ago: float = 10.0, **other: Any) -> JobSnapshot:
    """The agent on n1 just died; the job failed before on the nodes of `past`."""
    policy = FailurePolicy(max_excluded_nodes=most, eval_period_seconds=50.0)
    incidents = tuple(
        Incident("trainer-failed", "it died", 1, node, 1, NOW - seconds_ago, first_step_seconds=NOW - seconds_ago + 1)
        for node in past
    )
    seen = running(failure_policy=policy)
    seen = with_worker(seen, 1, phase="Failed", exit_code=1)
    return replace(seen, status=replace(seen.status, incidents=incidents, **other))


def names(seen: JobSnapshot) -> list[str]:
    return [e.name for e in plan(seen).status.excluded_nodes]


def test_a_second_failure_within_the_window_excludes_the_node_for_as_long() -> None:
    assert names(failing_node_exclusion(2)) == []
    made = plan(failing_node_exclusion(2, "n1")).status
    (found,) = made.excluded_nodes
    assert (found.name, found.until_seconds) == ("n1", NOW + 50.0)
    assert "2 failures of this job within 50 s" in found.reason
    assert names(failing_node_exclusion(2, "n1", seconds_ago=51.0)) == []
    assert names(failing_node_exclusion(2, "n0")) == []


def test_a_job_that_allows_none_excludes_none() -> None:
    assert names(failing_node_exclusion(0, "n1", "n1")) == []


def test_never_more_than_the_job_allows_and_the_newest_stay() -> None:
    old = (ExcludedNode("n5", "it failed", NOW + 9), ExcludedNode("n6", "it failed", NOW - 1))
    assert names(failing_node_exclusion(2, "n1", excluded_nodes=old)) == ["n5", "n1"]  # the other one's time is up
    assert names(failing_node_exclusion(1, "n1", excluded_nodes=old)) == ["n1"]


def test_an_excluded_node_is_left_once_another_worker_is_warm_elsewhere() -> None:
    seen = running(least=None)
    bad = ExcludedNode("n1", "2 failures", NOW + 50)
    seen = replace(
        seen,
        status=replace(seen.status, excluded_nodes=(bad,)),
        nodes=(*seen.nodes, ObservedNode("n3", "n3", True)),
    )
    assert [a for a in plan(seen).actions if isinstance(a, CreateWorker)] == [CreateWorker(1, 2, ("n1",))]
    over = replace(
        seen, now_seconds=NOW + 51, sessions=tuple(replace(s, last_message_seconds=NOW + 51) for s in seen.sessions)
    )
    assert not [a for a in plan(over).actions if isinstance(a, CreateWorker)]
