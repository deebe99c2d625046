"""Measures how much memory this container may still allocate.

Memory that is touched beyond the limit is not refused by the kernel: it kills a process of the container. So what does
not fit is refused here, with the numbers: for all local ranks at once, since a checkpoint that lacks one of them is
none. Reads /proc and /sys only; called by `staging_memory`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.protocol.text import amount

_ROOTS = (
    # version 2 as a container sees its own group, then version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryHeadroom:
    """Bytes; `limit` None: none is set, `free` is the machine's."""

    free: int
    limit: int | None
    used: int


def read_headroom(
    groups: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")
) -> MemoryHeadroom | None:
    """Reads what is left below the container's limit and on the machine.

    None if neither can be read.
    """
    free = _available(machine)
    for limit_file, used_file, reclaimable in _ROOTS:
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        used -= min(used, _stat((groups / used_file).parent / "memory.stat", reclaimable))
        left = max(0, limit - used)
        return MemoryHeadroom(left if free is None else min(left, free), limit, used)
    return None if free is None else MemoryHeadroom(free, None, 0)


@dataclass(frozen=True, slots=True)
class StagingDemand:
    """Memory still to be allocated: `slots` for each rank without enough."""

    slots: int
    slot_bytes: tuple[int, ...]
    """Of each such rank."""

    @property
    def size(self) -> int:
        return self.slots * sum(self.slot_bytes)

    def __str__(self) -> str:
        ranks, even = len(self.slot_bytes), len(set(self.slot_bytes)) <= 1
        each = f"{'' if even else 'up to '}{amount(max(self.slot_bytes, default=0))}"
        return (
            f"{self.slots} slots of {each} for {ranks} rank{'s' * (ranks != 1)}, {amount(self.size)} of staging memory,"
        )


def require(demand: StagingDemand, found: MemoryHeadroom | None) -> None:
    """Raises OSError with the numbers where it would not fit."""
    if found is None or demand.size <= found.free:
        return
    if found.limit is not None and found.limit - found.used < demand.size:
        text = (
            f"{demand} do not fit: the container's memory limit is {amount(found.limit)} and {amount(found.used)} are "
            f"in use; raise resources.limits.memory of the trainer by {amount(demand.size - found.free)} or more"
        )
    else:
        text = f"{demand} do not fit: the machine has {amount(found.free)} left"
    raise OSError(errno.ENOMEM, text)


def with_released(found: MemoryHeadroom | None, size: int) -> MemoryHeadroom | None:
    """The room there would be with `size` bytes of ours given back."""
    return None if found is None else replace(found, free=found.free + size, used=max(0, found.used - size))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(path: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


def _available(path: Path) -> int | None:
    try:
        row = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(row.split()[1]) * 1024
    except (OSError, ValueError, StopIteration):
        return None
