"""Implements one pipelined connection to a memory server in an event loop.

The operator uses it for all jobs, and a restore uses it to ask all servers at once. Many commands may be outstanding;
replies come in the order of the commands. If a server sends nothing for a call's time limit, all outstanding commands
fail. No thread waits for it, so it delays no other server.
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
from surefoot.memory_server.connection import TLS_SERVER_NAME, Command, Credentials, Dialogue, Request, tls_context
from surefoot.protocol.bounds import MAX_REPLY_BYTES, MAX_REPLY_SECONDS

T = TypeVar("T")

TIMEOUT_CONFIRMATION_SECONDS = 0.05
"""Wait between a timeout and its confirmation: if the event loop was busy, the reply may already have arrived."""

MAX_OUTSTANDING_COMMANDS = 20_000
"""Outstanding commands of one connection: more than all jobs of a cluster send to one server at once."""


class AsyncServerConnection:
    """Connects to one server; may be opened again after it was closed.

    The arguments are those of `connection.RespConnection`.
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
        self._address = host, port
        self._credentials = credentials
        self._call_seconds = call_seconds
        self._tls = tls
        self._socket_path = socket_path
        self._protocol: _ReplyReader | None = None
        self.sent_commands = 0
        """Number of commands sent since the object was made."""

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._protocol is not None and self._protocol.error is None

    async def open(self) -> None:
        """Connects and authenticates within the time limit of a call.

        Raises:
            OSError, redis.exceptions.RedisError: The server does not answer, or rejects the account.
        """
        async with asyncio.timeout(self._call_seconds):
            self._protocol = await self._connect()
        user, password = self._credentials.user, self._credentials.password
        if password:
            try:
                await self.exchange(("AUTH", user, password) if user else ("AUTH", password))
            except BaseException:
                self.close()
                raise

    async def run_dialogue(self, dialogue: Dialogue[T]) -> T:
        """Runs a dialogue to its end, and returns its result; raises the error that the dialogue raises."""
        try:
            request = next(dialogue)
            while True:
                try:
                    reply = await self.exchange(request)
                except Exception as error:  # noqa: BLE001  the dialogue decides about the meaning of an error
                    request = dialogue.throw(error)
                else:
                    request = dialogue.send(reply)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            dialogue.close()

    async def exchange(self, request: Request) -> Any:
        """Sends one command, or several together, and returns the reply or replies; see `connection.Reply`."""
        if self._protocol is None:
            raise redis.exceptions.ConnectionError("no connection is open")
        # an empty request only yields to other tasks
        if not request:
            await asyncio.sleep(0)
            return []
        if isinstance(request, list):
            futures = [self._send_command(command) for command in request]
            return [_raise_connection_error(reply) for reply in await asyncio.gather(*futures, return_exceptions=True)]
        return await self._send_command(request)

    def close(self, error: Exception | None = None) -> None:
        """Closes the connection; outstanding commands fail with `error`."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.fail(error or redis.exceptions.ConnectionError("the connection was closed"))

    async def _connect(self) -> _ReplyReader:
        """Connects by the server's Unix socket if it is on this node, else by TCP."""
        loop, socket_error = asyncio.get_running_loop(), ""
        if self._socket_path:
            try:
                unix_socket = connection.connect_socket(self._socket_path, self._call_seconds)
            except OSError as error:
                socket_error = error.strerror or str(error)
            else:
                unix_socket.setblocking(False)
                return (await loop.create_unix_connection(self._make_protocol, sock=unix_socket))[1]
        (host, port), tls = self._address, self._tls_context()
        name = TLS_SERVER_NAME if tls is not None else None
        _, protocol = await loop.create_connection(self._make_protocol, host, port, ssl=tls, server_hostname=name)
        if socket_error:
            connection.count_fallback(
                self._socket_path, socket_error
            )  # not before: if TCP fails too, the server is just gone
        return protocol

    def _make_protocol(self) -> _ReplyReader:
        """Makes the protocol object of a new connection."""
        return _ReplyReader(self._call_seconds)

    def _tls_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context that verifies the server; None without TLS."""
        if not self._tls:
            return None
        if not self._credentials.tls_ca:
            raise redis.exceptions.ConnectionError(
                "the server requires TLS, but no certificate authority is configured to verify it"
            )
        return tls_context(self._credentials.tls_ca)

    def _send_command(self, command: Command) -> asyncio.Future[Any]:
        """Packs and sends one command."""
        assert self._protocol is not None, "checked by `exchange`"
        self.sent_commands += 1
        return self._protocol.send(hiredis.pack_command((*command[0].split(), *command[1:])))


class _ReplyReader(asyncio.Protocol):
    """Matches replies to commands by their order."""

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._loop = asyncio.get_running_loop()
        self._outstanding: deque[asyncio.Future[Any]] = deque()
        parse: Callable[[str], Exception] = redis.connection.DefaultParser.parse_error
        self._reader = hiredis.Reader(replyError=parse, protocolError=redis.exceptions.InvalidResponse)
        self._transport: asyncio.Transport | None = None
        self._last_data_seconds = self._reply_start_seconds = 0.0
        self._unread = 0
        """Received bytes of the reply that is not yet complete."""
        self._timer: asyncio.TimerHandle | None = None
        self.error: Exception | None = None
        """Why the connection ended; None while it is open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        """Sends a packed command; the future gets its reply."""
        if self.error is not None:
            raise redis.exceptions.ConnectionError(str(self.error)) from self.error
        if len(self._outstanding) >= MAX_OUTSTANDING_COMMANDS:
            raise redis.exceptions.ConnectionError(f"{MAX_OUTSTANDING_COMMANDS} commands to it have no reply yet")
        assert self._transport is not None, "the loop sets it before it returns the connection"
        future: asyncio.Future[Any] = self._loop.create_future()
        # the time limit counts from the first command after an idle time
        if not self._outstanding:
            self._last_data_seconds = self._reply_start_seconds = self._loop.time()
            self._unread = 0
            self._start_timer()
        self._outstanding.append(future)
        self._transport.write(packed)
        return future

    def data_received(self, data: bytes) -> None:
        """Assigns complete replies to the oldest commands; ends the connection if the data is no reply."""
        self._last_data_seconds = self._loop.time()
        self._unread += len(data)
        # a faulty server could otherwise fill this process' memory, or answer the next command with old data
        if self._unread > MAX_REPLY_BYTES or not self._outstanding:
            self.fail(
                redis.exceptions.InvalidResponse(f"{self._unread} bytes arrived without a command, or as one reply")
            )
            return
        self._reader.feed(data)
        try:
            while self._outstanding and (reply := self._reader.gets()) is not False:
                self._deliver_reply(self._outstanding.popleft(), reply)
                self._reply_start_seconds, self._unread = self._last_data_seconds, 0
        except redis.exceptions.InvalidResponse as error:
            self.fail(redis.exceptions.InvalidResponse(f"received data that is no reply of Redis: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the outstanding commands after the server closed the connection."""
        self.fail(redis.exceptions.ConnectionError(str(error) if error is not None else "it closed the connection"))

    def fail(self, error: Exception) -> None:
        """Ends the connection; every outstanding command fails with this error."""
        if self.error is None:
            self.error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        while self._outstanding:
            future = self._outstanding.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the waiting task may have been cancelled

    @staticmethod
    def _deliver_reply(future: asyncio.Future[Any], reply: Any) -> None:
        """Gives a reply to its command; an error reply is raised where the command was sent."""
        if future.done():
            return  # the waiting task was cancelled
        if isinstance(reply, Exception):
            future.set_exception(reply)
            future.exception()
        else:
            future.set_result(reply)

    def _start_timer(self) -> None:
        """Starts the connection's timer, which ends at the time limit after the last received data."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._last_data_seconds + self._call_seconds, self._check_silence)

    def _check_silence(self) -> None:
        """Checks for silence, and for a reply that takes too long."""
        self._timer = None
        if not self._outstanding:
            return
        if self._loop.time() > self._reply_start_seconds + MAX_REPLY_SECONDS:
            self.fail(redis.exceptions.TimeoutError(f"one reply took more than {MAX_REPLY_SECONDS:g} s"))
        elif self._loop.time() < self._last_data_seconds + self._call_seconds:
            self._start_timer()
        else:
            self._timer = self._loop.call_later(
                TIMEOUT_CONFIRMATION_SECONDS, self._confirm_silence, self._last_data_seconds
            )

    def _confirm_silence(self, last_data_seconds: float) -> None:
        """Fails the connection if no data came since the timeout; the loop has read whatever had arrived by then."""
        self._timer = None
        if not self._outstanding:
            return
        if self._last_data_seconds == last_data_seconds:
            self.fail(redis.exceptions.TimeoutError(f"it sent nothing for {self._call_seconds:g} s"))
        else:
            self._start_timer()


def _raise_connection_error(reply: Any) -> Any:
    """Returns a reply, which may be an error of the server; raises an error of the connection."""
    if isinstance(reply, BaseException) and (not isinstance(reply, redis.exceptions.ResponseError)):
        raise reply
    return reply
