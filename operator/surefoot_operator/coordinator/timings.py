"""How long steps, stalls and drains of one agent typically are, from its heartbeats: medians of the newest few. Pure.

A median, because one evaluation, one slow disk or the first step's compilation is no trend. Agents speak at once when a
save is staged and when it has all its copies, so the time between those two words is its drain. Called by `sessions`;
ends with the epoch, since another world has other steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Heartbeat

MOST_STEPS = 31
MOST_SAVES = 9
"""Newest ones that count."""

FEWEST_STEPS = 3
"""Of fewer the first, slow one would be half."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The newest of each kind, in seconds."""

    steps: tuple[float, ...] = ()
    stalls: tuple[float, ...] = ()
    drains: tuple[float, ...] = ()
    pending: Mapping[Checkpoint, float] = field(default_factory=dict)
    """Since when saves that still drain are known to."""

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(self.steps) if len(self.steps) >= FEWEST_STEPS else None

    @property
    def stall_seconds(self) -> float | None:
        return statistics.median(self.stalls) if self.stalls else None

    @property
    def drain_seconds(self) -> float | None:
        return statistics.median(self.drains) if self.drains else None


NONE = Timings()


def heard(timings: Timings, beat: Heartbeat, grown: bool, now: float) -> Timings:
    """One heartbeat of the epoch; `grown`: it tells of a new step."""
    if grown and beat.step_seconds is not None:
        timings = replace(timings, steps=(*timings.steps, beat.step_seconds)[-MOST_STEPS:])
    if beat.stall_seconds is not None and timings.stalls[-1:] != (beat.stall_seconds,):
        timings = replace(timings, stalls=(*timings.stalls, beat.stall_seconds)[-MOST_SAVES:])
    own = [c for c in beat.pending if c.epoch == beat.epoch]  # an older epoch's drain may have met its end
    done = [now - since for c, since in timings.pending.items() if c not in own]
    if done or len(own) != len(timings.pending):
        pending = {c: timings.pending.get(c, now) for c in own}
        timings = replace(timings, pending=pending, drains=(*timings.drains, *done)[-MOST_SAVES:])
    return timings
