"""Reports each finished step of one rank to its save backend.

Used by `checkpointer`. What is no part of a step (a restore, a pause) must not count as its time: hangs are judged by it.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager

from surefoot.checkpointer.activity_monitor import OwnPace
from surefoot.checkpointer.loss_check import LossCheck
from surefoot.checkpointer.saving import Saver
from surefoot.checkpointer.state_guard import StateGuard
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import Stepped
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.progress import Progress


class StepReports:
    """Tells of steps, and measures what each took."""

    def __init__(self, saver: Saver, link: SaveBackend, guard: StateGuard, losses: LossCheck, pace: OwnPace) -> None:
        self._saver, self._link, self._guard, self._losses = saver, link, guard, losses
        self._pace = pace
        self._since = time.perf_counter()

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """So many seconds are no part of the step that follows."""
        self._since += seconds

    def aside(self) -> AbstractContextManager[None]:
        """Has nobody look meanwhile whether this rank works."""
        return self._pace.aside()

    def close(self) -> None:
        self._pace.close()

    def disown(self) -> None:
        self._pace.disown()

    def report(self, step: int, loss: float | None, stall: float | None, skipped: bool, level: int) -> None:
        """Tells of a finished step; the next one begins now."""
        now = time.perf_counter()
        progress = Progress(
            step=step,
            loss=loss,
            step_seconds=now - self._since,
            level=level,
            stall_seconds=stall,
            settled=Settled(self._saver.settled(step)),
            loss_is_finite=None if loss is None else math.isfinite(loss),
            passes=self._guard.passes(now),
            step_samples=self._guard.step_samples,
            **self._losses.odd.told,
            paces=self._pace.step_ends(self._guard.step_samples),
        )
        self._link.stepped(Stepped(progress, self._guard.consumed, skipped, self._guard.step_span))
        self._since = now
