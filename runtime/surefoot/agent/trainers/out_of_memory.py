"""Detects kills by the kernel's OOM killer from its cgroup counters.

They are read before trainers start and when one is gone. A process that the OOM killer ends leaves no word: it looks
like any SIGKILL, and people look for a fault where a limit was reached. Reads /sys and /proc only; called by
`supervisor`.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.agent.memory.headroom import MemoryHeadroom, read_headroom
from surefoot.protocol.plain import amount

_COUNTERS = (
    # version 2 and version 1 as a container sees its own group, then the whole machine's
    "fs/cgroup/memory.events",
    "fs/cgroup/memory/memory.oom_control",
)


def kills(system: Path = Path("/sys"), processes: Path = Path("/proc")) -> int:
    """Counts OOM kills in this container so far, or on the machine.

    The machine's count is read where there is no container.
    """
    for path in (*(system / name for name in _COUNTERS), processes / "vmstat"):
        found = _count(path)
        if found is not None:
            return found
    return 0


def describe_oom_kill(before: int, after: int, left: MemoryHeadroom | None = None) -> str:
    """Describes an OOM kill between two readings; empty if none happened."""
    if after <= before:
        return ""
    left = read_headroom() if left is None else left
    if left is None or left.limit is None:
        return "the kernel's OOM killer: this machine's memory was used up"
    return (
        f"the kernel's OOM killer: the container's memory limit is {amount(left.limit)},"
        f" {amount(left.used)} of it are in use now; raise resources.limits.memory, or use less a rank"
    )


def _count(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass  # another kind of machine: the next place is looked at
    return None
