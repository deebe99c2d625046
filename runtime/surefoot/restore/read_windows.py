"""Limits the reads that one rank has under way at a source; fewer once the source cut it off.

A server holds every reply until it is read, and cuts off whoever has most once all of them are more than it may hold.
Who comes back with as much is cut off again. Thread-safe; used by `copy_choice`, whose windows the reading threads
enter too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.errors import TierUnavailable

UNLIMITED = 1 << 30
"""Before the first cut: the threads' own buffers are the limit."""

_LOOK_SECONDS = 0.1
"""How often a thread that waits for its turn asks whether the restore was called off."""


class ReadWindows:
    """Counts reads by source. A thread that waits for its turn must have none under way."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._limits: dict[int, int] = defaultdict(lambda: UNLIMITED)
        self._under_way: dict[int, int] = defaultdict(int)
        self._cuts: dict[int, int] = defaultdict(int)
        self._changed = threading.Condition()

    def has_room(self, source: int) -> bool:
        with self._changed:
            return self._under_way[source] < self._limits[source]

    def try_enter(self, source: int) -> bool:
        """Counts a read if there is room for it."""
        with self._changed:
            if self._under_way[source] >= self._limits[source]:
                return False
            self._under_way[source] += 1
            return True

    def leave(self, source: int) -> None:
        with self._changed:
            self._under_way[source] -= 1
            self._changed.notify_all()

    @contextmanager
    def entered(self, source: int) -> Iterator[None]:
        """Waits for room, and counts the read that is made inside. Raises TierUnavailable if it is called off."""
        while not self.try_enter(source):
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
            if self._stop.is_set():
                raise TierUnavailable("the restore was called off")
        try:
            yield
        finally:
            self.leave(source)

    def shrink(self, source: int) -> int:
        """After a cut: two reads at a time, then one. Returns the number of cuts since the last answer."""
        with self._changed:
            self._limits[source] = 2 if self._limits[source] > 2 else 1
            self._cuts[source] += 1
            return self._cuts[source]

    def record_answer(self, source: int) -> int:
        """Forgets the cuts before an answer; returns how many there were."""
        with self._changed:
            return self._cuts.pop(source, 0)

    def limit_of(self, source: int) -> int:
        with self._changed:
            return self._limits[source]
