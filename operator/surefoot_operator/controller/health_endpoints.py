"""Serves /healthz, /readyz and /metrics, and measures event loop lag.

Touches the network; run by the composition root from its start.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from surefoot.text_server import Answer, CachedPage, TextServer
from surefoot_operator import metrics

TICK_SECONDS = 0.25
STALLED_SECONDS = 5.0
"""So long may the event loop be without its health being asked: as `LivenessLimits.lag_seconds`."""
FRESH_SECONDS = 0.5
"""How long a probe waits for the event loop: a kubelet waits a second for the probe."""
KEPT_SECONDS = 30.0
"""How long a late moment is remembered: longer than the time between two probes."""

MOST_REMARKS = 20

Sentences = Callable[[], Sequence[str]]


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=round(KEPT_SECONDS / TICK_SECONDS))

    @property
    def worst_seconds(self) -> float:
        since = time.monotonic() - KEPT_SECONDS
        return max((late for at, late in self._late if at >= since), default=0.0)

    async def run(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late = max(0.0, now - begin - TICK_SECONDS)
            self._late.append((now, late))
            metrics.loop_lag_seconds.observe(late)


class Probes:
    """Answers probes and metrics, each on a port and in a thread of its own.

    A probe fails (503) with the sentences of `unwell` or `unready`; where `unready` has none, `remarks` follow the `ok` in the
    answer to /readyz. All three are asked in the event loop, because they read what the loop changes: a few times a
    second, and when /readyz is asked. A probe is answered from the last sentences. A loop that does not come to ask is unwell itself.
    """

    def __init__(
        self,
        probe_port: int,
        metrics_port: int,
        unwell: Sentences,
        unready: Sentences,
        remarks: Sentences = lambda: (),
    ) -> None:
        self._wanted = probe_port, metrics_port
        self._unwell, self._unready, self._remarks = unwell, unready, remarks
        self._asked_seconds = time.monotonic()
        self._unwell_sentences: Sequence[str] = ()
        self._readiness = _answer(("the operator is starting",))
        self._asking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._probes = TextServer({"/healthz": self._healthz, "/readyz": self._readyz})
        self._metrics = TextServer({"/metrics": CachedPage(_metrics)})

    @property
    def port(self) -> int:
        """Of /healthz and /readyz."""
        return self._probes.port

    @property
    def metrics_port(self) -> int:
        return self._metrics.port

    async def start(self) -> None:
        """Listens. Raises OSError if a port is taken."""
        self._loop = asyncio.get_running_loop()
        self._ask()
        self._asking = asyncio.create_task(self._ask_always(), name="health")
        self._probes.start("", self._wanted[0])
        self._metrics.start("", self._wanted[1])

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await asyncio.to_thread(self._probes.close)
        await asyncio.to_thread(self._metrics.close)

    def _ask(self) -> None:
        self._unwell_sentences = tuple(self._unwell())
        self._readiness = _answer(tuple(self._unready()), tuple(self._remarks()))
        self._asked_seconds = time.monotonic()

    async def _ask_always(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._ask()

    def _healthz(self) -> Answer:
        age = time.monotonic() - self._asked_seconds
        stalled = (f"the event loop has been blocked for {age:.0f} s",) if age > STALLED_SECONDS else ()
        return _answer((*self._unwell_sentences, *stalled))

    def _readyz(self) -> Answer:
        """Has the event loop ask now; where it does not come to that in time, its last answer stands."""
        asked = threading.Event()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._ask_now, asked)
        except RuntimeError:  # the loop has ended, and the process is about to
            return self._readiness
        asked.wait(FRESH_SECONDS)
        return self._readiness

    def _ask_now(self, asked: threading.Event) -> None:
        try:
            self._ask()
        finally:
            asked.set()


def _metrics() -> Answer:
    return Answer(200, CONTENT_TYPE_LATEST, b"".join((generate_latest(), *metrics.jobs.text())))


def _answer(problems: Sequence[str], remarks: Sequence[str] = ()) -> Answer:
    lines = dict.fromkeys(problems or ("ok", *remarks[:MOST_REMARKS]))
    return Answer(503 if problems else 200, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode())
