"""Reads what trainers and their children have read, written and computed.

Linux's /proc; a process that ended meanwhile counts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from surefoot.agent.looks import Activity

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_CHILDREN = 256


def activity_of(pids: Iterable[int]) -> Activity:
    """Sums over these processes and their children; CPU over the children alone."""
    read, ticks = 0, 0
    for pid in pids:
        read += _io_bytes(pid)
        for child in _children(pid)[:_MOST_CHILDREN]:
            read += _io_bytes(child)
            ticks += _cpu_ticks(child)
    return Activity(read, ticks / _TICKS)


def _io_bytes(pid: int) -> int:
    lines = dict(line.split(": ", 1) for line in _text(f"/proc/{pid}/io").splitlines() if ": " in line)
    return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))


def _cpu_ticks(pid: int) -> int:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        found += [int(child) for child in _text(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
