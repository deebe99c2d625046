"""Reads what trainers and their children have read, written and computed.

Linux's /proc; a process that ended meanwhile counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from surefoot.agent.looks import Activity
from surefoot.linux_process import children, cpu_seconds

_MOST_CHILDREN = 256


def activity_of(pids: Iterable[tuple[int, bool]]) -> Activity:
    """Sums over these processes and their children.

    Each comes with whether it waits for other ranks: CPU that it spends on that is no sign of life.
    """
    io_bytes, seconds = 0, 0.0
    for pid, waits in pids:
        io_bytes += _io_bytes(pid)
        seconds += 0.0 if waits else cpu_seconds(pid)
        for child in sorted(children(pid))[:_MOST_CHILDREN]:
            io_bytes += _io_bytes(child)
            seconds += cpu_seconds(child)
    return Activity(io_bytes, seconds)


def _io_bytes(pid: int) -> int:
    try:
        content = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    lines = dict(line.split(": ", 1) for line in content.splitlines() if ": " in line)
    return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))
