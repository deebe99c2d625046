"""Runs the calls that have a deleted job's persistent data deleted, one at a time.

Owned by `worker_calls`. Counts what the fabric refused: an attempt that never gets a pod must not be the first one for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from surefoot_operator import metrics
from surefoot_operator.errors import FabricError
from surefoot_operator.job_snapshot import PurgeCallSeen
from surefoot_operator.policy.core.actions import PurgePersistent

log = logging.getLogger(__name__)


class PurgeCalls:
    """The calls of one job; `wake` has the loop plan again."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._task: asyncio.Task[None] | None = None
        self.seen = PurgeCallSeen()
        """How it stands now."""

    def begin(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins the call unless one is under way."""
        if self._task is None:
            self.seen = replace(self.seen, under_way=True)
            self._task = asyncio.create_task(self._make(action, call), name=str(action))

    async def settled(self) -> None:
        """Returns when no call is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Cancels a call under way and waits for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _make(self, action: PurgePersistent, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
            made = max(action.attempt, self.seen.attempt)
            self.seen = PurgeCallSeen(made, self._clock(), refusals=self.seen.refusals)
        except Exception as error:  # whatever it was, the plan hears of it and decides
            metrics.reconcile_failures.labels(type(error).__name__).inc()
            log.warning(
                "%s; %s was not carried out", error, action, exc_info=None if isinstance(error, FabricError) else error
            )
            self.seen = self._refused(action.attempt, error)
        finally:
            self.seen = replace(self.seen, under_way=False)
            self._task = None
            self._wake()

    def _refused(self, attempt: int, error: Exception) -> PurgeCallSeen:
        before, now = self.seen, self._clock()
        decided = isinstance(error, FabricError) and error.decided and not error.busy
        return replace(
            before,
            refusal=str(error) or type(error).__name__,
            refused_attempt=attempt,
            refusals=before.refusals + decided,
            since_seconds=before.since_seconds if before.refusal else now,
            last_seconds=now,
            closing=isinstance(error, FabricError) and error.closing,
        )
