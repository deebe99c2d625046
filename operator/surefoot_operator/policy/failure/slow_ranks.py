"""Compares how much of their time ranks wait for nobody.

Pure; called by `stragglers`. In synchronous training whoever needs longest waits least. A tie, uneven shares of the
batch or too few looks prove nothing, and name nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt

from surefoot.protocol.standing.rank_pace import RankPace, line_totals, together

FEWEST_PEERS = 3
"""Ranks that do the same work: of fewer nobody could say who is usual."""

LEAST_RATIO = 1.25
"""A rank that works less than so many times as long as its peers is not named, however steady they are."""

LEAST_SHARE = 0.1
"""Of a step: what all others wait for a rank must be worth a word."""

EACH_DEVIATIONS = 1.5
"""Standard deviations, of what differs between peers and of chance together, by which a rank stands out in a window."""

ALL_DEVIATIONS = 4.0
"""The same, of all windows together: so many looks leave little to chance."""

HARDLY = 0.01
"""Of its time: who is in a line no longer than that does nothing worth a word there."""

_NO_NODE = 10.0
"""No node is so many times as slow in one line and not in the others."""

_OF_MAD = 1.4826
"""Turns a median absolute deviation into a standard deviation, of normal noise (Rousseeuw and Croux, 1993)."""
_MANY = 64
"""Of more peers one more or less changes neither their median nor their deviation."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that waits far less than those that do the same."""

    rank: int
    share: float
    """Of its time, in which it waits for nobody."""
    usual_share: float
    """The same of its peers, for as large a part of the batch."""
    own_line: tuple[int, int] | None = None
    """Line of the training loop, and of what is called there, that takes most of the difference, where peers are not found;
    None: it does what they do."""

    @property
    def ratio(self) -> float:
        """How many times as long as its peers it works."""
        return self.share / max(self.usual_share, 0.01)


@dataclass(frozen=True, slots=True)
class _Usual:
    """What peers have in common."""

    share: float
    variance: float
    """How far one more of them would lie from it, but for the chance of its own looks."""
    rate: float
    """Samples a look."""


def slow_ranks(windows: Sequence[Sequence[RankPace]]) -> tuple[SlowRank, ...]:
    """Finds ranks that stand out in every window and in all together.

    Args:
        windows: Of all ranks, each of about the same steps; the oldest first.
    """
    always: set[int] | None = None
    for window in reversed(windows):  # in the newest nearly always nobody does
        slow = {one.rank for one in standing_out(window, EACH_DEVIATIONS)}
        always = slow if always is None else always & slow
        if not always:
            return ()
    pooled: dict[int, RankPace] = {}
    for pace in (pace for window in windows for pace in window):
        pooled[pace.rank] = together(pooled[pace.rank], pace) if pace.rank in pooled else pace
    found = (one for one in standing_out(pooled.values(), ALL_DEVIATIONS) if one.rank in (always or ()))
    return tuple(replace(one, own_line=_own_line(one, pooled)) for one in found)


def _own_line(slow: SlowRank, paces: Mapping[int, RankPace]) -> tuple[int, int] | None:
    """Where a rank does what its peers do not, if that is as much as half of what it works longer.

    Who is slow takes longer for what all do: its peers are found there as well, though less.
    """
    pace = paces[slow.rank]
    peers = [other for other in paces.values() if other.work == pace.work and other is not pace]
    looks, usual = sum(other.looks for other in peers), line_totals(peers)
    own = {
        line: count / pace.looks
        for line, count in line_totals((pace,)).items()
        if usual.get(line, 0) / looks <= max(HARDLY, count / pace.looks / _NO_NODE)
    }
    return max(own, key=lambda line: own[line]) if 2 * sum(own.values()) > slow.share - slow.usual_share else None


def standing_out(window: Iterable[RankPace], deviations: float) -> tuple[SlowRank, ...]:
    """Finds the ranks that stand out in one window, by rank.

    Returns:
        None where as many as half of the peers stand out: then nobody knows what is usual.
    """
    groups: dict[int, list[RankPace]] = {}
    for pace in window:
        groups.setdefault(pace.work, []).append(pace)
    found = list[SlowRank]()
    for peers in groups.values():
        slow = _beyond(peers, deviations) if len(peers) >= FEWEST_PEERS else []
        found += slow if 2 * len(slow) < len(peers) else []
    return tuple(sorted(found, key=lambda one: one.rank))


def _beyond(peers: Sequence[RankPace], deviations: float) -> list[SlowRank]:
    """Those far above what is usual of the others."""
    least = statistics.median_low(pace.share for pace in peers) + LEAST_SHARE
    above = [pace for pace in peers if pace.share > least]  # nearly always nobody
    whole = _usual(peers) if above and len(peers) > _MANY else None
    found = []
    for pace in above:
        usual = whole if whole is not None else _usual([other for other in peers if other is not pace])
        # who has the larger part of an uneven batch works longer, and is not slower for it
        expected = usual.share * max(1.0, _rate(pace) / usual.rate if usual.rate else 1.0)
        deviation = sqrt(usual.variance + _chance(usual.share, pace.looks))
        if pace.share > expected + max(deviations * deviation, LEAST_SHARE, (LEAST_RATIO - 1.0) * expected):
            found.append(SlowRank(pace.rank, pace.share, expected))
    return found


def _usual(others: Sequence[RankPace]) -> _Usual:
    share = statistics.median(pace.share for pace in others)
    spread = _OF_MAD * statistics.median(abs(pace.share - share) for pace in others)
    looks = statistics.median(pace.looks for pace in others)
    chance = _chance(share, looks)
    # equal ranks differ too, by the chance of looks alone: that part of their spread is no difference between them
    between = max(0.0, spread**2 - chance)
    of_median = pi / 2.0 * (between + chance) / len(others)
    return _Usual(share, between + of_median, statistics.median(map(_rate, others)))


def _rate(pace: RankPace) -> float:
    return pace.samples / pace.looks if pace.looks else 0.0


def _chance(share: float, looks: float) -> float:
    """The variance of a share that so many looks tell; none is taken for certain where they all say the same."""
    likely = (share * looks + 1.0) / (looks + 2.0)
    return likely * (1.0 - likely) / max(looks, 1.0)
