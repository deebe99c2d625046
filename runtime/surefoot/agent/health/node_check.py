"""Defines checks of the node, and runs each in a thread.

Called by `node_monitor`. A driver that hangs takes its caller with it: a check has a daemon thread of its own, is given a
time, and is not asked again before it has answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from surefoot.protocol.node_findings import NodeFinding


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
