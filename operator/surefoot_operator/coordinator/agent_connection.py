"""Sends messages to one agent through a bounded queue.

Sending never blocks the caller: an agent that does not read its messages is disconnected, and receives everything again
when it returns. Owned by `surefoot_operator.coordinator.agent_server`, which runs `pump` and calls `cut`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace

from aiohttp import web

from surefoot.errors import ProtocolError
from surefoot.protocol.holder_list import HoldersTold, told_steps
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Assign, HolderChanges, Holders, ToAgent
from surefoot.protocol.wire import encode
from surefoot_operator import metrics
from surefoot_operator.coordinator.desired_messages import Delivered, hears_all, outbox_diff
from surefoot_operator.coordinator.shared_texts import LARGE_CHARACTERS, SharedTexts, between

log = logging.getLogger(__name__)

LARGE_SECONDS = 1.0
"""How long an agent that takes a large text keeps its turn."""


class AgentConnection:
    """One agent's connection, accepted or about to be refused."""

    def __init__(
        self, websocket: web.WebSocketResponse, request: web.Request, queue_limit: int, shared: SharedTexts
    ) -> None:
        self._websocket = websocket
        self._shared = shared
        self._holders: HoldersTold = ()
        """Those that the line was told of, where they are not part of other messages."""
        self._all_listed = False
        """Whether those are all, and the text of what changes is the same for others."""
        self.transport = request.transport
        self._queue: asyncio.Queue[str] = asyncio.Queue(queue_limit)
        self._told: Delivered = {}
        self.version: int | None = None
        self.worker: WorkerId | None = None
        self.host: str | None = None
        """By which name it called this server."""
        self.shard: int | None = None
        """That its job is in; None: it has not said hello."""
        if self.transport is not None:
            raw = self.transport.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def lists_holders(self) -> bool:
        """Whether its version is told of holders by their changes."""
        return self.version is None or self.version >= HolderChanges.SINCE

    @property
    def hears_all(self) -> bool:
        """Whether it is told of every holder, needed or not."""
        return not self.lists_holders or hears_all(self._told)

    def tell(self, wanted: Iterable[ToAgent]) -> None:
        """Queues those of these messages that the agent lacks."""
        messages, self._told = outbox_diff(self._told, wanted)
        for message in messages:
            self.send(message)

    def send(self, message: ToAgent) -> None:
        """Queues one message; a full queue cuts the connection."""
        if isinstance(message, Assign | Holders) and self.lists_holders:
            self._list_holders(message)
            message = replace(message, holders=(), listed=True)
        try:
            self._put(encode(message, self.version))
        except ProtocolError as error:
            log.warning("cannot send to %s: %s", self.worker, error)

    def _list_holders(self, message: Assign | Holders) -> None:
        """Tells of the message's holders ahead of it, by what changes."""
        for before, after in told_steps(self._holders, self._all_listed, message):
            shared = not message.partial and after is message.holders
            text = (self._shared.between if shared else between)(before, after, self.version)
            if text is not None:
                self._put(text)
        self._holders, self._all_listed = message.holders, not message.partial

    def _put(self, text: str) -> None:
        try:
            self._queue.put_nowait(text)
        except asyncio.QueueFull:
            metrics.agents_slow.inc()
            log.warning(
                "%s does not read its messages (%d queued): closing its connection", self.worker, self._queue.maxsize
            )
            self.cut()

    async def pump(self) -> None:
        """Sends queued messages until cancelled or disconnected."""
        try:
            while True:
                await self._write(await self._queue.get())
        except (ConnectionError, RuntimeError):
            self.cut()  # the receiving side sees the end of the line and reports it

    async def _write(self, text: str) -> None:
        """Large texts a few at a time; an agent that takes long for one keeps others waiting for a moment only."""
        if len(text) < LARGE_CHARACTERS:
            await self._websocket.send_str(text)
            return
        async with self._shared.large:
            writing = asyncio.create_task(self._websocket.send_str(text))
            try:
                await asyncio.wait([writing], timeout=LARGE_SECONDS)
            except asyncio.CancelledError:
                writing.cancel()
                raise
        try:
            await writing
        finally:
            writing.cancel()

    async def close_with(self, message: ToAgent, wait_seconds: float) -> None:
        """Sends a last message and closes; cuts after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.send_str(encode(message, self.version))
                await self._websocket.close()
        except (TimeoutError, ConnectionError, RuntimeError):
            self.cut()

    async def close(self, wait_seconds: float) -> None:
        """Closes the WebSocket within `wait_seconds`, else cuts it."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.close(code=1001, message=b"the coordinator is shutting down")
        except (TimeoutError, ConnectionError, RuntimeError):
            self.cut()

    def cut(self) -> None:
        """Breaks the connection now, whatever is still queued."""
        if self.transport is not None:
            self.transport.abort()
