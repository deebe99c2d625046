"""Serves one WebSocket for each agent of all jobs of this operator.

Handles the network, the limits and the authentication; `agent_channel` and the pure modules below it interpret the
messages. Built by `controller`. While this operator does not lead a job's shard, the job's agents are rejected with
"retry" or with the address of the operator that does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import ssl
from asyncio import sslproto
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlsplit

from aiohttp import WSMsgType, web

from surefoot.errors import ProtocolError
from surefoot.protocol import bounds
from surefoot.protocol.messages import (
    FromAgent,
    Heartbeat,
    Hello,
    HelloRejected,
    PersistentPage,
    TrainerFailure,
    UnreadableSave,
)
from surefoot.protocol.text import short_repr
from surefoot.protocol.wire import decode
from surefoot_operator import metrics
from surefoot_operator.coordinator.agent_channel import AgentChannel, AgentConnection, EncodedListCache
from surefoot_operator.settings import CoordinatorSettings

log = logging.getLogger(__name__)


# ---- connection limits -----------------------------------------------------------------------------------------------
# Limits connections that have not authenticated yet. Any pod that reaches the agents' port can connect to it. Without
# these limits, one pod with thousands of silent connections would lock all agents out, and one hello of many megabytes
# would cost the operator ten times as much memory. AgentServer reports which connections were admitted; the limiter
# passes the data of the others on to aiohttp's unchanged protocol.

_MAX_HEAD_BYTES = 16 * 1024
"""Size limit of the HTTP request that opens the WebSocket; the hello has a limit of its own."""


class ConnectionLimiter:
    """Counts unauthenticated connections and rejects those beyond the limits."""

    def __init__(self, settings: CoordinatorSettings, create_inner: Callable[[], asyncio.Protocol]) -> None:
        self.settings = settings
        self._create_inner = create_inner
        self._unauthenticated: dict[asyncio.BaseTransport, LimitedConnection] = {}
        """The unauthenticated connections by their transport, oldest first."""
        self._count_by_peer: Counter[str] = Counter()
        """Number of unauthenticated connections of each peer address."""
        self._rejection_logged = False
        """Whether a rejection was logged already; later ones are only counted."""

    def create_protocol(self) -> asyncio.Protocol:
        """Creates the protocol of a new connection."""
        return LimitedConnection(self, self._create_inner())

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Removes the limits from a connection whose hello was accepted."""
        connection = self._unauthenticated.get(transport) if transport is not None else None
        if connection is not None:
            connection.is_admitted = True
            self.stop_counting(connection)

    def admit_unauthenticated(self, connection: LimitedConnection) -> bool:
        """Decides whether a new connection may stay."""
        if self._count_by_peer[connection.peer] >= self.settings.max_unauthenticated_per_address:
            return self._reject_connection(connection.peer)
        if len(self._unauthenticated) >= self.settings.max_unauthenticated:
            # the address with most connections loses its oldest: an agent has one, so a flood never displaces it
            busiest_peer = self._count_by_peer.most_common(1)[0][0]
            if self._count_by_peer[busiest_peer] <= self._count_by_peer[connection.peer]:
                return self._reject_connection(connection.peer)
            oldest = next(d for d in self._unauthenticated.values() if d.peer == busiest_peer)
            self._reject_connection(busiest_peer)
            oldest.disconnect_now()
            self.stop_counting(oldest)
        assert connection.transport is not None, "it was just made"
        self._unauthenticated[connection.transport] = connection
        self._count_by_peer[connection.peer] += 1
        return True

    def stop_counting(self, connection: LimitedConnection) -> None:
        """Stops counting a connection that ended or was admitted."""
        if connection.transport is not None and self._unauthenticated.pop(connection.transport, None) is not None:
            self._count_by_peer[connection.peer] -= 1
            if not self._count_by_peer[connection.peer]:
                del self._count_by_peer[connection.peer]

    def _reject_connection(self, peer: str) -> bool:
        metrics.agent_connections_rejected.labels("too-many-connections").inc()
        if not self._rejection_logged:
            self._rejection_logged = True  # a flood of connections must not become a flood of log lines
            log.warning(
                "rejecting connections from %s, which has too many that sent no valid hello; further rejections are"
                " only counted in the metric of rejected connections",
                peer,
            )
        return False


