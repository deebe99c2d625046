"""Classifies a trainer's exit as a first cause or a secondary error.

Pure. A killed rank breaks its peers' connections within milliseconds, and every one of them raises: those errors are
secondary, cost no budget, and must not hide the first. Called by `supervisor` when an exit is seen.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

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
class Cause:
    local: int
    text: str
    secondary: bool


def first_cause(endings: Sequence[RankExit]) -> Cause:
    """Chooses the worker's first cause.

    The earliest error that is no echo, else a death without a report, else the earliest.
    """
    told = sorted((e for e in endings if e.report is not None), key=lambda e: e.report.at if e.report else 0.0)
    own = next((e for e in told if e.report is not None and not is_secondary(e.report)), None)
    if own is not None:
        return Cause(own.local, describe(own.code, own.report, own.oom), secondary=False)
    silent = next((e for e in endings if e.report is None and e.code not in (None, 0)), None)
    if silent is not None:
        return Cause(silent.local, describe(silent.code, None, silent.oom), secondary=False)
    if told:
        return Cause(told[0].local, describe(told[0].code, told[0].report), secondary=True)
    return Cause(endings[0].local, "ended for an unknown reason", secondary=False)


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
        body = json.loads(text)
        message = body["message"]
        if isinstance(message, str):
            return ErrorReport(str(body["kind"]), message, float(body["at"]))
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
