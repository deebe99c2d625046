"""Listens for HTTP on one port, until closed.

Touches the network; used by the probes and the admission server. A port that was left to chance differs between the
families: one socket a family, and IPv4's is told.
"""

from __future__ import annotations

import ssl

from aiohttp import web


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
