"""Names the ranks that all others wait for.

Pure; called by `plan` and `status_conditions`. Nothing fails where a rank is persistently slower: each step takes longer, on every
rank alike, and without a name people look for it for days.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt

from surefoot.protocol.progress import RankPace, line_totals, together
from surefoot_operator.api.status import Straggler, World
from surefoot_operator.job_snapshot import MOST_WINDOWS, SessionSeen
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    member_sessions,
)

# ---- slow ranks ------------------------------------------------------------------------------------------------------
# Compares how much of their time ranks wait for nobody. In synchronous training whoever needs longest waits least. A
# tie, uneven shares of the batch or too few looks prove nothing, and name nobody.

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


# ---- stragglers ------------------------------------------------------------------------------------------------------

MOST_NAMED = 8
"""Of more the worst are named."""

_CHANGED = 0.2
"""A slowdown that changes by this part is told anew: less would be written again and again."""


def judged(facts: WorldFacts) -> tuple[Straggler, ...]:
    """The stragglers to tell of now.

    As they were told before, until there are enough looks at every rank of the present world. One that was named stays so
    until it stands out in no window any more.
    """
    world, known = facts.status.world, facts.status.stragglers
    if world is None or world.state != "Committed":
        return known
    known = tuple(one for one in known if world.size >= FEWEST_PEERS and _is_there(world, one))
    told = [s for _, s in member_sessions(facts) if s is not None and s.epoch == world.epoch]
    if not told or len(told) < len(world.members) or any(len(s.timings.pace.windows) < MOST_WINDOWS for s in told):
        return known
    windows = [_window(told, MOST_WINDOWS - 1)]
    if not known and not standing_out(windows[0], EACH_DEVIATIONS):
        return known  # nearly always
    windows = [*(_window(told, at) for at in range(MOST_WINDOWS - 1)), *windows]
    slow = [one for one in slow_ranks(windows) if 0 <= one.rank < world.size]
    slow = sorted(slow, key=lambda one: -one.ratio)[:MOST_NAMED]
    steps = max((s.timings.step_seconds or 0.0 for s in told), default=0.0)
    since = min(s.timings.pace.windows[0].since_step for s in told)
    found = {one.rank: _named(world, one, steps, since, facts.now) for one in slow}
    named = [_as_told(old, found.pop(old.rank, None)) for old in known if _still_out(old, found, windows)]
    return (*named, *found.values())


def _window(told: Sequence[SessionSeen], at: int) -> list[RankPace]:
    return [pace for session in told for pace in session.timings.pace.windows[at].paces]


def sentence(one: Straggler) -> str:
    """What people are told of a straggler."""
    what = f"{one.slowdown_ratio:.3g} times as long as its peers"
    waits = f"all others wait {one.wait_seconds:.2g} s in each step for it"
    answer = f"; {one.answer}" if one.answer else ""
    if one.own_line is not None:
        where = f"in line {one.own_line} of its training loop" if one.own_line else "in several lines of its program"
        where += f" (line {one.own_called_line} of what is called there)" if one.own_called_line else ""
        return (
            f"rank {one.rank} does more than its peers, since step {one.since_step} or before: it works {what}, most of"
            f" that {where}, where its peers are not found, and {waits}. It is the program, and not node {one.node}{answer}"
        )
    return (
        f"rank {one.rank} on worker {one.worker} (node {one.node}) is persistently slower, since step {one.since_step} or"
        f" before: it works {what}, and {waits}{answer}"
    )


def place_of(world: World, rank: int) -> int:
    """The place of a rank's worker among the members."""
    return rank * len(world.members) // world.size


def _still_out(known: Straggler, found: dict[int, Straggler], windows: Sequence[Sequence[RankPace]]) -> bool:
    if known.rank in found:
        return True
    return any(one.rank == known.rank for window in windows for one in standing_out(window, EACH_DEVIATIONS))


def _as_told(known: Straggler, now: Straggler | None) -> Straggler:
    """Since when stays, and the numbers, unless they have become others."""
    if now is None:
        return known
    if known.own_line is not None:  # what was the program's stays so
        now = replace(now, own_line=known.own_line, own_called_line=known.own_called_line)
    if (
        now.own_line == known.own_line
        and abs(now.slowdown_ratio - known.slowdown_ratio) <= _CHANGED * known.slowdown_ratio
    ):
        return known
    return replace(now, since_step=known.since_step, since_seconds=known.since_seconds, answer=known.answer)


def _named(world: World, slow: SlowRank, step_seconds: float, since_step: int, now: float) -> Straggler:
    member = world.members[place_of(world, slow.rank)]
    waits = (slow.share - slow.usual_share) * step_seconds
    return Straggler(
        slow.rank,
        member.index,
        member.node,
        float(f"{slow.ratio:.3g}"),
        float(f"{waits:.3g}"),
        since_step,
        now,
        own_line=None if slow.own_line is None else slow.own_line[0],
        own_called_line=0 if slow.own_line is None else slow.own_line[1],
    )


def _is_there(world: World, one: Straggler) -> bool:
    """Whether the same worker still is that rank, on the same node."""
    if one.rank >= world.size:
        return False
    member = world.members[place_of(world, one.rank)]
    return (member.index, member.node) == (one.worker, one.node)