class LimitedConnection(asyncio.Protocol):
    """Passes one connection's data on to the wrapped protocol until it exceeds a limit."""

    def __init__(self, limiter: ConnectionLimiter, inner: asyncio.Protocol) -> None:
        self._limiter, self._inner = limiter, inner
        self._allowed_bytes = limiter.settings.max_hello_bytes + _MAX_HEAD_BYTES
        self._hello_timer: asyncio.TimerHandle | None = None
        self._is_passed_on = False
        self.is_admitted = False
        self.transport: asyncio.Transport | None = None
        self.peer = ""

    def disconnect_now(self) -> None:
        """Breaks the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        self.transport = transport
        peer_name = transport.get_extra_info("peername")
        self.peer = str(peer_name[0]) if isinstance(peer_name, tuple) and peer_name else ""
        if not self._limiter.admit_unauthenticated(self):
            self.disconnect_now()
            return
        self._is_passed_on = True
        # AgentServer answers a late hello itself; this timer ends connections that do not even open a WebSocket
        self._hello_timer = asyncio.get_running_loop().call_later(
            2 * self._limiter.settings.hello_timeout_seconds, self._on_hello_timeout
        )
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_passed_on:
            return
        if not self.is_admitted:
            self._allowed_bytes -= len(data)
            if self._allowed_bytes < 0:
                metrics.agent_connections_rejected.labels("message-too-large").inc()
                self.disconnect_now()
                return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_passed_on else None

    def pause_writing(self) -> None:
        if self._is_passed_on:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._is_passed_on:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.stop_counting(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._is_passed_on:
            self._inner.connection_lost(exc)

    def _on_hello_timeout(self) -> None:
        if not self.is_admitted:
            metrics.agent_connections_rejected.labels("timeout").inc()
            self.disconnect_now()


# ---- message sizes ---------------------------------------------------------------------------------------------------
# Limits the size of each agent message by its kind, before it is parsed. Pure. An agent shares its pod with a user's
# program, and one operator serves all jobs: one job's messages must not use up the memory for the others. Only a page
# of a listing has a reason to be large.

MAX_USUAL_CHARACTERS = 64 * 1024
"""Size limit of messages that are not in `_CHARACTER_LIMITS`."""
_CHARACTER_LIMITS = {
    PersistentPage.__name__: bounds.MAX_PAGE_CHARACTERS,
    Heartbeat.__name__: 1024 * 1024,
    TrainerFailure.__name__: 1024 * 1024,
    UnreadableSave.__name__: 1024 * 1024,
}
_TYPE = re.compile(r'\{"v":\d{1,9},"type":"(\w{1,40})"')
"""The beginning of every large message that an agent sends. A message that begins otherwise has the usual limit."""

# the fields of a hello are used as keys, stored, and quoted in messages
_MAX_HELLO_CHARACTERS = {"job": 128, "incarnation": 128, "node": 253, "token": 32 * 1024, "store": 512}
_MAX_NUMBER = 2**53


def check_size(text: str, listing_requested: bool = True) -> None:
    """Raises ProtocolError if a message is too large for its kind.

    Args:
        text: The message before it is parsed.
        is_asked: Whether a listing was requested from its agent; otherwise a large page is an error.
    """
    if len(text) <= MAX_USUAL_CHARACTERS:
        return
    match = _TYPE.match(text)
    kind = match[1] if match is not None else "unknown"
    limit = _CHARACTER_LIMITS.get(kind, MAX_USUAL_CHARACTERS)
    if len(text) > limit:
        raise ProtocolError(f"a message ({kind}) has {len(text)} characters, more than any valid one ({limit})")
    if kind == PersistentPage.__name__ and not listing_requested:
        raise ProtocolError(f"a message ({kind}) of {len(text)} characters was sent without a request")
    # parsed, short strings take many times their length; a quote that begins or ends one has no backslash before it
    string_count = (text.count('"') - text.count('\\"')) // 2
    if string_count > bounds.MAX_PAGE_TEXTS:
        raise ProtocolError(
            f"a message ({kind}) has {string_count} strings, more than any valid one ({bounds.MAX_PAGE_TEXTS})"
        )


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError if a field of a hello is too long or out of range."""
    for name, max_characters in _MAX_HELLO_CHARACTERS.items():
        text = getattr(hello, name)
        if text is not None and len(text) > max_characters:
            raise ProtocolError(f"Hello.{name} has {len(text)} characters; at most {max_characters} are allowed")
    for name in ("index", "attempt", "generation", "stopped"):
        number = getattr(hello, name)
        if not 0 <= number <= _MAX_NUMBER:
            raise ProtocolError(f"Hello.{name} is {short_repr(number)}; it must be between 0 and {_MAX_NUMBER}")


