"""Finds the first cause among the exits of a worker's trainers.

A killed rank breaks its peers' connections within milliseconds, and each of them raises an error. Those errors are
secondary: they cost no restart budget and must not hide the first cause. `supervisor` calls this at each exit. Pure, but
for the counters of the OOM killer.
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

_SECONDARY_ERRORS = re.compile(
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
    """The error file that a trainer wrote before it exited."""

    kind: str
    """Qualified name of the exception's class."""
    message: str
    at: float
    """Time of the error in Unix seconds of this node; only for ordering the ranks of one worker."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """Describes how one local rank ended; it may have written its error file and not have exited yet."""

    local: int
    """Local rank."""
    code: int | None
    """Exit code, negative for a signal; None: the process still runs."""
    report: ErrorReport | None
    """Error file of the rank; None: it wrote none."""
    oom: str = ""
    """Description of an OOM kill that may have ended it; empty: there was none."""


@dataclass(frozen=True, slots=True)
class ExitCause:
    """First cause of failure on a worker."""

    local: int
    """Local rank that failed first."""
    text: str
    """The failure in one line."""
    secondary: bool
    """Whether it is only the effect of another worker's failure."""


def first_cause(exits: Sequence[RankExit]) -> ExitCause:
    """Chooses the worker's first cause.

    It is the earliest reported error that is not secondary; else an exit without a report; else the earliest error.
    """
    reported = sorted((e for e in exits if e.report is not None), key=lambda e: e.report.at if e.report else 0.0)
    primary = next((e for e in reported if e.report is not None and not is_secondary(e.report)), None)
    if primary is not None:
        return ExitCause(primary.local, describe_exit(primary.code, primary.report, primary.oom), secondary=False)
    silent = next((e for e in exits if e.report is None and e.code not in (None, 0)), None)
    if silent is not None:
        return ExitCause(silent.local, describe_exit(silent.code, None, silent.oom), secondary=False)
    if reported:
        return ExitCause(reported[0].local, describe_exit(reported[0].code, reported[0].report), secondary=True)
    return ExitCause(exits[0].local, "ended for an unknown reason", secondary=False)


def is_secondary(report: ErrorReport) -> bool:
    """Whether an error is of a kind that ranks raise when another rank ends."""
    kind = report.kind.rpartition(".")[2]
    if kind not in _COLLECTIVE_TYPES | _ERRORS_OF_COLLECTIVES:
        return False
    return _SECONDARY_ERRORS.search(report.message) is not None


def describe_exit(code: int | None, report: ErrorReport | None, oom: str = "") -> str:
    """Describes an exit in one line: exception, signal, exit code or OOM kill."""
    if oom:
        return (
            f"killed by {oom}"
            if report is None and code == -signal.SIGKILL
            else f"{describe_exit(code, report)}; {oom}"
        )
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
    """Parses an error file, written by Surefoot or by torch's `@record`; None: it is neither."""
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
# Detects kills by the kernel's OOM killer, and the limit that was reached. Counters are read before trainers start and
# after one has ended. A process that the OOM killer ends writes nothing: it looks like any SIGKILL, so users would search
# for a bug where a limit was reached, and a node filled by other pods would use up the restart budget of an innocent
# program. Reads /sys, /proc and the kernel's log only.

Limit = Literal["", "limit", "node"]
"""Memory that was used up: the container's limit, the node's memory, or neither (empty)."""

_COUNTERS = (
    # cgroup versions 2 and 1 as a container sees its own group: file with kills, file with limit hits and the key in it
    ("fs/cgroup/memory.events", "fs/cgroup/memory.events", "oom"),
    ("fs/cgroup/memory/memory.oom_control", "fs/cgroup/memory/memory.failcnt", ""),
)
_KILL = re.compile(r"oom-kill:constraint=(\w+).*?(?:oom_memcg=([^,]*))?,task_memcg=([^,]*)")
_CHILD = re.compile(r"killed by signal: killed|signal 9\b|sigkill", re.IGNORECASE)
_NODES_GROUPS = re.compile(r"/kubepods(\.slice)?(/kubepods-\w+\.slice|/burstable|/besteffort)?/?")
"""Memory groups of the kubelet above those of pods: their limits are shares of the node."""


@dataclass(frozen=True, slots=True)
class OomCounts:
    """Counters of the OOM killer at one moment."""

    kills: int = 0
    """Number of processes killed in this container, or on the whole machine outside a container."""
    limit_hits: int | None = None
    """Number of times the container's own limit was reached; None: unknown."""


