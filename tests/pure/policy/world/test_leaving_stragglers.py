"""A straggler's node is left where that pays: it still works, and a smaller world may lose more than all wait for it.

With spares, with a loss or a rollback under way, and beside the sums of waiting and growing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.builders import BEGAN, session, with_session, worker
from support.paces import paced
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.spec import FailurePolicy, HealthPolicy, NumericsPolicy
from surefoot_operator.api.status import ExcludedNode, Incident, JobStatus, ReplacedStraggler
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.membership.node_exclusion import YOUNG_SECONDS, suspect_nodes
from surefoot_operator.policy.membership.planned_change import MOVE_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

NOW = BEGAN + 100
SLOW = (0.32, 0.32, 0.96)
SMALL, LARGE = 0.3, 0.5
"""Of each step, what all wait for worker 2: less than the third that it does, and more."""


def asked(least: int | None = None, **spec: Any) -> Observed:
    """Worker 2 of three is slow, and no other worker is there yet."""
    seen = paced(*SLOW, least=least, **{"health_policy": HealthPolicy(on_straggler="Replace"), **spec})
    return replace(seen, free_nodes=1)


def left(wait_share: float, least: int | None = 2, created: float = NOW, warm: bool = False) -> Observed:
    """Its node is being left; the second attempt of worker 2 was made then."""
    seen = asked(least)
    there = ReplacedStraggler(2, 2, "n2", NOW, NOW + 1000, wait_share)
    return replace(
        seen,
        status=replace(seen.status, replaced_stragglers=(there,), next_attempt=3),
        workers=(*seen.workers, worker(2, 2, node="n3", phase="Running", created_seconds=created)),
        sessions=(*seen.sessions, session(2, 2, now=NOW, node="n3", warm=warm, stopped=1)),
        nodes=(*seen.nodes, NodeSeen("n3", "n3", True)),
    )


def late(wait_share: float) -> Observed:
    return left(wait_share, created=NOW - MOVE_SECONDS)


def moves(seen: Observed) -> bool:
    return any(isinstance(action, Barrier) for action in plan(seen).actions)


def claimed(seen: Observed, reason: str = "node n1 is gone") -> Observed:
    world = seen.status.world
    assert world is not None
    world = replace(world, epoch=2, state="Claimed", reason=reason, changed_seconds=NOW - 60)
    sessions = tuple(replace(s, stopped=2) for s in seen.sessions)
    holders = tuple(replace(h, fence=2, read_epoch=2) for h in seen.holders)
    return replace(seen, status=replace(seen.status, world=world), sessions=sessions, holders=holders)


def members(seen: Observed) -> list[tuple[int, int]]:
    world = plan(seen).status.world
    assert world is not None
    assert world.state == "Committed", plan(seen).reason
    return [(m.index, m.attempt) for m in world.members]


def decided(seen: Observed) -> JobStatus:
    made = plan(seen)
    check(made, seen)
    return made.status


def test_what_all_wait_for_it_is_kept_with_the_decision() -> None:
    (moved,) = decided(asked()).replaced_stragglers
    assert moved.wait_share == 0.64


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
    status = replace(seen.status, sick_nodes=(ExcludedNode("n2", "its GPU fell off the bus", NOW + 1000),))
    assert moves(replace(seen, status=status))
    signalled = replace(seen, nodes=tuple(replace(n, signal="drained") if n.name == "n2" else n for n in seen.nodes))
    assert moves(signalled)


def test_after_another_ones_loss_the_straggler_is_better_than_nobody() -> None:
    """Worker 1 is lost: of a job of two at least, one would be left without the straggler."""
    for share in (SMALL, LARGE):
        seen = with_session(left(share), 1, connected=False, since_seconds=NOW - 50, heard_seconds=NOW - 50)
        gone = replace(seen, workers=tuple(w for w in seen.workers if w.index != 1))
        gone = replace(gone, nodes=tuple(n for n in gone.nodes if n.name != "n1"))
        assert members(claimed(gone)) == [(0, 1), (2, 1)]


def test_a_move_waits_for_no_sums_of_growing() -> None:
    """Incidents so near each other that no growing would pay: the move keeps the size, and is none."""
    seen = left(LARGE, warm=True)
    found = tuple(
        Incident("node-lost", "node n9 is gone", 1, "n9", 1, at, at, at, at, at, at + 9.0, world_before=3)
        for at in (NOW - 60, NOW - 40, NOW - 20)
    )
    assert moves(replace(seen, status=replace(seen.status, incidents=found)))


def with_spare(seen: Observed) -> Observed:
    return replace(
        seen,
        workers=(*seen.workers, worker(3)),
        sessions=(*seen.sessions, session(3, now=NOW, warm=True, stopped=1)),
        nodes=(*seen.nodes, NodeSeen("n3", "n3", True)),
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
        Incident("trainer-failed", "rank 3 ended with code 1", 3, node, 1, at, at, at, at, at, at + 9.0, world_before=3)
        for at in (NOW - 60, NOW - 40)
    )


def test_no_rank_moves_to_a_spare_where_most_failures_were() -> None:
    """There it may fail again, which costs more than a slow step."""
    seen = with_spare(asked(spares=1))
    seen = replace(seen, status=replace(seen.status, incidents=failed_on("n3")))
    assert list(suspect_nodes(gather(seen))) == ["n3"]
    status = decided(seen)
    assert status.replaced_stragglers == ()
    assert status.stragglers[0].answer == "it stays for now: no other node is free"


def test_a_rollback_goes_first_and_takes_nothing_from_its_budget() -> None:
    """The loss is no number in the round that would move the straggler: the claim goes back, and the next world moves."""
    policy = HealthPolicy(on_straggler="Replace", numerics=NumericsPolicy())
    seen = asked(health_policy=policy, failure_policy=FailurePolicy(max_restarts=2))
    for one in seen.sessions:
        odd = {"odd_step": 42, "odd_since": 41, "odd_kind": "not-finite", "odd_text": "the loss of step 42 is nan"}
        seen = with_session(seen, one.index, **odd)
    status = decided(seen)
    assert status.world is not None
    assert (status.world.epoch, status.world.state) == (2, "Claimed")
    assert "going back" in status.world.reason
    assert [one.node for one in status.replaced_stragglers] == ["n2"]
    assert status.rollback is not None


def test_while_an_incident_is_open_nothing_is_begun() -> None:
    seen = asked()
    open_one = Incident(
        "numerics", "the loss is nan: going back to step 30", None, None, 1, NOW - 3, NOW - 3, world_before=3
    )
    status = decided(replace(seen, status=replace(seen.status, incidents=(open_one,))))
    assert status.replaced_stragglers == ()
    assert status.stragglers[0].answer == "it stays until the world runs"


def test_right_after_a_restart_nobody_is_moved() -> None:
    """Who has just come to a node has nothing in its caches."""
    seen = asked()
    for ago, moved in ((YOUNG_SECONDS - 1, []), (YOUNG_SECONDS, ["n2"])):
        began = NOW - ago
        over = replace(failed_on("n1")[0], claimed_seconds=began - 3, first_step_seconds=began)
        status = decided(replace(seen, status=replace(seen.status, incidents=(over,))))
        assert [one.node for one in status.replaced_stragglers] == moved
        assert ("less than 180 s ago" in status.stragglers[0].answer) == (not moved)
