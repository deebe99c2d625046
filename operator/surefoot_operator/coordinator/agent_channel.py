"""Connects one job's sessions with its agents' connections, and sends each agent the messages that it lacks.

Keeps state and decides nothing: every change goes through the pure modules `sessions`, `conversations` and
`desired_messages`. Called by `surefoot_operator.coordinator.agent_server` with agents' messages and by `reconcile` with
the stored state. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter

from aiohttp import web

from surefoot.protocol.bounds import max_manifests_per_tier
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.memory_server_list import SentServers, list_changes, list_transitions
from surefoot.protocol.messages import (
    Assign,
    FromAgent,
    Heartbeat,
    Hello,
    HelloRejected,
    ListPersistent,
    MemoryServers,
    ToAgent,
    TrainersStopped,
    Welcome,
)
from surefoot.protocol.wire import encode
from surefoot_operator import metrics
from surefoot_operator.coordinator import sessions as transitions
from surefoot_operator.coordinator.desired_messages import (
    Delivered,
    DesiredState,
    diff_messages,
    find_affected_workers,
    list_desired_messages,
    was_sent_all_servers,
)
from surefoot_operator.coordinator.sessions import Session, Sessions
from surefoot_operator.job_snapshot import ObservedSession

log = logging.getLogger(__name__)


# ---- messages encoded once for all agents ----------------------------------------------------------------------------
# Encodes a message once that many agents receive. Encoding a list of two thousand memory servers for each of two
# thousand agents would block the event loop for seconds, and the texts would not fit in the operator's memory.

MAX_CACHED_TEXTS = 64
"""Encoded differences that are cached, the newest."""

LARGE_TEXT_CHARACTERS = 16 * 1024
"""Texts of this length and more are sent by few connections at once."""
MAX_SIMULTANEOUS_LARGE_TEXTS = 32
"""Connections that may send a large text at once; each copies the text to its own buffer."""


def encode_list_difference(old_servers: SentServers, new_servers: SentServers) -> str | None:
    """Encodes the difference of two lists of memory servers; None: they are equal."""
    message = None if old_servers is new_servers else list_changes(old_servers, new_servers)
    return None if message is None else encode(message)


class EncodedListCache:
    """Caches encoded differences of lists of memory servers, by the identity of the two lists.

    `AgentChannel.apply_desired_state` makes equal lists the same object.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, int], tuple[SentServers, SentServers, str | None]] = OrderedDict()
        self.large_text_slots = asyncio.Semaphore(MAX_SIMULTANEOUS_LARGE_TEXTS)

    def encode_difference(self, old_servers: SentServers, new_servers: SentServers) -> str | None:
        """Encodes the difference of two lists, once for all connections; None: they are equal."""
        if old_servers is new_servers:
            return None
        key = (id(old_servers), id(new_servers))
        if key not in self._texts:
            text = encode_list_difference(old_servers, new_servers)
            # the entry refers to both lists, so no other list can get their identities while it is cached
            self._texts[key] = (old_servers, new_servers, text)
            if len(self._texts) > MAX_CACHED_TEXTS:
                self._texts.popitem(last=False)
        return self._texts[key][2]


# ---- one connection --------------------------------------------------------------------------------------------------
# Sends messages to one agent through a bounded queue. Sending never blocks the caller: an agent that does not read its
# messages is disconnected, and receives everything again when it reconnects. Owned by
# `surefoot_operator.coordinator.agent_server`, which runs `run_sender` and calls `disconnect_now`.

LARGE_TEXT_TURN_SECONDS = 1.0
"""Time after which a slow connection lets another one send its large text too."""


