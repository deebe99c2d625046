"""Records Kubernetes events in the background, with a rate limit.

Each event is a call to the API server, one after another: within a round they would hold up the next plan, and agents
may send notices of any text as fast as they like. Owned by the reconciler. Everything is logged, whatever becomes of
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from surefoot_operator import metrics, reasons
from surefoot_operator.errors import PlatformError
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.reasons import STORAGE_OPERATION_FAILED

log = logging.getLogger(__name__)

MINUTE_SECONDS = 60.0
MAX_EVENTS_OF_PLANS = 120
MAX_EVENTS_OF_AGENTS = 20
"""Within a minute, of what plans and of what agents say."""
_AT_ONCE = 16
_FLUSH_SECONDS = 2.0

QUIET_SECONDS = 60.0
MAX_REPORTED = 3
"""Events within that time. A tier that is gone fails for every rank of the world, and one of them says why."""

Record = Callable[[Sequence[Event]], Awaitable[None]]


class EventBudget:
    """Limits events within any minute and reports how many were left out.

    So many within any minute. Says how many were left out, once there is room again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent_times: deque[float] = deque()
        self._left_out = 0

    def allowed(self, events: Iterable[Event], now: float) -> tuple[Event, ...]:
        """Selects the events that may be told now.

        `now` is of a clock that never goes back.
        """
        while self._recent_times and now - self._recent_times[0] >= MINUTE_SECONDS:
            self._recent_times.popleft()
        allowed: list[Event] = []
        for event in events:
            if len(self._recent_times) >= self._most:
                self._left_out += 1
                metrics.events_suppressed.inc()
                continue
            if self._left_out:
                text = f"{self._left_out} events before this one stand in the operator's log only: too many in a minute"
                allowed.append(Event(reasons.EVENTS_SUPPRESSED, text, warning=True))
                self._recent_times.append(now)
                self._left_out = 0
            allowed.append(event)
            self._recent_times.append(now)
        return tuple(allowed)


class EventRecorder:
    """Records one job's events in the background.

    One job's. `say`, and `close` once; `flush` where what comes next ends the job.
    """

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._plans, self._agents = EventBudget(MAX_EVENTS_OF_PLANS), EventBudget(MAX_EVENTS_OF_AGENTS)
        self._waiting: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None

    def record(self, events: Iterable[Event], of_agents: bool = False) -> None:
        """Logs them all, and has those told that are not too many."""
        events = tuple(events)
        for event in events:
            log.log(logging.WARNING if event.warning else logging.INFO, "%s: %s", event.reason, event.message)
        budget = self._agents if of_agents else self._plans
        self._waiting.extend(budget.allowed(events, self._clock()))
        if self._waiting and self._task is None:
            self._task = asyncio.create_task(self._send_events(), name="events")
            self._task.add_done_callback(self._ended)

    async def flush(self) -> None:
        """Waits until what was said is told, a little while."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_FLUSH_SECONDS)

    async def close(self) -> None:
        await self.flush()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_events(self) -> None:
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            try:
                await self._record(some)
            except PlatformError as error:
                metrics.reconcile_failures.labels("events").inc()
                log.warning("could not record %d events, they are in this log only: %s", len(some), error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            metrics.reconcile_failures.labels("events").inc()
            log.error("recording events failed: %s", error, exc_info=error)


class TierFailureEvents:
    """Turns agents' tier failures into events of one job.

    Each when it begins, and once a minute while it lasts. Whoever failed is asked again within seconds: without this a
    tier that is away fills the events of a job.
    """

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}

    def events(self, sentences: Iterable[str], now: float) -> tuple[Event, ...]:
        """Those that are news."""
        self._reported = {sentence: at for sentence, at in self._reported.items() if now - at < QUIET_SECONDS}
        events = []
        for sentence in sentences:
            if sentence in self._reported or len(self._reported) >= MAX_REPORTED:
                log.debug("%s", sentence)
                continue
            self._reported[sentence] = now
            events.append(Event(STORAGE_OPERATION_FAILED, sentence, warning=True))
        return tuple(events)
