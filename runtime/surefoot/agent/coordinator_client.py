"""Keeps one WebSocket to the coordinator open; the training continues while there is none.

Every connection starts with a Hello; nothing else is sent before the Welcome. Messages that a connection cannot carry
are dropped: facts are sent again after every Welcome, and the coordinator repeats its requests. Runs on the agent's loop.
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
# Chooses the address at which to connect to the coordinator. Pure. Jobs move among the operator's replicas when the
# number of shards changes, while an agent's environment keeps the address that its pod was created with.

MAX_FAILURES_PER_ADDRESS = 12
"""Consecutive failures at one address before another is tried: some seconds, in which a new leader may start there."""


@dataclass(frozen=True, slots=True)
class CoordinatorAddresses:
    """Records the coordinator's current address and those in the agent's environment."""

    configured_urls: tuple[str, ...]
    """URLs from the agent's environment, in the order in which they are tried."""
    current_url: str
    """URL of the next connection."""
    failures: int = 0
    """Number of consecutive failures at the current URL."""


def first_address(first: str, fallback: str = "") -> CoordinatorAddresses:
    """Returns the addresses with `first` as the current one; `fallback` is tried after it if not empty."""
    return CoordinatorAddresses(tuple(dict.fromkeys(url for url in (first, fallback) if url)), first)


def follow_referral(addresses: CoordinatorAddresses, address: str) -> CoordinatorAddresses:
    """Switches to the address that a rejection named; counts a failure if it has another scheme or no host.

    From wss:// an agent never follows to ws://, which would send the token in clear text.
    """
    if urlsplit(address).scheme != urlsplit(addresses.current_url).scheme or not urlsplit(address).hostname:
        return with_failure(addresses)
    return replace(addresses, current_url=address, failures=0)


def with_failure(addresses: CoordinatorAddresses) -> CoordinatorAddresses:
    """Counts a failure; after PATIENCE in a row, switches to the next address of the agent's environment."""
    if addresses.failures + 1 < MAX_FAILURES_PER_ADDRESS:
        return replace(addresses, failures=addresses.failures + 1)
    next_index = (
        addresses.configured_urls.index(addresses.current_url) + 1
        if addresses.current_url in addresses.configured_urls
        else 0
    )
    return replace(
        addresses, current_url=addresses.configured_urls[next_index % len(addresses.configured_urls)], failures=0
    )


def with_welcome(addresses: CoordinatorAddresses) -> CoordinatorAddresses:
    """Resets the failures at an address whose coordinator sent a Welcome."""
    return replace(addresses, failures=0)


# ---- coordinator client ----------------------------------------------------------------------------------------------

UNREACHABLE_BACKOFF = Backoff(0.05, 0.5)
"""Backoff while no server accepts connections: a leader that has just started is found within half a second."""
REJECTED_BACKOFF = Backoff(0.05, 6.5)
"""Backoff while a server answers but sends no Welcome: each attempt costs a handshake, and thousands may connect."""
_MAX_REQUESTED_SECONDS = 10.0
"""Longest wait that a rejection can request."""
_CONNECT_SECONDS = 0.5
"""Timeout of one TCP connect: a pod on a lost node answers nothing, and the next attempt may reach its successor."""
_OPEN_SECONDS = 5.0
_PING_SECONDS = 10.0
_TCP_USER_TIMEOUT_MILLISECONDS = 3000
"""Time after which unacknowledged data ends the connection: the other node is gone."""
_DNS_CACHE_SECONDS = 60
"""How long a resolved address is cached: a name server may have failed together with the leader."""
_MAX_QUEUED = 1024
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_NOTICES = 100
_MAX_REASONS = 10


class AgentRejected(SurefootError):
    """The coordinator rejected this agent for good."""