class AgentConnection:
    """The WebSocket of one agent, from its opening to its end, whether its hello is accepted or not."""

    def __init__(
        self, websocket: web.WebSocketResponse, request: web.Request, queue_limit: int, shared: EncodedListCache
    ) -> None:
        self._websocket = websocket
        self._shared = shared
        self._servers: SentServers = ()
        """The memory servers in the last list that was sent on this connection."""
        self._is_complete_list = False
        """Whether that list has all servers; then the encoded difference can be shared with other connections."""
        self.transport = request.transport
        self._queue: asyncio.Queue[str] = asyncio.Queue(queue_limit)
        self._sent: Delivered = {}
        self.worker: WorkerId | None = None
        self.requested_host: str | None = None
        """Host name in the URL that the agent connected to; None: the request had none."""
        self.shard: int | None = None
        """The shard of its job; None: it has not sent a hello yet."""
        if self.transport is not None:
            # without this, Nagle's algorithm delays small messages such as StopTrainers
            raw_socket = self.transport.get_extra_info("socket")
            if raw_socket is not None and raw_socket.family in (socket.AF_INET, socket.AF_INET6):
                raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def was_sent_all_servers(self) -> bool:
        """Whether the agent was sent all memory servers, not only those that its worker needs."""
        return was_sent_all_servers(self._sent)

    def send_missing(self, desired: Iterable[ToAgent]) -> None:
        """Queues those of the messages that the agent was not sent yet."""
        messages, self._sent = diff_messages(self._sent, desired)
        for message in messages:
            self.send(message)

    def send(self, message: ToAgent) -> None:
        """Queues one message; if the queue is full, disconnects."""
        if isinstance(message, Assign | MemoryServers):
            self._send_server_changes(message)
            message = replace(message, servers=())
        self._queue_text(encode(message))

    def _send_server_changes(self, message: Assign | MemoryServers) -> None:
        """Queues the difference between the message's memory servers and those already sent."""
        for old_servers, new_servers in list_transitions(self._servers, self._is_complete_list, message):
            is_shareable = not message.is_partial and new_servers is message.servers
            text = (self._shared.encode_difference if is_shareable else encode_list_difference)(
                old_servers, new_servers
            )
            if text is not None:
                self._queue_text(text)
        self._servers, self._is_complete_list = message.servers, not message.is_partial

    def _queue_text(self, text: str) -> None:
        try:
            self._queue.put_nowait(text)
        except asyncio.QueueFull:
            metrics.agents_disconnected_slow.inc()
            log.warning(
                "disconnecting the agent of %s, which does not read its messages (%d are queued); it will reconnect",
                self.worker,
                self._queue.maxsize,
            )
            self.disconnect_now()

    async def run_sender(self) -> None:
        """Sends queued messages until cancelled or disconnected."""
        try:
            while True:
                await self._write_text(await self._queue.get())
        except (ConnectionError, RuntimeError):
            self.disconnect_now()  # the receiving side then notices the closed connection and records it

    async def _write_text(self, text: str) -> None:
        """Writes a text to the WebSocket; limits how many connections write large ones at once.

        A connection that needs long for a large text lets another one start after `LARGE_TEXT_TURN_SECONDS`.
        """
        if len(text) < LARGE_TEXT_CHARACTERS:
            await self._websocket.send_str(text)
            return
        async with self._shared.large_text_slots:
            write_task = asyncio.create_task(self._websocket.send_str(text))
            try:
                await asyncio.wait([write_task], timeout=LARGE_TEXT_TURN_SECONDS)
            except asyncio.CancelledError:
                write_task.cancel()
                raise
        try:
            await write_task
        finally:
            write_task.cancel()

    async def close_with(self, message: ToAgent, wait_seconds: float) -> None:
        """Sends a last message and closes the WebSocket; breaks the connection after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.send_str(encode(message))
                await self._websocket.close()
        except (TimeoutError, ConnectionError, RuntimeError):
            self.disconnect_now()

    async def close(self, wait_seconds: float) -> None:
        """Closes the WebSocket; breaks the connection after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.close(code=1001, message=b"the coordinator is shutting down")
        except (TimeoutError, ConnectionError, RuntimeError):
            self.disconnect_now()

    def disconnect_now(self) -> None:
        """Breaks the connection at once and discards the queued messages."""
        if self.transport is not None:
            self.transport.abort()


# ---- agent channel ---------------------------------------------------------------------------------------------------

SEND_BATCH_AGENTS = 64
"""Agents that are sent messages in one turn of the event loop; takes some milliseconds."""

OnChange = Callable[[bool], None]
"""Called after each change. True: plan at once. False: the plan may wait for the next progress write."""


