"""Keeps the layout records that one job's indexes and listings name.

Owned by `memory.job_holders`, lent to its probes. Bounded by what the job runs: records that nothing names any more are
let go, and one that would take more than the job's bound is refused by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from surefoot.errors import OutOfBounds
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import Layout

UNNAMED_SECONDS = 60.0
"""A record may be read before the index that names it is known: longer than any visit of a holder takes."""


class LayoutShelf:
    """Layout records by digest; `add` may be called in threads."""

    def __init__(self) -> None:
        self.max_values = bounds.max_layout_values(0)
        """How many numbers, texts and lists all of them may have."""
        self._layouts: dict[str, tuple[Layout, int, float]] = {}
        """With the number of its values, and when it was read."""
        self._reading = threading.Lock()

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._layouts)

    def __contains__(self, digest: str) -> bool:
        return digest in self._layouts

    def __getitem__(self, digest: str) -> Layout:
        return self._layouts[digest][0]

    def add(self, digest: str, text: str) -> None:
        """Reads a record whose digest was compared.

        One at a time: each may take a hundred megabytes for a moment.

        Raises:
            ProtocolError: it cannot be read; OutOfBounds: or takes more than the job may.
        """
        with self._reading:
            values = bounds.values_of(text)
            total = values + sum(kept for _, kept, _ in tuple(self._layouts.values()))
            if total > self.max_values:
                bound = f"0 to {self.max_values} for a job of its size"
                raise OutOfBounds(f"layout {digest}", "the number of values of all layouts", str(total), bound)
            self._layouts[digest] = (Layout.from_json(text), values, time.monotonic())

    def keep(self, named: Collection[str]) -> None:
        """Lets records go that nothing names any more; what was just read is named in a moment."""
        old = time.monotonic() - UNNAMED_SECONDS
        for digest in self._layouts.keys() - set(named):
            if self._layouts[digest][2] < old:
                del self._layouts[digest]
