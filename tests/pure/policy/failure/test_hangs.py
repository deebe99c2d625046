"""A world that stands still: when it is a hang, the same whoever's timer runs out first, and nobody is blamed by a tie."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, running, with_session
from surefoot_operator.api.spec import FailurePolicy
from surefoot_operator.api.status import Incident
from surefoot_operator.observed import ExitSeen, Observed
from surefoot_operator.policy.check import check
from surefoot_operator.policy.plan import plan

NOW = BEGAN + 700


def still(steps: tuple[int, ...] = (42, 42, 42), seconds: float = 601.0, **spec: object) -> Observed:
    """Everybody is heard, and nobody made a step for so long."""
    seen = running(now=NOW, **spec)
    for index, step in enumerate(steps):
        seen = with_session(seen, index, step=step, step_at_seconds=NOW - seconds)
    return seen


def timers(seen: Observed, *late: float, ranks: tuple[int, ...] = (-1, -1, -1)) -> Observed:
    """The agents' own timers ran out, each so long ago."""
    for index, seconds in enumerate(late):
        cause = "hang: no step for 600 s after step 42"
        seen = with_session(
            seen, index, exit=ExitSeen(1, ranks[index], -9, cause, False, NOW - seconds, "hang", f"rank {index}: here")
        )
    return seen


def decided(seen: Observed) -> Incident:
    made = plan(seen)
    check(made, seen)
    return made.status.incidents[-1]


def blamed(incident: Incident) -> tuple[int | None, str | None, int | None]:
    return incident.worker, incident.node, incident.rank


@pytest.mark.parametrize("own", [True, False], ids=["agents", "operator"])
def test_where_all_stand_at_one_step_nobody_is_blamed(own: bool) -> None:
    seen = timers(still(seconds=599.0), 0.03, 0.04, 0.0) if own else still()
    incident = decided(seen)
    assert incident.kind == "hang"
    assert blamed(incident) == (None, None, None)
    assert "no rank is behind: all are at step 42" in incident.reason
    assert plan(seen).status.restarts_counted == 1


@pytest.mark.parametrize("own", [True, False], ids=["agents", "operator"])
def test_the_one_that_stands_at_an_earlier_step_is_blamed(own: bool) -> None:
    seen = still((42, 42, 41), 599.0 if own else 601.0)
    incident = decided(timers(seen, 0.0, 0.02, 0.03) if own else seen)
    assert incident.kind == "hang"
    assert blamed(incident) == (2, "n2", 2)
    assert "rank 2 on worker 2 is at step 41" in incident.reason


def test_two_that_stand_at_an_earlier_step_are_named_and_not_blamed() -> None:
    incident = decided(still((41, 42, 41)))
    assert blamed(incident) == (None, None, None)
    assert "workers 0, 2 are at step 41" in incident.reason


def test_whoever_is_not_heard_is_no_evidence() -> None:
    seen = with_session(still((42, 42, 41)), 0, connected=False, since_seconds=NOW - 0.1)
    assert blamed(decided(seen)) == (None, None, None)


def test_a_rank_that_has_ended_is_said() -> None:
    incident = decided(with_session(still(), 1, ended=(1,)))
    assert "of worker 1 ranks have ended with code 0" in incident.reason


def test_the_only_worker_is_blamed_where_one_of_its_ranks_is_behind_the_others() -> None:
    seen = running(now=NOW, workers=1, nproc_per_node=2)
    assert blamed(decided(timers(seen, 0.0))) == (None, None, None)
    assert blamed(decided(timers(seen, 0.0, ranks=(1,)))) == (0, "n0", 1)


def test_ties_never_come_to_exclude_a_node() -> None:
    policy = FailurePolicy(max_num_repeat_offenders_to_avoid=2)
    seen = still(failure_policy=policy)
    for _ in range(3):
        made = plan(seen)
        assert made.status.excluded_nodes == ()
        seen = replace(seen, status=replace(seen.status, incidents=made.status.incidents))


def test_what_workers_say_is_kept_with_the_incident_also_when_it_comes_later() -> None:
    seen = timers(still(seconds=599.0), 0.0)
    claimed = plan(seen).status
    assert claimed.incidents[-1].detail == "rank 0: here"
    later = replace(timers(seen, 0.0, 0.0, 0.0), status=claimed, now=NOW + 0.1)
    assert plan(later).status.incidents[-1].detail == "rank 0: here\nrank 1: here\nrank 2: here"


def test_details_are_shortened() -> None:
    seen = with_session(running(now=NOW), 0, exit=ExitSeen(1, 0, 1, "boom", False, NOW, detail="x" * 100_000))
    old = Incident("hang", "it hung", None, None, 1, BEGAN, first_step_seconds=BEGAN, detail="y" * 8000)
    made = plan(replace(seen, status=replace(seen.status, incidents=(old,)))).status
    assert [len(i.detail) for i in made.incidents] == [500, 8000]


@given(st.lists(st.integers(40, 44), min_size=3, max_size=3))
def test_blame_follows_from_the_steps_alone(steps: list[int]) -> None:
    incident = decided(still((steps[0], steps[1], steps[2])))
    slow = [index for index, step in enumerate(steps) if step == min(steps)]
    assert incident.worker == (slow[0] if len(slow) == 1 else None)
