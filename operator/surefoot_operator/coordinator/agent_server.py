"""Serves one WebSocket for each agent.

Touches the network; `agent_channel` and the pure modules below it interpret messages. Built by `controller`. One server
carries all jobs of an operator; while that operator does not lead, agents are told to try again.
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
# Limits connections that have not authenticated yet. Whoever reaches the agents' port can connect to it. Without this,
# one pod with thousands of silent connections shuts all agents out, and one hello of many megabytes costs the operator
# ten times as much memory. AgentServer uses it and reports who was admitted; behind it aiohttp's protocol is unchanged.

_HEAD_BYTES = 16 * 1024
"""Of the HTTP request that opens the WebSocket, beside the hello."""


class ConnectionLimiter:
    """Counts unauthenticated connections and refuses those beyond the limits."""

    def __init__(self, settings: CoordinatorSettings, behind: Callable[[], asyncio.Protocol]) -> None:
        self.settings = settings
        self._behind = behind
        self._unauthenticated: dict[asyncio.BaseTransport, LimitedConnection] = {}
        """In the order in which they came."""
        self._of_peer: Counter[str] = Counter()
        self._shut = False

    def create_protocol(self) -> asyncio.Protocol:
        """Creates the protocol of a new connection."""
        return LimitedConnection(self, self._behind())

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Lifts the limits from a connection whose hello was accepted."""
        door = self._unauthenticated.get(transport) if transport is not None else None
        if door is not None:
            door.admitted = True
            self.connection_closed(door)

    def connection_opened(self, door: LimitedConnection) -> bool:
        """Decides whether a new connection may stay."""
        if self._of_peer[door.peer] >= self.settings.max_unauthenticated_per_address:
            return self._turned_away(door.peer)
        if len(self._unauthenticated) >= self.settings.max_unauthenticated:
            # whoever holds most loses its oldest: an agent has one, and is never that one while others flood
            most = self._of_peer.most_common(1)[0][0]
            if self._of_peer[most] <= self._of_peer[door.peer]:
                return self._turned_away(door.peer)
            oldest = next(d for d in self._unauthenticated.values() if d.peer == most)
            self._turned_away(most)
            oldest.cut()
            self.connection_closed(oldest)
        assert door.transport is not None, "it was just made"
        self._unauthenticated[door.transport] = door
        self._of_peer[door.peer] += 1
        return True

    def connection_closed(self, door: LimitedConnection) -> None:
        """Stops counting a connection that ended or was admitted."""
        if door.transport is not None and self._unauthenticated.pop(door.transport, None) is not None:
            self._of_peer[door.peer] -= 1
            if not self._of_peer[door.peer]:
                del self._of_peer[door.peer]

    def _turned_away(self, peer: str) -> bool:
        metrics.agent_connections_rejected.labels("too-many-connections").inc()
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
        if not self._gate.connection_opened(self):
            self.cut()
            return
        self._passed = True
        # the server itself says a word when a hello is late; a connection that does not even open a WebSocket ends here
        self._late = asyncio.get_running_loop().call_later(
            2 * self._gate.settings.hello_timeout_seconds, self._too_late
        )
        self._behind.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._passed:
            return
        if not self.admitted:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                metrics.agent_connections_rejected.labels("message-too-large").inc()
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
        self._gate.connection_closed(self)
        if self._late is not None:
            self._late.cancel()
        if self._passed:
            self._behind.connection_lost(exc)

    def _too_late(self) -> None:
        if not self.admitted:
            metrics.agent_connections_rejected.labels("timeout").inc()
            self.cut()


# ---- message sizes ---------------------------------------------------------------------------------------------------
# Limits the size of each agent message by its kind. Pure; called before a message is parsed. An agent runs beside a
# user's program, and one operator serves all jobs: one job's messages must not exhaust the others' memory. Only what
# was read of a tier has a reason to be large.

