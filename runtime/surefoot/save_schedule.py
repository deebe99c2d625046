"""Decides at which steps to save.

Pure: a step's number, the rank's own level and the coordinator's decide, and nothing else. A step is due iff it is a
multiple of interval·2^level. Levels only ever halve the set of due steps, so the sets that different ranks save nest,
and ranks that back off differently still meet at every step that the slowest one saves. Where a job names seconds, or
`auto` (Young and Daly's interval), the interval is one step and the coordinator's level does the rest. Called by
`checkpointer`, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_EXPONENT = 20
"""A coordinator may ask for every 1,048,576th interval."""

MAX_BACKOFF = 10
"""A rank by itself backs off to every 1,024th interval at most."""

LOWER_AFTER = 8
"""A rank that raised its own level lowers it by one after so many saves in a row for which a slot was free."""


@dataclass(frozen=True, slots=True)
class RankBackoff:
    """Holds a rank's own level, and its streak of staged saves.

    The streak counts due saves in a row that found a slot since the level last changed.
    """

    exponent: int = 0
    streak: int = 0

    def back_off(self, exponent: int) -> RankBackoff:
        """Halves the saves from here on: none found a slot.

        `level` is the one that the save was due at, the rank's own or the coordinator's.
        """
        return RankBackoff(exponent + 1 if exponent < MAX_BACKOFF else exponent, 0)

    def count_staged(self) -> RankBackoff:
        """Counts a staged save; a streak lowers the level again."""
        if self.exponent == 0:
            return self
        if self.streak + 1 >= LOWER_AFTER:
            return RankBackoff(self.exponent - 1, 0)
        return replace(self, streak=self.streak + 1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Holds the job's intervals in steps.

    No persistent one (None or 0) where no tier has steps of its own.
    """

    interval_steps: int
    persistent_interval_steps: int | None = None

    def __post_init__(self) -> None:
        if self.interval_steps < 1 or (self.persistent_interval_steps or 0) < 0:
            raise ValueError(
                f"intervals of {self.interval_steps} and {self.persistent_interval_steps} steps: each must be at least 1"
            )

    def due(self, step: int, exponent: int) -> bool:
        """Decides whether a step is saved at a level.

        Steps meant for the persistent tier are due at every level.
        """
        if step < 1:
            return False
        return step % (self.interval_steps << min(exponent, MAX_EXPONENT)) == 0 or self.persistent_due(step)

    def persistent_due(self, step: int) -> bool:
        """Decides whether the save of a step is promoted.

        Every persistent interval is, rounded up to whole memory intervals.
        """
        if not self.persistent_interval_steps or step < 1:
            return False
        intervals = -(-self.persistent_interval_steps // self.interval_steps)
        return step % (intervals * self.interval_steps) == 0
