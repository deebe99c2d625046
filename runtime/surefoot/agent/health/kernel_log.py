"""Reads new lines of the kernel's log, where it may be read.

Reads /dev/kmsg only, without waiting; called by `supervisor`. In most containers it is closed: then
nothing is known from it, and nothing is concluded.
"""

from __future__ import annotations

import os
from pathlib import Path

_RECORD_BYTES = 8192
"""The kernel refuses a read that is smaller than its record."""
_MOST_RECORDS = 4096
"""In one look: a log that is flooded must not hold up whoever reads it."""


class KernelLog:
    """Yields lines written since it was opened or last read."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()  # not ours to read

    @property
    def readable(self) -> bool:
        return self._file is not None

    def lines(self) -> list[str]:
        """Returns new lines, oldest first, without those overwritten meanwhile."""
        found: list[str] = []
        while self._file is not None and len(found) < _MOST_RECORDS:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten: the next read begins at the oldest one
            except OSError:
                self.close()
                break
            if not record:
                break
            found += _texts(record.decode(errors="replace"))
        return found

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _texts(record: str) -> list[str]:
    """What a record says: behind its priority, number and time, before its dictionary."""
    return [line.partition(";")[2] or line for line in record.splitlines() if line and not line.startswith(" ")]
