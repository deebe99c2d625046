"""`python watched_cluster.py TARGET-FILE`: the operator's real cache of a cluster, watched from a stand-in API server.

Serves what the operator measures of its watches, told in TARGET-FILE as Prometheus' file_sd; ends with SIGTERM. The
stand-in lists nothing and keeps each watch open, as a quiet cluster does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry, start_http_server

from surefoot_operator import metrics
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache


async def answer(request: web.Request) -> web.StreamResponse:
    if "watch" not in request.query:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.Event().wait()
    return response


async def main(tell: Callable[[str], object]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    api = Api(ApiClient(Configuration(host=f"http://{host}:{port}")), 5.0)
    cache = ClusterCache(api)
    await cache.start()
    registry = CollectorRegistry()
    for family in (metrics.watch_age_seconds, metrics.watch_failures):
        registry.register(family)
    server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
    tell(json.dumps([{"targets": [f"127.0.0.1:{server.server_port}"]}]))
    try:
        await ended.wait()
    finally:
        await cache.close()
        await api.close()
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).write_text))
