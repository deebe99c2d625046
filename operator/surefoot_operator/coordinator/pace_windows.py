"""Cuts the looks that an agent tells as totals into windows.

Pure; called by `agent_timings`. A window has enough looks of each rank, and some steps: one evaluation that a program does
not announce is one window, however long it takes. Nor does the first of an epoch count: who has just been started, on another
node than the others, reads and compiles what they have had for long.
"""

from __future__ import annotations

from surefoot.protocol.progress import Progress
from surefoot.protocol.standing.rank_pace import between
from surefoot_operator.job_snapshot import MOST_WINDOWS, PaceSeen, PaceWindow

WINDOW_LOOKS = 48
"""Of each rank: some ten seconds."""

WINDOW_STEPS = 4


def paced(seen: PaceSeen, told: Progress) -> PaceSeen:
    """Adds what one heartbeat of the same epoch tells of paces."""
    windows = tuple(between(*pair) for pair in zip(seen.marked, told.paces, strict=False))
    whole = tuple(one for one in windows if one is not None)
    if len(whole) != len(told.paces) or len(seen.marked) != len(told.paces):
        return PaceSeen(told.paces, told.step)  # the first word of this epoch, or not all ranks told before
    if told.step - seen.marked_step < WINDOW_STEPS or min(one.looks for one in whole) < WINDOW_LOOKS:
        return seen
    window = (PaceWindow(seen.marked_step, whole),) if seen.warmed_up else ()
    return PaceSeen(told.paces, told.step, (*seen.windows, *window)[-MOST_WINDOWS:], warmed_up=True)
