"""Runs the checks of an agent's node and reports changed findings.

`agent_process` uses it on its loop. Each check runs at its own period with a timeout; one that hangs or fails is reported
once by name, and the others continue. A finding is sent once as a notice; the coordinator always gets the whole list.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from surefoot import metrics
from surefoot.agent.health.gpu_checks import GpuCheck
from surefoot.agent.health.node_checks import FolderCheck, KernelLogFindings, LinkCheck, MemoryPressure
from surefoot.protocol.messages import MAX_FINDING_CHARACTERS, MAX_FINDINGS, FromAgent, NodeFinding, NodeHealth

# ---- node check ------------------------------------------------------------------------------------------------------
# Defines checks of the node, and runs each in a daemon thread of its own, since a driver that hangs blocks its caller. A
# check has a timeout and is not started again before it has answered.


class NodeCheck(Protocol):
    """Checks one part of the node; may block and may raise."""

    name: str
    period_seconds: float

    def find_faults(self) -> Sequence[NodeFinding]:
        """Returns all present faults; empty: there are none."""
        ...


Answer = Callable[[Sequence[NodeFinding] | Exception], None]


class CheckThread:
    """Runs one check in a thread, one run at a time."""

    def __init__(self, check: NodeCheck) -> None:
        self.check = check
        self._request = threading.Semaphore(0)
        self._answer: Answer | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a run of the check has not ended yet."""
        return self._answer is not None

    def start_check(self, on_result: Answer) -> None:
        """Starts one run of the check; `on_result` is called in the check's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"check-{self.check.name}", daemon=True)
            self._thread.start()
        self._answer = on_result
        self._request.release()

    def _run(self) -> None:
        while True:
            self._request.acquire()
            on_result = self._answer
            assert on_result is not None
            try:
                result: Sequence[NodeFinding] | Exception = self.check.find_faults()
            except Exception as error:  # noqa: BLE001  it is reported once, and the training must continue
                result = error
            self._answer = None
            on_result(result)


# ---- node monitor ----------------------------------------------------------------------------------------------------

CHECK_SECONDS = 10.0
"""Timeout of one run of a check."""

RETRY_SECONDS = 300.0
"""Time after which the findings are sent again even if nothing changed, so that the operator knows their age."""

_POLL_SECONDS = 1.0
_ORDER = {"node": 0, "application": 1, "unknown": 2}


@dataclass(slots=True)
class _RunningCheck:
    thread: CheckThread
    due_seconds: float = 0.0
    since_seconds: float | None = None
    findings: tuple[NodeFinding, ...] = ()
    error: set[str] = field(default_factory=set)
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class NodeMonitor:
    """Runs the node's checks and reports their findings: `run` until cancelled.

    Args:
        checks: Checks of the node; each runs in its own thread.
        send: Sends a message to the coordinator.
        notice: Sends a notice for the job's events, by reason and text.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        send: Callable[[FromAgent], None],
        notice: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running_checks = [_RunningCheck(CheckThread(check)) for check in checks]
        self._send, self._notice, self._clock = send, notice, clock
        self._loop = asyncio.get_running_loop()
        self._sent_findings: tuple[NodeFinding, ...] = ()
        self._notified: set[tuple[str, str]] = set()
        self._sent_seconds = clock()

    @property
    def findings(self) -> tuple[NodeFinding, ...]:
        """All present findings, the most severe first, each reason once."""
        by_reason: dict[str, NodeFinding] = {}
        for finding in (finding for running in self._running_checks for finding in running.findings):
            other = by_reason.get(finding.reason)
            if other is None or _ORDER[finding.blame] < _ORDER[other.blame]:
                by_reason[finding.reason] = finding
        ordered = sorted(by_reason.values(), key=lambda finding: (_ORDER[finding.blame], finding.reason))
        return tuple(replace(finding, text=finding.text[:MAX_FINDING_CHARACTERS]) for finding in ordered[:MAX_FINDINGS])

    def health(self) -> NodeHealth:
        """Returns the message with all present findings."""
        return NodeHealth(self.findings, time.time())

    async def first_answer(self, name: str) -> None:
        """Waits until this check has answered once and its findings are sent; returns at once if there is no such check."""
        for running in self._running_checks:
            if running.thread.check.name == name:
                await running.answered.wait()

    async def run(self) -> None:
        while True:
            self.poll_checks()
            await asyncio.sleep(_POLL_SECONDS)

    def poll_checks(self) -> None:
        """Starts the checks that are due and reports those that exceed their timeout."""
        now = self._clock()
        for running in self._running_checks:
            if running.since_seconds is not None:
                if now - running.since_seconds > CHECK_SECONDS:
                    self._report_trouble(running, "HealthCheckTimeout", f"has not answered for {CHECK_SECONDS:g} s")
            elif now >= running.due_seconds:
                running.since_seconds = now
                running.thread.start_check(functools.partial(self._on_result, running))
        if now - self._sent_seconds >= RETRY_SECONDS:
            self._send_health()

    def _on_result(self, running: _RunningCheck, result: Sequence[NodeFinding] | Exception) -> None:
        """Passes a check's result to the loop; called in the check's thread."""
        try:
            self._loop.call_soon_threadsafe(self._record_result, running, result)
        except RuntimeError:
            pass  # the agent has ended

    def _record_result(self, running: _RunningCheck, result: Sequence[NodeFinding] | Exception) -> None:
        running.since_seconds = None
        running.due_seconds = self._clock() + running.thread.check.period_seconds
        running.answered.set()  # waiters run after this function, when the findings are sent
        if isinstance(result, Exception):
            self._report_trouble(running, "HealthCheckError", f"failed: {type(result).__name__}: {result}")
            result = running.findings  # keep its former findings
        running.findings = tuple(result)
        for finding in running.findings:
            self._notify_once(finding.reason, finding.text)
        if _urgent_part(self.findings) != _urgent_part(self._sent_findings):
            self._send_health()

    def _send_health(self) -> None:
        self._sent_findings, self._sent_seconds = self.findings, self._clock()
        self._send(self.health())

    def _report_trouble(self, running: _RunningCheck, reason: str, text: str) -> None:
        if reason in running.error:
            return
        running.error.add(reason)
        metrics.fallbacks.labels(kind="node_check").inc()
        self._notice(reason, f"the node check {running.thread.check.name} {text}; this is reported only once")

    def _notify_once(self, reason: str, text: str) -> None:
        if (reason, text) in self._notified or len(self._notified) >= 64:
            return
        self._notified.add((reason, text))
        self._notice(reason, text)


def _urgent_part(findings: Sequence[NodeFinding]) -> list[tuple[str, str]]:
    """Returns the part of the findings whose change is sent at once; changed numbers in texts can wait."""
    return [(finding.reason, finding.blame) for finding in findings]


# ---- list of checks --------------------------------------------------------------------------------------------------


def node_checks(folders: Iterable[Path]) -> list[NodeCheck]:
    """Creates one check of each kind; `folders` are those that the worker writes to."""
    return [GpuCheck(), KernelLogFindings(), MemoryPressure(), FolderCheck(folders), LinkCheck()]
