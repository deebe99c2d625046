"""Keeps the layout records that one job's indexes and listings name.

Owned by `memory.job_servers`, lent to its probes. Bounded by what the job runs: records that nothing names any more are
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
        self._values = 0
        """Of all of them: added up anew for each record, ten thousand ranks' would take fifty million additions."""
        self._reading, self._changing = threading.Lock(), threading.Lock()

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
            total = self._values - self._values_of(digest) + values
            if total > self.max_values:
                bound = f"0 to {self.max_values} for a job of its size"
                raise OutOfBounds(f"layout {digest}", "the number of values of all layouts", str(total), bound)
            layout = Layout.from_json(text)
            with self._changing:
                self._values += values - self._values_of(digest)
                self._layouts[digest] = (layout, values, time.monotonic())

    def keep(self, named: Collection[str]) -> None:
        """Lets records go that nothing names any more; what was just read is named in a moment."""
        old = time.monotonic() - UNNAMED_SECONDS
        for digest in self.digests - set(named):
            if self._layouts[digest][2] < old:
                with self._changing:
                    self._values -= self._values_of(digest)
                    del self._layouts[digest]

    def _values_of(self, digest: str) -> int:
        known = self._layouts.get(digest)
        return known[1] if known is not None else 0
