"""Keeps one WebSocket to the coordinator open while the training goes on.

Every connection begins with a Hello; nothing else is sent before the Welcome. What the connection cannot carry is
dropped: facts are sent again after every Welcome, and whoever asked for something asks again. Runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from surefoot import metrics
from surefoot.errors import ConfigurationError, ProtocolError, SurefootError
from surefoot.protocol.memory_server_list import MemoryServerList
from surefoot.protocol.messages import FromAgent, Heartbeat, Hello, HelloRejected, Notice, ToAgent, Welcome
from surefoot.protocol.timeouts import Backoff
from surefoot.protocol.wire import decode, encode
from surefoot.settings import AgentSettings
from surefoot.task_set import wait_for_first

_log = logging.getLogger(__name__)


# ---- addresses -------------------------------------------------------------------------------------------------------
# Chooses which address the coordinator is looked for at. Pure. Jobs move among replicas of the operator when the number
# of its shards changes, while an agent keeps the address that its pod was made with.

PATIENCE = 12
"""Failures in a row at one address, until another one is tried: some seconds, in which a new leader begins there."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddresses:
    """Where the agent looks now, and where it began."""

    own: tuple[str, ...]
    """From its environment, the first one first."""
    now: str
    failures: int = 0
    """In a row at `now`."""


def first_address(first: str, fallback: str = "") -> CoordinatorAddresses:
    """Begins at the first address."""
    return CoordinatorAddresses(tuple(dict.fromkeys(url for url in (first, fallback) if url)), first)


def follow_referral(known: CoordinatorAddresses, address: str) -> CoordinatorAddresses:
    """Follows a refusal that names another address.

    One without TLS is not followed from one with it: the token would travel in clear.
    """
    if urlsplit(address).scheme != urlsplit(known.now).scheme or not urlsplit(address).hostname:
        return with_failure(known)
    return replace(known, now=address, failures=0)


def with_failure(known: CoordinatorAddresses) -> CoordinatorAddresses:
    """Counts a failure.

    After many in a row the agent's own addresses are tried in turn.
    """
    if known.failures + 1 < PATIENCE:
        return replace(known, failures=known.failures + 1)
    after = known.own.index(known.now) + 1 if known.now in known.own else 0
    return replace(known, now=known.own[after % len(known.own)], failures=0)


def with_welcome(known: CoordinatorAddresses) -> CoordinatorAddresses:
    """Stays where it was let in."""
    return replace(known, failures=0)


# ---- coordinator client ----------------------------------------------------------------------------------------------

UNANSWERED = Backoff(0.05, 0.5)
"""A leader that has just begun is found within half a second."""
ANSWERED = Backoff(0.05, 6.5)
"""Where somebody answers each try costs a handshake, and thousands of agents may ask at once."""
_MAX_ASKED_SECONDS = 10.0
_CONNECT_SECONDS = 0.5
"""A pod that went with its node answers nothing; the next try may reach its successor."""
_OPEN_SECONDS = 5.0
_PING_SECONDS = 10.0
_TCP_USER_TIMEOUT_MILLISECONDS = 3000
"""Data that the other machine's kernel does not acknowledge for so long ends the line: that node is gone."""
_NAME_SECONDS = 60
"""How long a resolved address is used: a name server may have died together with the leader."""
_QUEUE = 1024
_MESSAGE_BYTES = 64 << 20
_NOTICES = 100
_REASONS = 10


class AgentRejected(SurefootError):
    """The coordinator refused this agent for good."""


