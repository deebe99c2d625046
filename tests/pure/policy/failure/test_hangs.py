"""A world that stands still: when it is a hang, the same whoever's timer runs out first, and nobody is blamed by a tie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.builders import BEGAN, running, with_session
from surefoot.protocol.hangs import Collective, RankPlace
from surefoot_operator.api.spec import FailurePolicy
from surefoot_operator.api.status import Incident
from surefoot_operator.job_snapshot import ExitSeen, Observed, StandingSeen, Timings
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

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


PLACES = (
    RankPlace((0,), "a", "in all_reduce", waiting=True),
    RankPlace((1,), "b", "in load (me/train.py:28)", waiting=False),
    RankPlace((2,), "a", "in all_reduce", waiting=True),
)


def proven(seconds: float = 121.0, places: tuple[RankPlace, ...] = PLACES, **progress: object) -> Observed:
    """Each agent has told that nothing moves in its rank; steps took a second."""
    seen = still(seconds=seconds)
    for index, place in enumerate(places):
        standing, timings = StandingSeen(42, (place,)), Timings(steps=(1.0,) * 12)
        seen = with_session(seen, index, standing=standing, timings=timings, **progress)
    return seen


def test_a_hang_that_every_stack_shows_is_found_by_the_jobs_own_pace_and_names_who_differs() -> None:
    incident = decided(proven())
    assert (incident.kind, *blamed(incident)) == ("hang", 1, "n1", 1)
    assert incident.reason == (
        "no step for 120 s, and steps take 1 s: in no rank did stack or I/O move between two looks;"
        " rank 1 on worker 1 stands in load (me/train.py:28), all others wait elsewhere"
    )


def test_where_all_stand_alike_the_hang_is_found_and_nobody_named() -> None:
    alike = tuple(RankPlace((rank,), "a", "in all_reduce", waiting=True) for rank in range(3))
    incident = decided(proven(places=alike))
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)


def test_where_all_stand_in_one_line_the_collectives_name_who_is_in_another_and_no_node() -> None:
    alike = tuple(RankPlace((rank,), "a", "in all_reduce", waiting=True) for rank in range(3))
    seen = proven(places=alike)
    for index, group in enumerate(("default_pg", "group 1", "default_pg")):
        call = Collective((index,), group, 7, "all_reduce", "Float[4]", "scheduled")
        seen = with_session(seen, index, standing=StandingSeen(42, alike[index : index + 1], collectives=(call,)))
    incident = decided(seen)
    assert (incident.kind, *blamed(incident)) == ("hang", 1, None, 1)
    assert incident.reason.endswith(
        "; rank 1 on worker 1 waits in all_reduce #7 of group 1 (Float[4]), all others in all_reduce #7 of default_pg (Float[4]):"
        " the program's ranks take unlike paths, no node is at fault"
    )


def test_where_stacks_and_collectives_name_two_ranks_nobody_is_blamed() -> None:
    seen = proven()
    for index, place in enumerate(PLACES):
        state: Any = "finished" if index == 2 else "scheduled"
        call = Collective((index,), "default_pg", 7 - (index == 2), "all_reduce", "", state)
        seen = with_session(seen, index, standing=StandingSeen(42, (place,), collectives=(call,)))
    incident = decided(seen)
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)
    assert "; nobody is named: by its stack rank 1 differs" in incident.reason


def test_the_odd_one_is_named_at_the_ceiling_too() -> None:
    seen = with_session(proven(seconds=601.0), 0, timings=Timings())
    assert blamed(decided(seen)) == (1, "n1", 1)


def test_the_odd_one_that_computes_for_ever_is_named_at_the_ceiling_and_not_before() -> None:
    loops = StandingSeen(42, PLACES[1:2], moves=True)
    assert plan(with_session(proven(), 1, standing=loops)).status.incidents == ()
    assert blamed(decided(with_session(proven(seconds=601.0), 1, standing=loops))) == (1, "n1", 1)


def test_who_stood_elsewhere_at_an_earlier_step_is_not_named_by_it() -> None:
    incident = decided(with_session(proven(seconds=601.0), 1, standing=StandingSeen(41, PLACES[1:2])))
    assert (incident.kind, *blamed(incident)) == ("hang", None, None, None)


def test_what_is_not_proven_waits_for_the_ceiling() -> None:
    moving = with_session(proven(), 2, standing=None)
    stepped = with_session(proven(), 2, standing=StandingSeen(41, PLACES[2:]))
    unheard = with_session(proven(), 2, connected=False, since_seconds=NOW - 0.1)
    early = proven(seconds=119.0)
    few = proven()
    for index in range(3):
        few = with_session(few, index, timings=Timings(steps=(1.0,) * 3))
    paused = proven(paused="evaluation")
    for seen in (moving, stepped, unheard, early, few, paused):
        assert plan(seen).status.incidents == ()


def test_what_stood_so_for_long_before_is_given_the_whole_time() -> None:
    hang = Incident("hang", "it stood", None, None, 0, BEGAN, first_step_seconds=BEGAN + 1, last_step=42)
    seen = proven()
    seen = replace(seen, status=replace(seen.status, incidents=(hang,)))
    assert plan(seen).status.incidents == (hang,)
    past = replace(hang, last_step=30)
    seen = replace(seen, status=replace(seen.status, incidents=(past,)))
    assert decided(seen).kind == "hang"


def test_an_announced_pause_has_the_time_that_it_announced() -> None:
    def pausing(seconds: float) -> Observed:
        return proven(seconds=seconds, paused="evaluation", pause_seconds=650.0)

    assert plan(pausing(640.0)).status.incidents == ()
    assert decided(pausing(651.0)).reason.startswith(
        "no step for stepTimeoutSeconds (650 s), while it had announced evaluation; "
    )


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
