"""A memory cgroup of its own for a server: the kernel kills it at its container's limit, as a kubelet has it do.

Needs root and the memory controller, version 1 or 2; a test is skipped only where the kernel refuses the group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def container_bytes(memory_bytes: int, client_bytes: int) -> int:
    """The limit that the chart gives a server's container; a test of the chart holds the two equal."""
    return memory_bytes + memory_bytes // 16 + client_bytes + (128 << 20)


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A group and the names of its files, which differ by version."""

    folder: Path
    peak_file: str
    events_file: str

    def join(self) -> None:
        """Moves the process that calls it into the group; for `preexec_fn`."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """The most that the group had at any moment."""
        return int((self.folder / self.peak_file).read_text())

    @property
    def kill_count(self) -> int:
        """How many of its processes the kernel killed for want of memory."""
        lines = (self.folder / self.events_file).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def limited_to(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new group; processes in it must have ended before the block does."""
    name = f"surefoot-test-{uuid4().hex[:12]}"
    try:
        group = _made(name, limit_bytes)
    except OSError as error:
        pytest.skip(f"needs root and the memory controller of cgroups (1 or 2): {error}")
    try:
        yield group
    finally:
        _remove(group.folder)


def _made(name: str, limit_bytes: int) -> MemoryCgroup:
    if (_V1 / "memory.limit_in_bytes").exists():
        group = MemoryCgroup(_V1 / name, "memory.max_usage_in_bytes", "memory.oom_control")
        limit_file = "memory.limit_in_bytes"
    else:
        group = MemoryCgroup(_V2 / name, "memory.peak", "memory.events")
        limit_file = "memory.max"
    group.folder.mkdir()
    try:
        (group.folder / limit_file).write_text(str(limit_bytes))
    except OSError:
        group.folder.rmdir()
        raise
    return group


def _remove(folder: Path) -> None:
    """The kernel lets go of a group some moments after its last process was reaped."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # between two tries; the condition is the removal
