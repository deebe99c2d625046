"""Collects recent steps, stalls, drains and paces from one agent's heartbeats.

Pure; called by `sessions`. Agents report at once when a save is staged and when it has all its copies; the time between
is its drain. Ends with the epoch, since another world has other steps.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.messages import Heartbeat
from surefoot.protocol.step_limit import MOST_STEPS
from surefoot_operator.coordinator.pace_windows import paced
from surefoot_operator.job_snapshot import Timings

MOST_SAVES = 9
"""Newest ones that count."""


def timed(timings: Timings, beat: Heartbeat, grown: bool, now: float) -> Timings:
    """Adds one heartbeat of the same epoch.

    `grown`: it reports a new step.
    """
    told = beat.progress
    if grown and told.step_seconds is not None:
        timings = replace(timings, steps=(*timings.steps, told.step_seconds)[-MOST_STEPS:])
    if told.paces:
        timings = replace(timings, pace=paced(timings.pace, told))
    if told.stall_seconds is not None and timings.stalls[-1:] != (told.stall_seconds,):
        timings = replace(timings, stalls=(*timings.stalls, told.stall_seconds)[-MOST_SAVES:])
    own = [c for c in beat.pending if c.epoch == beat.epoch]  # an older epoch's drain may have met its end
    done = [now - since for c, since in timings.pending.items() if c not in own]
    if done or len(own) != len(timings.pending):
        pending = {c: timings.pending.get(c, now) for c in own}
        timings = replace(timings, pending=pending, drains=(*timings.drains, *done)[-MOST_SAVES:])
    return timings
