"""Counts how often a rank is found at work of its own.

Pure; trainers tell it, the operator compares. Steps of synchronous training end for all ranks at once, so their length
tells nobody who is slow: the slow one is who seldom waits while all others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class RankPace(NamedTuple):
    """Looks at one rank's main thread, as totals of an epoch.

    Two of them make a window. A tuple, as messages carry one of each rank: names would be most of it.
    """

    rank: int
    work: int
    """What it works on, as a number (elements of its model): ranks of unlike work are not compared."""
    looks: int
    own: int
    """Looks that found it doing something, in place of waiting for other ranks."""
    samples: int
    """What it consumed; 0: not known."""
    lines: tuple[tuple[int, int, int], ...] = ()
    """Lines of its training loop, of the function that is called there, and how many of `own` found it so; 0 and 0: in any
    other. What all ranks do, as to load data, is left out."""

    @property
    def share(self) -> float:
        """The part of its time in which it waits for nobody."""
        return self.own / self.looks if self.looks else 0.0


def between(before: RankPace, now: RankPace) -> RankPace | None:
    """Subtracts an earlier total; None if it is of another count."""
    if (before.rank, before.work) != (now.rank, now.work):
        return None
    looks, own, samples = now.looks - before.looks, now.own - before.own, now.samples - before.samples
    if min(looks, own, looks - own, samples) < 0:
        return None
    told = line_totals((before,))
    lines = ((*line, count - told.get(line, 0)) for line, count in line_totals((now,)).items())
    return RankPace(now.rank, now.work, looks, own, samples, tuple(one for one in lines if one[-1] > 0))


def together(one: RankPace, other: RankPace) -> RankPace:
    """Adds two windows of the same rank."""
    return RankPace(
        one.rank, one.work, one.looks + other.looks, one.own + other.own, one.samples + other.samples,
        tuple((*line, count) for line, count in sorted(line_totals((one, other)).items())),
    )  # fmt: skip


def line_totals(paces: Iterable[RankPace]) -> dict[tuple[int, int], int]:
    """How often any of them was found in each line."""
    found: dict[tuple[int, int], int] = {}
    for pace in paces:
        for line, called, count in pace.lines:
            found[line, called] = found.get((line, called), 0) + count
    return found
