"""Keeps one pipelined connection to a holder in an event loop.

Used by the operator for all jobs, and by whoever restores, who asks every holder at once. Many commands are under way, and
replies come in their order. A server that says nothing for the limit of a call fails them all: nobody waits for it in a
thread, so it delays no other holder.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import hiredis
import redis

from surefoot.memory_server import connection
from surefoot.memory_server.connection import TLS_NAME, Command, Credentials, Dialogue, Reply, tls_context
from surefoot.protocol.bounds import MAX_REPLY_BYTES, MAX_REPLY_SECONDS

T = TypeVar("T")

CONFIRMED_SECONDS = 0.05
"""How long behind its limit a silence is looked at again: the loop itself may have been busy, with the reply at its door."""

MAX_UNDER_WAY = 20_000
"""Commands without a reply on one line: more than all jobs of a cluster ask of one holder at once."""


class AsyncServerConnection:
    """Connects to one server; may be opened again.

    Arguments as of `connection.Wire`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        call_seconds: float,
        tls: bool = False,
        socket_path: str = "",
    ) -> None:
        self._where = host, port
        self._credentials = credentials
        self._call_seconds = call_seconds
        self._tls = tls
        self._socket_path = socket_path
        self._protocol: _ReplyReader | None = None
        self.asked = 0
        """Commands sent since it was made."""

    @property
    def is_open(self) -> bool:
        return self._protocol is not None and self._protocol.error is None

    async def open(self) -> None:
        """Connects and authenticates within the call's limit.

        Raises:
            OSError, redis.exceptions.RedisError: it does not answer, or refuses the account.
        """
        async with asyncio.timeout(self._call_seconds):
            self._protocol = await self._connected()
        user, password = self._credentials.user, self._credentials.password
        if password:
            try:
                await self.exchange(("AUTH", user, password) if user else ("AUTH", password))
            except BaseException:
                self.close()
                raise

    async def run_exchange(self, dialogue: Dialogue[T]) -> T:
        """Carries a dialogue to its end.

        Raises what the dialogue makes of an error.
        """
        try:
            asked = next(dialogue)
            while True:
                try:
                    reply = await self.exchange(asked)
                except Exception as error:  # noqa: BLE001  what an error means the dialogue says
                    asked = dialogue.throw(error)
                else:
                    asked = dialogue.send(reply)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            dialogue.close()

    async def exchange(self, asked: Reply) -> Any:
        """Sends and awaits one command, or several together; see `Asked`."""
        if self._protocol is None:
            raise redis.exceptions.ConnectionError("no connection is open")
        if not asked:
            await asyncio.sleep(0)
            return []
        if isinstance(asked, list):
            futures = [self._send(command) for command in asked]
            return [_value(reply) for reply in await asyncio.gather(*futures, return_exceptions=True)]
        return await self._send(asked)

    def close(self, error: Exception | None = None) -> None:
        """Closes the connection; whoever waits for a reply is told."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.fail(error or redis.exceptions.ConnectionError("the connection was closed"))

    async def _connected(self) -> _ReplyReader:
        """By the server's socket on this node, else by TCP."""
        loop, why = asyncio.get_running_loop(), ""
        if self._socket_path:
            try:
                near = connection.connect_socket(self._socket_path, self._call_seconds)
            except OSError as error:
                why = error.strerror or str(error)
            else:
                near.setblocking(False)
                return (await loop.create_unix_connection(self._replies, sock=near))[1]
        (host, port), trusted = self._where, self._trusted()
        name = TLS_NAME if trusted is not None else None
        _, found = await loop.create_connection(self._replies, host, port, ssl=trusted, server_hostname=name)
        if why:
            connection.count_fallback(self._socket_path, why)  # only now: a server that is gone has no second-best way
        return found

    def _replies(self) -> _ReplyReader:
        return _ReplyReader(self._call_seconds)

    def _trusted(self) -> ssl.SSLContext | None:
        if not self._tls:
            return None
        if not self._credentials.tls_ca:
            raise redis.exceptions.ConnectionError("it speaks TLS, and no authority was given to verify it by")
        return tls_context(self._credentials.tls_ca)

    def _send(self, command: Command) -> asyncio.Future[Any]:
        assert self._protocol is not None, "looked at by `exchange`"
        self.asked += 1
        return self._protocol.send(hiredis.pack_command((*command[0].split(), *command[1:])))


