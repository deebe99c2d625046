"""Runs the checks of an agent's node and tells what changed.

Used by `agent_process`, on its loop. Each check is asked at its own period and within a time limit; one that hangs or fails is
told once by name, and the others go on. What was found is said to people once, and to the coordinator as a whole.
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
from surefoot.agent.health.node_checks import FolderCheck, KernelWords, LinkCheck, MemoryPressure
from surefoot.protocol.messages import LONGEST_TEXT, MOST_FINDINGS, FromAgent, NodeFinding, NodeHealth

# ---- node check ------------------------------------------------------------------------------------------------------
# Defines checks of the node, and runs each in a thread. A driver that hangs takes its caller with it: a check has a
# daemon thread of its own, is given a time, and is not asked again before it has answered.


class NodeCheck(Protocol):
    """One look at one part of the node; may block, may raise."""

    name: str
    period_seconds: float

    def find(self) -> Sequence[NodeFinding]:
        """Returns all that is wrong now; empty: nothing is."""
        ...


Answer = Callable[[Sequence[NodeFinding] | Exception], None]


class CheckThread:
    """Asks one check, one question at a time."""

    def __init__(self, check: NodeCheck) -> None:
        self.check = check
        self._asked = threading.Semaphore(0)
        self._answer: Answer | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a question has no answer yet."""
        return self._answer is not None

    def ask(self, answer: Answer) -> None:
        """Has the thread look once; `answer` is called in it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"check-{self.check.name}", daemon=True)
            self._thread.start()
        self._answer = answer
        self._asked.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            answer = self._answer
            assert answer is not None
            try:
                found: Sequence[NodeFinding] | Exception = self.check.find()
            except Exception as error:  # noqa: BLE001  whatever it was, it is told once and the training goes on
                found = error
            self._answer = None
            answer(found)


# ---- node monitor ----------------------------------------------------------------------------------------------------

CHECK_SECONDS = 10.0
"""A check that takes longer hangs."""

AGAIN_SECONDS = 300.0
"""The clock is told so often even if nothing was found."""

_LOOK_SECONDS = 1.0
_ORDER = {"node": 0, "application": 1, "unknown": 2}


@dataclass(slots=True)
class _Asked:
    thread: CheckThread
    due_seconds: float = 0.0
    since_seconds: float | None = None
    found: tuple[NodeFinding, ...] = ()
    trouble: set[str] = field(default_factory=set)
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class NodeWatch:
    """`run` until cancelled; `findings` is what is wrong now.

    Args:
        checks: Each is asked in a thread of its own.
        send: Sends a message to the coordinator.
        notice: Tells people, by reason and text.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        send: Callable[[FromAgent], None],
        notice: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked = [_Asked(CheckThread(check)) for check in checks]
        self._send, self._notice, self._clock = send, notice, clock
        self._loop = asyncio.get_running_loop()
        self._told: tuple[NodeFinding, ...] = ()
        self._said: set[tuple[str, str]] = set()
        self._told_at = clock()

    @property
    def findings(self) -> tuple[NodeFinding, ...]:
        """Everything found, the gravest first, each reason once."""
        found: dict[str, NodeFinding] = {}
        for one in (one for asked in self._asked for one in asked.found):
            known = found.get(one.reason)
            if known is None or _ORDER[one.blame] < _ORDER[known.blame]:
                found[one.reason] = one
        ordered = sorted(found.values(), key=lambda one: (_ORDER[one.blame], one.reason))
        return tuple(replace(one, text=one.text[:LONGEST_TEXT]) for one in ordered[:MOST_FINDINGS])

    def health(self) -> NodeHealth:
        """The whole of it as a message."""
        return NodeHealth(self.findings, time.time())

    async def first_answer(self, name: str) -> None:
        """Waits until this check has answered once.

        What it found is sent by then. Without such a check it returns at once.
        """
        for asked in self._asked:
            if asked.thread.check.name == name:
                await asked.answered.wait()

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Asks what is due, and names what hangs."""
        now = self._clock()
        for asked in self._asked:
            if asked.since_seconds is not None:
                if now - asked.since_seconds > CHECK_SECONDS:
                    self._trouble(asked, "CheckHangs", f"has not answered for {CHECK_SECONDS:g} s")
            elif now >= asked.due_seconds:
                asked.since_seconds = now
                asked.thread.ask(functools.partial(self._answered, asked))
        if now - self._told_at >= AGAIN_SECONDS:
            self._tell()

    def _answered(self, asked: _Asked, found: Sequence[NodeFinding] | Exception) -> None:
        """In the check's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, asked, found)
        except RuntimeError:
            pass  # the agent has ended

    def _take(self, asked: _Asked, found: Sequence[NodeFinding] | Exception) -> None:
        asked.since_seconds = None
        asked.due_seconds = self._clock() + asked.thread.check.period_seconds
        asked.answered.set()  # whoever waits for it comes to its turn behind this
        if isinstance(found, Exception):
            self._trouble(asked, "CheckFails", f"failed: {type(found).__name__}: {found}")
            found = asked.found  # what it found before stands
        asked.found = tuple(found)
        for one in asked.found:
            self._say(one.reason, one.text)
        if _essence(self.findings) != _essence(self._told):
            self._tell()

    def _tell(self) -> None:
        self._told, self._told_at = self.findings, self._clock()
        self._send(self.health())

    def _trouble(self, asked: _Asked, reason: str, text: str) -> None:
        if reason in asked.trouble:
            return
        asked.trouble.add(reason)
        metrics.fallbacks.labels(what="node_check").inc()
        self._notice(reason, f"the node check {asked.thread.check.name} {text}; it is not told again")

    def _say(self, reason: str, text: str) -> None:
        if (reason, text) in self._said or len(self._said) >= 64:
            return
        self._said.add((reason, text))
        self._notice(reason, text)


def _essence(findings: Sequence[NodeFinding]) -> list[tuple[str, str]]:
    """What must be told at once where it changes; a figure in a sentence may wait."""
    return [(one.reason, one.blame) for one in findings]


# ---- node checks parts -----------------------------------------------------------------------------------------------
# Lists the checks that an agent runs of its node.


def node_checks(folders: Iterable[Path]) -> list[NodeCheck]:
    """Makes one check of each kind; the worker writes to `folders`."""
    return [GpuCheck(), KernelWords(), MemoryPressure(), FolderCheck(folders), LinkCheck()]
