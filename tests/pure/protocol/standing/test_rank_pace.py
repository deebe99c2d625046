"""Totals of looks become windows, and what is of another count is none."""

from __future__ import annotations

from surefoot.protocol import messages, wire
from surefoot.protocol.progress import Progress, RankPace, between, of_worker, together

BEFORE = RankPace(1, 100, looks=50, own=20, samples=80, lines=((7, 0, 4), (9, 5, 16)))
LATER = RankPace(1, 100, looks=100, own=60, samples=112, lines=((0, 0, 3), (7, 0, 4), (9, 5, 50)))


def test_two_totals_are_a_window_and_windows_add_up_again() -> None:
    window = between(BEFORE, LATER)
    assert window == RankPace(1, 100, 50, 40, 32, ((0, 0, 3), (9, 5, 34)))
    assert window.share == 0.8
    assert together(BEFORE, window) == LATER
    assert RankPace(0, 0, 0, 0, 0).share == 0.0


def test_what_is_of_another_count_is_no_window() -> None:
    others = {"rank": 2, "work": 7, "looks": 40, "own": 10, "samples": 60}
    for name, value in others.items():
        assert between(BEFORE, LATER._replace(**{name: value})) is None, name
    assert between(BEFORE, LATER._replace(own=90)) is None, "more at work than looked at"


def test_a_worker_tells_all_its_ranks_in_a_hundred_and_thirty_bytes_each() -> None:
    lines = tuple((line, 1502, 12_345) for line in (104, 105, 107, 110, 112))
    ranks = [RankPace(rank, 7_000_000_000, 123_456, 98_765, 9_999_999, lines) for rank in (1000, 1001)]
    told = of_worker([Progress(5, paces=(pace,)) for pace in ranks])
    assert told.paces == tuple(ranks)
    text = wire.encode(messages.Heartbeat(1, 0, True, told))
    assert len(text) - len(wire.encode(messages.Heartbeat(1, 0, True, Progress(5)))) <= 130 * len(ranks)
    assert wire.decode(text).progress.paces == tuple(ranks)
