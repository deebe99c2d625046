"""Totals of looks become windows of enough looks and steps, and no more than a few of them are kept."""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.progress import Progress, RankPace
from surefoot_operator.coordinator.sessions import WINDOW_LOOKS, WINDOW_STEPS, paced
from surefoot_operator.job_snapshot import MOST_WINDOWS, PaceSeen


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