class AgentChannel:
    """Exchanges messages with all agents of one job, and keeps their sessions."""

    def __init__(self, job: str, heartbeat_seconds: float, clock: Callable[[], float], changed: OnChange) -> None:
        self._sessions: Sessions = transitions.create_sessions(job, clock())
        self._by_worker: dict[WorkerId, Session] = {}
        self.term = uuid.uuid4().hex
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._changed = changed
        self._expected_workers: frozenset[WorkerId] | None = None
        self._desired: DesiredState | None = None
        self._connections: dict[WorkerId, AgentConnection] = {}
        self._workers_to_serve: dict[WorkerId, None] = {}
        """Workers whose agents may lack messages, in the order in which they are served."""

    @property
    def sessions(self) -> Sessions:
        """The current sessions. Heartbeats change `by_worker` in place; `take_snapshot` returns a copy."""
        return self._sessions

    @sessions.setter
    def sessions(self, sessions: Sessions) -> None:
        if sessions.by_worker is not self._by_worker:
            # copying for each heartbeat of thousands of agents would cost the square of their number; other messages
            # are rare
            self._by_worker = dict(sessions.by_worker)
            sessions = replace(sessions, by_worker=self._by_worker)
        self._sessions = sessions

    # -- from the reconciler

    def set_expected_workers(self, workers: Iterable[WorkerId]) -> None:
        """Sets the workers whose agents may connect, including those just created."""
        self._expected_workers = frozenset(workers)
        self.sessions = transitions.drop_removed_workers(self.sessions, self._expected_workers)

    def limit_listings(self, ranks: int) -> None:
        """Limits the size of listings by the number of ranks that the job may run."""
        requests = self.sessions.requests
        if requests.max_records != max_manifests_per_tier(ranks):
            self.sessions = replace(
                self.sessions, requests=replace(requests, max_records=max_manifests_per_tier(ranks))
            )

    def apply_desired_state(self, desired: DesiredState) -> None:
        """Takes over the stored state and sends agents the messages that follow from it."""
        old_sessions, old_desired = self.sessions, self._desired
        if old_desired is not None and desired.servers == old_desired.servers:
            # equal lists must be the same object, or EncodedListCache does not find them
            desired = replace(desired, servers=old_desired.servers)
        self._desired = desired
        self.sessions = transitions.apply_membership(old_sessions, desired.status.membership)
        affects_all = old_desired is None or desired.sent_parts != old_desired.sent_parts
        self._send_updates(None if affects_all else find_affected_workers(old_sessions, self.sessions))

    def apply_transition(self, transition: Callable[[Sessions], Sessions]) -> None:
        """Applies a pure transition of the sessions and sends agents the messages that follow from it."""
        old_sessions, self.sessions = self.sessions, transition(self.sessions)
        self._send_updates(find_affected_workers(old_sessions, self.sessions))

    def take_snapshot(self) -> tuple[Sessions, float]:
        """Returns a copy of the sessions and the time; removes the notices and failures that it returns."""
        snapshot = self.sessions
        self.sessions = replace(snapshot, notices=(), requests=replace(snapshot.requests, failures=()))
        return replace(snapshot, by_worker=dict(snapshot.by_worker)), self._clock()

    # -- from the server

    def hello_rejection(self, hello: Hello) -> HelloRejected | None:
        """Returns why this hello must be rejected; None: it is accepted."""
        return transitions.hello_rejection(self.sessions, hello, self._expected_workers)

    def record_retry_later(self) -> None:
        """Records that a hello of this job was rejected with "retry"."""
        self.sessions = transitions.record_retry_later(self.sessions, self._clock())

    def accept_agent(self, hello: Hello, connection: AgentConnection) -> None:
        """Accepts a hello and sends the agent its messages; disconnects the worker's older connection."""
        worker = WorkerId(hello.index, hello.attempt)
        old_connection = self._connections.pop(worker, None)
        if old_connection is not None:
            old_connection.disconnect_now()
        connection.worker = worker
        self._connections[worker] = connection
        old_sessions = self.sessions
        self.sessions = transitions.apply_hello(old_sessions, hello, self._clock())
        connection.send(Welcome(self.term, self._heartbeat_seconds))
        self._send_updates(find_affected_workers(old_sessions, self.sessions), worker)
        self._changed(not transitions.is_adopted(self.sessions, worker))

    def handle_message(self, connection: AgentConnection, message: FromAgent) -> None:
        """Applies one message and reports the change; ignores a message of a replaced connection."""
        worker = connection.worker
        if worker is None or self._connections.get(worker) is not connection:
            return
        old_sessions, is_claimed = (
            self.sessions,
            self.sessions.membership is not None and self.sessions.membership.state == "Claimed",
        )
        old_session = old_sessions.by_worker[worker]
        # frequent messages that change no other agent's messages: updated in place, without comparing sessions
        if isinstance(message, Heartbeat | TrainersStopped):
            now = self._clock()
            if isinstance(message, Heartbeat):
                new_session = transitions.apply_heartbeat(old_sessions.membership, old_session, message, now)
            else:
                new_session = transitions.apply_trainers_stopped(old_session, message.generation, now)
            self._by_worker[worker] = new_session
            self._changed(_may_change_plan(old_session.observed, new_session.observed, is_claimed))
            return
        self.sessions = transitions.apply_message(old_sessions, worker, message, self._clock())
        self._send_updates(find_affected_workers(old_sessions, self.sessions), worker)
        has_reply_or_notice = (
            self.sessions.requests is not old_sessions.requests or self.sessions.notices is not old_sessions.notices
        )
        self._changed(
            has_reply_or_notice
            or _may_change_plan(old_session.observed, self.sessions.by_worker[worker].observed, is_claimed)
        )

    def awaits_listing(self, connection: AgentConnection) -> bool:
        """Whether this connection's agent was asked for a listing, so that it may send a large reply."""
        requests = self.sessions.requests.by_id.values()
        return any(o.worker == connection.worker and isinstance(o.message, ListPersistent) for o in requests)

    def on_connection_closed(self, connection: AgentConnection) -> None:
        """Records that a connection ended, unless a newer one has replaced it."""
        worker = connection.worker
        if worker is not None and self._connections.get(worker) is connection:
            del self._connections[worker]
            self.sessions = transitions.record_disconnect(self.sessions, worker, self._clock())
            self._changed(True)

    @property
    def connections(self) -> tuple[AgentConnection, ...]:
        return tuple(self._connections.values())

    def _send_updates(self, workers: Iterable[WorkerId] | None, first: WorkerId | None = None) -> None:
        """Sends workers the messages that they lack, many of them in batches.

        Sending to two thousand agents at once would block the event loop for longer than a lease renewal may wait.

        Args:
            workers: The workers; None: all that are connected.
            first: A worker that is served at once; None: none.
        """
        if first is not None:
            self._send_to(first)
        workers_to_serve = (
            self._connections if workers is None else [w for w in workers if w in self._connections and w != first]
        )
        if len(workers_to_serve) <= SEND_BATCH_AGENTS and not self._workers_to_serve:
            for worker in tuple(workers_to_serve):
                self._send_to(worker)
            return
        if not self._workers_to_serve:
            asyncio.get_running_loop().call_soon(self._send_next_batch)
        self._workers_to_serve.update(dict.fromkeys(workers_to_serve))

    def _send_next_batch(self) -> None:
        """Sends one batch of workers the messages that follow from the newest state, then yields to the event loop."""
        try:
            for worker in tuple(islice(self._workers_to_serve, SEND_BATCH_AGENTS)):
                del self._workers_to_serve[worker]
                self._send_to(worker)
        finally:
            if self._workers_to_serve:
                asyncio.get_running_loop().call_soon(self._send_next_batch)

    def _send_to(self, worker: WorkerId) -> None:
        connection = self._connections.get(worker)
        if connection is not None and self._desired is not None:
            connection.send_missing(
                list_desired_messages(self._desired, self.sessions, worker, connection.was_sent_all_servers)
            )


