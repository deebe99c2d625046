"""Owns asyncio tasks until they end, reports their errors and joins them.

Python may garbage-collect a running task that has no reference, and drops an error that is never read. A process that
half works is worse than one that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any


async def repeat_until_cancelled(work: Callable[[], Awaitable[float]], first_pause_seconds: float = 0.0) -> None:
    """Calls `work` until cancelled; it returns the seconds to pause before the next call.

    A quarter of each pause is random, so that processes that started together do not call one server at the same
    moment. An error of `work` ends the loop.
    """
    pause_seconds = first_pause_seconds
    while True:
        if pause_seconds:
            await asyncio.sleep(pause_seconds * random.uniform(0.75, 1.0))
        pause_seconds = await work()


def log_failure_to(log: logging.Logger) -> Callable[[str, BaseException], None]:
    """Returns an error callback for a TaskSet that only logs the error."""
    return lambda name, error: log.error("%s failed: %s", name, error, exc_info=error)


class TaskSet:
    """Owns tasks, and closes or joins them before its owner ends."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        """Starts with no tasks.

        Args:
            failed: Called once with a task's name and its error; never for one that was cancelled.
        """
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Runs the coroutine concurrently as a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def start_once(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Starts the work unless a task of the same name runs; returns whether it was started."""
        if any(task.get_name() == name for task in self._tasks):
            return False
        self.start(work(), name)
        return True

    async def join(self) -> None:
        """Waits until no task runs, including tasks that are started while it waits."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def close(self) -> None:
        """Cancels every task and waits for its end."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task.get_name(), error)


async def wait_for_first(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for the first task that ends, then cancels the others; raises the first one's error.

    All tasks have ended when it returns, also if it is cancelled itself.
    """
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
