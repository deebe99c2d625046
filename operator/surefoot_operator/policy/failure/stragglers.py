"""Names the ranks that all others wait for.

Pure; called by `plan` and `status_conditions`. Nothing fails where a rank is persistently slower: each step takes longer, on every
rank alike, and without a name people look for it for days.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt

from surefoot.protocol.progress import RankActivity, add, line_totals
from surefoot_operator.api.status import Membership, Straggler
from surefoot_operator.job_snapshot import MAX_WINDOWS, ObservedSession
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    member_sessions,
)

# ---- slow ranks ------------------------------------------------------------------------------------------------------
# Compares how much of their time ranks wait for nobody. In synchronous training whoever needs longest waits least. A
# tie, uneven shares of the batch or too few looks prove nothing, and name nobody.

MIN_PEERS = 3
"""Ranks that do the same work: of fewer nobody could say who is usual."""

MIN_RATIO = 1.25
"""A rank that works less than so many times as long as its peers is not named, however steady they are."""

MIN_SHARE = 0.1
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
    divergent_line: tuple[int, int] | None = None
    """Line of the training loop, and of what is called there, that takes most of the difference, where peers are not found;
    None: it does what they do."""

    @property
    def ratio(self) -> float:
        """How many times as long as its peers it works."""
        return self.share / max(self.usual_share, 0.01)


@dataclass(frozen=True, slots=True)
class _PeerBaseline:
    """What peers have in common."""

    share: float
    variance: float
    """How far one more of them would lie from it, but for the chance of its own looks."""
    rate: float
    """Samples a look."""


def slow_ranks(windows: Sequence[Sequence[RankActivity]]) -> tuple[SlowRank, ...]:
    """Finds ranks that stand out in every window and in all together.

    Args:
        windows: Of all ranks, each of about the same steps; the oldest first.
    """
    always: set[int] | None = None
    for window in reversed(windows):  # in the newest nearly always nobody does
        slow = {one.rank for one in outlier_ranks(window, EACH_DEVIATIONS)}
        always = slow if always is None else always & slow
        if not always:
            return ()
    pooled: dict[int, RankActivity] = {}
    for pace in (pace for window in windows for pace in window):
        pooled[pace.rank] = add(pooled[pace.rank], pace) if pace.rank in pooled else pace
    found = (one for one in outlier_ranks(pooled.values(), ALL_DEVIATIONS) if one.rank in (always or ()))
    return tuple(replace(one, divergent_line=_divergent_line(one, pooled)) for one in found)


def _divergent_line(slow: SlowRank, paces: Mapping[int, RankActivity]) -> tuple[int, int] | None:
    """Where a rank does what its peers do not, if that is as much as half of what it works longer.

    Who is slow takes longer for what all do: its peers are found there as well, though less.
    """
    pace = paces[slow.rank]
    peers = [other for other in paces.values() if other.work == pace.work and other is not pace]
    looks, usual = sum(other.observations for other in peers), line_totals(peers)
    own = {
        line: count / pace.observations
        for line, count in line_totals((pace,)).items()
        if usual.get(line, 0) / looks <= max(HARDLY, count / pace.observations / _NO_NODE)
    }
    return max(own, key=lambda line: own[line]) if 2 * sum(own.values()) > slow.share - slow.usual_share else None


def outlier_ranks(window: Iterable[RankActivity], deviations: float) -> tuple[SlowRank, ...]:
    """Finds the ranks that stand out in one window, by rank.

    Returns:
        None where as many as half of the peers stand out: then nobody knows what is usual.
    """
    groups: dict[int, list[RankActivity]] = {}
    for pace in window:
        groups.setdefault(pace.work, []).append(pace)
    found = list[SlowRank]()
    for peers in groups.values():
        slow = _far_above_peers(peers, deviations) if len(peers) >= MIN_PEERS else []
        found += slow if 2 * len(slow) < len(peers) else []
    return tuple(sorted(found, key=lambda one: one.rank))


def _far_above_peers(peers: Sequence[RankActivity], deviations: float) -> list[SlowRank]:
    """Those far above what is usual of the others."""
    least = statistics.median_low(pace.share for pace in peers) + MIN_SHARE
    above = [pace for pace in peers if pace.share > least]  # nearly always nobody
    whole = _peer_baseline(peers) if above and len(peers) > _MANY else None
    found = []
    for pace in above:
        usual = whole if whole is not None else _peer_baseline([other for other in peers if other is not pace])
        # who has the larger part of an uneven batch works longer, and is not slower for it
        expected = usual.share * max(1.0, _rate(pace) / usual.rate if usual.rate else 1.0)
        deviation = sqrt(usual.variance + _sampling_variance(usual.share, pace.observations))
        if pace.share > expected + max(deviations * deviation, MIN_SHARE, (MIN_RATIO - 1.0) * expected):
            found.append(SlowRank(pace.rank, pace.share, expected))
    return found


def _peer_baseline(others: Sequence[RankActivity]) -> _PeerBaseline:
    share = statistics.median(pace.share for pace in others)
    spread = _OF_MAD * statistics.median(abs(pace.share - share) for pace in others)
    looks = statistics.median(pace.observations for pace in others)
    chance = _sampling_variance(share, looks)
    # equal ranks differ too, by the chance of looks alone: that part of their spread is no difference between them
    between = max(0.0, spread**2 - chance)
    of_median = pi / 2.0 * (between + chance) / len(others)
    return _PeerBaseline(share, between + of_median, statistics.median(map(_rate, others)))


def _rate(pace: RankActivity) -> float:
    return pace.samples / pace.observations if pace.observations else 0.0


def _sampling_variance(share: float, looks: float) -> float:
    """The variance of a share that so many looks tell; none is taken for certain where they all say the same."""
    likely = (share * looks + 1.0) / (looks + 2.0)
    return likely * (1.0 - likely) / max(looks, 1.0)


# ---- stragglers ------------------------------------------------------------------------------------------------------

MAX_NAMED = 8
"""Of more the worst are named."""

_CHANGED = 0.2
"""A slowdown that changes by this part is told anew: less would be written again and again."""


def current_stragglers(facts: WorldFacts) -> tuple[Straggler, ...]:
    """The stragglers to tell of now.

    As they were told before, until there are enough looks at every rank of the present world. One that was named stays so
    until it stands out in no window any more.
    """
    world, known = facts.status.membership, facts.status.stragglers
    if world is None or world.state != "Committed":
        return known
    known = tuple(one for one in known if world.world_size >= MIN_PEERS and _is_same_worker(world, one))
    told = [s for _, s in member_sessions(facts) if s is not None and s.generation == world.generation]
    if not told or len(told) < len(world.members) or any(len(s.timings.pace.windows) < MAX_WINDOWS for s in told):
        return known
    windows = [_window(told, MAX_WINDOWS - 1)]
    if not known and not outlier_ranks(windows[0], EACH_DEVIATIONS):
        return known  # nearly always
    windows = [*(_window(told, at) for at in range(MAX_WINDOWS - 1)), *windows]
    slow = [one for one in slow_ranks(windows) if 0 <= one.rank < world.world_size]
    slow = sorted(slow, key=lambda one: -one.ratio)[:MAX_NAMED]
    steps = max((s.timings.step_seconds or 0.0 for s in told), default=0.0)
    since = min(s.timings.pace.windows[0].since_step for s in told)
    found = {one.rank: _named(world, one, steps, since, facts.now) for one in slow}
    named = [
        _with_old_numbers(old, found.pop(old.rank, None)) for old in known if _is_still_outlier(old, found, windows)
    ]
    return (*named, *found.values())


def _window(told: Sequence[ObservedSession], at: int) -> list[RankActivity]:
    return [pace for session in told for pace in session.timings.pace.windows[at].paces]


def describe_straggler(one: Straggler) -> str:
    """What people are told of a straggler."""
    what = f"{one.slowdown_ratio:.3g} times as long as its peers"
    waits = f"all others wait {one.wait_seconds:.2g} s in each step for it"
    answer = f"; {one.action}" if one.action else ""
    if one.divergent_line is not None:
        where = (
            f"in line {one.divergent_line} of its training loop"
            if one.divergent_line
            else "in several lines of its program"
        )
        where += f" (line {one.divergent_callee_line} of what is called there)" if one.divergent_callee_line else ""
        return (
            f"rank {one.rank} does more than its peers, since step {one.since_step} or before: it works {what}, most of"
            f" that {where}, where its peers are not found, and {waits}. It is the program, and not node {one.node}{answer}"
        )
    return (
        f"rank {one.rank} on worker {one.worker} (node {one.node}) is persistently slower, since step {one.since_step} or"
        f" before: it works {what}, and {waits}{answer}"
    )


def group_rank_of(world: Membership, rank: int) -> int:
    """The place of a rank's worker among the members."""
    return rank * len(world.members) // world.world_size