# Fields of a session that may change without a plan at once: _PROGRESS_FIELDS always, _SAVE_FIELDS only while no
# generation is claimed and waits for saves.
_PROGRESS_FIELDS = {"last_message_seconds", "progress", "timings", "step_at_seconds"}
_SAVE_FIELDS = {"pending", "saved", "copies"}
_urgent_fields_of = attrgetter(
    *(f.name for f in fields(ObservedSession) if f.name not in _PROGRESS_FIELDS | _SAVE_FIELDS)
)
_save_fields_of = attrgetter(*sorted(_SAVE_FIELDS))
_urgent_progress_of = attrgetter(
    "restored", "restored_from", "save_bytes", "no_staging_reason", "exited_ranks", "loss_is_finite"
)


def _may_change_plan(old: ObservedSession, new: ObservedSession, is_claimed: bool) -> bool:
    """Whether a plan should be made at once, because its decision could change.

    New steps and saves only change the reported progress, except while a claimed generation waits for saves.
    `Progress.closed_steps` grows with every step, and the deletions that it allows may wait for the next plan.
    """
    if _urgent_fields_of(old) != _urgent_fields_of(new) or (
        is_claimed and _save_fields_of(old) != _save_fields_of(new)
    ):
        return True
    if (old.step_at_seconds is None) != (new.step_at_seconds is None):  # the generation's first step
        return True
    return old.progress is not new.progress and bool(
        _urgent_progress_of(old.progress) != _urgent_progress_of(new.progress)
    )