# ---- TLS -------------------------------------------------------------------------------------------------------------
# Reduces the memory of TLS connections. asyncio gives each one a receive buffer of 256 KiB for its whole life: half a
# gigabyte for two thousand agents, whose heartbeats have a few hundred bytes.

TLS_BUFFER_BYTES = 32 * 1024
"""Receive buffer of one TLS connection: two TLS records. Longer messages are read in several turns."""


def shrink_tls_buffers() -> None:
    """Sets the receive buffer of all TLS connections that asyncio opens from now on to `TLS_BUFFER_BYTES`."""
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


# ---- redirects -------------------------------------------------------------------------------------------------------
# Finds the operator replica that leads an agent's job. Without it, an agent whose job is led by another replica would
# ask the same one forever.


def _single_shard(_: str) -> int:
    return 0


def _no_url(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ShardDirectory:
    """Finds a job's shard, and the URL at which the shard's leader serves agents."""

    shard_of: Callable[[str], int] = _single_shard
    """Returns the number of a job's shard."""
    url_of: Callable[[int], str] = _no_url
    """Returns the URL of a shard's leader; empty: it is not known, so agents stay where they are."""

    def find_redirect_url(self, shard: int, host: str | None) -> str:
        """Returns the URL to which an agent must be redirected; empty: it called the right server.

        Args:
            shard: The shard of the agent's job.
            host: Host name in the URL that the agent connected to; None: the request had none.
        """
        url = self.url_of(shard)
        return url if url and urlsplit(url).hostname != host else ""


# ---- agent server ----------------------------------------------------------------------------------------------------

AGENTS_PATH = "/v1/agents"
_FROM_AGENT = get_args(FromAgent)

Authenticator = Callable[[Hello], Awaitable[HelloRejected | None]]
"""Checks a hello's token. Returns None if it is valid, else the rejection (with `retry` if it could not be checked)."""


def create_token_authenticator(expected_token: Callable[[str, int, int], str]) -> Authenticator:
    """Returns an authenticator that compares a hello's token with the expected one in constant time.

    `expected(job, index, attempt)` returns the token of that worker.
    """

    async def authenticate(hello: Hello) -> HelloRejected | None:
        right = expected_token(hello.job, hello.index, hello.attempt)
        if hmac.compare_digest(hello.token.encode(), right.encode()):
            return None
        return HelloRejected(f"the token is not that of worker {hello.index} (attempt {hello.attempt})", retry=False)

    return authenticate


class AgentServer:
    """Listens for agents and hands them to their job's channel."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        authenticate: Authenticator,
        tls: ssl.SSLContext | None = None,
        shard_directory: ShardDirectory = ShardDirectory(),
    ) -> None:
        self._settings = settings
        self._shard_directory = shard_directory
        self._authenticate = authenticate
        self._tls = tls
        self._channels: dict[str, AgentChannel] = {}
        self._leading_events: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """An event for each shard; set while this operator leads the shard."""
        self._open_connections: set[AgentConnection] = set()
        """All open WebSockets, whether their hello is accepted or not."""
        self._accepted_count = 0
        """Number of open connections whose hello was accepted."""
        self._list_cache = EncodedListCache()
        self._limiter: ConnectionLimiter | None = None
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._port: int | None = None

    @property
    def url(self) -> str:
        """URL at which agents connect, with the port that is in use."""
        return f"ws{'s' if self._tls else ''}://{self._settings.host}:{self._port}{AGENTS_PATH}"

    @property
    def port(self) -> int:
        """Port at which the server listens; only after `start`."""
        assert self._port is not None, "start() has not returned yet"
        return self._port

    def add_channel(self, job: str, channel: AgentChannel) -> None:
        """Accepts agents of this job from now on."""
        self._channels[job] = channel

    def remove_channel(self, job: str, channel: AgentChannel) -> None:
        """Disconnects this channel's agents, and rejects the job's agents from now on.

        If another channel serves the job by now, its agents are not affected: a runner that ends late must not reject
        the agents of its successor.
        """
        if self._channels.get(job) is channel:
            del self._channels[job]
        for connection in channel.connections:
            connection.disconnect_now()

    def set_leading(self, is_leading: bool, shard: int = 0) -> None:
        """Sets whether this operator leads a shard.

        An operator that stops leading disconnects the shard's agents, so that they follow only the next leader.
        """
        if is_leading:
            self._leading_events[shard].set()
        else:
            self._leading_events[shard].clear()
            for connection in tuple(self._open_connections):
                if connection.shard == shard:
                    connection.disconnect_now()

    async def start(self) -> None:
        """Starts to listen. Raises OSError if the port is in use."""
        if self._tls:
            shrink_tls_buffers()
        app = web.Application()
        app.router.add_get(AGENTS_PATH, self._handle_request)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._settings.close_timeout_seconds)
        await self._runner.setup()
        http_server = self._runner.server
        assert http_server is not None, "setup() makes it"
        self._limiter = ConnectionLimiter(self._settings, http_server)
        self._listener = await asyncio.get_running_loop().create_server(
            self._limiter.create_protocol,
            self._settings.host,
            self._settings.port,
            reuse_address=True,  # a restarted operator must get the port that its agents know
            ssl=self._tls,
            ssl_handshake_timeout=self._settings.hello_timeout_seconds if self._tls else None,
        )
        self._port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Closes every connection and stops listening, within about a second.

        Agents keep training and connect to the next coordinator.
        """
        for leading_event in self._leading_events.values():
            leading_event.clear()
        await asyncio.gather(
            *(connection.close(self._settings.close_timeout_seconds) for connection in tuple(self._open_connections))
        )
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle_request(self, request: web.Request) -> web.StreamResponse:
        websocket = web.WebSocketResponse(
            timeout=self._settings.close_timeout_seconds,
            max_msg_size=self._settings.max_message_bytes,
            compress=False,
        )
        await websocket.prepare(request)
        connection = AgentConnection(websocket, request, self._settings.max_queued_messages, self._list_cache)
        connection.requested_host = request.url.host
        self._open_connections.add(connection)
        try:
            await self._serve_agent(websocket, connection)
        finally:
            self._open_connections.discard(connection)
        return websocket

    async def _serve_agent(self, websocket: web.WebSocketResponse, connection: AgentConnection) -> None:
        outcome = await self._check_hello(websocket, connection)
        if isinstance(outcome, HelloRejected):
            await connection.close_with(outcome, self._settings.close_timeout_seconds)
            return
        hello, channel = outcome
        assert self._limiter is not None, "it listens"
        self._limiter.admit(connection.transport)
        sender = asyncio.create_task(connection.run_sender(), name=f"to worker {hello.index}")
        self._accepted_count += 1
        try:
            channel.accept_agent(hello, connection)
            await self._receive_messages(websocket, connection, channel)
        finally:
            self._accepted_count -= 1
            channel.on_connection_closed(connection)
            sender.cancel()
            with suppress(asyncio.CancelledError):
                await sender

    async def _check_hello(
        self, websocket: web.WebSocketResponse, connection: AgentConnection
    ) -> tuple[Hello, AgentChannel] | HelloRejected:
        """Receives and checks the hello; counts and logs a rejection.

        Returns:
            The hello and the channel of its job, or the rejection to send.
        """
        try:
            async with asyncio.timeout(self._settings.hello_timeout_seconds):
                hello = await self._receive_hello(websocket)
                connection.shard = shard = self._shard_directory.shard_of(hello.job)
                redirect_url = (
                    ""
                    if self._leading_events[shard].is_set()
                    else self._shard_directory.find_redirect_url(shard, connection.requested_host)
                )
                if redirect_url:
                    text = f"the job is in shard {shard}, whose leader is at {redirect_url}"
                    return _log_rejection("other-shard", HelloRejected(text, retry=True, address=redirect_url))
                if not await self._wait_until_leading(shard):
                    text = f"this operator does not lead shard {shard}, which has this job: retry"
                    return _log_rejection("not-leading", HelloRejected(text, retry=True))
                channel = self._channels.get(hello.job)
                if channel is None:
                    text = f"this operator does not serve job {hello.job} (it serves {len(self._channels)} others)"
                    return _log_rejection("foreign-job", HelloRejected(text, retry=self._settings.retry_unknown_jobs))
                hello_rejection = await self._authenticate(hello)
                if hello_rejection is not None:
                    if hello_rejection.retry:
                        channel.record_retry_later()
                    return _log_rejection("token", hello_rejection)
        except TimeoutError:
            text = (
                f"no hello was received, or its token could not be checked, within "
                f"{self._settings.hello_timeout_seconds:g} s"
            )
            return _log_rejection("timeout", HelloRejected(text, retry=True))
        except ProtocolError as error:
            return _log_rejection("protocol", HelloRejected(str(error), retry=False))
        if self._channels.get(hello.job) is not channel:
            # the channel was replaced while the token was checked, and would never send this agent a message
            text = f"job {hello.job} was handed over to another leader: retry"
            return _log_rejection("foreign-job", HelloRejected(text, retry=True))
        hello_rejection = channel.hello_rejection(hello)
        if hello_rejection is not None:
            if hello_rejection.retry:
                channel.record_retry_later()
            return _log_rejection("worker", hello_rejection)
        if self._accepted_count >= self._settings.max_agents:
            text = (
                f"{self._accepted_count} agents are connected, which is the limit: raise `max_agents` in the operator's"
                " settings"
            )
            return _log_rejection("too-many-agents", HelloRejected(text, retry=True))
        return hello, channel

    async def _wait_until_leading(self, shard: int) -> bool:
        """Waits up to `lead_seconds` until this operator leads the shard; returns whether it does.

        Agents that arrive just before it becomes the leader are thus accepted at once, instead of retrying one by one.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lead_wait_seconds):
                await self._leading_events[shard].wait()
        return self._leading_events[shard].is_set()

    async def _receive_hello(self, websocket: web.WebSocketResponse) -> Hello:
        """Receives and parses the hello; raises ProtocolError if the first message is not a valid one."""
        frame = await websocket.receive()
        if frame.type is not WSMsgType.TEXT:
            raise ProtocolError(f"the first frame is {frame.type.name}, not a hello (TEXT)")
        if len(frame.data) > self._settings.max_hello_bytes:
            raise ProtocolError(
                f"the first message has {len(frame.data)} characters; a hello has at most {self._settings.max_hello_bytes}"
            )
        message = decode(frame.data)
        if not isinstance(message, Hello):
            raise ProtocolError(f"the first message is {type(message).__name__}, not Hello")
        check_hello(message)
        return message

    @staticmethod
    async def _receive_messages(
        websocket: web.WebSocketResponse, connection: AgentConnection, channel: AgentChannel
    ) -> None:
        """Receives messages until the connection ends.

        Closes it at an invalid message: the agent reconnects and reports everything again.
        """
        try:
            async for frame in websocket:
                if frame.type is WSMsgType.TEXT:
                    check_size(
                        frame.data, len(frame.data) <= MAX_USUAL_CHARACTERS or channel.awaits_listing(connection)
                    )
                message = decode(frame.data) if frame.type is WSMsgType.TEXT else None
                if not isinstance(message, _FROM_AGENT) or isinstance(message, Hello):
                    raise ProtocolError(
                        f"a {frame.type.name} frame with {type(message).__name__} is not a message of an agent"
                    )
                channel.handle_message(connection, message)
        except ProtocolError as error:
            metrics.agents_disconnected_invalid.inc()
            log.warning("closing the connection of %s, which sent an invalid message: %s", connection.worker, error)
            await websocket.close(code=1002, message=str(error).encode()[:120])


def _log_rejection(kind: str, rejection: HelloRejected) -> HelloRejected:
    metrics.agent_connections_rejected.labels(kind).inc()
    log.info("rejected an agent's hello (%s): %s", kind, rejection.reason)
    return rejection
