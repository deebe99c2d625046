"""Detects kills by the kernel's OOM killer, and whose limit was reached.

Counters are read before trainers start and when one is gone. A process that the OOM killer ends leaves no word: it
looks like any SIGKILL, and people look for a fault where a limit was reached; and a node that others filled would use
up the budget of a program that did nothing. Reads /sys, /proc and the kernel's log only; called by `supervisor`.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefoot.agent.headroom import MemoryHeadroom, read_headroom
from surefoot.agent.trainers.exit_cause import RankExit
from surefoot.protocol.text import amount

Limit = Literal["", "limit", "node"]
"""Whose memory was used up: the container's own limit, the node's, or nobody's."""

_COUNTERS = (
    # version 2 and version 1 as a container sees its own group: what was killed there, and when its limit was reached
    ("fs/cgroup/memory.events", "fs/cgroup/memory.events", "oom"),
    ("fs/cgroup/memory/memory.oom_control", "fs/cgroup/memory/memory.failcnt", ""),
)
_KILL = re.compile(r"oom-kill:constraint=(\w+).*?(?:oom_memcg=([^,]*))?,task_memcg=([^,]*)")
_CHILD = re.compile(r"killed by signal: killed|signal 9\b|sigkill", re.IGNORECASE)
_NODES_GROUPS = re.compile(r"/kubepods(\.slice)?(/kubepods-\w+\.slice|/burstable|/besteffort)?/?")
"""Groups that a kubelet gives a share of its node to, above those of pods."""


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Readings of one moment."""

    kills: int = 0
    """Processes that any OOM killer ended: in this container, or on the machine where there is none."""
    limit_hits: int | None = None
    """How often the container's own limit was reached; None: it cannot be read."""


@dataclass(frozen=True, slots=True)
class OomKill:
    """A kill between two readings, for people and for the budget."""

    limit: Limit
    text: str


def oom_counts(system: Path = Path("/sys"), processes: Path = Path("/proc")) -> OomCounts:
    """Counts OOM kills in this container so far, or on the machine.

    The machine's count is read where there is no container.
    """
    for killed, reached, name in _COUNTERS:
        found = _count(system / killed, "oom_kill")
        if found is not None:
            return OomCounts(found, _count(system / reached, name))
    return OomCounts(_count(processes / "vmstat", "oom_kill") or 0)


def oom_between(
    before: OomCounts, after: OomCounts, left: MemoryHeadroom | None = None, kernel: Iterable[str] = ()
) -> OomKill | None:
    """Explains OOM kills between two readings; None if there were none.

    Args:
        before: Counts before the epoch's trainers started.
        after: Counts once one of them is gone.
        left: The container's memory; None: it is read.
        kernel: Lines of the kernel's log since then, none where it may not be read.
    """
    if after.kills <= before.kills:
        return None
    left = read_headroom() if left is None else left
    own = left.limit if left is not None else None
    reached = own is not None and (after.limit_hits is None or after.limit_hits > (before.limit_hits or 0))
    limit = _told(kernel) or ("limit" if reached else "node")
    if left is None or own is None:
        said = "the container has no memory limit of its own: the node's memory, or what its pod may have, was used up"
        return OomKill(limit, f"the kernel's OOM killer: {said}")
    use = f"{amount(left.used)} of it are in use now"
    if limit == "limit":
        remedy = "raise resources.limits.memory, or use less a rank"
        return OomKill(
            limit, f"the kernel's OOM killer: the container's memory limit is {amount(own)}, {use}; {remedy}"
        )
    said = f"the node's memory was used up; the container's own limit of {amount(own)} was not reached, {use}"
    return OomKill(limit, f"the kernel's OOM killer: {said}")


def injected_kill(word: Path | None) -> OomKill | None:
    """The kill that `surefoot local --fault oom` made, told once; None: none.

    `word` names the memory group that a trainer was put into, whose own counters say whether the kernel ended it there, or
    why SIGKILL had to stand in.
    """
    if word is None or not word.exists():
        return None
    told = json.loads(word.read_text(encoding="utf-8"))
    if why := told["stands_in"]:
        text = f"the kernel's OOM killer, for which SIGKILL stands in here ({why})"
    else:
        group = Path(told["group"])
        if not (_count(group / "memory.events", "oom_kill") or _count(group / "memory.oom_control", "oom_kill")):
            return None  # this end is another's
        text = "the kernel's OOM killer: the limit of the memory group that it was put into was reached"
    word.unlink()
    return OomKill("limit", text)


def limit_of(blamed: RankExit | None, kill: OomKill | None) -> Limit:
    """Whose memory ended this rank; empty: its end has another cause.

    The counters tell that something was killed, not who: only a rank that was killed, or says that a process of its own
    was, is taken for it.
    """
    if kill is None or blamed is None:
        return ""
    killed = blamed.report is None and blamed.code == -signal.SIGKILL
    lost_child = blamed.report is not None and _CHILD.search(blamed.report.message) is not None
    return kill.limit if killed or lost_child else ""


def _told(lines: Iterable[str]) -> Limit:
    """Whose limit the kernel's own lines name; empty: none, or several."""
    found: set[Limit] = set()
    for line in lines:
        match = _KILL.search(line)
        if match is None:
            continue
        constraint, group = match.group(1), match.group(2) or ""
        above = constraint == "CONSTRAINT_MEMCG" and not _NODES_GROUPS.fullmatch(group)
        found.add("limit" if above else "node")
    return found.pop() if len(found) == 1 else ""


def _count(path: Path, name: str) -> int | None:
    """The number behind `name`, or that of a file of one number."""
    try:
        for line in path.read_text().splitlines():
            word, _, number = line.rpartition(" ")
            if word == name:
                return int(number)
    except (OSError, ValueError):
        pass  # another kind of machine: the next place is looked at
    return None
