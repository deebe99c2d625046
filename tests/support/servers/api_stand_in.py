"""One path of an API server, answered by a test, and the operator's client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from surefoot_operator.platforms.kubernetes.api_client import Api


@asynccontextmanager
async def answered_by(path: str, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Api]:
    """A client whose calls of `path` reach `answer`, over a real socket."""
    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()  # type: ignore[no-untyped-call]
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    api = Api(ApiClient(configuration))  # type: ignore[no-untyped-call]
    yield api
    await api.close()
    await runner.cleanup()