USUAL_CHARACTERS = 64 * 1024
_LARGER = {
    PersistentPage.__name__: bounds.MAX_PAGE_CHARACTERS,
    Heartbeat.__name__: 1024 * 1024,
    TrainerFailure.__name__: 1024 * 1024,
    UnreadableSave.__name__: 1024 * 1024,
}
_TYPE = re.compile(r'\{"v":\d{1,9},"type":"(\w{1,40})"')
"""How every agent of ours begins. What begins otherwise may be right, and is small."""

_HELLO_CHARACTERS = {"job": 128, "incarnation": 128, "node": 253, "token": 32 * 1024, "store": 512}
_MAX_NUMBER = 2**53


def check_size(text: str, is_asked: bool = True) -> None:
    """Raises ProtocolError if a message is too large for its kind, before it is read.

    `is_asked`: whether its agent was asked what a tier has; else no answer of it is large.
    """
    if len(text) <= USUAL_CHARACTERS:
        return
    found = _TYPE.match(text)
    name = found[1] if found is not None else "unknown"
    limit = _LARGER.get(name, USUAL_CHARACTERS)
    if len(text) > limit:
        raise ProtocolError(f"a message ({name}) of {len(text)} characters, more than any valid one has")
    if name == PersistentPage.__name__ and not is_asked:
        raise ProtocolError(f"a message ({name}) of {len(text)} characters without a request")
    # short texts take many times their length in memory; a quote that begins one has no backslash before it
    texts = (text.count('"') - text.count('\\"')) // 2
    if texts > bounds.MAX_PAGE_TEXTS:
        raise ProtocolError(f"a message ({name}) of {texts} texts, more than any valid one has")


def check_hello(hello: Hello) -> None:
    """Raises ProtocolError if a hello's field is out of bounds.

    Its fields are used as keys, stored, and quoted in messages.
    """
    for name, most in _HELLO_CHARACTERS.items():
        text = getattr(hello, name)
        if text is not None and len(text) > most:
            raise ProtocolError(f"Hello.{name} has {len(text)} characters, more than {most}")
    for name in ("index", "attempt", "generation", "stopped"):
        number = getattr(hello, name)
        if not 0 <= number <= _MAX_NUMBER:
            raise ProtocolError(f"Hello.{name} is {short_repr(number)}, which is out of range")


# ---- TLS -------------------------------------------------------------------------------------------------------------
# Makes TLS connections of an event loop take less memory. Called before the server listens. asyncio gives each TLS
# connection a buffer of 256 KiB for what comes in, for as long as it lives: half a gigabyte at two thousand agents,
# whose heartbeats are some hundred bytes.

BUFFER_BYTES = 32 * 1024
"""Two records of TLS. More that comes at once is read in turns."""


def lessen_buffers() -> None:
    """Sets the buffer of each TLS connection opened from now on."""
    sslproto.SSLProtocol.max_size = BUFFER_BYTES


# ---- referrals -------------------------------------------------------------------------------------------------------
# Says where agents of a job are to go. Made by the composition root. Without it an agent whose job is led by another
# replica asks the same one for ever.


def _only_shard(_: str) -> int:
    return 0


