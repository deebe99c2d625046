"""Decides at which steps to save.

Pure: the decision depends only on the step's number, the rank's own interval exponent and the coordinator's. A step is
due if and only if it is a multiple of interval·2^exponent. Each increment halves the set of due steps, so the sets of
different ranks are nested, and ranks that back off differently still save together at every step that the slowest one
saves. If a job sets seconds or `auto` (Young and Daly's interval), the interval is one step and the coordinator's
exponent determines the rest. `checkpointer` calls this once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_EXPONENT = 20
"""Largest exponent that a coordinator may set: every 1,048,576th interval."""

MAX_BACKOFF = 10
"""Largest exponent to which a rank backs off by itself: every 1,024th interval."""

LOWER_AFTER = 8
"""Number of consecutive due saves with a free slot after which a rank lowers its exponent by one."""


@dataclass(frozen=True, slots=True)
class RankBackoff:
    """Records a rank's own interval exponent and the number of consecutive due saves with a free slot since it changed."""

    exponent: int = 0
    streak: int = 0

    def back_off(self, exponent: int) -> RankBackoff:
        """Halves the number of further saves, because a due save found no free slot.

        `exponent` is the one at which that save was due, the rank's own or the coordinator's.
        """
        return RankBackoff(exponent + 1 if exponent < MAX_BACKOFF else exponent, 0)

    def count_staged(self) -> RankBackoff:
        """Counts a staged save; LOWER_AFTER of them in a row lower the exponent."""
        if self.exponent == 0:
            return self
        if self.streak + 1 >= LOWER_AFTER:
            return RankBackoff(self.exponent - 1, 0)
        return replace(self, streak=self.streak + 1)


@dataclass(frozen=True, slots=True)
class SaveSchedule:
    """Records the job's save intervals in steps; None or 0: the persistent tier has no interval in steps."""

    interval_steps: int
    persistent_interval_steps: int | None = None

    def __post_init__(self) -> None:
        if self.interval_steps < 1 or (self.persistent_interval_steps or 0) < 0:
            raise ValueError(
                f"intervals of {self.interval_steps} and {self.persistent_interval_steps} steps: each must be at least 1"
            )

    def is_due(self, step: int, exponent: int) -> bool:
        """Decides whether a step is saved at an interval exponent; steps for the persistent tier are due at every one."""
        if step < 1:
            return False
        return step % (self.interval_steps << min(exponent, MAX_EXPONENT)) == 0 or self.is_upload_due(step)

    def is_upload_due(self, step: int) -> bool:
        """Decides whether the save of a step is uploaded: once per persistent interval, rounded up to memory intervals."""
        if not self.persistent_interval_steps or step < 1:
            return False
        intervals = -(-self.persistent_interval_steps // self.interval_steps)
        return step % (intervals * self.interval_steps) == 0
