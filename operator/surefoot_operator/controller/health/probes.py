"""Serves /healthz, /readyz and /metrics, and measures event loop lag.

Touches the network; run by the composition root from its start.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from surefoot_operator import metrics
from surefoot_operator.controller.http_listener import HttpListener

TICK_SECONDS = 0.25
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
    """Answers probes: 503 with the sentences that `unwell` or `unready` give.

    `remarks` stand in the answer to /readyz where nothing of that is so.
    """

    def __init__(self, port: int, unwell: Sentences, unready: Sentences, remarks: Sentences = lambda: ()) -> None:
        self._listener, self._unwell, self._unready, self._remarks = HttpListener(port), unwell, unready, remarks

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        await self._listener.start(app)

    async def close(self) -> None:
        await self._listener.close()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _answer(self._unwell())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._unready(), self._remarks())

    async def _metrics(self, _: web.Request) -> web.Response:
        text = bytearray(generate_latest())
        for more in metrics.jobs.text():  # of a thousand jobs megabytes, for which nobody else is to wait
            text += more
            await asyncio.sleep(0)
        return web.Response(body=bytes(text), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(problems: Sequence[str], remarks: Sequence[str] = ()) -> web.Response:
    lines = dict.fromkeys(problems or ("ok", *remarks[:MOST_REMARKS]))
    return web.Response(status=503 if problems else 200, text="\n".join(lines) + "\n")
