"""Provides Unix seconds that never step within one leader's term.

Read by sessions, holders and plans. The wall clock may jump by an hour when it is corrected or when a machine was
suspended; compared with it, every agent would be silent and every world would hang at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class TermClock:
    """The wall clock as it stood when the term began, and from then on the monotonic one. Call it for the time."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall if wall is not None else time.time
        self._steady = steady
        self._offset = 0.0
        self.begin()

    def begin(self) -> None:
        """A new term: nothing is remembered of the one before, so the wall clock may be believed anew."""
        self._offset = self._wall() - self._steady()

    def __call__(self) -> float:
        return self._offset + self._steady()
