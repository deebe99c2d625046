"""How much memory this container may still take: asked before staging memory is touched.

Memory that is touched beyond the limit is not refused by the kernel: it kills a process of the container. So what does
not fit is refused here, with the numbers. Reads /proc and /sys only; called by `arena`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

_ROOTS = (
    # version 2 as a container sees its own group, then version 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes; `limit` None: none is set, `free` is the machine's."""

    free: int
    limit: int | None
    used: int


def room(groups: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")) -> Room | None:
    """What is left below the container's limit and on the machine; None if neither can be read."""
    free = _available(machine)
    for limit_file, used_file, reclaimable in _ROOTS:
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        used -= min(used, _stat((groups / used_file).parent / "memory.stat", reclaimable))
        left = max(0, limit - used)
        return Room(left if free is None else min(left, free), limit, used)
    return None if free is None else Room(free, None, 0)


def require(size: int, found: Room | None) -> None:
    """Raises OSError with the numbers where `size` bytes would not fit."""
    if found is None or size <= found.free:
        return
    if found.limit is not None and found.limit - found.used < size:
        text = (
            f"{size} bytes of staging memory do not fit: the container's memory limit is {found.limit} bytes and "
            f"{found.used} are in use; raise resources.limits.memory of the trainer by {size - found.free} bytes or more"
        )
    else:
        text = f"{size} bytes of staging memory do not fit: the machine has {found.free} bytes left"
    raise OSError(errno.ENOMEM, text)


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
