"""Reports a tool's progress as JSON lines on standard error.

{"done", "total"} in bytes. Silent unless `SUREFOOT_TOOL_PROGRESS` is set: a person who runs a tool by hand reads its
last line alone.
"""

from __future__ import annotations

import json
import os
import sys
import time

VARIABLE = "SUREFOOT_TOOL_PROGRESS"
_PAUSE_SECONDS = 0.1


class ByteProgress:
    """Counts bytes towards a total, on one thread."""

    def __init__(self, total: int) -> None:
        self._wanted = bool(os.environ.get(VARIABLE))
        self._total, self._done, self._next = total, 0, 0.0

    def add(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if self._wanted and (now >= self._next or self._done >= self._total):
            self._next = now + _PAUSE_SECONDS
            sys.stderr.write(json.dumps({"done": self._done, "total": self._total}) + "\n")
            sys.stderr.flush()
