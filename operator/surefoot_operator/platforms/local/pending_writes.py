"""Writes a node's records, and again later what a disk refused.

Owned by the node's loop. Without it the node would end with the first write that fails, every agent and its Redis with
it, for what a machine is out of for a moment.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from surefoot_operator.platforms.local.run_folder import read_json, write_json

RETRY_SECONDS = 0.5


class PendingWrites:
    """Keeps the newest content of each file until it is written."""

    def __init__(self) -> None:
        self._pending: dict[Path, dict[str, Any]] = {}
        self._retry_at = 0.0
        self._failing = False

    @property
    def retry_at(self) -> float | None:
        """When to `flush` again, on the monotonic clock; None: everything is written."""
        return self._retry_at if self._pending else None

    def write(self, path: Path, body: dict[str, Any]) -> None:
        """Writes at once, or with a later `flush`."""
        self._pending[path] = body
        self._retry_at = 0.0
        self.flush()

    def read(self, path: Path) -> dict[str, Any] | None:
        """The content that is there, or that will be."""
        return self._pending[path] if path in self._pending else read_json(path)

    def drop(self, path: Path) -> None:
        """Removes the file, written or not."""
        self._pending.pop(path, None)
        path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Writes what is left, unless that failed a moment ago."""
        if time.monotonic() < self._retry_at:
            return
        for path, body in list(self._pending.items()):
            try:
                write_json(path, body, durable=False)
            except OSError as error:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                if not self._failing:
                    self._failing = True
                    _note(f"{path.name} could not be written and is tried again: {error}")
                return
            del self._pending[path]
        if self._failing:
            self._failing = False
            _note("everything is written again")


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may lie on the same full disk
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has
