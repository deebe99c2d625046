"""Serves one WebSocket for each agent.

Touches the network; `agent_channel` and the pure modules below it interpret messages. Built by `controller`. One server
carries all jobs of an operator; while that operator does not lead, agents are told to try again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import get_args

from aiohttp import WSMsgType, web

from surefoot.errors import ProtocolError
from surefoot.protocol.messages import FromAgent, Hello, Refused
from surefoot.protocol.wire import OLDEST, SUBPROTOCOLS, decode, decode_versioned, version_of
from surefoot_operator import metrics
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_connection import AgentConnection
from surefoot_operator.coordinator.connection_limits import ConnectionLimiter
from surefoot_operator.coordinator.message_sizes import USUAL_CHARACTERS, check_hello, check_size
from surefoot_operator.coordinator.referrals import Referrals
from surefoot_operator.coordinator.shared_texts import SharedTexts
from surefoot_operator.coordinator.tls_lines import lessen_buffers
from surefoot_operator.settings import CoordinatorSettings

log = logging.getLogger(__name__)

PATH = "/v1/agents"
_FROM_AGENT = get_args(FromAgent)

Authenticator = Callable[[Hello], Awaitable[Refused | None]]
"""Whether the hello's token is that worker's: None if so, else the refusal (`retry` if it could not be found out)."""


def tokens(expected: Callable[[str, int, int], str]) -> Authenticator:
    """Authenticates by each worker's expected token, compared in constant time.

    `expected(job, index, attempt)` gives the token.
    """

    async def authenticate(hello: Hello) -> Refused | None:
        right = expected(hello.job, hello.index, hello.attempt)
        if hmac.compare_digest(hello.token.encode(), right.encode()):
            return None
        return Refused(f"the token is not that of worker {hello.index} (attempt {hello.attempt})", retry=False)

    return authenticate


class AgentServer:
    """Listens for agents and hands them to their job's channel."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        authenticate: Authenticator,
        tls: ssl.SSLContext | None = None,
        referrals: Referrals = Referrals(),  # noqa: B008  frozen
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
        self._shared = SharedTexts()
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

    def forget(self, job: str, channel: AgentChannel) -> None:
        """Disconnects this channel's agents, and refuses the job's from now on.

        A job that another channel serves by now goes on: a runner that ends late must not turn away the agents of the next.
        """
        if self._jobs.get(job) is channel:
            del self._jobs[job]
        for line in channel.lines:
            line.cut()

    def lead(self, leading: bool, shard: int = 0) -> None:
        """Sets whether this operator leads a shard.

        One that stops leading disconnects the shard's agents: they must not follow its messages any more.
        """
        if leading:
            self._led[shard].set()
        else:
            self._led[shard].clear()
            for line in tuple(self._open):
                if line.shard == shard:
                    line.cut()

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
            self._gate.door,
            self._settings.host,
            self._settings.port,
            reuse_address=True,  # an operator that was killed comes back to the port that its agents know
            ssl=self._tls,
            ssl_handshake_timeout=self._settings.hello_seconds if self._tls else None,
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
            protocols=SUBPROTOCOLS,
            max_msg_size=self._settings.message_bytes,
            compress=False,
        )
        await websocket.prepare(request)
        line = AgentConnection(websocket, request, self._settings.send_queue, self._shared)
        line.version, line.host = version_of(websocket.ws_protocol), request.url.host
        self._open.add(line)
        try:
            await self._converse(websocket, line)
        finally:
            self._open.discard(line)
        return websocket

    async def _converse(self, websocket: web.WebSocketResponse, line: AgentConnection) -> None:
        admitted = await self._admitted(websocket, line)
        if isinstance(admitted, Refused):
            await line.close_with(admitted, self._settings.close_seconds)
            return
        hello, channel = admitted
        assert self._gate is not None, "it listens"
        self._gate.admit(line.transport)
        pump = asyncio.create_task(line.pump(), name=f"to worker {hello.index}")
        self._joined += 1
        try:
            channel.join(hello, line)
            await self._listen(websocket, line, channel)
        finally:
            self._joined -= 1
            channel.leave(line)
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def _admitted(
        self, websocket: web.WebSocketResponse, line: AgentConnection
    ) -> tuple[Hello, AgentChannel] | Refused:
        """Reads and judges the hello. What is refused is counted by kind and logged with its sentence."""
        try:
            async with asyncio.timeout(self._settings.hello_seconds):
                hello = await self._hello(websocket, line)
                line.shard = shard = self._referrals.shard_of(hello.job)
                elsewhere = "" if self._led[shard].is_set() else self._referrals.elsewhere(shard, line.host)
                if elsewhere:
                    text = f"the job is in shard {shard}, whose leader is at {elsewhere}"
                    return _refused("elsewhere", Refused(text, retry=True, address=elsewhere))
                if not await self._leads_soon(shard):
                    return _refused("not-leading", Refused("this operator does not lead: ask again", retry=True))
                channel = self._jobs.get(hello.job)
                if channel is None:
                    text = f"job {hello.job} is not served here ({len(self._jobs)} others are)"
                    return _refused("foreign-job", Refused(text, retry=self._settings.foreign_retry))
                bad = await self._authenticate(hello)
                if bad is not None:
                    if bad.retry:
                        channel.turn_away()
                    return _refused("token", bad)
        except TimeoutError:
            text = f"no hello, or no answer about its token, within {self._settings.hello_seconds:g} s"
            return _refused("timeout", Refused(text, retry=True))
        except ProtocolError as error:
            if line.version is None:
                line.version = OLDEST  # whoever speaks none of ours is likeliest to read the oldest
            return _refused("protocol", Refused(str(error), retry=False))
        if self._jobs.get(hello.job) is not channel:
            # while its token was looked at: nobody would ever answer it there
            return _refused("foreign-job", Refused(f"job {hello.job} was handed over: ask again", retry=True))
        bad = channel.refusal(hello)
        if bad is not None:
            if bad.retry:
                channel.turn_away()
            return _refused("worker", bad)
        if self._joined >= self._settings.lines:
            text = (
                f"{self._joined} agents are connected, no more are accepted: raise `lines` in the operator's settings"
            )
            return _refused("full", Refused(text, retry=True))
        return hello, channel

    async def _leads_soon(self, shard: int) -> bool:
        """Whether this operator leads the shard, or does within moments.

        A new leader's agents are there when it begins, instead of finding it one after another.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lead_seconds):
                await self._led[shard].wait()
        return self._led[shard].is_set()

    async def _hello(self, websocket: web.WebSocketResponse, line: AgentConnection) -> Hello:
        frame = await websocket.receive()
        if frame.type is not WSMsgType.TEXT:
            raise ProtocolError(f"the first frame is {frame.type.name}, not a hello")
        if len(frame.data) > self._settings.hello_bytes:
            raise ProtocolError(f"the first message has {len(frame.data)} characters: a hello is never that long")
        message, version = decode_versioned(frame.data)
        if line.version is None:
            line.version = version
        if version != line.version:
            raise ProtocolError(f"the hello speaks version {version}, the line was opened for {line.version}")
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
                channel.hear(line, message)
        except ProtocolError as error:
            metrics.agents_garbled.inc()
            log.warning("closing the connection of %s: %s", line.worker, error)
            await websocket.close(code=1002, message=str(error).encode()[:120])


def _refused(kind: str, refusal: Refused) -> Refused:
    metrics.agents_refused.labels(kind).inc()
    log.info("refused an agent: %s", refusal.reason)
    return refusal
