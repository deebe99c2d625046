"""An agent as the coordinator sees one: a real WebSocket client that says what a test tells it to."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import aiohttp

from support.machine_speed import scaled
from surefoot.protocol.memory_server_list import MemoryServerList
from surefoot.protocol.messages import FromAgent, Hello, Message, ToAgent
from surefoot.protocol.wire import decode, encode

log = logging.getLogger(__name__)

M = TypeVar("M")
DEADLINE_SECONDS = scaled(120.0)


class FakeAgent:
    """One connection. `said` is everything heard so far, in order; waits have a deadline."""

    def __init__(self, url: str, hello: Hello | None, address: str | None = None) -> None:
        """`address`: which of this machine's it comes from."""
        self.url, self.hello, self.address = url, hello, address
        self.said: list[ToAgent] = []
        self.closed = asyncio.Event()
        self._news = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self._reader: asyncio.Task[None] | None = None
        self.socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> FakeAgent:
        local = (self.address, 0) if self.address is not None else None
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=local))
        try:
            self.socket = await self._session.ws_connect(
                self.url, max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=0.5)
            )
            self._reader = asyncio.create_task(self._read())
            if self.hello is not None:
                await self.say(self.hello)
        except BaseException:
            await self.leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def say(self, message: FromAgent) -> None:
        assert self.socket is not None
        await self.socket.send_str(encode(message))

    async def say_text(self, text: str) -> None:
        assert self.socket is not None
        await self.socket.send_str(text)

    async def heard(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind, so far or to come."""

        def found() -> M | None:
            return next((m for m in self.said if isinstance(m, kind) and where(m)), None)

        async with asyncio.timeout(DEADLINE_SECONDS), self._news:
            await self._news.wait_for(lambda: found() is not None)
        result = found()
        assert result is not None
        return result

    async def ended(self) -> None:
        """Waits until the other side has closed the line."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.closed.wait()

    def cut(self) -> None:
        """Breaks the line as a killed process would."""
        assert self.socket is not None
        assert self.socket._response.connection is not None
        transport = self.socket._response.connection.transport
        assert transport is not None
        transport.abort()

    async def leave(self) -> None:
        try:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
            if self.socket is not None:
                await self.socket.close()
        finally:
            if self._session is not None:
                await self._session.close()

    async def _read(self) -> None:
        assert self.socket is not None
        holders = MemoryServerList()
        try:
            async for frame in self.socket:
                message: Message | None = holders.apply_message(decode(frame.data))  # type: ignore[arg-type]
                if message is None:
                    continue
                async with self._news:
                    self.said.append(message)  # type: ignore[arg-type]  # the coordinator says nothing else
                    self._news.notify_all()
        except Exception:
            log.exception("%s could not read what it was sent", self.hello)  # as an agent, it begins a new line
        finally:
            self.closed.set()


def hello(index: int = 0, attempt: int = 1, **other: object) -> Hello:
    """A hello of a warm agent that runs nothing; `other` replaces fields."""
    fields: dict[str, object] = {
        "job": "job-1",
        "index": index,
        "attempt": attempt,
        "incarnation": f"i{index}-{attempt}",
        "node": f"node-{index}",
        "token": f"token-{index}-{attempt}",
        "generation": 0,
        "stopped": 0,
        "is_warm": True,
    }
    return Hello(**{**fields, **other})  # type: ignore[arg-type]  # tests name real fields


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition that no event announces; fails with its name after the deadline."""
    limit = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"never came about: {what}; meanwhile\n{_everybody()}")
        await asyncio.sleep(0.005)


def _everybody() -> str:
    """What each task and each thread of this process is at: whoever waits for nothing is among them."""
    text = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda t: t.get_name()):
        task.print_stack(limit=4, file=text)
    for ident, frame in sys._current_frames().items():
        text.write(f"thread {ident}\n{''.join(traceback.format_stack(frame, limit=4))}")
    return text.getvalue()
