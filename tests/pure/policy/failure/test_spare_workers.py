"""Spares: warm workers beside the world, one of which takes a lost worker's rank at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import (
    BEGAN,
    running,
    session,
    with_node,
    with_session,
    with_worker,
    worker,
)
from surefoot.protocol.messages import Barrier
from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, Incident, Member, Membership
from surefoot_operator.job_snapshot import JobSnapshot, ObservedNode, PendingCreate
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.failure.spare_workers import indexes_to_train, required_indexes, spare_agents
from surefoot_operator.policy.membership.claim import STOPPING_WAIT_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.report.blockers import find_blocker, find_spare_blocker

NOW = BEGAN + 100
SPARE = 3


def with_spare(least: int | None = None, warm: bool = True, spares: int = 1, **other: Any) -> JobSnapshot:
    """Workers 0 to 2 train, 3 is there beside them."""
    seen = running(least=least, spares=spares)
    heard = session(SPARE, now=NOW, warm=warm, stopped=1)
    return replace(
        seen,
        workers=(*seen.workers, worker(SPARE)),
        sessions=(*seen.sessions, heard),
        nodes=(*seen.nodes, ObservedNode("n3", "n3", True)),
        **other,
    )


def claimed(seen: JobSnapshot, ago: float = 1.0) -> JobSnapshot:
    """Everybody who is connected has stopped; the next epoch is claimed and every holder read."""
    world = replace(
        seen.status.membership or Membership(1, "Committed"), generation=2, state="Claimed", changed_seconds=NOW - ago
    )
    sessions = tuple(replace(s, stopped=2) for s in seen.sessions)
    holders = tuple(replace(h, fence=2, read_generation=2) for h in seen.servers)
    return replace(seen, status=replace(seen.status, membership=world), sessions=sessions, servers=holders)


def lost(seen: JobSnapshot, index: int) -> JobSnapshot:
    """This worker has ended with its line."""
    seen = with_worker(seen, index, phase="Failed", exit_code=-9)
    return with_session(seen, index, connected=False, since_seconds=NOW - 0.5)


def members(seen: JobSnapshot) -> tuple[Member, ...]:
    world = plan(seen).status.membership
    assert world is not None
    assert world.state == "Committed", plan(seen).reason
    return world.members


def actions(seen: JobSnapshot, kind: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, kind)]


def condition(seen: JobSnapshot, kind: str = reasons.SPARES_READY) -> Condition | None:
    return next((c for c in plan(seen).status.conditions if c.type == kind), None)


def test_spares_are_made_beside_the_world() -> None:
    seen = running(spares=2)
    assert actions(seen, CreateWorker) == [CreateWorker(3, 2), CreateWorker(4, 2)]


def test_a_spare_makes_no_world_larger() -> None:
    for least in (None, 1):
        seen = with_spare(least)
        assert actions(seen, Barrier) == []
        assert actions(seen, DeleteWorker) == []
        assert [m.index for m in members(claimed(seen))] == [0, 1, 2]


def test_a_spare_takes_the_lost_workers_rank_and_the_others_keep_theirs() -> None:
    """By their numbers two of three ranks would move, and read from other nodes what their own have."""
    for least in (None, 2):
        found = members(claimed(lost(with_spare(least), 1)))
        assert [m.index for m in found] == [0, SPARE, 2]
        assert found[1].node == "n3"


def test_the_lost_worker_is_made_again_and_is_the_next_spare() -> None:
    seen = lost(with_spare(), 1)
    after = replace(seen, status=plan(claimed(seen)).status)
    assert actions(after, CreateWorker) == [CreateWorker(1, 2)]
    assert sorted(required_indexes(build_facts(after))) == [0, 1, 2, 3]


def test_two_lost_workers_get_two_spares_in_order() -> None:
    seen = with_spare(spares=2)
    seen = replace(
        seen, workers=(*seen.workers, worker(4)), sessions=(*seen.sessions, session(4, now=NOW, warm=True, stopped=1))
    )
    assert [m.index for m in members(claimed(lost(lost(seen, 0), 2)))] == [3, 1, 4]


def test_who_is_about_to_be_ready_again_is_preferred_for_a_moment() -> None:
    """A crash of every trainer would otherwise move ranks to spares by chance."""
    seen = with_session(claimed(with_spare()), 2, stopped=1)
    made = plan(seen)
    assert made.status.membership == seen.status.membership
    assert "precede spares" in made.reason
    late = with_session(claimed(with_spare(), ago=STOPPING_WAIT_SECONDS + 0.1), 2, stopped=1)
    assert [m.index for m in members(late)] == [0, 1, SPARE]


def test_one_whose_line_broke_a_moment_ago_goes_before_a_spare() -> None:
    away = with_session(claimed(with_spare()), 2, connected=False, since_seconds=NOW - 0.1)
    assert "precede spares" in plan(away).reason
    gone = with_session(claimed(with_spare()), 2, connected=False, since_seconds=NOW - 0.3)
    assert [m.index for m in members(gone)] == [0, 1, SPARE]


def test_a_member_that_began_as_a_spare_is_not_ended_with_the_spares() -> None:
    seen = with_spare()
    status = plan(claimed(lost(seen, 1))).status
    job = replace(seen.job, spec=replace(seen.job.spec, spares=0))
    fewer = replace(lost(seen, 1), status=status, job=job)
    assert sorted(required_indexes(build_facts(fewer))) == [0, 2, SPARE]
    assert [a.name for a in actions(fewer, DeleteWorker)] == ["gpt-1-1"]
    assert actions(fewer, CreateWorker) == []


def test_a_fixed_size_job_moves_to_a_spare_at_once() -> None:
    """Nothing is waited for where others want a node left, or its worker ends."""
    for seen in (
        with_node(with_spare(), "n1", evacuation_reason="it has the label x=y"),
        with_worker(with_spare(), 1, deleting=True),
    ):
        assert [a.phase for a in actions(seen, Barrier)] == ["proposed"]
    departed = with_worker(claimed(with_spare()), 1, deleting=True)
    assert [m.index for m in members(departed)] == [0, SPARE, 2]


def test_spares_that_have_no_node_hinder_nothing_and_are_told_once() -> None:
    seen = running(spares=1)
    pending = worker(SPARE, phase="Pending", node=None, message="0/3 nodes are available", created_seconds=NOW - 90)
    seen = replace(seen, workers=(*seen.workers, pending))
    facts = build_facts(seen)
    assert indexes_to_train(facts) == {0, 1, 2}
    assert find_blocker(facts) is None
    assert find_spare_blocker(facts) is not None
    told = condition(seen)
    assert told is not None
    assert (told.status, told.reason) == ("False", "Unschedulable")
    assert told.message == "0 of 1 spares are warm; worker 3 has no node: 0/3 nodes are available"
    scheduled = condition(seen, reasons.PODS_SCHEDULED)
    assert scheduled is not None
    assert (scheduled.status, scheduled.reason) == ("True", "Scheduled")


def test_a_refused_spare_is_told_and_hinders_nothing() -> None:
    seen = running(spares=1, least=None)
    seen = replace(seen, creates=(PendingCreate(SPARE, 2, False, "403: exceeded quota", until_seconds=NOW + 9),))
    told = condition(seen)
    assert told is not None
    assert told.message == "0 of 1 spares are warm; worker 3 was rejected: 403: exceeded quota"
    assert "refused" not in plan(seen).reason


def test_a_spare_that_cannot_start_ends_no_job_whose_world_is_there() -> None:
    seen = claimed(with_spare(), ago=0.0)
    seen = with_worker(seen, SPARE, phase="Failed", exit_code=1)
    seen = with_session(seen, SPARE, connected=False)
    seen = with_session(seen, 0, warm=False)
    worn = replace(seen, status=replace(seen.status, failed_starts=99))
    assert plan(worn).status.phase != "Failed"


def test_spares_are_told_to_be_ready_once_as_many_are_warm() -> None:
    assert condition(running()) is None
    told = condition(with_spare())
    assert told is not None
    assert (told.status, told.reason, told.message) == ("True", "AllWarm", "1 of 1 spares are warm")
    cold = condition(with_spare(warm=False))
    assert cold is not None
    assert (cold.status, cold.reason) == ("False", "Waiting")
    away = condition(replace(claimed(with_spare()), status=plan(claimed(with_spare())).status))
    assert away is not None


def test_a_lost_spare_changes_no_world_and_is_replaced() -> None:
    seen = lost(with_spare(), SPARE)
    made = plan(seen)
    assert made.status.membership == seen.status.membership
    assert [a.index for a in actions(seen, CreateWorker)] == [SPARE]
    assert made.status.incidents == ()
    assert spare_agents(build_facts(seen)) == []


def test_starts_that_failed_beside_a_world_are_not_held_against_the_next_one() -> None:
    """A spare on a bad host fails for hours; then one worker is lost, and its replacement may fail once."""
    seen = lost(with_spare(), 1)
    worn = replace(seen, status=replace(seen.status, failed_starts=99))
    made = plan(worn).status
    assert made.membership is not None
    assert made.membership.state == "Claimed"
    assert made.failed_starts == 0


def _failed_on(*nodes: str) -> JobSnapshot:
    """A claim with a spare, after trainers failed on these nodes one after the other."""
    seen = claimed(with_spare(None))
    told = [
        Incident("trainer-failed", "exit code 1", int(n[1:]), n, 1, NOW - 90 + at, NOW - 89 + at, fenced_seconds=NOW - 88 + at,
                 committed_seconds=NOW - 87 + at, first_step_seconds=NOW - 80 + at)
        for at, n in enumerate(nodes)
    ]  # fmt: skip
    return replace(seen, status=replace(seen.status, incidents=tuple(told)))


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        (("n1",), [0, 1, 2]),
        (("n1", "n1"), [0, SPARE, 2]),
        (("n1", "n2"), [0, 1, 2]),
        (("n1", "n1", "n3", "n3"), [0, 1, 2]),
        (("n1", "n1", "n0"), [0, SPARE, 2]),
    ],
)
def test_a_spare_takes_the_rank_of_a_worker_whose_node_failed_most(nodes: tuple[str, ...], chosen: list[int]) -> None:
    """Where the failure followed the rank to the spare's node, no node has most of them, and everybody stays."""
    seen = _failed_on(*nodes)
    assert [m.index for m in members(seen)] == chosen
    told = [e.message for e in plan(seen).events if "failures were on node n1" in e.message]
    assert bool(told) == (SPARE in chosen)
    bare = replace(seen, sessions=seen.sessions[:3], workers=seen.workers[:3])
    assert [m.index for m in members(bare)] == [0, 1, 2], "without a spare everybody begins where they were"
