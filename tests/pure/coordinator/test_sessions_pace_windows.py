"""Tests of `coordinator.sessions_pace_windows`."""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Hello, NodeFinding, NodeHealth
from surefoot.protocol.progress import Progress, RankActivity
from surefoot_operator.coordinator.sessions import (
    MIN_WINDOW_OBSERVATIONS,
    MIN_WINDOW_STEPS,
    Sessions,
    add_activity,
    apply_hello,
    apply_message,
    create_sessions,
)
from surefoot_operator.job_snapshot import MAX_WINDOWS, ActivityHistory, ObservedSession

# ---- pace windows ----------------------------------------------------------------------------------------------------
# Totals of looks become windows of enough looks and steps, and no more than a few of them are kept.


def told(step: int, *looks: int) -> Progress:
    return Progress(step, activities=tuple(RankActivity(rank, 7, of, of // 2, 0) for rank, of in enumerate(looks)))


def test_a_window_has_enough_looks_at_each_rank_and_some_steps() -> None:
    seen = replace(add_activity(ActivityHistory(), told(10, 5, 5)), warmed_up=True)
    assert (seen.window_start_step, seen.windows) == (10, ())
    assert add_activity(seen, told(30, 5 + MIN_WINDOW_OBSERVATIONS, 9)) == seen, "few looks at one of them"
    assert add_activity(seen, told(10 + MIN_WINDOW_STEPS - 1, 500, 500)) == seen, "an evaluation, or steps of minutes"
    whole = add_activity(seen, told(30, 5 + MIN_WINDOW_OBSERVATIONS, 7 + MIN_WINDOW_OBSERVATIONS))
    assert [(w.since_step, [p.observations for p in w.activities]) for w in whole.windows] == [
        (10, [MIN_WINDOW_OBSERVATIONS, MIN_WINDOW_OBSERVATIONS + 2])
    ]
    assert whole.window_start_step == 30


def test_the_first_of_an_epoch_counts_for_nothing() -> None:
    """A worker that was just started reads and compiles what the others have had for long."""
    seen = add_activity(add_activity(ActivityHistory(), told(0, 0)), told(10, 100))
    assert (seen.window_start_step, seen.windows) == (10, ())
    assert [w.since_step for w in add_activity(seen, told(20, 200)).windows] == [10]


def test_the_newest_windows_are_kept() -> None:
    seen = ActivityHistory()
    for at in range(10):
        seen = add_activity(seen, told(10 * at, 100 * at))
    assert [w.since_step for w in seen.windows] == [10 * at for at in range(9 - MAX_WINDOWS, 9)]


def test_what_not_every_rank_told_before_begins_anew() -> None:
    seen = add_activity(add_activity(add_activity(ActivityHistory(), told(0, 0)), told(10, 100)), told(20, 200))
    assert len(seen.windows) == 1
    assert add_activity(seen, told(30, 300, 50)) == ActivityHistory(told(30, 300, 50).activities, 30)
    assert add_activity(seen, told(30, 150)).windows == (), "fewer than before"


# ---- node findings ---------------------------------------------------------------------------------------------------
# What an agent finds on its node replaces what it found before, and a clock that is far off is told once.

WORKER = WorkerId(0, 1)
LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")


def joined() -> Sessions:
    return apply_hello(create_sessions("job", 0.0), Hello("job", 0, 1, "inc", "n0", "", 0, 0, True), 1.0)


def seen(sessions: Sessions) -> ObservedSession:
    return sessions.by_worker[WORKER].observed


def test_findings_stand_until_others_come_with_the_time_since_they_are_these() -> None:
    one = apply_message(joined(), WORKER, NodeHealth((LOST,), 5.0), 5.0)
    assert (seen(one).findings, seen(one).findings_seconds) == ((LOST,), 5.0)
    other_words = NodeFinding("GpuLost", "GPU 0 is still lost", "node")
    again = apply_message(one, WORKER, NodeHealth((other_words,), 9.0), 9.0)
    assert (seen(again).findings, seen(again).findings_seconds) == ((other_words,), 5.0)
    over = apply_message(again, WORKER, NodeHealth((), 12.0), 12.0)
    assert (seen(over).findings, seen(over).findings_seconds) == ((), 12.0)


def test_a_clock_that_is_far_off_is_told_when_it_comes_about() -> None:
    sessions = joined()
    for now, clock in ((10.0, 10.5), (20.0, 320.0), (30.0, 331.0), (40.0, 40.0), (50.0, 5.0)):
        sessions = apply_message(sessions, WORKER, NodeHealth((), clock), now)
    assert [(notice.reason, notice.text) for _, notice in sessions.notices] == [
        (
            "ClockSkew",
            "the clock of node n0 is 300 s fast compared with the operator's: check its time synchronization",
        ),
        ("ClockSkew", "the clock of node n0 is 45 s slow compared with the operator's: check its time synchronization"),
    ]
    unsaid = apply_message(joined(), WORKER, NodeHealth(), 1000.0)
    assert seen(unsaid).clock_skew_seconds is None
    assert unsaid.notices == ()
