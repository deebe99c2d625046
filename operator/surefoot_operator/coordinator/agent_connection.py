"""Sends messages to one agent through a bounded queue.

Sending never blocks the caller: an agent that does not take its messages is cut off, and hears the whole word anew
when it comes back. Owned by `coordinator.agent_server`, which runs `pump` and calls `cut`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from aiohttp import web

from surefoot.errors import ProtocolError
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import ToAgent
from surefoot.protocol.wire import encode
from surefoot_operator import metrics
from surefoot_operator.coordinator.desired_messages import Delivered, outbox_diff

log = logging.getLogger(__name__)


class AgentConnection:
    """A connection whose hello was accepted, or that is about to be refused."""

    def __init__(self, websocket: web.WebSocketResponse, request: web.Request, queue_limit: int) -> None:
        self._websocket = websocket
        self.transport = request.transport
        self._queue: asyncio.Queue[str] = asyncio.Queue(queue_limit)
        self._told: Delivered = {}
        self.version: int | None = None
        self.worker: WorkerId | None = None
        if self.transport is not None:
            raw = self.transport.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def tell(self, wanted: Iterable[ToAgent]) -> None:
        """Queues what of this the agent was not told yet."""
        messages, self._told = outbox_diff(self._told, wanted)
        for message in messages:
            self.send(message)

    def send(self, message: ToAgent) -> None:
        """Queues one message; cuts the line if too many wait already."""
        try:
            text = encode(message, self.version)
        except ProtocolError as error:
            log.warning("cannot send to %s: %s", self.worker, error)
            return
        try:
            self._queue.put_nowait(text)
        except asyncio.QueueFull:
            metrics.agents_slow.inc()
            log.warning(
                "%s does not read its messages (%d queued): closing its connection", self.worker, self._queue.maxsize
            )
            self.cut()

    async def pump(self) -> None:
        """Sends what is queued, in order, until cancelled or the line breaks."""
        try:
            while True:
                await self._websocket.send_str(await self._queue.get())
        except (ConnectionError, RuntimeError):
            self.cut()  # the receiving side sees the end of the line and reports it

    async def close_with(self, message: ToAgent, wait_seconds: float) -> None:
        """Sends a last message and closes; cuts after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.send_str(encode(message, self.version))
                await self._websocket.close()
        except (TimeoutError, ConnectionError, RuntimeError):
            self.cut()

    async def close(self, wait_seconds: float) -> None:
        """Closes politely, within `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.close(code=1001, message=b"the coordinator leaves")
        except (TimeoutError, ConnectionError, RuntimeError):
            self.cut()

    def cut(self) -> None:
        """Breaks the connection now, whatever is still queued."""
        if self.transport is not None:
            self.transport.abort()
