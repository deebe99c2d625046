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

EVALUATION_INTERVAL_SECONDS = 0.25
"""How often health is evaluated, and the lag of the event loop measured."""
MAX_EVALUATION_AGE_SECONDS = 5.0
"""How long health may go without evaluation before the event loop counts as blocked, as
`LivenessLimits.lag_seconds`."""
READINESS_TIMEOUT_SECONDS = 0.5
"""How long /readyz waits for the event loop; the kubelet's probe times out after one second."""
LAG_RETENTION_SECONDS = 30.0
"""How long a lag is remembered, which is longer than the time between two probes."""

MAX_REMARKS = 20
"""Maximum number of remarks in the response to /readyz."""

ListProblems = Callable[[], Sequence[str]]
"""Returns the current problems or remarks, a sentence each."""


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque(
            maxlen=round(LAG_RETENTION_SECONDS / EVALUATION_INTERVAL_SECONDS)
        )

    @property
    def max_lag_seconds(self) -> float:
        """The worst lag of the last 30 s, in seconds."""
        start_seconds = time.monotonic() - LAG_RETENTION_SECONDS
        return max(
            (lag_seconds for measured_seconds, lag_seconds in self._lags if measured_seconds >= start_seconds),
            default=0.0,
        )

    async def run(self) -> None:
        """Measures the lag four times a second until cancelled."""
        while True:
            start_seconds = time.monotonic()
            await asyncio.sleep(EVALUATION_INTERVAL_SECONDS)
            now = time.monotonic()
            lag_seconds = max(0.0, now - start_seconds - EVALUATION_INTERVAL_SECONDS)
            self._lags.append((now, lag_seconds))
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
        list_liveness_failures: ListProblems,
        list_readiness_failures: ListProblems,
        list_remarks: ListProblems = lambda: (),
    ) -> None:
        self._requested_ports = probe_port, metrics_port
        self._list_liveness_failures, self._list_readiness_failures, self._list_remarks = (
            list_liveness_failures,
            list_readiness_failures,
            list_remarks,
        )
        self._evaluated_seconds = time.monotonic()
        self._liveness_failures: Sequence[str] = ()
        self._readiness_answer = _health_answer(("the operator is starting",))
        self._evaluation_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._probes = TextServer({"/healthz": self._healthz_answer, "/readyz": self._readyz_answer})
        self._metrics = TextServer({"/metrics": CachedPage(_metrics_answer)})

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
        self._evaluate()
        self._evaluation_task = asyncio.create_task(self._evaluate_forever(), name="health")
        self._probes.start("", self._requested_ports[0])
        self._metrics.start("", self._requested_ports[1])

    async def close(self) -> None:
        if self._evaluation_task is not None:
            self._evaluation_task.cancel()
            await asyncio.gather(self._evaluation_task, return_exceptions=True)
        await asyncio.to_thread(self._probes.close)
        await asyncio.to_thread(self._metrics.close)

    def _evaluate(self) -> None:
        self._liveness_failures = tuple(self._list_liveness_failures())
        self._readiness_answer = _health_answer(tuple(self._list_readiness_failures()), tuple(self._list_remarks()))
        self._evaluated_seconds = time.monotonic()

    async def _evaluate_forever(self) -> None:
        while True:
            await asyncio.sleep(EVALUATION_INTERVAL_SECONDS)
            self._evaluate()

    def _healthz_answer(self) -> Answer:
        age = time.monotonic() - self._evaluated_seconds
        stalled = (f"the event loop has been blocked for {age:.0f} s",) if age > MAX_EVALUATION_AGE_SECONDS else ()
        return _health_answer((*self._liveness_failures, *stalled))

    def _readyz_answer(self) -> Answer:
        """Evaluates readiness in the event loop; uses the last result if the loop does not respond in time."""
        evaluated = threading.Event()
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._evaluate_and_signal, evaluated)
        except RuntimeError:  # the loop has ended, and the process is about to end
            return self._readiness_answer
        evaluated.wait(READINESS_TIMEOUT_SECONDS)
        return self._readiness_answer

    def _evaluate_and_signal(self, evaluated: threading.Event) -> None:
        try:
            self._evaluate()
        finally:
            evaluated.set()


def _metrics_answer() -> Answer:
    return Answer(200, CONTENT_TYPE_LATEST, generate_latest())


def _health_answer(problems: Sequence[str], remarks: Sequence[str] = ()) -> Answer:
    lines = dict.fromkeys(problems or ("ok", *remarks[:MAX_REMARKS]))
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
    reconcile_seconds: float = 180.0
    """A reconcile is bounded by its calls' own limits; one that takes longer is stuck."""
    lag_seconds: float = 5.0
    """Maximum lag of the event loop. Agents count as silent after three seconds without a heartbeat being read."""
    api_seconds: float = 10.0
    """A stale watch counts as stuck only if the API server answered something within this time."""


@dataclass(frozen=True, slots=True)
class LivenessSigns:
    """Measurements that the decision is made from."""

    watch_seconds_by_kind: Mapping[str, float]
    """By kind: seconds since the API server last answered the watch, also with a rejection, which no restart helps."""
    reconcile_seconds_by_job: Mapping[str, float]
    """By job: seconds that its current reconcile has taken; 0 between two."""
    lag_seconds: float
    """Worst lag of the event loop in the last half minute."""
    api_seconds: float
    """Seconds since the API server last answered any request."""


def liveness_failures(signs: LivenessSigns, limits: LivenessLimits) -> tuple[str, ...]:
    """Returns a sentence for each part of the process that is stuck; empty: the process is healthy."""
    failures = []
    if signs.api_seconds <= limits.api_seconds:
        failures += [
            f"the watch of {kind} has received no answer for {age:.0f} s, although the API server answers other requests"
            for kind, age in sorted(signs.watch_seconds_by_kind.items())
            if age > limits.watch_seconds
        ]
    failures += [
        f"the reconcile of job {job} has been running for {age:.0f} s"
        for job, age in sorted(signs.reconcile_seconds_by_job.items())
        if age > limits.reconcile_seconds
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
        self._requested_port, self._tls_context = port, context
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, app: web.Application) -> None:
        """Starts to listen. Raises OSError if the port is taken."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(
            self._runner, "", self._requested_port, ssl_context=self._tls_context, reuse_address=True
        ).start()
        addresses = self._runner.addresses
        self.port = next((address[1] for address in addresses if len(address) == 2), addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