class CoordinatorClient:
    """Connects to the coordinator, sends heartbeats and queued messages, and passes received ones to `on_message`.

    `hello` and `heartbeat` build these messages; `trust` verifies the server, None: the system's authorities do.
    """

    def __init__(
        self,
        addresses: CoordinatorAddresses,
        hello: Callable[[], Hello],
        heartbeat: Callable[[], Heartbeat],
        on_message: Callable[[ToAgent], None],
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._addresses = addresses
        self._trust: ssl.SSLContext | bool = True if trust is None else trust
        self._hello, self._heartbeat, self._on_message = hello, heartbeat, on_message
        self._heartbeat_seconds = 0.5
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[FromAgent] | None = None
        self._last_message_seconds = time.monotonic()
        self._logged: set[str] = set()
        self._requested_seconds = 0.0
        """Seconds to wait before the next attempt, as the last rejection requested."""
        self._referred = ""
        """Address named by the last rejection; empty: none."""
        self._notices: collections.deque[Notice] = collections.deque(maxlen=_MAX_NOTICES)

    def away_seconds(self) -> float:
        """Seconds without a connection to the coordinator; 0 while connected."""
        return 0.0 if self._outbox is not None else time.monotonic() - self._last_message_seconds

    def send(self, message: FromAgent) -> None:
        """Queues a message; without a connection it is dropped, unless it is a notice."""
        if self._outbox is None:
            if isinstance(message, Notice):
                self._notices.append(message)
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            metrics.fallbacks.labels(kind="coordinator_slow").inc()
            self._outbox = None  # `_send_messages` notices this and ends the connection; a new one follows

    def send_heartbeat(self) -> None:
        """Sends a heartbeat now instead of at the next interval."""
        self._changed.set()

    async def run(self) -> None:
        """Reconnects until cancelled.

        Raises:
            AgentRejected: The coordinator rejected this agent for good.
        """
        failures = 0
        timeout = aiohttp.ClientTimeout(total=None, connect=_OPEN_SECONDS, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(ttl_dns_cache=_DNS_CACHE_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                welcomed, answered, start_seconds = False, True, time.monotonic()
                self._requested_seconds, self._referred = 0.0, ""
                try:
                    welcomed = await self._run_connection(session)
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
                backoff_seconds = (REJECTED_BACKOFF if answered else UNREACHABLE_BACKOFF).wait_seconds(
                    failures, random.random()
                )
                if answered and not welcomed:
                    backoff_seconds = max(
                        UNREACHABLE_BACKOFF.first_seconds, backoff_seconds - (time.monotonic() - start_seconds)
                    )  # the server itself kept it waiting
                # jittered, since a server that requests a wait requests the same one from all agents
                requested_seconds = min(self._requested_seconds, _MAX_REQUESTED_SECONDS) * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff_seconds, requested_seconds))

    def _next_addresses(self, welcomed: bool) -> CoordinatorAddresses:
        if self._referred:
            return follow_referral(self._addresses, self._referred)
        return with_welcome(self._addresses) if welcomed else with_failure(self._addresses)

    def _log_outage(self, reason: str) -> None:
        """Logs each reason once per outage, at most _MAX_REASONS of them: it may last hours, with several attempts a second."""
        if reason not in self._logged and len(self._logged) < _MAX_REASONS:
            self._logged.add(reason)
            _log.info(
                "no connection to the coordinator at %s: %s; training continues, trying again",
                self._addresses.current_url,
                reason,
            )

    async def _run_connection(self, session: aiohttp.ClientSession) -> bool:
        """Runs one connection from Hello to its end; returns whether the coordinator sent a Welcome."""
        async with asyncio.timeout(_OPEN_SECONDS):
            websocket = await session.ws_connect(
                self._addresses.current_url,
                heartbeat=_PING_SECONDS,
                max_msg_size=_MAX_MESSAGE_BYTES,
                ssl=self._trust,
            )
        async with websocket:
            tcp_socket = websocket.get_extra_info("socket")
            if tcp_socket is not None and tcp_socket.family in (socket.AF_INET, socket.AF_INET6):
                tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MILLISECONDS)
            async with asyncio.timeout(_OPEN_SECONDS):
                await websocket.send_str(encode(self._hello()))
                first = await self._receive(websocket)
            if first is None:
                return False
            if isinstance(first, HelloRejected):
                return self._apply_rejection(first)
            if not isinstance(first, Welcome):
                raise ProtocolError(f"the coordinator replied to Hello with {type(first).__name__}, not with Welcome")
            self._heartbeat_seconds = first.heartbeat_seconds
            self._logged.clear()
            outbox: asyncio.Queue[FromAgent] = asyncio.Queue(_MAX_QUEUED)
            self._outbox = outbox
            while self._notices:
                outbox.put_nowait(self._notices.popleft())
            self._on_message(first)
            await self._exchange_messages(websocket, outbox)
            return True

    async def _exchange_messages(
        self, websocket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[FromAgent]
    ) -> None:
        tasks = [
            asyncio.create_task(self._receive_messages(websocket)),
            asyncio.create_task(self._send_messages(websocket, outbox)),
            asyncio.create_task(self._send_heartbeats(websocket)),
        ]
        await wait_for_first(tasks)

    async def _receive_messages(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        server_list = MemoryServerList()
        while (received := await self._receive(websocket)) is not None:
            if isinstance(received, HelloRejected):
                self._apply_rejection(received)
                return
            message = server_list.apply_message(received)
            if message is not None:
                self._on_message(message)

    async def _send_messages(
        self, websocket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[FromAgent]
    ) -> None:
        while self._outbox is outbox:
            await websocket.send_str(encode(await outbox.get()))

    async def _send_heartbeats(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            self._changed.clear()
            await websocket.send_str(encode(self._heartbeat()))
            try:
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_seconds)
            except TimeoutError:
                pass  # nothing changed: send the next regular one

    @staticmethod
    async def _receive(websocket: aiohttp.ClientWebSocketResponse) -> ToAgent | None:
        frame = await websocket.receive()
        if frame.type is aiohttp.WSMsgType.TEXT:
            message = decode(frame.data)
            if not isinstance(message, ToAgent):
                raise ProtocolError(f"a coordinator never sends {type(message).__name__}")
            return message
        if frame.type is aiohttp.WSMsgType.BINARY:
            raise ProtocolError("received a binary frame: the server is no Surefoot coordinator; check its URL")
        return None

    def _apply_rejection(self, rejection: HelloRejected) -> bool:
        if not rejection.retry:
            raise AgentRejected(f"the coordinator rejected this agent for good: {rejection.reason}")
        self._requested_seconds, self._referred = rejection.after_seconds, rejection.address
        self._log_outage(f"it requests another attempt: {rejection.reason}")
        return False


# ---- credentials -----------------------------------------------------------------------------------------------------
# Reads the agent's token and the certificate authority that verifies the coordinator. A kubelet renews the token's file
# while the pod runs, so the agent reads it for each connection and never caches it.

_TOKEN_BYTES = 1 << 16


class TokenUnavailable(SurefootError):
    """The token file cannot be read now; a later attempt may succeed."""


def read_token(settings: AgentSettings) -> str:
    """Returns the token from the file in the settings, or the fixed one if no file is set."""
    if not settings.token_file:
        return settings.token
    try:
        with Path(settings.token_file).open("rb") as file:
            token = file.read(_TOKEN_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenUnavailable(
            f"the token cannot be read from {settings.token_file} (SUREFOOT_TOKEN_FILE): {error}; "
            "is the projected service-account token mounted there, and readable by this user?"
        ) from error
    if not token:
        raise TokenUnavailable(
            f"{settings.token_file} (SUREFOOT_TOKEN_FILE) is empty: no token was projected into it yet"
        )
    return token


def tls_context(settings: AgentSettings) -> ssl.SSLContext | None:
    """Builds a context that trusts only the configured authority and checks host names; None: none is configured."""
    if not settings.coordinator_ca:
        return None
    if not settings.coordinator_url.startswith("wss://"):
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is set, but SUREFOOT_COORDINATOR_URL is {settings.coordinator_url!r}: only wss:// "
            "is verified, and a token never goes out in clear; correct the URL, or leave the authority out"
        )
    try:
        # with `cadata`, Python loads none of the system's authorities; host names are checked
        return ssl.create_default_context(cadata=settings.coordinator_ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"SUREFOOT_COORDINATOR_CA is not a certificate in PEM form: {error}; it is the text of ca.crt in the "
            "operator's TLS secret"
        ) from error
