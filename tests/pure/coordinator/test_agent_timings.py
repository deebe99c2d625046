"""What the coordinator makes of the times in heartbeats."""

from __future__ import annotations

from dataclasses import replace

from support.talk import A, beat, talking
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.coordinator.sessions import Sessions, heard
from surefoot_operator.job_snapshot import Timings

C1, C2 = Checkpoint(2, 50), Checkpoint(2, 60)


def after(sessions: Sessions, now: float, step: int = 41, **other: object) -> Sessions:
    return heard(sessions, A, beat(2, step, **other), now)


def known(sessions: Sessions) -> Timings:
    return sessions.by_worker[A].seen.timings


def test_one_slow_step_is_no_trend_and_few_steps_are_none() -> None:
    sessions = talking()
    for step, seconds in ((41, 9.0), (42, 1.0)):
        sessions = after(sessions, 1000.0 + step, step, step_seconds=seconds)
        assert known(sessions).step_seconds is None
    sessions = after(sessions, 1043.0, 43, step_seconds=1.2)
    assert known(sessions).step_seconds == 1.2


def test_a_step_that_is_told_again_counts_once() -> None:
    sessions = talking()
    for at in range(10):
        sessions = after(sessions, 1000.0 + at, 41, step_seconds=1.0)
    assert known(sessions).step_seconds is None


def test_a_stall_that_is_told_again_counts_once() -> None:
    sessions = talking()
    for at, stall in enumerate((0.5, 0.1, 0.1, 0.1, 0.3)):
        sessions = after(sessions, 1000.0 + at, stall_seconds=stall)
    assert known(sessions).stall_seconds == 0.3


def test_a_drain_lasts_from_the_word_that_it_is_pending_to_the_word_that_it_is_not() -> None:
    sessions = after(talking(), 1000.0, pending=(C1,))
    sessions = after(sessions, 1000.5, pending=(C1, C2))
    assert known(sessions).drain_seconds is None
    sessions = after(sessions, 1002.0, pending=(C2,))
    assert known(sessions).drain_seconds == 2.0
    sessions = after(sessions, 1004.5)
    assert known(sessions).drain_seconds == 3.0  # of 2 and 4


def test_what_another_epoch_left_is_no_drain_of_this_one() -> None:
    sessions = after(talking(), 1000.0, pending=(Checkpoint(1, 40),))
    sessions = after(sessions, 1009.0)
    assert known(sessions).drain_seconds is None


def test_another_epoch_begins_without_the_times_of_the_last() -> None:
    sessions = talking()
    for step in range(41, 46):
        sessions = after(sessions, 1000.0 + step, step, step_seconds=1.0, stall_seconds=0.1)
    sessions = heard(sessions, A, replace(beat(3, 0), stopped=3), 1100.0)
    assert (known(sessions).step_seconds, known(sessions).stall_seconds) == (None, None)
