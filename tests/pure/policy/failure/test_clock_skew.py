"""No step of a clock, this machine's or a former leader's, decides anything about a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, running, worker
from surefoot_operator.api.status import ExcludedNode, Incident, Membership, Restart
from surefoot_operator.controller.process_setup import TermClock
from surefoot_operator.policy.failure.clock_skew import clamp_future_times
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.reconcile.reconciler import WorkerAges

NOW = BEGAN + 100
HOUR = 3600.0


@pytest.mark.parametrize("step", [HOUR, -HOUR, 10 * 365 * 86400.0])
def test_a_step_of_the_wall_clock_moves_no_time_of_a_term(step: float) -> None:
    wall, steady = [1_700_000_000.0], [50.0]
    clock = TermClock(lambda: wall[0], lambda: steady[0])
    assert clock() == 1_700_000_000.0
    wall[0] += step
    steady[0] += 2.0
    assert clock() == 1_700_000_002.0
    clock.start_term()
    assert clock() == 1_700_000_000.0 + step, "the next term believes the wall anew"


def test_what_a_clock_that_ran_ahead_wrote_is_taken_for_now_and_nothing_else_is_touched() -> None:
    status = running().status
    assert clamp_future_times(status, NOW, HOUR) == status
    later = NOW + HOUR
    world = replace(status.membership or Membership(1, "Committed"), changed_seconds=later)
    incident = Incident("hang", "a test", 1, "n1", 1, later, later, first_step_seconds=None)
    ahead = replace(
        status,
        membership=world,
        incidents=(incident,),
        recent_restarts=(Restart(later),),
        excluded_nodes=(ExcludedNode("n1", "a test", later + 7 * HOUR),),
        progress_seconds=later,
        start_seconds=BEGAN,
    )
    found = clamp_future_times(ahead, NOW, HOUR)
    assert found.membership is not None
    assert found.membership.changed_seconds == found.progress_seconds == found.recent_restarts[0].time_seconds == NOW
    assert (found.incidents[0].detected_seconds, found.incidents[0].first_step_seconds) == (NOW, None)
    assert found.excluded_nodes[0].until_seconds == NOW + HOUR
    assert found.start_seconds == BEGAN
    assert clamp_future_times(found, NOW + 1, HOUR) == found


def test_a_claim_of_a_leader_whose_clock_ran_ahead_ends_as_soon_as_any() -> None:
    """One named holder is silent, and what it may have is worth 0.2 s: not an hour and 0.2 s."""
    seen = running()
    world = seen.status.membership
    assert world is not None
    claim = replace(world, generation=2, state="Claimed", reason="a test", changed_seconds=NOW + HOUR)
    seen = replace(
        seen,
        term_seconds=NOW,
        sessions=tuple(replace(s, stopped=2) for s in seen.sessions),
        servers=tuple(
            replace(h, fence=2, read_generation=2, state="Unreachable" if h.endpoint.instance.node == "n1" else "Ready")
            for h in seen.servers
        ),
        status=clamp_future_times(replace(seen.status, membership=claim), NOW, HOUR),
    )
    after = replace(
        seen, now_seconds=NOW + 10, sessions=tuple(replace(s, last_message_seconds=NOW + 10) for s in seen.sessions)
    )
    made = plan(after)
    assert made.status.membership is not None
    assert made.status.membership.state == "Committed"


def test_workers_are_as_old_as_we_know_them_whatever_their_fabric_s_clock_says() -> None:
    ages = WorkerAges()
    old, odd = worker(0, created_seconds=NOW - 50), worker(1, created_seconds=NOW + HOUR)
    assert [w.created_seconds for w in ages.with_local_ages((old, odd), NOW)] == [NOW - 50, NOW]
    new = worker(2, created_seconds=NOW - HOUR)
    assert [w.created_seconds for w in ages.with_local_ages((old, odd, new), NOW + 5)] == [NOW - 50, NOW, NOW + 5]
    assert [w.created_seconds for w in ages.with_local_ages((new,), NOW + 9)] == [NOW + 5]
    ended = replace(new, phase="Failed")
    (seen,) = ages.with_local_ages((ended,), NOW + 12)
    assert (seen.phase, seen.created_seconds) == ("Failed", NOW + 5)
    assert ages.with_local_ages((ended,), NOW + 13)[0] is seen, "an unchanged worker is the same to every round"
