"""Limits connections that have not authenticated yet.

Whoever reaches the agents' port can connect to it. Without this, one pod with thousands of silent connections shuts all
agents out, and one hello of many megabytes costs the operator ten times as much memory. Used by `agent_server`, which
reports who was admitted; behind it aiohttp's protocol is unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from surefoot_operator import metrics
from surefoot_operator.settings import CoordinatorSettings

log = logging.getLogger(__name__)

_HEAD_BYTES = 16 * 1024
"""Of the HTTP request that opens the WebSocket, beside the hello."""


class ConnectionLimiter:
    """Counts unauthenticated connections and refuses those beyond the limits."""

    def __init__(self, settings: CoordinatorSettings, behind: Callable[[], asyncio.Protocol]) -> None:
        self.settings = settings
        self._behind = behind
        self._strangers: dict[asyncio.BaseTransport, LimitedConnection] = {}
        """In the order in which they came."""
        self._of_peer: Counter[str] = Counter()
        self._shut = False

    def door(self) -> asyncio.Protocol:
        """Creates the protocol of a new connection."""
        return LimitedConnection(self, self._behind())

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Lifts the limits from a connection whose hello was accepted."""
        door = self._strangers.get(transport) if transport is not None else None
        if door is not None:
            door.admitted = True
            self.left(door)

    def came(self, door: LimitedConnection) -> bool:
        """Decides whether a new connection may stay."""
        if self._of_peer[door.peer] >= self.settings.strangers_of_a_peer:
            return self._turned_away(door.peer)
        if len(self._strangers) >= self.settings.strangers:
            # whoever holds most loses its oldest: an agent has one, and is never that one while others flood
            most = self._of_peer.most_common(1)[0][0]
            if self._of_peer[most] <= self._of_peer[door.peer]:
                return self._turned_away(door.peer)
            oldest = next(d for d in self._strangers.values() if d.peer == most)
            self._turned_away(most)
            oldest.cut()
            self.left(oldest)
        assert door.transport is not None, "it was just made"
        self._strangers[door.transport] = door
        self._of_peer[door.peer] += 1
        return True

    def left(self, door: LimitedConnection) -> None:
        """Stops counting a connection that ended or was admitted."""
        if door.transport is not None and self._strangers.pop(door.transport, None) is not None:
            self._of_peer[door.peer] -= 1
            if not self._of_peer[door.peer]:
                del self._of_peer[door.peer]

    def _turned_away(self, peer: str) -> bool:
        metrics.agents_refused.labels("crowd").inc()
        if not self._shut:
            self._shut = True  # a flood must not become a flood of lines
            log.warning("%s opened too many unauthenticated connections: refusing more", peer)
        return False


class LimitedConnection(asyncio.Protocol):
    """Passes one connection's data on until it exceeds a limit."""

    def __init__(self, gate: ConnectionLimiter, behind: asyncio.Protocol) -> None:
        self._gate, self._behind = gate, behind
        self._left_bytes = gate.settings.hello_bytes + _HEAD_BYTES
        self._late: asyncio.TimerHandle | None = None
        self._passed = False
        self.admitted = False
        self.transport: asyncio.Transport | None = None
        self.peer = ""

    def cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        self.transport = transport
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) and name else ""
        if not self._gate.came(self):
            self.cut()
            return
        self._passed = True
        # the server itself says a word when a hello is late; a connection that does not even open a WebSocket ends here
        self._late = asyncio.get_running_loop().call_later(2 * self._gate.settings.hello_seconds, self._too_late)
        self._behind.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._passed:
            return
        if not self.admitted:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                metrics.agents_refused.labels("size").inc()
                self.cut()
                return
        self._behind.data_received(data)

    def eof_received(self) -> bool | None:
        return self._behind.eof_received() if self._passed else None

    def pause_writing(self) -> None:
        if self._passed:
            self._behind.pause_writing()

    def resume_writing(self) -> None:
        if self._passed:
            self._behind.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.left(self)
        if self._late is not None:
            self._late.cancel()
        if self._passed:
            self._behind.connection_lost(exc)

    def _too_late(self) -> None:
        if not self.admitted:
            metrics.agents_refused.labels("timeout").inc()
            self.cut()
