"""Reads the indexes of many holders at once, on one event loop.

Used by `catalogue`. A thread for each holder spends more on taking turns than on reading, and a rank that restores from
hundreds of holders stands meanwhile. A holder that is silent takes its own time limit, and delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.errors import TierError
from surefoot.memory_server.async_connection import HolderLine
from surefoot.memory_server.connection import Credentials, explained
from surefoot.memory_server.fenced_calls import Entries, FencedCalls, HolderIndex
from surefoot.protocol.identities import Checkpoint, HolderEndpoint

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Holders that are asked at a time: each one's time limit runs while this process shakes hands with all of them, and
hundreds of TLS handshakes on a busy machine take longer than that."""


@dataclass(frozen=True, slots=True)
class IndexedHolder:
    """Names one job's index on one holder, and the reader's account."""

    endpoint: HolderEndpoint
    job: str
    account: Credentials
    call_seconds: float

    async def index(self, only: Checkpoint | None, known: Entries) -> HolderIndex:
        """Connects, reads and closes; raises a TierError."""
        endpoint = self.endpoint
        near = self.account.socket_to(endpoint.server_id)
        line = HolderLine(endpoint.host, endpoint.port, self.account, self.call_seconds, endpoint.tls, near)
        try:
            with explained(str(endpoint.holder), "connecting"):
                await line.open()
            return await line.converse(FencedCalls(endpoint, self.job).index(only, known))
        finally:
            line.close()


def read_together(holders: Sequence[IndexedHolder], only: Checkpoint | None) -> list[HolderIndex | None]:
    """Reads each holder's index; None where one is silent.

    Blocks; for a thread that runs no event loop. `only`: reads this checkpoint alone.
    """
    return asyncio.run(_read_all(holders, only)) if holders else []


async def _read_all(holders: Sequence[IndexedHolder], only: Checkpoint | None) -> list[HolderIndex | None]:
    turns, known = asyncio.Semaphore(AT_ONCE), Entries()

    async def read(holder: IndexedHolder) -> HolderIndex | None:
        async with turns:
            try:
                return await holder.index(only, known)
            except TierError as silent:
                log.warning("memory:%s is silent: %s", holder.endpoint.server_id, silent)
                return None

    return list(await asyncio.gather(*map(read, holders)))
