"""Records Kubernetes events in the background, with a rate limit.

Owned by the reconciler. Each event costs a call to the API server, so recording events within a reconcile would delay
the next plan. Agents may also send notices of any text as fast as they like. Every event is logged, even if it is not
recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from surefoot_operator import metrics
from surefoot_operator.errors import PlatformError
from surefoot_operator.policy.core.actions import Event

log = logging.getLogger(__name__)

MINUTE_SECONDS = 60.0
MAX_PLAN_EVENTS_PER_MINUTE = 120
"""Events that plans may record within any minute."""
MAX_AGENT_EVENTS_PER_MINUTE = 20
"""Events that agents' notices may record within any minute."""
_MAX_BATCH_EVENTS = 16
"""Events that one call to `Record` gets."""
_FLUSH_TIMEOUT_SECONDS = 2.0
"""How long to wait for queued events before a job's reconciler stops or lets the job be deleted."""

REPEAT_INTERVAL_SECONDS = 60.0
"""An identical failure of a tier is reported again after this long."""
MAX_RECENT_FAILURES = 3
"""Different failures reported within that time: when a tier is down it fails for every rank, and one report is
enough."""

Record = Callable[[Sequence[Event]], Awaitable[None]]
"""Writes events to the API server; raises PlatformError if it rejects them."""


class EventBudget:
    """Limits events within any minute, and adds an event that counts those left out."""

    def __init__(self, most: int) -> None:
        self._max_per_minute = most
        self._recent_times: deque[float] = deque()
        self._suppressed_count = 0

    def select_allowed(self, events: Iterable[Event], now: float) -> tuple[Event, ...]:
        """Returns the events that may be recorded now, the count of suppressed ones first.

        Args:
            events: New events in order.
            now: Seconds of a monotonic clock.
        """
        while self._recent_times and now - self._recent_times[0] >= MINUTE_SECONDS:
            self._recent_times.popleft()
        allowed_events: list[Event] = []
        for event in events:
            if len(self._recent_times) >= self._max_per_minute:
                self._suppressed_count += 1
                metrics.events_suppressed.inc()
                continue
            if self._suppressed_count:
                text = f"{self._suppressed_count} earlier events are only in the operator's log: too many in a minute"
                allowed_events.append(Event("EventsSuppressed", text, warning=True))
                self._recent_times.append(now)
                self._suppressed_count = 0
            allowed_events.append(event)
            self._recent_times.append(now)
        return tuple(allowed_events)


class EventRecorder:
    """Records one job's events in the background.

    Call `flush` before a step that ends the job, and `close` once at the end.
    """

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._plan_budget, self._agent_budget = (
            EventBudget(MAX_PLAN_EVENTS_PER_MINUTE),
            EventBudget(MAX_AGENT_EVENTS_PER_MINUTE),
        )
        self._queue: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None

    def record(self, events: Iterable[Event], of_agents: bool = False) -> None:
        """Logs all events, and queues those within the rate limit to be recorded."""
        events = tuple(events)
        for event in events:
            log.log(logging.WARNING if event.warning else logging.INFO, "%s: %s", event.reason, event.message)
        budget = self._agent_budget if of_agents else self._plan_budget
        self._queue.extend(budget.select_allowed(events, self._clock()))
        if self._queue and self._task is None:
            self._task = asyncio.create_task(self._send_events(), name="events")
            self._task.add_done_callback(self._on_sender_done)

    async def flush(self) -> None:
        """Waits until queued events are recorded, for at most 2 s."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_FLUSH_TIMEOUT_SECONDS)

    async def close(self) -> None:
        """Flushes, then cancels recording if events are still queued."""
        await self.flush()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_events(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(_MAX_BATCH_EVENTS, len(self._queue)))]
            try:
                await self._record(batch)
            except PlatformError as error:
                metrics.reconcile_failures.labels("events").inc()
                log.warning("cannot record %d events, they are in this log only: %s", len(batch), error)

    def _on_sender_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.reconcile_failures.labels("events").inc()
            log.error("recording events failed; queued events are in this log only: %s", error, exc_info=error)


class TierFailureEvents:
    """Turns agents' tier failures into events of one job.

    A failure is reported when it starts and once a minute while it lasts. Failed requests are retried within seconds,
    so without this limit a tier that is down would flood the job's events.
    """

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}

    def new_events(self, sentences: Iterable[str], now: float) -> tuple[Event, ...]:
        """Returns events for the failures that were not reported within the last minute; `now` is in seconds."""
        self._reported = {
            sentence: reported_seconds
            for sentence, reported_seconds in self._reported.items()
            if now - reported_seconds < REPEAT_INTERVAL_SECONDS
        }
        events = []
        for sentence in sentences:
            if sentence in self._reported or len(self._reported) >= MAX_RECENT_FAILURES:
                log.debug("%s", sentence)
                continue
            self._reported[sentence] = now
            events.append(Event("StorageOperationFailed", sentence, warning=True))
        return tuple(events)
