"""Lets an agent's ranks write to a target one after another.

Shared by the drains of one agent. Ranks that send to one server at once take its single thread from each other, and their
chunks from the processor's cache: with four of them a gigabyte cost half as much CPU again and took longer. First come,
first served, so that no rank's next save goes before another one's last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal
from weakref import WeakValueDictionary

from surefoot.protocol.identities import HolderId

LOOK_SECONDS = 0.05
"""How soon whoever waits sees that its order was called off."""

Outcome = Literal["turn", "stopped", "unavailable"]


class TargetTurn:
    """Orders those who write to one target."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._failures = 0

    @contextmanager
    def taken(self, is_stopped: Callable[[], bool]) -> Iterator[Outcome]:
        """Waits for the turn, and holds it for the block.

        Yields `unavailable` at once where the target failed those before: each would wait for the same silence anew,
        and hold its slot meanwhile.
        """
        outcome, ticket = self._wait(is_stopped)
        try:
            yield outcome
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def fail(self) -> None:
        """Tells whoever waits behind this turn that the target does not answer."""
        with self._changed:
            self._failures += 1
            self._changed.notify_all()

    def _wait(self, is_stopped: Callable[[], bool]) -> tuple[Outcome, object]:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            failures = self._failures
            while True:
                if is_stopped():
                    return "stopped", ticket
                if self._failures != failures:
                    return "unavailable", ticket
                if self._waiting[0] is ticket:
                    return "turn", ticket
                self._changed.wait(LOOK_SECONDS)


class TargetTurns:
    """Keeps one turn a target, as long as somebody writes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[HolderId, TargetTurn] = WeakValueDictionary()

    def of(self, target: HolderId) -> TargetTurn:
        """Returns the turn that all writers to `target` share."""
        with self._lock:
            turn = self._turns.get(target)
            if turn is None:
                turn = self._turns[target] = TargetTurn()
            return turn
