"""A halt that is named again and again while a trainer stands still: seldom, and never far ahead."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, job, running, session, told, worker
from surefoot_operator.job_snapshot import HoldSeen, NodeSeen, Observed
from surefoot_operator.policy.core.actions import ProposeHold
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


def at(seen: Observed, now: float, hold: HoldSeen | None, step: int | None = None) -> Observed:
    """Later, everybody heard; `step`: it was just made, else all stand as they stood."""
    sessions = tuple(replace(s, heard_seconds=now) for s in seen.sessions)
    if step is not None:
        sessions = tuple(told(s, step=step, step_at_seconds=now) if s.epoch else s for s in sessions)
    return replace(seen, now=now, hold=hold, sessions=sessions)


def test_a_world_that_stands_still_is_asked_seldom_and_about_the_next_steps() -> None:
    seen, now, hold, named = growing(), NOW, None, []
    while now < NOW + 590:
        made = plan(at(seen, now, hold))
        for action in made.actions:
            assert isinstance(action, ProposeHold)
            if action.verb == "propose":
                named.append(action.step)
                hold = HoldSeen(1, action.step, "Proposed", now)
            elif hold is not None:
                hold = replace(hold, state="Refused")
        assert made.wake_after_seconds is not None
        now += max(0.01, made.wake_after_seconds)
    assert named[0] == 42 + 6
    assert len(named) < 10, named
    assert named[-1] < 42 + 6 + 10, named
    assert len(set(named)) == len(named), "an answer to an older one is never taken for it"
    assert hold is not None
    (thawed,) = plan(at(seen, now, replace(hold, state="Refused"), step=43)).actions
    assert isinstance(thawed, ProposeHold)
    assert thawed.step <= named[-1] + 6, "the next one lies where all get to at once"


def test_a_world_that_moves_and_refuses_is_asked_about_a_later_step() -> None:
    hold = HoldSeen(1, 48, "Refused", NOW)
    (again,) = plan(at(growing(), NOW + 0.6, hold, step=49)).actions
    assert again == ProposeHold(1, 49 + 6, "propose")
