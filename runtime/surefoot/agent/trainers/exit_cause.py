"""Classifies a trainer's exit as a first cause or a secondary error.

Pure. A killed rank breaks its peers' connections within milliseconds, and every one of them raises: those errors are
secondary, cost no budget, and must not hide the first. Called by `supervisor` when an exit is seen.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefoot.agent.staging_memory import MemoryHeadroom, read_headroom
from surefoot.protocol.text import format_bytes

_ECHOES = re.compile(
    "|".join(
        (
            r"connection (was )?(closed|reset|refused|aborted)( by (remote )?peer)?",
            r"connection closed by peer",
            r"broken pipe",
            r"\bread error\b|\bwrite error\b",
            r"gloo.*(socket|connection|timeout|timed out|recv|read|closed)",
            r"(remote (process|peer|side)|peer).*(exited|closed|lost|shutdown|gone)",
            r"nccl.*(remote error|unhandled system error|socket|watchdog)|ncclremoteerror|ncclsystemerror",
            r"watchdog.*(timeout|timed out)|collective operation.*timed? ?out",
            r"tcpstore.*(time|recv|closed|connect|broken)|store.*timed? ?out",
            r"socket (timeout|(has )?timed out)|timed out (waiting|after) |timeout caused pair closure",
            r"failed to recv, got 0 bytes|sendbytes failed|recvvalue failed",
        )
    ),
    re.IGNORECASE,
)
_COLLECTIVE_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_ERRORS_OF_COLLECTIVES = {"RuntimeError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "TimeoutError"}


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Holds what a trainer wrote about its own error."""

    kind: str
    message: str
    at: float
    """Unix seconds on this machine: orders the ranks of one worker, nothing else."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """What is known of one local rank's end.

    It may have written its error and not have exited yet.
    """

    local: int
    code: int | None
    report: ErrorReport | None
    oom: str = ""
    """What the kernel's OOM killer had to do with it."""


@dataclass(frozen=True, slots=True)
class ExitCause:
    local: int
    text: str
    secondary: bool


def first_cause(exits: Sequence[RankExit]) -> ExitCause:
    """Chooses the worker's first cause.

    The earliest error that is no echo, else a death without a report, else the earliest.
    """
    reported = sorted((e for e in exits if e.report is not None), key=lambda e: e.report.at if e.report else 0.0)
    primary = next((e for e in reported if e.report is not None and not is_secondary(e.report)), None)
    if primary is not None:
        return ExitCause(primary.local, describe(primary.code, primary.report, primary.oom), secondary=False)
    silent = next((e for e in exits if e.report is None and e.code not in (None, 0)), None)
    if silent is not None:
        return ExitCause(silent.local, describe(silent.code, None, silent.oom), secondary=False)
    if reported:
        return ExitCause(reported[0].local, describe(reported[0].code, reported[0].report), secondary=True)
    return ExitCause(exits[0].local, "ended for an unknown reason", secondary=False)


def is_secondary(report: ErrorReport) -> bool:
    """Whether an error is what another rank's death makes ranks raise."""
    kind = report.kind.rpartition(".")[2]
    if kind not in _COLLECTIVE_TYPES | _ERRORS_OF_COLLECTIVES:
        return False
    return _ECHOES.search(report.message) is not None


def describe(code: int | None, report: ErrorReport | None, oom: str = "") -> str:
    """Describes an end in one line: exception, signal, exit code, or OOM."""
    if oom:
        return f"killed by {oom}" if report is None and code == -signal.SIGKILL else f"{describe(code, report)}; {oom}"
    if report is not None:
        lines = report.message.strip().splitlines()
        first = lines[0] if lines else ""
        return f"{report.kind}: {first}"[:400] if report.kind != "SystemExit" else f"exited: {first}"[:400]
    if code is None:
        return "ended for an unknown reason"
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    return f"exit code {code}"


