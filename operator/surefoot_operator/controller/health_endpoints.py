"""Serves /healthz, /readyz and /metrics, and measures event loop lag.

Touches the network; run by the composition root from its start.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from surefoot.text_server import Answer, CachedPage, TextServer
from surefoot_operator import metrics

TICK_SECONDS = 0.25
"""How often health is evaluated, and the lag of the event loop measured."""
STALLED_SECONDS = 5.0
"""How long health may go without evaluation before the event loop counts as blocked, as
`LivenessLimits.lag_seconds`."""
FRESH_SECONDS = 0.5
"""How long /readyz waits for the event loop; the kubelet's probe times out after one second."""
LAG_RETENTION_SECONDS = 30.0
"""How long a lag is remembered, which is longer than the time between two probes."""

MOST_REMARKS = 20
"""Maximum number of remarks in the response to /readyz."""

Sentences = Callable[[], Sequence[str]]
"""Returns the current problems or remarks, a sentence each."""


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=round(LAG_RETENTION_SECONDS / TICK_SECONDS))

    @property
    def worst_seconds(self) -> float:
        """The worst lag of the last 30 s, in seconds."""
        start_seconds = time.monotonic() - LAG_RETENTION_SECONDS
        return max(
            (lag_seconds for measured_seconds, lag_seconds in self._late if measured_seconds >= start_seconds),
            default=0.0,
        )

    async def run(self) -> None:
        """Measures the lag four times a second until cancelled."""
        while True:
            start_seconds = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            lag_seconds = max(0.0, now - start_seconds - TICK_SECONDS)
            self._late.append((now, lag_seconds))
            metrics.loop_lag_seconds.observe(lag_seconds)


class HealthEndpoints:
    """Serves health and metrics, each on its own port and in its own thread.

    The functions are called in the event loop, because they read state that the loop changes: four times a second, and
    at each request of /readyz. Responses use the last result. A loop too busy to evaluate is unhealthy itself.

    Args:
        probe_port: Port of /healthz and /readyz. 0: any free one.
        metrics_port: Port of /metrics. 0: any free one.
        unwell: Returns why the process must be restarted; any sentence fails /healthz (503).
        unready: Returns why the process is not ready; any sentence fails /readyz (503).
        remarks: Returns sentences that follow `ok` in the response to /readyz.
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
        """Port of /healthz and /readyz."""
        return self._probes.port

    @property
    def metrics_port(self) -> int:
        """Port of /metrics."""
        return self._metrics.port

    async def start(self) -> None:
        """Starts to listen. Raises OSError if a port is taken."""
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
        """Evaluates readiness in the event loop; uses the last result if the loop does not respond in time."""
        evaluated = threading.Event()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._ask_now, evaluated)
        except RuntimeError:  # the loop has ended, and the process is about to end
            return self._readiness
        evaluated.wait(FRESH_SECONDS)
        return self._readiness

    def _ask_now(self, evaluated: threading.Event) -> None:
        try:
            self._ask()
        finally:
            evaluated.set()


def _metrics() -> Answer:
    return Answer(200, CONTENT_TYPE_LATEST, generate_latest())


def _answer(problems: Sequence[str], remarks: Sequence[str] = ()) -> Answer:
    lines = dict.fromkeys(problems or ("ok", *remarks[:MOST_REMARKS]))
    return Answer(503 if problems else 200, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode())


# ---- liveness --------------------------------------------------------------------------------------------------------
# Decides from measurements whether the process should be restarted. Pure. A restart helps a process that is stuck, but
# not while the API server is away, so a watch that is stale for that reason does not count.


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Limits beyond which the process counts as stuck."""

    watch_seconds: float = 120.0
    """A watch renews itself every half minute; one without an answer for this long, while others get answers, is
    stuck."""
    round_seconds: float = 180.0
    """A reconcile is bounded by its calls' own limits; one that takes longer is stuck."""
    lag_seconds: float = 5.0
    """Maximum lag of the event loop. Agents count as silent after three seconds without a heartbeat being read."""
    answered_seconds: float = 10.0
    """A stale watch counts as stuck only if the API server answered something within this time."""


@dataclass(frozen=True, slots=True)
class LivenessSigns:
    """Measurements that the decision is made from."""

    watches: Mapping[str, float]
    """By kind: seconds since the API server last answered the watch, also with a rejection, which no restart helps."""
    rounds: Mapping[str, float]
    """By job: seconds that its current reconcile has taken; 0 between two."""
    lag_seconds: float
    """Worst lag of the event loop in the last half minute."""
    api_seconds: float
    """Seconds since the API server last answered any request."""


def liveness_failures(signs: LivenessSigns, limits: LivenessLimits) -> tuple[str, ...]:
    """Returns a sentence for each part of the process that is stuck; empty: the process is healthy."""
    failures = []
    if signs.api_seconds <= limits.answered_seconds:
        failures += [
            f"the watch of {kind} has received no answer for {age:.0f} s, although the API server answers other requests"
            for kind, age in sorted(signs.watches.items())
            if age > limits.watch_seconds
        ]
    failures += [
        f"the reconcile of job {job} has been running for {age:.0f} s"
        for job, age in sorted(signs.rounds.items())
        if age > limits.round_seconds
    ]
    if signs.lag_seconds > limits.lag_seconds:
        failures.append(f"the event loop ran {signs.lag_seconds:.1f} s late")
    return tuple(failures)


# ---- http listener ---------------------------------------------------------------------------------------------------
# Listens for HTTP on one port, until closed. Touches the network; used by the admission server. With port 0, IPv4 and
# IPv6 get different sockets and ports; the port of IPv4 is reported.


class HttpListener:
    """Serves one application; `port` is 0 before it listens."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._wanted, self._context = port, context
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, app: web.Application) -> None:
        """Starts to listen. Raises OSError if the port is taken."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "", self._wanted, ssl_context=self._context, reuse_address=True).start()
        addresses = self._runner.addresses
        self.port = next((address[1] for address in addresses if len(address) == 2), addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