def _nowhere(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ShardDirectory:
    """Knows a job's shard, and where its agents connect."""

    shard_of: Callable[[str], int] = _only_shard
    url_of: Callable[[int], str] = _nowhere
    """Empty: wherever they are."""

    def other_address(self, shard: int, host: str | None) -> str:
        """Returns where an agent is to go; empty: it is right here.

        `host`: by which name it called this server.
        """
        url = self.url_of(shard)
        return url if url and urlsplit(url).hostname != host else ""


# ---- agent server ----------------------------------------------------------------------------------------------------

PATH = "/v1/agents"
_FROM_AGENT = get_args(FromAgent)

Authenticator = Callable[[Hello], Awaitable[HelloRejected | None]]
"""Whether the hello's token is that worker's: None if so, else the refusal (`retry` if it could not be found out)."""


def tokens(expected: Callable[[str, int, int], str]) -> Authenticator:
    """Authenticates by each worker's expected token, compared in constant time.

    `expected(job, index, attempt)` gives the token.
    """

    async def authenticate(hello: Hello) -> HelloRejected | None:
        right = expected(hello.job, hello.index, hello.attempt)
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
        referrals: ShardDirectory = ShardDirectory(),
    ) -> None:
        self._settings = settings
        self._referrals = referrals
        self._authenticate = authenticate
        self._tls = tls
        self._jobs: dict[str, AgentChannel] = {}
        self._led: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """Of each shard: set while this operator leads it."""
        self._open: set[AgentConnection] = set()
        self._joined = 0
        """How many of these are agents that were accepted."""
        self._shared = EncodedListCache()
        self._gate: ConnectionLimiter | None = None
        self._listening: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._port: int | None = None

    @property
    def url(self) -> str:
        """Where agents connect."""
        return f"ws{'s' if self._tls else ''}://{self._settings.host}:{self._port}{PATH}"

    @property
    def port(self) -> int:
        assert self._port is not None, "start() has not returned yet"
        return self._port

    def serve(self, job: str, channel: AgentChannel) -> None:
        """Accepts agents of this job from now on."""
        self._jobs[job] = channel

    def remove_channel(self, job: str, channel: AgentChannel) -> None:
        """Disconnects this channel's agents, and refuses the job's from now on.

        A job that another channel serves by now goes on: a runner that ends late must not turn away the agents of the next.
        """
        if self._jobs.get(job) is channel:
            del self._jobs[job]
        for line in channel.connections:
            line.disconnect_now()

    def set_leading(self, leading: bool, shard: int = 0) -> None:
        """Sets whether this operator leads a shard.

        One that stops leading disconnects the shard's agents: they must not follow its messages any more.
        """
        if leading:
            self._led[shard].set()
        else:
            self._led[shard].clear()
            for line in tuple(self._open):
                if line.shard == shard:
                    line.disconnect_now()

    async def start(self) -> None:
        """Listens. Raises OSError if the port is taken."""
        if self._tls:
            lessen_buffers()
        app = web.Application()
        app.router.add_get(PATH, self._agent)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=self._settings.close_seconds)
        await self._runner.setup()
        behind = self._runner.server
        assert behind is not None, "setup() makes it"
        self._gate = ConnectionLimiter(self._settings, behind)
        self._listening = await asyncio.get_running_loop().create_server(
            self._gate.create_protocol,
            self._settings.host,
            self._settings.port,
            reuse_address=True,  # an operator that was killed comes back to the port that its agents know
            ssl=self._tls,
            ssl_handshake_timeout=self._settings.hello_timeout_seconds if self._tls else None,
        )
        self._port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Closes every connection and stops listening, within a second or so.

        Agents continue and look for another coordinator.
        """
        for led in self._led.values():
            led.clear()
        await asyncio.gather(*(line.close(self._settings.close_seconds) for line in tuple(self._open)))
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        websocket = web.WebSocketResponse(
            timeout=self._settings.close_seconds,
            max_msg_size=self._settings.message_bytes,
            compress=False,
        )
        await websocket.prepare(request)
        line = AgentConnection(websocket, request, self._settings.send_queue, self._shared)
        line.host = request.url.host
        self._open.add(line)
        try:
            await self._converse(websocket, line)
        finally:
            self._open.discard(line)
        return websocket

    async def _converse(self, websocket: web.WebSocketResponse, line: AgentConnection) -> None:
        admitted = await self._check_hello(websocket, line)
        if isinstance(admitted, HelloRejected):
            await line.close_with(admitted, self._settings.close_seconds)
            return
        hello, channel = admitted
        assert self._gate is not None, "it listens"
        self._gate.admit(line.transport)
        pump = asyncio.create_task(line.run_sender(), name=f"to worker {hello.index}")
        self._joined += 1
        try:
            channel.join(hello, line)
            await self._listen(websocket, line, channel)
        finally:
            self._joined -= 1
            channel.connection_ended(line)
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def _check_hello(
        self, websocket: web.WebSocketResponse, line: AgentConnection
    ) -> tuple[Hello, AgentChannel] | HelloRejected:
        """Reads and judges the hello. What is refused is counted by kind and logged with its sentence."""
        try:
            async with asyncio.timeout(self._settings.hello_timeout_seconds):
                hello = await self._hello(websocket)
                line.shard = shard = self._referrals.shard_of(hello.job)
                elsewhere = "" if self._led[shard].is_set() else self._referrals.other_address(shard, line.host)
                if elsewhere:
                    text = f"the job is in shard {shard}, whose leader is at {elsewhere}"
                    return _rejected("other-shard", HelloRejected(text, retry=True, address=elsewhere))
                if not await self._leads_soon(shard):
                    return _rejected("not-leading", HelloRejected("this operator does not lead: ask again", retry=True))
                channel = self._jobs.get(hello.job)
                if channel is None:
                    text = f"job {hello.job} is not served here ({len(self._jobs)} others are)"
                    return _rejected("foreign-job", HelloRejected(text, retry=self._settings.foreign_retry))
                bad = await self._authenticate(hello)
                if bad is not None:
                    if bad.retry:
                        channel.record_retry_later()
                    return _rejected("token", bad)
        except TimeoutError:
            text = f"no hello, or no answer about its token, within {self._settings.hello_timeout_seconds:g} s"
            return _rejected("timeout", HelloRejected(text, retry=True))
        except ProtocolError as error:
            return _rejected("protocol", HelloRejected(str(error), retry=False))
        if self._jobs.get(hello.job) is not channel:
            # while its token was looked at: nobody would ever answer it there
            return _rejected("foreign-job", HelloRejected(f"job {hello.job} was handed over: ask again", retry=True))
        bad = channel.rejection(hello)
        if bad is not None:
            if bad.retry:
                channel.record_retry_later()
            return _rejected("worker", bad)
        if self._joined >= self._settings.lines:
            text = (
                f"{self._joined} agents are connected, no more are accepted: raise `lines` in the operator's settings"
            )
            return _rejected("too-many-agents", HelloRejected(text, retry=True))
        return hello, channel

    async def _leads_soon(self, shard: int) -> bool:
        """Whether this operator leads the shard, or does within moments.

        A new leader's agents are there when it begins, instead of finding it one after another.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lead_seconds):
                await self._led[shard].wait()
        return self._led[shard].is_set()

    async def _hello(self, websocket: web.WebSocketResponse) -> Hello:
        frame = await websocket.receive()
        if frame.type is not WSMsgType.TEXT:
            raise ProtocolError(f"the first frame is {frame.type.name}, not a hello")
        if len(frame.data) > self._settings.hello_bytes:
            raise ProtocolError(f"the first message has {len(frame.data)} characters: a hello is never that long")
        message = decode(frame.data)
        if not isinstance(message, Hello):
            raise ProtocolError(f"the first message is {type(message).__name__}, not Hello")
        check_hello(message)
        return message

    @staticmethod
    async def _listen(websocket: web.WebSocketResponse, line: AgentConnection, channel: AgentChannel) -> None:
        """Hears messages until the line ends. One that cannot be read ends it: the agent comes back and says all anew."""
        try:
            async for frame in websocket:
                if frame.type is WSMsgType.TEXT:
                    check_size(frame.data, len(frame.data) <= USUAL_CHARACTERS or channel.awaits_answer(line))
                message = decode(frame.data) if frame.type is WSMsgType.TEXT else None
                if not isinstance(message, _FROM_AGENT) or isinstance(message, Hello):
                    raise ProtocolError(
                        f"{frame.type.name} frame with {type(message).__name__}: agents send no such message here"
                    )
                channel.handle_message(line, message)
        except ProtocolError as error:
            metrics.agents_disconnected_invalid.inc()
            log.warning("closing the connection of %s: %s", line.worker, error)
            await websocket.close(code=1002, message=str(error).encode()[:120])


def _rejected(kind: str, refusal: HelloRejected) -> HelloRejected:
    metrics.agent_connections_rejected.labels(kind).inc()
    log.info("refused an agent: %s", refusal.reason)
    return refusal