def read_report(text: str) -> ErrorReport | None:
    """Parses an error file: ours or torch's `@record`; None: neither."""
    try:
        record = json.loads(text)
        message = record["message"]
        if isinstance(message, str):
            return ErrorReport(str(record["kind"]), message, float(record["at"]))
        extra = message["extraInfo"]
        kind, _, rest = str(message["message"]).partition(": ")
        return ErrorReport(kind, rest, float(extra["timestamp"]))
    except (ValueError, KeyError, TypeError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- out of memory ---------------------------------------------------------------------------------------------------
# Detects kills by the kernel's OOM killer, and whose limit was reached. Counters are read before trainers start and
# when one is gone. A process that the OOM killer ends leaves no word: it looks like any SIGKILL, and people look for a
# fault where a limit was reached; and a node that others filled would use up the budget of a program that did nothing.
# Reads /sys, /proc and the kernel's log only.

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
        kill_count = _count(system / killed, "oom_kill")
        if kill_count is not None:
            return OomCounts(kill_count, _count(system / reached, name))
    return OomCounts(_count(processes / "vmstat", "oom_kill") or 0)


def oom_between(
    before: OomCounts, after: OomCounts, headroom: MemoryHeadroom | None = None, kernel: Iterable[str] = ()
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
    headroom = read_headroom() if headroom is None else headroom
    limit_bytes = headroom.limit if headroom is not None else None
    is_limit_reached = limit_bytes is not None and (after.limit_hits is None or after.limit_hits > (before.limit_hits or 0))
    limit = _limit_in_kernel_log(kernel) or ("limit" if is_limit_reached else "node")
    if headroom is None or limit_bytes is None:
        detail = "the container has no memory limit of its own: the node's memory, or what its pod may have, was used up"
        return OomKill(limit, f"the kernel's OOM killer: {detail}")
    usage_text = f"{format_bytes(headroom.used)} of it are in use now"
    if limit == "limit":
        remedy = "raise resources.limits.memory, or use less a rank"
        return OomKill(
            limit, f"the kernel's OOM killer: the container's memory limit is {format_bytes(limit_bytes)}, {usage_text}; {remedy}"
        )
    detail = f"the node's memory was used up; the container's own limit of {format_bytes(limit_bytes)} was not reached, {usage_text}"
    return OomKill(limit, f"the kernel's OOM killer: {detail}")


def injected_kill(path: Path | None) -> OomKill | None:
    """The kill that `surefoot local --fault oom` made, told once; None: none.

    `word` names the memory group that a trainer was put into, whose own counters say whether the kernel ended it there, or
    why SIGKILL had to stand in.
    """
    if path is None or not path.exists():
        return None
    injection = json.loads(path.read_text(encoding="utf-8"))
    if why := injection["stands_in"]:
        text = f"the kernel's OOM killer, for which SIGKILL stands in here ({why})"
    else:
        group = Path(injection["group"])
        if not (_count(group / "memory.events", "oom_kill") or _count(group / "memory.oom_control", "oom_kill")):
            return None  # this end is another's
        text = "the kernel's OOM killer: the limit of the memory group that it was put into was reached"
    path.unlink()
    return OomKill("limit", text)


def limit_of(failed: RankExit | None, kill: OomKill | None) -> Limit:
    """Whose memory ended this rank; empty: its end has another cause.

    The counters tell that something was killed, not who: only a rank that was killed, or says that a process of its own
    was, is taken for it.
    """
    if kill is None or failed is None:
        return ""
    was_killed = failed.report is None and failed.code == -signal.SIGKILL
    lost_child = failed.report is not None and _CHILD.search(failed.report.message) is not None
    return kill.limit if was_killed or lost_child else ""


def _limit_in_kernel_log(lines: Iterable[str]) -> Limit:
    """Whose limit the kernel's own lines name; empty: none, or several."""
    limits: set[Limit] = set()
    for line in lines:
        match = _KILL.search(line)
        if match is None:
            continue
        constraint, group = match.group(1), match.group(2) or ""
        is_own_limit = constraint == "CONSTRAINT_MEMCG" and not _NODES_GROUPS.fullmatch(group)
        limits.add("limit" if is_own_limit else "node")
    return limits.pop() if len(limits) == 1 else ""


def _count(path: Path, name: str) -> int | None:
    """The number behind `name`, or that of a file of one number."""
    try:
        for line in path.read_text().splitlines():
            key, _, number = line.rpartition(" ")
            if key == name:
                return int(number)
    except (OSError, ValueError):
        pass  # another kind of machine: the next place is looked at
    return None
