"""Runs copies in helper threads while the training waits.

While the training is inside a call its own cores stand idle. Used by `stager`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from surefoot.staging.host_copies import Copy, Scratch

_log = logging.getLogger(__name__)

MOST_HELPERS = 3
"""With the training's own thread that is four cores, which read memory about as fast as all of a socket's ranks may."""

T = TypeVar("T")


class Crew:
    """Runs helping threads of normal priority, idle without shared work."""

    def __init__(self, helpers: int) -> None:
        self._wake = threading.Condition()
        self._task: Callable[[], None] | None = None
        self._turn = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        for number in range(helpers):
            thread = threading.Thread(target=self._help, name=f"surefoot-helper-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as refused:  # no more threads are allowed: whoever shares the work does it all
                _log.warning(
                    "only %d of %d helping threads could be started, so copies take longer: %s",
                    number,
                    helpers,
                    refused,
                )
                break
            self._threads.append(thread)

    @staticmethod
    def size() -> int:
        """How many helpers there are cores for, beside the calling thread."""
        return min(MOST_HELPERS, len(os.sched_getaffinity(0)) - 1)

    @contextmanager
    def helping(self, task: Callable[[], None]) -> Iterator[None]:
        """Lets each helper run `task` once, inside the block.

        It does not wait for them: whoever shares the work does.
        """
        with self._wake:
            self._task = task
            self._turn += 1
            self._wake.notify_all()
        try:
            yield
        finally:
            with self._wake:
                self._task = None

    def close(self, wait_seconds: float | None = None) -> None:
        """Ends the threads, and waits for them that long."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(wait_seconds)

    def _help(self) -> None:
        turn = 0
        while True:
            turn, task = self._next(turn)
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001  # whoever shares the work does it then, and reports what ails it
                _log.debug("a helper could not", exc_info=True)
            del task  # with what it holds: the helper may rest for long

    def _next(self, turn: int) -> tuple[int, Callable[[], None] | None]:
        """The first task behind this turn; none when the crew is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or (self._turn != turn and self._task is not None))
            return self._turn, None if self._closed else self._task


class Work(Generic[T]):
    """Distributes items to threads; each item is begun by one of them."""

    def __init__(self, do: Callable[[T], None], things: Iterable[T]) -> None:
        self._do, self._things = do, deque(things)
        self._changed = threading.Condition()
        self._running = 0
        self.error: Exception | None = None

    def share(self) -> None:
        """Carries out items that no thread has begun, until none is left."""
        while self.do_next():
            pass

    def do_next(self) -> bool:
        """Does one thing; False if nothing was left to begin."""
        with self._changed:
            if not self._things:
                return False
            thing = self._things.popleft()
            self._running += 1
        try:
            self._do(thing)
        except Exception as error:  # noqa: BLE001  # whoever asked for the work raises or reports it
            self.error = error
        except BaseException as interrupt:  # Ctrl-C in the middle of a copy: what it was of is not copied
            self.error = RuntimeError(f"the copy was interrupted by {type(interrupt).__name__}")
            raise
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._changed.notify_all()
        return True

    @property
    def left(self) -> bool:
        """Whether anything of it has not been done."""
        return bool(self._things or self._running)

    def finish(self, wait_seconds: float | None = None) -> bool:
        """Shares it, and waits that long for what other threads have begun; returns whether all of it is done."""
        self.share()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, wait_seconds)


class Digests:
    """Digests the sources of copies while the training waits.

    A helper may be preempted at any moment on a busy machine. Nobody waits for one: its copy is digested again, and
    whatever it finds later, of bytes that may have changed, is ignored.
    """

    def __init__(self, copies: Sequence[Copy], scratch: Scratch) -> None:
        self._copies, self._scratch = copies, scratch
        self._found: dict[int, int] = {}
        self._left = deque(range(len(copies)))

    def share(self) -> None:
        """Digests copies that no thread has begun, until none is left."""
        while True:
            try:
                index = self._left.popleft()
            except IndexError:
                return
            self._take(index)

    def finish(self) -> list[int]:
        """Completes the digests and returns them, one per copy."""
        self.share()
        for index in range(len(self._copies)):
            if index not in self._found:
                self._take(index)
        return [self._found[index] for index in range(len(self._copies))]

    def _take(self, index: int) -> None:
        self._found.setdefault(index, self._copies[index].digest(self._scratch))
