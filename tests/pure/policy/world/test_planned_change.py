"""A halt that is named again and again while a trainer stands still: seldom, and never far ahead."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, job, running, session, told, worker
from surefoot.protocol.messages import Barrier
from surefoot_operator.job_snapshot import NodeSeen, Observed, ObservedBarrier
from surefoot_operator.policy.planning.plan import plan

NOW = BEGAN + 100


def growing() -> Observed:
    """Two workers train at step 42, a tenth of a second a step, and a third is warm."""
    seen = running(workers=2, least=1)
    return replace(
        seen,
        job=job(3, least=1),
        workers=(*seen.workers, worker(2)),
        sessions=(*seen.sessions, session(2, now=NOW)),
        nodes=(*seen.nodes, NodeSeen("n2", "n2", True)),
    )


def at(seen: Observed, now: float, barrier: ObservedBarrier | None, step: int | None = None) -> Observed:
    """Later, everybody heard; `step`: it was just made, else all stand as they stood."""
    sessions = tuple(replace(s, heard_seconds=now) for s in seen.sessions)
    if step is not None:
        sessions = tuple(told(s, step=step, step_at_seconds=now) if s.epoch else s for s in sessions)
    return replace(seen, now=now, barrier=barrier, sessions=sessions)


def test_a_world_that_stands_still_is_asked_seldom_and_about_the_next_steps() -> None:
    seen, now, barrier, named = growing(), NOW, None, []
    while now < NOW + 590:
        made = plan(at(seen, now, barrier))
        for action in made.actions:
            assert isinstance(action, Barrier)
            if action.phase == "proposed":
                named.append(action.step)
                barrier = ObservedBarrier(Barrier(1, action.step, "proposed"), now)
            elif barrier is not None:
                barrier = replace(barrier, sent=replace(barrier.sent, phase="cancelled"))
        assert made.wake_after_seconds is not None
        now += max(0.01, made.wake_after_seconds)
    assert named[0] == 42 + 6
    assert len(named) < 10, named
    assert named[-1] < 42 + 6 + 10, named
    assert len(set(named)) == len(named), "an answer to an older one is never taken for it"
    assert barrier is not None
    (thawed,) = plan(at(seen, now, replace(barrier, sent=replace(barrier.sent, phase="cancelled")), step=43)).actions
    assert isinstance(thawed, Barrier)
    assert thawed.step <= named[-1] + 6, "the next one lies where all get to at once"


def test_a_world_that_moves_and_refuses_is_asked_about_a_later_step() -> None:
    barrier = ObservedBarrier(Barrier(1, 48, "cancelled"), NOW)
    (again,) = plan(at(growing(), NOW + 0.6, barrier, step=49)).actions
    assert again == Barrier(1, 49 + 6, "proposed")
