"""Runs named single-flight tasks beside the reconcile loop.

Owned by the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from surefoot_operator import metrics

log = logging.getLogger(__name__)


class Background:
    """Runs named single-flight tasks.

    What they do is asked for again by the next plan if it still matters.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Starts `work` unless one of its name runs; returns whether it did."""
        if name in self._tasks:
            return False
        task = asyncio.create_task(work(), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))
        return True

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.reconcile_failures.labels(type(error).__name__).inc()
            log.error("%s failed: %s", name, error, exc_info=error)