class _ReplyReader(asyncio.Protocol):
    """Matches replies to commands by their order."""

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        parse: Callable[[str], Exception] = redis.connection.DefaultParser.parse_error
        self._reader = hiredis.Reader(replyError=parse, protocolError=redis.exceptions.InvalidResponse)
        self._transport: asyncio.Transport | None = None
        self._last_data_seconds = self._since = 0.0
        self._unread = 0
        """Bytes of the reply that is coming in."""
        self._timer: asyncio.TimerHandle | None = None
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        if self.error is not None:
            raise redis.exceptions.ConnectionError(str(self.error)) from self.error
        if len(self._waiting) >= MAX_UNDER_WAY:
            raise redis.exceptions.ConnectionError(f"{MAX_UNDER_WAY} commands have no reply yet")
        assert self._transport is not None, "made by the loop before anybody has it"
        future: asyncio.Future[Any] = self._loop.create_future()
        if not self._waiting:
            self._last_data_seconds = self._since = self._loop.time()
            self._unread = 0
            self._watch()
        self._waiting.append(future)
        self._transport.write(packed)
        return future

    def data_received(self, data: bytes) -> None:
        self._last_data_seconds = self._loop.time()
        self._unread += len(data)
        if self._unread > MAX_REPLY_BYTES or not self._waiting:
            self.fail(
                redis.exceptions.InvalidResponse(f"{self._unread} bytes arrived without a request, or in one reply")
            )
            return
        self._reader.feed(data)
        try:
            while self._waiting and (reply := self._reader.gets()) is not False:
                self._answer(self._waiting.popleft(), reply)
                self._since, self._unread = self._last_data_seconds, 0
        except redis.exceptions.InvalidResponse as error:
            self.fail(redis.exceptions.InvalidResponse(f"no reply of a Redis: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(redis.exceptions.ConnectionError(str(error) if error is not None else "it closed the connection"))

    def fail(self, error: Exception) -> None:
        """Ends the connection; every command without a reply fails by this."""
        if self.error is None:
            self.error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # looked at: whoever waited may be gone

    @staticmethod
    def _answer(future: asyncio.Future[Any], reply: Any) -> None:
        if future.done():
            return  # nobody waits for it any more
        if isinstance(reply, Exception):
            future.set_exception(reply)
            future.exception()
        else:
            future.set_result(reply)

    def _watch(self) -> None:
        """One timer a line: silence counts from what was heard last."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._last_data_seconds + self._call_seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        if self._loop.time() > self._since + MAX_REPLY_SECONDS:
            self.fail(redis.exceptions.TimeoutError(f"one reply took more than {MAX_REPLY_SECONDS:g} s"))
        elif self._loop.time() < self._last_data_seconds + self._call_seconds:
            self._watch()
        else:
            self._timer = self._loop.call_later(CONFIRMED_SECONDS, self._confirm, self._last_data_seconds)

    def _confirm(self, heard: float) -> None:
        """What had come while the loop was busy was read before this."""
        self._timer = None
        if not self._waiting:
            return
        if self._last_data_seconds == heard:
            self.fail(redis.exceptions.TimeoutError(f"nothing for {self._call_seconds:g} s"))
        else:
            self._watch()


def _value(reply: Any) -> Any:
    """An error of the server's is a reply; one of the connection ends the exchange."""
    if isinstance(reply, BaseException) and (not isinstance(reply, redis.exceptions.ResponseError)):
        raise reply
    return reply
