"""Names the ranks that all others wait for.

Pure; called by `plan` and `status_conditions`. Nothing fails where a rank is persistently slower: each step takes longer, on every
rank alike, and without a name people look for it for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.protocol.standing.rank_pace import RankPace
from surefoot_operator.api.status import Straggler, World
from surefoot_operator.job_snapshot import MOST_WINDOWS, SessionSeen
from surefoot_operator.policy.core.facts import Facts, member_sessions
from surefoot_operator.policy.failure.slow_ranks import (
    EACH_DEVIATIONS,
    FEWEST_PEERS,
    SlowRank,
    slow_ranks,
    standing_out,
)

MOST_NAMED = 8
"""Of more the worst are named."""

_CHANGED = 0.2
"""A slowdown that changes by this part is told anew: less would be written again and again."""


def judged(facts: Facts) -> tuple[Straggler, ...]:
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
