"""A node that others want left: its worker trains on until another is warm, and nothing is lost by the move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, session, with_node, with_session, worker
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.status import World
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker
from surefoot_operator.policy.membership.planned_change import MOVE_SECONDS
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100


def sick(least: int | None = None, **other: Any) -> Observed:
    """Three workers run well; node n1 bears a signal, and n3 is free."""
    seen = with_node(running(least=least), "n1", signal="it has the label x=y")
    return replace(seen, nodes=(*seen.nodes, NodeSeen("n3", "n3", True)), **other)


def beside(seen: Observed, warm: bool, created: float = NOW, node: str = "n3") -> Observed:
    """The second attempt of worker 1, on another node."""
    new = worker(1, 2, node=node, phase="Running", created_seconds=created)
    heard = session(1, 2, now=seen.now, node=node, warm=warm)
    status = replace(seen.status, next_attempt=3)
    return replace(seen, status=status, workers=(*seen.workers, new), sessions=(*seen.sessions, heard))


def actions(seen: Observed, kind: type[Any]) -> list[Any]:
    return [a for a in plan(seen).actions if isinstance(a, kind)]


def test_a_worker_is_made_beside_it_on_another_node() -> None:
    seen = sick()
    assert actions(seen, CreateWorker) == [CreateWorker(1, 2, ("n1",))]
    assert actions(seen, DeleteWorker) == []
    assert actions(seen, Barrier) == []
    coming = beside(seen, warm=False)
    assert actions(coming, CreateWorker) == []
    assert actions(coming, DeleteWorker) == []
    assert actions(coming, Barrier) == []


def test_the_world_moves_once_that_one_is_warm_and_loses_nothing() -> None:
    made = plan(beside(sick(), warm=True))
    assert [a.phase for a in made.actions if isinstance(a, Barrier)] == ["proposed"]
    assert "worker 1 leaves node n1 (it has the label x=y)" in made.reason


def claimed(seen: Observed) -> Observed:
    """Everybody has saved and stopped; the next epoch is claimed."""
    world = replace(seen.status.world or World(1, "Committed"), epoch=2, state="Claimed", changed_seconds=NOW - 60)
    sessions = tuple(replace(s, stopped=2) for s in seen.sessions)
    holders = tuple(replace(h, fence=2, read_epoch=2) for h in seen.holders)
    return replace(seen, status=replace(seen.status, world=world), sessions=sessions, holders=holders)


def members(seen: Observed) -> list[tuple[int, int]]:
    world = plan(seen).status.world
    assert world is not None
    assert world.state == "Committed"
    return [(m.index, m.attempt) for m in world.members]


def test_the_new_world_has_the_worker_on_the_other_node() -> None:
    assert members(claimed(beside(sick(), warm=True))) == [(0, 1), (1, 2), (2, 1)]


def test_a_claim_meanwhile_takes_the_old_one_while_the_new_one_is_not_warm() -> None:
    assert members(claimed(beside(sick(), warm=False))) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("ghost", ["its pod is deleted", "its machine lost its power"])
def test_a_second_one_that_died_without_a_word_hides_not_the_first(ghost: str) -> None:
    """Of a machine that loses its power nobody closes the line: its agent counts as connected, and is not heard."""
    seen = claimed(beside(sick(), warm=True))
    if ghost == "its pod is deleted":
        seen = replace(seen, workers=tuple(w for w in seen.workers if w.attempt == 1))
    else:
        silent = tuple(replace(s, heard_seconds=NOW - 30) if s.attempt == 2 else s for s in seen.sessions)
        seen = replace(seen, sessions=silent)
    assert members(seen) == [(0, 1), (1, 1), (2, 1)]


def test_an_elastic_job_moves_with_fewer_workers_after_a_while() -> None:
    seen = sick(least=2)
    early = beside(seen, warm=False, created=NOW - MOVE_SECONDS + 1)
    assert actions(early, Barrier) == []
    late = beside(seen, warm=False, created=NOW - MOVE_SECONDS)
    assert len(actions(late, Barrier)) == 1
    assert members(claimed(late)) == [(0, 1), (2, 1)]


def test_a_job_that_would_have_no_world_without_the_node_stays_there() -> None:
    late = beside(sick(), warm=False, created=NOW - 10 * MOVE_SECONDS)
    assert actions(late, Barrier) == []


def test_who_left_such_a_node_does_not_come_back_to_it() -> None:
    seen = sick(least=2)
    world = seen.status.world
    assert world is not None
    small = replace(world, size=2, members=tuple(m for m in world.members if m.index != 1))
    seen = with_session(replace(seen, status=replace(seen.status, world=small)), 1, epoch=0)
    assert actions(seen, Barrier) == []
    well = with_node(seen, "n1", signal="")
    assert "grow from 2 to 3" in plan(well).reason


def test_when_nobody_wants_it_left_any_more_the_second_one_goes() -> None:
    seen = with_node(beside(sick(), warm=True), "n1", signal="")
    assert [d.name for d in actions(seen, DeleteWorker)] == ["gpt-1-2"]
    assert actions(seen, Barrier) == []


def test_a_second_one_that_fails_at_once_is_not_made_again_at_once() -> None:
    failed = worker(1, 2, node="n3", phase="Failed", exit_code=1, created_seconds=NOW - 1)
    seen = sick()
    seen = replace(seen, workers=(*seen.workers, failed), status=replace(seen.status, next_attempt=3))
    assert actions(seen, CreateWorker) == []
    later = replace(seen, now=NOW + 10, sessions=tuple(replace(s, heard_seconds=NOW + 10) for s in seen.sessions))
    assert actions(later, CreateWorker) == [CreateWorker(1, 3, ("n1",))]
