"""Wakes the controller through kopf when a TrainingJob changes.

Runs in a thread and event loop of its own, because kopf installs signal handlers and cancels every task younger than
itself. No decision depends on its events; docs/adr/0005 has the reasons. Made by the composition root.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import kopf

from surefoot.protocol.timeouts import Backoff
from surefoot_operator.api.spec import GROUP, VERSION
from surefoot_operator.controller import process_metrics
from surefoot_operator.platforms.kubernetes.api_client import loaded

log = logging.getLogger(__name__)

PLURAL = "trainingjobs"
_BACKOFF = Backoff(1.0, 30.0)
_END_SECONDS = 3.0


class KopfTrigger:
    """Calls `woken` in the loop that started it after each event.

    `login` is called in kopf's loop, at first and whenever the server refuses the credentials. `close` takes seconds at
    most.
    """

    def __init__(
        self, login: Callable[[], Awaitable[kopf.ConnectionInfo]], woken: Callable[[], None], only_namespace: str = ""
    ) -> None:
        self._login, self._woken, self._only_namespace = login, woken, only_namespace
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def end(self) -> str:
        """Why kopf wakes us no more; empty while it does."""
        dead = self._thread is not None and not self._thread.is_alive() and not self._stop.is_set()
        return "the thread that watches jobs through kopf has ended" if dead else ""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        # a daemon: whatever hangs in there must not keep the process from ending
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        if self._inner is not None:
            loop, ended = self._inner
            with suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(ended.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _END_SECONDS)

    def _run(self) -> None:
        """kopf ends at the first error it does not know; it is begun anew until we end ourselves."""
        ends = 0
        while not self._stop.is_set():
            try:
                asyncio.run(self._operate())
            except Exception as error:  # noqa: BLE001  of whatever kind: without kopf the cache still wakes us
                log.warning("kopf ended: %s; restarting it", error)
            ends += 1
            if not self._stop.wait(_BACKOFF.seconds(ends, random.random())):
                process_metrics.kopf_ended.inc()

    async def _operate(self) -> None:
        # not the thread's own flag: kopf would wait for that in a thread that outlives it when it ends by itself
        ended = asyncio.Event()
        self._inner = asyncio.get_running_loop(), ended
        if self._stop.is_set():
            return
        where: dict[str, Any] = {"clusterwide": True}
        if self._only_namespace:
            where = {"namespaces": [self._only_namespace]}
        await kopf.operator(
            registry=self._registry(),
            settings=kopf_settings(),
            standalone=True,
            # kopf would name itself after its user, who has no name in a container
            identity=cast(Any, "surefoot-operator"),
            stop_flag=ended,
            **where,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        """One of our own: kopf's default one is the whole process's."""
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return await self._login()

        @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
        async def heard(**_: Any) -> None:
            # `type` is None after each listing, and a deletion during a gap is never told: only that something is new counts
            process_metrics.kopf_events.inc()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._woken)

        return registry


def kopf_settings() -> kopf.OperatorSettings:
    """Configures kopf to watch jobs only: bounded waits, no writes."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 60
    settings.watching.client_timeout = 75
    settings.watching.connect_timeout = 3
    settings.watching.inactivity_timeout = 70
    settings.watching.reconnect_backoff = 1
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 3
    settings.networking.error_backoffs = (0.5, 1, 2, 5)
    settings.queueing.idle_timeout = 1
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None  # it would end the process, which is not kopf's
    return settings


async def connection(kubeconfig: Path | None) -> kopf.ConnectionInfo:
    """Gives kopf our API server and identity. Raises FabricError."""
    found = await loaded(kubeconfig)
    token = await found.get_api_key_with_prefix("BearerToken")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        scheme="Bearer" if token else None,
        token=token.split()[-1] if token else None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
    )