@dataclass(frozen=True, slots=True)
class OomKill:
    """An OOM kill: the limit that was reached and a description for the incident."""

    limit: Limit
    text: str


def read_oom_counts(system: Path = Path("/sys"), processes: Path = Path("/proc")) -> OomCounts:
    """Reads the counts of OOM kills in this container so far, or on the machine outside a container."""
    for killed, reached, name in _COUNTERS:
        kill_count = _read_count(system / killed, "oom_kill")
        if kill_count is not None:
            return OomCounts(kill_count, _read_count(system / reached, name))
    return OomCounts(_read_count(processes / "vmstat", "oom_kill") or 0)


def find_oom_kill(
    before: OomCounts, after: OomCounts, headroom: MemoryHeadroom | None = None, kernel: Iterable[str] = ()
) -> OomKill | None:
    """Describes an OOM kill between two readings; None if there was none.

    Args:
        before: Counts before the generation's trainers started.
        after: Counts after one of them has ended.
        headroom: The container's memory; None: it is read now.
        kernel: Lines of the kernel's log in between; empty if it cannot be read.
    """
    if after.kills <= before.kills:
        return None
    headroom = read_headroom() if headroom is None else headroom
    limit_bytes = headroom.limit_bytes if headroom is not None else None
    is_limit_reached = limit_bytes is not None and (
        after.limit_hits is None or after.limit_hits > (before.limit_hits or 0)
    )
    limit = _limit_in_kernel_log(kernel) or ("limit" if is_limit_reached else "node")
    if headroom is None or limit_bytes is None:
        detail = (
            "the container has no memory limit of its own: the node's memory, or what its pod may have, was used up"
        )
        return OomKill(limit, f"the kernel's OOM killer: {detail}")
    usage_text = f"{format_bytes(headroom.used_bytes)} of it are in use now"
    if limit == "limit":
        remedy = "raise resources.limits.memory, or use less a rank"
        return OomKill(
            limit,
            f"the kernel's OOM killer: the container's memory limit is {format_bytes(limit_bytes)}, {usage_text}; {remedy}",
        )
    detail = f"the node's memory was used up; the container's own limit of {format_bytes(limit_bytes)} was not reached, {usage_text}"
    return OomKill(limit, f"the kernel's OOM killer: {detail}")


def consume_injected_kill(path: Path | None) -> OomKill | None:
    """Returns, once, the OOM kill that `surefoot local --fault oom` injected; None: there was none.

    The file at `path` names the memory group into which a trainer was put, whose counters show whether the kernel killed it
    there, or the reason why SIGKILL was used instead.
    """
    if path is None or not path.exists():
        return None
    injection = json.loads(path.read_text(encoding="utf-8"))
    if why := injection["stands_in"]:
        text = f"the kernel's OOM killer, for which SIGKILL stands in here ({why})"
    else:
        group = Path(injection["group"])
        if not (
            _read_count(group / "memory.events", "oom_kill") or _read_count(group / "memory.oom_control", "oom_kill")
        ):
            return None  # this exit has another cause
        text = "the kernel's OOM killer: the limit of the memory group that it was put into was reached"
    path.unlink()
    return OomKill("limit", text)


def exceeded_limit_of(failed: RankExit | None, kill: OomKill | None) -> Limit:
    """Returns the limit for which this rank was killed; empty: its exit has another cause.

    The counters show that a process was killed, not which: only a rank that ended by SIGKILL, or that reports a killed
    process of its own, is attributed to the OOM killer.
    """
    if kill is None or failed is None:
        return ""
    was_killed = failed.report is None and failed.code == -signal.SIGKILL
    lost_child = failed.report is not None and _CHILD.search(failed.report.message) is not None
    return kill.limit if was_killed or lost_child else ""


def _limit_in_kernel_log(lines: Iterable[str]) -> Limit:
    """Returns the limit that the kernel's log names; empty: none, or several different ones."""
    limits: set[Limit] = set()
    for line in lines:
        match = _KILL.search(line)
        if match is None:
            continue
        constraint, group = match.group(1), match.group(2) or ""
        is_own_limit = constraint == "CONSTRAINT_MEMCG" and not _NODES_GROUPS.fullmatch(group)
        limits.add("limit" if is_own_limit else "node")
    return limits.pop() if len(limits) == 1 else ""


def _read_count(path: Path, name: str) -> int | None:
    """Reads the number after `name` in a file; an empty `name` reads a file that is one number."""
    try:
        for line in path.read_text().splitlines():
            key, _, number = line.rpartition(" ")
            if key == name:
                return int(number)
    except (OSError, ValueError):
        pass  # this system has another cgroup version: the caller tries its file
    return None
