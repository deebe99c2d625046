"""Decides when one object that its tier refuses counts as damaged.

Whoever is silent is waited for, and nothing is called bad meanwhile. A tier that answers for its other objects is not
silent: an object that it refuses again and again is a bad sector, a wrong mode or a denied key, and no waiting helps.
Without an end to it, one such object would keep a job from every older checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from surefoot import metrics
from surefoot.errors import Corrupt, ObjectRefused, SurefootError, TierError

PATIENCE_SECONDS = 15.0
"""How long a tier that answers for others may refuse an object until that is called bad."""


class RefusedObjects:
    """Remembers since when each object is refused; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[Hashable, float] = {}
        self._lock = threading.Lock()

    def verdict(self, key: Hashable, problem: TierError, ask_neighbour: Callable[[], object]) -> SurefootError:
        """Returns the problem as it is, or as damage once the object was refused for too long.

        Args:
            key: Names the object.
            problem: How the last read of it ended.
            ask_neighbour: Reads something else of the same tier. Time counts only while that succeeds.
        """
        if not isinstance(problem, ObjectRefused):
            return problem
        try:
            ask_neighbour()
        except SurefootError:
            with self._lock:
                self._since.pop(key, None)
            return problem
        now = self._clock()
        with self._lock:
            seconds = now - self._since.setdefault(key, now)
        if seconds < PATIENCE_SECONDS:
            return problem
        metrics.fallbacks.labels("object_refused").inc()
        return Corrupt(f"{problem}; the tier returns other objects and has refused this one for {seconds:.0f} s")

    def record_answer(self, key: Hashable) -> None:
        """Forgets the refusals before an answer: the next one is a first one again."""
        if self._since:
            with self._lock:
                self._since.pop(key, None)