def _is_still_outlier(known: Straggler, found: dict[int, Straggler], windows: Sequence[Sequence[RankActivity]]) -> bool:
    if known.rank in found:
        return True
    return any(one.rank == known.rank for window in windows for one in outlier_ranks(window, EACH_DEVIATIONS))


def _with_old_numbers(known: Straggler, now: Straggler | None) -> Straggler:
    """Since when stays, and the numbers, unless they have become others."""
    if now is None:
        return known
    if known.divergent_line is not None:  # what was the program's stays so
        now = replace(now, divergent_line=known.divergent_line, divergent_callee_line=known.divergent_callee_line)
    if (
        now.divergent_line == known.divergent_line
        and abs(now.slowdown_ratio - known.slowdown_ratio) <= _CHANGED * known.slowdown_ratio
    ):
        return known
    return replace(now, since_step=known.since_step, since_seconds=known.since_seconds, action=known.action)


def _named(world: Membership, slow: SlowRank, step_seconds: float, since_step: int, now: float) -> Straggler:
    member = world.members[group_rank_of(world, slow.rank)]
    waits = (slow.share - slow.usual_share) * step_seconds
    return Straggler(
        slow.rank,
        member.index,
        member.node,
        float(f"{slow.ratio:.3g}"),
        float(f"{waits:.3g}"),
        since_step,
        now,
        divergent_line=None if slow.divergent_line is None else slow.divergent_line[0],
        divergent_callee_line=0 if slow.divergent_line is None else slow.divergent_line[1],
    )


def _is_same_worker(world: Membership, one: Straggler) -> bool:
    """Whether the same worker still is that rank, on the same node."""
    if one.rank >= world.world_size:
        return False
    member = world.members[group_rank_of(world, one.rank)]
    return (member.index, member.node) == (one.worker, one.node)
