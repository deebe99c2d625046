"""Owns asyncio tasks until their ends, reports errors, joins all.

A task that nobody keeps may be collected while it runs, and one whose error nobody reads fails unheard: what only half
works is worse than what is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any


async def repeat(work: Callable[[], Awaitable[float]], first_pause_seconds: float = 0.0) -> None:
    """Does the work until cancelled; it returns how long to pause before the next time.

    A quarter of each pause is drawn at random: processes that began together would else ask one server in one instant.
    What the work raises ends the loop.
    """
    pause_seconds = first_pause_seconds
    while True:
        if pause_seconds:
            await asyncio.sleep(pause_seconds * random.uniform(0.75, 1.0))
        pause_seconds = await work()


def logged(log: logging.Logger) -> Callable[[str, BaseException], None]:
    """Makes what only writes an error to a log, for a TaskSet."""
    return lambda name, error: log.error("%s failed: %s", name, error, exc_info=error)


class TaskSet:
    """Owns tasks, and closes or joins them before its owner ends."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        """Takes what hears of errors.

        Args:
            failed: Called once with a task's name and its error; never for one that was cancelled.
        """
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Runs the coroutine beside its caller."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def start_once(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Runs the work unless one of its name runs.

        Returns:
            Whether it was begun.
        """
        if any(task.get_name() == name for task in self._tasks):
            return False
        self.start(work(), name)
        return True

    async def join(self) -> None:
        """Returns when no task runs, of those that began meanwhile none either."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def close(self) -> None:
        """Cancels every task and waits for its end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task.get_name(), error)


async def wait_for_first(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for the first task that ends, then cancels the others.

    All have ended when it returns, also where it is cancelled itself. Raises what the first one raised.
    """
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
