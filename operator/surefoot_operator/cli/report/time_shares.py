"""Divides a job's time among what it was spent on.

Pure. Each moment counts once, for the first of the causes that it has: a step that ran during a recovery is part of the recovery. A sum
of durations would count such seconds twice, and a share of training that adds up to more than the day hides what was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["recovery", "change", "starting", "stall", "repeated", "training", "other"]
CAUSES: tuple[Cause, ...] = ("recovery", "change", "starting", "stall", "repeated", "training", "other")
"""In the order in which a moment counts."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time with its cause, in Unix seconds."""

    begin: float
    end: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class TimeShare:
    """The seconds of one cause."""

    cause: Cause
    seconds: float


def time_shares(begin: float, end: float, stretches: Iterable[Stretch]) -> tuple[TimeShare, ...]:
    """Divides [begin, end) by cause; what has none is `other`."""
    edges: list[tuple[float, int, Cause]] = []
    for one in stretches:
        first, last = max(begin, one.begin), min(end, one.end)
        if last > first:
            edges += [(first, 1, one.cause), (last, -1, one.cause)]
    edges.sort(key=lambda edge: edge[0])
    spent: Counter[Cause] = Counter()
    active: Counter[Cause] = Counter()
    at = begin
    for moment, change, cause in edges:
        spent[_counted(active)] += moment - at  # type: ignore[assignment]  # seconds, not counts
        active[cause] += change
        at = moment
    spent[_counted(active)] += max(0.0, end - at)  # type: ignore[assignment]
    return tuple(TimeShare(cause, spent[cause]) for cause in CAUSES if spent[cause] > 0)


def _counted(active: Counter[Cause]) -> Cause:
    return next((cause for cause in CAUSES if active[cause] > 0), "other")


def share_of(shares: Sequence[TimeShare], cause: Cause) -> float | None:
    """One cause's part of all seconds; None of no time."""
    total = sum(one.seconds for one in shares)
    return sum(one.seconds for one in shares if one.cause == cause) / total if total > 0 else None
