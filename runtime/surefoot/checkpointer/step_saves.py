"""Saves a step where a slot is free, or for certain.

Used by `checkpointer`. A save at each interval that waited for a slot would stop the training that it protects; one that must
happen (a held step, the last one) and did not wait would be lost.
"""

from __future__ import annotations

import logging

from surefoot import metrics
from surefoot.checkpointer.saving import Saver
from surefoot.checkpointer.state_guard import StateGuard
from surefoot.ipc.save_backend import SaveBackend
from surefoot.save_schedule import OwnLevel, Schedule

_log = logging.getLogger(__name__)

HOLD_SLOT_SECONDS = 30.0
"""How long a save that must happen (a held step, `save_now`, the last one) waits for a slot to become free."""


class StepSaves:
    """Saves steps of one rank, and knows what the last save cost."""

    def __init__(self, saver: Saver, link: SaveBackend, guard: StateGuard) -> None:
        self.schedule = Schedule(link.attached.interval_steps, link.attached.persistent_interval_steps)
        self.stall_seconds: float | None = None
        """Of the last save whose stall was taken."""
        self._saver, self._link, self._guard = saver, link, guard
        self._level = OwnLevel()
        self._saved_before = False

    @property
    def level(self) -> int:
        """Every 2^level-th due step is saved."""
        return max(self._level.level, self._link.level())

    def may_save(self, step: int) -> bool:
        """Returns whether the state is still that of the last step.

        Logs if it is not.
        """
        since = self._guard.changed_by()
        if since is None and self._saver.dropped_step == step:
            since = "its tensors have changed"
        if since is None:
            return True
        text = f"step {step} is not saved: {since} since step() was called; save or close right behind step()"
        _log.warning("%s", text)
        self._link.say("SaveSkipped", text)
        return False

    def stall_of_last_save(self) -> float | None:
        """Takes the stall of the last save.

        Inside the call, and before the optimizer step that followed.
        """
        stall, self._saver.stall_seconds = self._saver.stall_seconds, 0.0
        saved, self._saved_before = self._saved_before, False
        if not saved:
            return None
        metrics.stall_seconds.observe(stall)
        self.stall_seconds = stall
        return stall

    def save_if_free(self, step: int, level: int) -> bool:
        """Saves without waiting; returns whether no slot was free."""
        result = self._saver.save(step, wait_seconds=0.0)
        self._level = self._level.skipped(level) if result == "skipped" else self._level.staged()
        self._saved_before = True
        return result == "skipped"

    def save_for_certain(self, step: int) -> bool:
        """Saves, waiting for a slot; returns whether it is staged."""
        result = self._saver.save(step, wait_seconds=HOLD_SLOT_SECONDS)
        self._saver.wait()
        self._saved_before = True
        if result == "skipped":
            self._link.say("SaveSkipped", f"step {step} had to be saved, and no slot was free: it is not")
        return self._saver.staged_step == step
