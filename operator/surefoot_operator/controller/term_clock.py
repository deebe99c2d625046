"""Provides Unix seconds that never step within one leader's term.

Read by sessions, holders and plans. The wall clock may jump by an hour when it is corrected or after a suspend;
compared with it, every agent would be silent and every world would hang at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class TermClock:
    """The wall clock at the term's start, plus monotonic seconds since."""

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall if wall is not None else time.time
        self._steady = steady
        self._offset = 0.0
        self.begin()

    def begin(self) -> None:
        """Starts a term: reads the wall clock anew."""
        self._offset = self._wall() - self._steady()

    def __call__(self) -> float:
        return self._offset + self._steady()
