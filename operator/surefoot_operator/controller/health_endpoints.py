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
STALLED_SECONDS = 5.0
"""So long may the event loop be without its health being asked: as `LivenessLimits.lag_seconds`."""
FRESH_SECONDS = 0.5
"""How long a probe waits for the event loop: a kubelet waits a second for the probe."""
LAG_RETENTION_SECONDS = 30.0
"""How long a late moment is remembered: longer than the time between two probes."""

MOST_REMARKS = 20

Sentences = Callable[[], Sequence[str]]


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=round(LAG_RETENTION_SECONDS / TICK_SECONDS))

    @property
    def worst_seconds(self) -> float:
        since = time.monotonic() - LAG_RETENTION_SECONDS
        return max((late for at, late in self._late if at >= since), default=0.0)

    async def run(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late = max(0.0, now - begin - TICK_SECONDS)
            self._late.append((now, late))
            metrics.loop_lag_seconds.observe(late)


class HealthEndpoints:
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
    return Answer(200, CONTENT_TYPE_LATEST, generate_latest())


def _answer(problems: Sequence[str], remarks: Sequence[str] = ()) -> Answer:
    lines = dict.fromkeys(problems or ("ok", *remarks[:MOST_REMARKS]))
    return Answer(503 if problems else 200, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode())


# ---- liveness --------------------------------------------------------------------------------------------------------
# Decides from measurements whether the process should be restarted. Pure. A restart helps a process that is stuck. It
# does not help while the API server is away, so a watch that is stale for that reason is not counted.


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    watch_seconds: float = 120.0
    """A watch renews itself every half minute; one that has not for so long, while the server answers, is stuck."""
    round_seconds: float = 180.0
    """A reconcile is bounded by its calls' own limits; one that takes longer is stuck."""
    lag_seconds: float = 5.0
    """How late the event loop may be. Agents count as silent after three."""
    answered_seconds: float = 10.0
    """So lately must the API server have answered for a stale watch to be our own fault."""


@dataclass(frozen=True, slots=True)
class LivenessSigns:
    watches: Mapping[str, float]
    """Kind -> seconds since the API server last answered it, be it with a refusal: no restart would change that."""
    rounds: Mapping[str, float]
    """Job -> seconds that its reconcile under way has taken."""
    lag_seconds: float
    """The worst of the last half minute."""
    api_seconds: float
    """Since the API server last answered anything."""


def liveness_failures(vitals: LivenessSigns, limits: LivenessLimits) -> tuple[str, ...]:
    """Lists what is stuck, a sentence each; empty: alive."""
    found = []
    if vitals.api_seconds <= limits.answered_seconds:
        found += [
            f"the watch of {kind} has received no answer for {age:.0f} s, although the API server answers"
            for kind, age in sorted(vitals.watches.items())
            if age > limits.watch_seconds
        ]
    found += [
        f"the reconcile of job {job} has taken {age:.0f} s"
        for job, age in sorted(vitals.rounds.items())
        if age > limits.round_seconds
    ]
    if vitals.lag_seconds > limits.lag_seconds:
        found.append(f"the event loop was {vitals.lag_seconds:.1f} s late")
    return tuple(found)


# ---- http listener ---------------------------------------------------------------------------------------------------
# Listens for HTTP on one port, until closed. Touches the network; used by the probes and the admission server. A port
# that was left to chance differs between the families: one socket a family, and IPv4's is told.


class HttpListener:
    """Serves one application; `port` is 0 before it listens."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self._wanted, self._context = port, context
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, app: web.Application) -> None:
        """Listens. Raises OSError if the port is taken."""
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "", self._wanted, ssl_context=self._context, reuse_address=True).start()
        found = self._runner.addresses
        self.port = next((address[1] for address in found if len(address) == 2), found[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
