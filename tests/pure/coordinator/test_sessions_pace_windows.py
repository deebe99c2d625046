"""Tests of `coordinator.sessions_pace_windows`."""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Hello, NodeFinding, NodeHealth
from surefoot.protocol.progress import Progress, RankPace
from surefoot_operator.coordinator.sessions import WINDOW_LOOKS, WINDOW_STEPS, Sessions, begin, connected, heard, paced
from surefoot_operator.job_snapshot import MOST_WINDOWS, PaceSeen, SessionSeen

# ---- pace windows ----------------------------------------------------------------------------------------------------
# Totals of looks become windows of enough looks and steps, and no more than a few of them are kept.


def told(step: int, *looks: int) -> Progress:
    return Progress(step, paces=tuple(RankPace(rank, 7, of, of // 2, 0) for rank, of in enumerate(looks)))


def test_a_window_has_enough_looks_at_each_rank_and_some_steps() -> None:
    seen = replace(paced(PaceSeen(), told(10, 5, 5)), warmed_up=True)
    assert (seen.marked_step, seen.windows) == (10, ())
    assert paced(seen, told(30, 5 + WINDOW_LOOKS, 9)) == seen, "few looks at one of them"
    assert paced(seen, told(10 + WINDOW_STEPS - 1, 500, 500)) == seen, "an evaluation, or steps of minutes"
    whole = paced(seen, told(30, 5 + WINDOW_LOOKS, 7 + WINDOW_LOOKS))
    assert [(w.since_step, [p.looks for p in w.paces]) for w in whole.windows] == [
        (10, [WINDOW_LOOKS, WINDOW_LOOKS + 2])
    ]
    assert whole.marked_step == 30


def test_the_first_of_an_epoch_counts_for_nothing() -> None:
    """A worker that was just started reads and compiles what the others have had for long."""
    seen = paced(paced(PaceSeen(), told(0, 0)), told(10, 100))
    assert (seen.marked_step, seen.windows) == (10, ())
    assert [w.since_step for w in paced(seen, told(20, 200)).windows] == [10]


def test_the_newest_windows_are_kept() -> None:
    seen = PaceSeen()
    for at in range(10):
        seen = paced(seen, told(10 * at, 100 * at))
    assert [w.since_step for w in seen.windows] == [10 * at for at in range(9 - MOST_WINDOWS, 9)]


def test_what_not_every_rank_told_before_begins_anew() -> None:
    seen = paced(paced(paced(PaceSeen(), told(0, 0)), told(10, 100)), told(20, 200))
    assert len(seen.windows) == 1
    assert paced(seen, told(30, 300, 50)) == PaceSeen(told(30, 300, 50).paces, 30)
    assert paced(seen, told(30, 150)).windows == (), "fewer than before"


# ---- node findings ---------------------------------------------------------------------------------------------------
# What an agent finds on its node replaces what it found before, and a clock that is far off is told once.

WORKER = WorkerId(0, 1)
LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")


def joined() -> Sessions:
    return connected(begin("job", 0.0), Hello("job", 0, 1, "inc", "n0", "", 0, 0, True), 1.0)


def seen(sessions: Sessions) -> SessionSeen:
    return sessions.by_worker[WORKER].seen


def test_findings_stand_until_others_come_with_the_time_since_they_are_these() -> None:
    one = heard(joined(), WORKER, NodeHealth((LOST,), 5.0), 5.0)
    assert (seen(one).findings, seen(one).findings_seconds) == ((LOST,), 5.0)
    other_words = NodeFinding("GpuLost", "GPU 0 is still lost", "node")
    again = heard(one, WORKER, NodeHealth((other_words,), 9.0), 9.0)
    assert (seen(again).findings, seen(again).findings_seconds) == ((other_words,), 5.0)
    over = heard(again, WORKER, NodeHealth((), 12.0), 12.0)
    assert (seen(over).findings, seen(over).findings_seconds) == ((), 12.0)


def test_a_clock_that_is_far_off_is_told_when_it_comes_about() -> None:
    sessions = joined()
    for now, clock in ((10.0, 10.5), (20.0, 320.0), (30.0, 331.0), (40.0, 40.0), (50.0, 5.0)):
        sessions = heard(sessions, WORKER, NodeHealth((), clock), now)
    assert [(notice.reason, notice.text) for _, notice in sessions.notices] == [
        ("ClockSkew", "the clock of node n0 is 300 s ahead of the operator's"),
        ("ClockSkew", "the clock of node n0 is 45 s behind the operator's"),
    ]
    unsaid = heard(joined(), WORKER, NodeHealth(), 1000.0)
    assert seen(unsaid).clock_skew_seconds is None
    assert unsaid.notices == ()
