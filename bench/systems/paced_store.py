"""torch.save to a store as shared as a cluster's: at most 1 GB/s for a node, and durable when it returns.

The bytes go to the same tmpfs as everyone's, and the writer is held to the pace; fsync costs nothing there, so that the pace
alone is what stands for a parallel file system, an NFS server or a bucket.
"""

from __future__ import annotations

import os
import time
from typing import BinaryIO

import torch

from bench.systems.torch_save import TorchSave

BYTES_PER_SECOND = 1e9
SHORTEST_SECONDS = 0.002
"""A pickle is thousands of small writes; to sleep behind each would take longer than the bytes."""


class PacedFile:
    """A file whose writes return when the pace allows."""

    def __init__(self, file: BinaryIO, bytes_per_second: float) -> None:
        self._file, self._pace = file, bytes_per_second
        self._began, self._written = time.monotonic(), 0

    def write(self, data: bytes | memoryview) -> int:
        count = self._file.write(data)
        self._written += count
        self._wait(SHORTEST_SECONDS)
        return count

    def flush(self) -> None:
        """Hands on what is buffered: torch.save asks for it at its end."""
        self._file.flush()

    def finish(self) -> None:
        """Waits until all is written at the pace."""
        self.flush()
        self._wait(0.0)

    def _wait(self, at_least: float) -> None:
        ahead = self._began + self._written / self._pace - time.monotonic()
        if ahead > at_least:
            time.sleep(ahead)


class PacedTorchSave(TorchSave):
    def begin(self, step: int) -> None:
        with self.place(step).open("wb") as file:
            paced = PacedFile(file, BYTES_PER_SECOND)
            torch.save(self.program.state(), paced)  # type: ignore[arg-type]  # it writes and flushes, and no more is asked
            paced.finish()
            os.fsync(file.fileno())