class CoordinatorClient:
    """Builds hello and heartbeats by callback; `hear` gets every message."""

    def __init__(
        self,
        addresses: CoordinatorAddresses,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        hear: Callable[[ToAgent], None],
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._addresses = addresses
        self._trust: ssl.SSLContext | bool = True if trust is None else trust
        self._hello, self._heartbeat, self._on_message = hello, heartbeat, hear
        self._heartbeat_seconds = 0.5
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[FromAgent] | None = None
        self._last_message_seconds = time.monotonic()
        self._logged: set[str] = set()
        self._after = 0.0
        """When it was asked to come again, by the last refusal."""
        self._referred = ""
        """Where to, by the last refusal."""
        self._notices: collections.deque[Notice] = collections.deque(maxlen=_NOTICES)

    def away_seconds(self) -> float:
        """Seconds without a connection to the coordinator; 0 while connected."""
        return 0.0 if self._outbox is not None else time.monotonic() - self._last_message_seconds

    def send(self, message: FromAgent) -> None:
        """Queues a message; while nobody listens only notices are kept."""
        if self._outbox is None:
            if isinstance(message, Notice):
                self._notices.append(message)
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            metrics.fallbacks.labels(kind="coordinator_slow").inc()
            self._outbox = None  # the pump sees it and the line is opened anew

    def send_heartbeat(self) -> None:
        """A heartbeat now."""
        self._changed.set()

    async def run(self) -> None:
        """Keeps connected until cancelled; TurnedAway on a final refusal."""
        failures = 0
        timeout = aiohttp.ClientTimeout(total=None, connect=_OPEN_SECONDS, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(ttl_dns_cache=_NAME_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                welcomed, answered, began = False, True, time.monotonic()
                self._after, self._referred = 0.0, ""
                try:
                    welcomed = await self._converse(session)
                except AgentRejected:
                    raise
                except (aiohttp.ClientConnectorError, TimeoutError) as error:
                    answered = False
                    self._log_outage(str(error) or type(error).__name__)
                except (aiohttp.ClientError, OSError, SurefootError) as error:
                    self._log_outage(str(error) or type(error).__name__)
                finally:
                    if self._outbox is not None:
                        welcomed = True
                        self._last_message_seconds = time.monotonic()
                    self._outbox = None
                failures = 0 if welcomed else failures + 1
                self._addresses = self._next_addresses(welcomed)
                wait = (ANSWERED if answered else UNANSWERED).seconds(failures, random.random())
                if answered and not welcomed:
                    wait = max(UNANSWERED.first_seconds, wait - (time.monotonic() - began))  # it was kept waiting there
                # what was asked for is waited at least in part: a server that names a time names it to all
                asked = min(self._after, _MAX_ASKED_SECONDS) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(wait, asked))

    def _next_addresses(self, welcomed: bool) -> CoordinatorAddresses:
        if self._referred:
            return follow_referral(self._addresses, self._referred)
        return with_welcome(self._addresses) if welcomed else with_failure(self._addresses)

    def _log_outage(self, why: str) -> None:
        """Logs each reason once per outage, a few of them: it may last for hours, at some tries a second."""
        if why not in self._logged and len(self._logged) < _REASONS:
            self._logged.add(why)
            _log.info("no line to the coordinator at %s: %s; training goes on, trying again", self._addresses.now, why)

    async def _converse(self, session: aiohttp.ClientSession) -> bool:
        """One connection, from hello to its end; whether it was welcomed."""
        async with asyncio.timeout(_OPEN_SECONDS):
            websocket = await session.ws_connect(
                self._addresses.now,
                heartbeat=_PING_SECONDS,
                max_msg_size=_MESSAGE_BYTES,
                ssl=self._trust,
            )
        async with websocket:
            raw = websocket.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MILLISECONDS)
            async with asyncio.timeout(_OPEN_SECONDS):
                await websocket.send_str(encode(self._hello()))
                first = await self._next(websocket)
            if first is None:
                return False
            if isinstance(first, HelloRejected):
                return self._rejected(first)
            if not isinstance(first, Welcome):
                raise ProtocolError(f"the coordinator began with {type(first).__name__}, not Welcome")
            self._heartbeat_seconds = first.heartbeat_seconds
            self._logged.clear()
            outbox: asyncio.Queue[FromAgent] = asyncio.Queue(_QUEUE)
            self._outbox = outbox
            while self._notices:
                outbox.put_nowait(self._notices.popleft())
            self._on_message(first)
            await self._talk(websocket, outbox)
            return True

    async def _talk(self, websocket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[FromAgent]) -> None:
        tasks = [
            asyncio.create_task(self._listen(websocket)),
            asyncio.create_task(self._pump(websocket, outbox)),
            asyncio.create_task(self._beats(websocket)),
        ]
        await wait_for_first(tasks)

    async def _listen(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        holders = MemoryServerList()
        while (told := await self._next(websocket)) is not None:
            if isinstance(told, HelloRejected):
                self._rejected(told)
                return
            message = holders.apply_message(told)
            if message is not None:
                self._on_message(message)

    async def _pump(self, websocket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[FromAgent]) -> None:
        while self._outbox is outbox:
            await websocket.send_str(encode(await outbox.get()))

    async def _beats(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            self._changed.clear()
            await websocket.send_str(encode(self._heartbeat()))
            try:
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_seconds)
            except TimeoutError:
                pass  # nothing changed: the next regular one

    @staticmethod
    async def _next(websocket: aiohttp.ClientWebSocketResponse) -> ToAgent | None:
        frame = await websocket.receive()
        if frame.type is aiohttp.WSMsgType.TEXT:
            message = decode(frame.data)
            if not isinstance(message, ToAgent):
                raise ProtocolError(f"a coordinator does not say {type(message).__name__}")
            return message
        if frame.type is aiohttp.WSMsgType.BINARY:
            raise ProtocolError("a binary frame: this is no surefoot coordinator")
        return None

    def _rejected(self, refusal: HelloRejected) -> bool:
        if not refusal.retry:
            raise AgentRejected(f"the coordinator refused this agent for good: {refusal.reason}")
        self._after, self._referred = refusal.after_seconds, refusal.address
        self._log_outage(f"it asks to try again: {refusal.reason}")
        return False


# ---- credentials -----------------------------------------------------------------------------------------------------
# Reads the agent's token and the certificate authority that verifies the coordinator. A kubelet renews the token's file
# while the pod lives, so it is read at each connection and never kept. Built by the agent process from its settings;
# the client asks for both.

_TOKEN_BYTES = 1 << 16


class TokenUnavailable(SurefootError):
    """The token's file cannot be read now; a later try may succeed."""


def read_token(settings: AgentSettings) -> str:
    """Reads the token: from its file if there is one, else fixed."""
    if not settings.token_file:
        return settings.token
    try:
        with Path(settings.token_file).open("rb") as file:
            found = file.read(_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenUnavailable(
            f"the token cannot be read from {settings.token_file} (SUREFOOT_TOKEN_FILE): {error}; "
            "is the projected service-account token mounted there, and readable by this user?"
        ) from error
    if not found:
        raise TokenUnavailable(
            f"{settings.token_file} (SUREFOOT_TOKEN_FILE) is empty: no token was projected into it yet"
        )
    return found


def tls_context(settings: AgentSettings) -> ssl.SSLContext | None:
    """Trusts the given authority alone, names checked; None: the system's authorities."""
    if not settings.coordinator_ca:
        return None
    if not settings.coordinator_url.startswith("wss://"):
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is set, but SUREFOOT_COORDINATOR_URL is {settings.coordinator_url!r}: only wss:// "
            "is verified, and a token never goes out in clear; correct the URL, or leave the authority out"
        )
    try:
        # with an authority given, none of the system's is loaded; names are checked
        return ssl.create_default_context(cadata=settings.coordinator_ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is not a certificate in PEM form: {error}; it is the text of ca.crt in the "
            "operator's TLS secret"
        ) from error
