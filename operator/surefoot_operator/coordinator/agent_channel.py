"""Joins one job's sessions and connections, and sends what agents must know.

Holds state, decides nothing: every change goes through `sessions`, `conversations` and `desired_messages`. Called by
`surefoot_operator.coordinator.agent_server` with agents' messages and by `reconcile` with the stored state. Runs on one event loop.
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

from surefoot.protocol.bounds import max_records
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.memory_server_list import SentServers, known_transitions, list_changes
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
    concerned,
    desired_messages,
    outbox_diff,
    was_sent_all_servers,
)
from surefoot_operator.coordinator.sessions import Session, Sessions
from surefoot_operator.job_snapshot import ObservedSession

log = logging.getLogger(__name__)


# ---- messages encoded once for all agents ----------------------------------------------------------------------------
# Encodes messages that many agents receive alike once. Two thousand copies of a list of two thousand holders would take
# seconds of the event loop, and more memory than the operator has.

MAX_TEXTS = 64
"""Of the newest changes; agents that were told the same long ago are few."""

LARGE_CHARACTERS = 16 * 1024
LARGE_AT_A_TIME = 32
"""Large texts that are being written at a time: each stands in its connection's buffer once more."""


def between(told: SentServers, wanted: SentServers) -> str | None:
    """Encodes the difference of two holder lists; None: they are equal."""
    message = None if told is wanted else list_changes(told, wanted)
    return None if message is None else encode(message)


class EncodedListCache:
    """Caches one server's encoded holder lists by the lists' identity.

    Equal lists are made one object where the desired state is taken.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, int], tuple[SentServers, SentServers, str | None]] = OrderedDict()
        self.large = asyncio.Semaphore(LARGE_AT_A_TIME)

    def between(self, told: SentServers, wanted: SentServers) -> str | None:
        """Encodes the difference once for all lines; None: they are equal."""
        if told is wanted:
            return None
        key = (id(told), id(wanted))
        if key not in self._texts:
            text = between(told, wanted)
            self._texts[key] = (told, wanted, text)  # which keeps both, so that no other list gets their identity
            if len(self._texts) > MAX_TEXTS:
                self._texts.popitem(last=False)
        return self._texts[key][2]


# ---- one connection --------------------------------------------------------------------------------------------------
# Sends messages to one agent through a bounded queue. Sending never blocks the caller: an agent that does not read its
# messages is disconnected, and receives everything again when it returns. Owned by
# `surefoot_operator.coordinator.agent_server`, which runs `pump` and calls `cut`.

LARGE_SECONDS = 1.0
"""How long an agent that takes a large text keeps its turn."""


class AgentConnection:
    """One agent's connection, accepted or about to be refused."""

    def __init__(
        self, websocket: web.WebSocketResponse, request: web.Request, queue_limit: int, shared: EncodedListCache
    ) -> None:
        self._websocket = websocket
        self._shared = shared
        self._servers: SentServers = ()
        """Those that the line was told of, where they are not part of other messages."""
        self._all_listed = False
        """Whether those are all, and the text of what changes is the same for others."""
        self.transport = request.transport
        self._queue: asyncio.Queue[str] = asyncio.Queue(queue_limit)
        self._sent: Delivered = {}
        self.worker: WorkerId | None = None
        self.host: str | None = None
        """By which name it called this server."""
        self.shard: int | None = None
        """That its job is in; None: it has not said hello."""
        if self.transport is not None:
            raw = self.transport.get_extra_info("socket")
            if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_sent_all_servers(self) -> bool:
        """Whether it is told of every holder, needed or not."""
        return was_sent_all_servers(self._sent)

    def send_missing(self, wanted: Iterable[ToAgent]) -> None:
        """Queues those of these messages that the agent lacks."""
        messages, self._sent = outbox_diff(self._sent, wanted)
        for message in messages:
            self.send(message)

    def send(self, message: ToAgent) -> None:
        """Queues one message; a full queue cuts the connection."""
        if isinstance(message, Assign | MemoryServers):
            self._list_servers(message)
            message = replace(message, servers=())
        self._put(encode(message))

    def _list_servers(self, message: Assign | MemoryServers) -> None:
        """Tells of the message's holders ahead of it, by what changes."""
        for before, after in known_transitions(self._servers, self._all_listed, message):
            shared = not message.is_partial and after is message.servers
            text = (self._shared.between if shared else between)(before, after)
            if text is not None:
                self._put(text)
        self._servers, self._all_listed = message.servers, not message.is_partial

    def _put(self, text: str) -> None:
        try:
            self._queue.put_nowait(text)
        except asyncio.QueueFull:
            metrics.agents_disconnected_slow.inc()
            log.warning(
                "%s does not read its messages (%d queued): closing its connection", self.worker, self._queue.maxsize
            )
            self.disconnect_now()

    async def run_sender(self) -> None:
        """Sends queued messages until cancelled or disconnected."""
        try:
            while True:
                await self._write(await self._queue.get())
        except (ConnectionError, RuntimeError):
            self.disconnect_now()  # the receiving side sees the end of the line and reports it

    async def _write(self, text: str) -> None:
        """Large texts a few at a time; an agent that takes long for one keeps others waiting for a moment only."""
        if len(text) < LARGE_CHARACTERS:
            await self._websocket.send_str(text)
            return
        async with self._shared.large:
            writing = asyncio.create_task(self._websocket.send_str(text))
            try:
                await asyncio.wait([writing], timeout=LARGE_SECONDS)
            except asyncio.CancelledError:
                writing.cancel()
                raise
        try:
            await writing
        finally:
            writing.cancel()

    async def close_with(self, message: ToAgent, wait_seconds: float) -> None:
        """Sends a last message and closes; cuts after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.send_str(encode(message))
                await self._websocket.close()
        except (TimeoutError, ConnectionError, RuntimeError):
            self.disconnect_now()

    async def close(self, wait_seconds: float) -> None:
        """Closes the WebSocket within `wait_seconds`, else cuts it."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._websocket.close(code=1001, message=b"the coordinator is shutting down")
        except (TimeoutError, ConnectionError, RuntimeError):
            self.disconnect_now()

    def disconnect_now(self) -> None:
        """Breaks the connection now, whatever is still queued."""
        if self.transport is not None:
            self.transport.abort()


# ---- agent channel ---------------------------------------------------------------------------------------------------

SEND_BATCH_SECONDS = 64
"""Agents that are told in one turn of the loop: some milliseconds."""

Changed = Callable[[bool], None]
"""Called after each change; True if a plan should be made at once, False if it may wait for the next progress write."""


class AgentChannel:
    """Everything between the operator and the agents of one job."""

    def __init__(self, job: str, heartbeat_seconds: float, clock: Callable[[], float], changed: Changed) -> None:
        self._sessions: Sessions = transitions.new_sessions(job, clock())
        self._by_worker: dict[WorkerId, Session] = {}
        self.term = uuid.uuid4().hex
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._changed = changed
        self._expected_workers: frozenset[WorkerId] | None = None
        self._rule: DesiredState | None = None
        self._connections: dict[WorkerId, AgentConnection] = {}
        self._due: dict[WorkerId, None] = {}
        """Who is still to be told, in order."""

    @property
    def sessions(self) -> Sessions:
        """The sessions now, which heartbeats change in place; copies: `taken`."""
        return self._sessions

    @sessions.setter
    def sessions(self, sessions: Sessions) -> None:
        if sessions.by_worker is not self._by_worker:
            # a copy for each heartbeat of thousands would cost the square of their number; other words are few
            self._by_worker = dict(sessions.by_worker)
            sessions = replace(sessions, by_worker=self._by_worker)
        self._sessions = sessions

    # -- from the reconciler

    def set_expected_workers(self, workers: Iterable[WorkerId]) -> None:
        """Sets the workers that may connect, those just created included."""
        self._expected_workers = frozenset(workers)
        self.sessions = transitions.drop_gone_workers(self.sessions, self._expected_workers)

    def bound(self, ranks: int) -> None:
        """Bounds what is kept of agents' listings, by how many ranks the job may run."""
        orders = self.sessions.orders
        if orders.max_records != max_records(ranks):
            self.sessions = replace(self.sessions, orders=replace(orders, max_records=max_records(ranks)))

    def apply_state(self, rule: DesiredState) -> None:
        """Takes the state now stored and sends agents what follows from it."""
        before, old = self.sessions, self._rule
        if old is not None and rule.servers == old.servers:
            rule = replace(rule, servers=old.servers)  # the same value for all time: what is made of it is made once
        self._rule = rule
        self.sessions = transitions.apply_membership(before, rule.status.membership)
        everybody = old is None or rule.sent_parts != old.sent_parts
        self._send_updates(None if everybody else concerned(before, self.sessions))

    def apply_transition(self, transition: Callable[[Sessions], Sessions]) -> None:
        """Applies a pure transition and sends agents what follows from it."""
        before, self.sessions = self.sessions, transition(self.sessions)
        self._send_updates(concerned(before, self.sessions))

    def take_snapshot(self) -> tuple[Sessions, float]:
        """Copies the sessions and the time; empties notices and failures."""
        whole = self.sessions
        self.sessions = replace(whole, notices=(), orders=replace(whole.orders, failures=()))
        return replace(whole, by_worker=dict(whole.by_worker)), self._clock()

    # -- from the server

    def rejection(self, hello: Hello) -> HelloRejected | None:
        return transitions.rejection(self.sessions, hello, self._expected_workers)

    def record_retry_later(self) -> None:
        """Records that an agent of this job was asked to come again."""
        self.sessions = transitions.record_retry_later(self.sessions, self._clock())

    def join(self, hello: Hello, line: AgentConnection) -> None:
        """Accepts a hello; its connection replaces the worker's older one."""
        worker = WorkerId(hello.index, hello.attempt)
        older = self._connections.pop(worker, None)
        if older is not None:
            older.disconnect_now()
        line.worker = worker
        self._connections[worker] = line
        before = self.sessions
        self.sessions = transitions.apply_hello(before, hello, self._clock())
        line.send(Welcome(self.term, self._heartbeat_seconds))
        self._send_updates(concerned(before, self.sessions), worker)
        self._changed(not transitions.is_adopted(self.sessions, worker))

    def handle_message(self, line: AgentConnection, message: FromAgent) -> None:
        """Applies one message; those of a replaced connection are ignored."""
        worker = line.worker
        if worker is None or self._connections.get(worker) is not line:
            return
        before, claimed = (
            self.sessions,
            self.sessions.membership is not None and self.sessions.membership.state == "Claimed",
        )
        old = before.by_worker[worker]
        if isinstance(message, Heartbeat | TrainersStopped):  # what all agents say, and says nothing to any other
            now = self._clock()
            if isinstance(message, Heartbeat):
                new = transitions.apply_heartbeat(before.membership, old, message, now)
            else:
                new = transitions.apply_stopped(old, message.generation, now)
            self._by_worker[worker] = new
            self._changed(_may_change_plan(old.observed, new.observed, claimed))
            return
        self.sessions = transitions.apply_message(before, worker, message, self._clock())
        self._send_updates(concerned(before, self.sessions), worker)
        spoke = self.sessions.orders is not before.orders or self.sessions.notices is not before.notices
        self._changed(spoke or _may_change_plan(old.observed, self.sessions.by_worker[worker].observed, claimed))

    def awaits_answer(self, line: AgentConnection) -> bool:
        """Whether this line's agent was asked what a tier has, and may send a large answer."""
        outstanding = self.sessions.orders.pending.values()
        return any(o.worker == line.worker and isinstance(o.message, ListPersistent) for o in outstanding)

    def connection_ended(self, line: AgentConnection) -> None:
        """Records that a connection ended."""
        worker = line.worker
        if worker is not None and self._connections.get(worker) is line:
            del self._connections[worker]
            self.sessions = transitions.connection_broken(self.sessions, worker, self._clock())
            self._changed(True)

    @property
    def connections(self) -> tuple[AgentConnection, ...]:
        return tuple(self._connections.values())

    def _send_updates(self, workers: Iterable[WorkerId] | None, first: WorkerId | None = None) -> None:
        """Says to these (None: to all), and to `first`, what they must know by now; to many in turns.

        A word to two thousand agents takes longer than a lease's renewal may wait.
        """
        if first is not None:
            self._send_to(first)
        due = self._connections if workers is None else [w for w in workers if w in self._connections and w != first]
        if len(due) <= SEND_BATCH_SECONDS and not self._due:
            for worker in tuple(due):
                self._send_to(worker)
            return
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send_next_batch)
        self._due.update(dict.fromkeys(due))

    def _send_next_batch(self) -> None:
        """Tells a few of those that wait, as things stand by now, and lets others on the loop."""
        try:
            for worker in tuple(islice(self._due, SEND_BATCH_SECONDS)):
                del self._due[worker]
                self._send_to(worker)
        finally:
            if self._due:
                asyncio.get_running_loop().call_soon(self._send_next_batch)

    def _send_to(self, worker: WorkerId) -> None:
        line = self._connections.get(worker)
        if line is not None and self._rule is not None:
            line.send_missing(desired_messages(self._rule, self.sessions, worker, line.is_sent_all_servers))


_CALM = {"last_message_seconds", "progress", "timings", "step_at_seconds"}
_SAVES = {"pending", "saved", "copies"}
_URGENT = attrgetter(*(f.name for f in fields(ObservedSession) if f.name not in _CALM | _SAVES))
_OF_SAVES = attrgetter(*sorted(_SAVES))
_OF_PROGRESS = attrgetter(
    "restored", "restored_from", "save_bytes", "no_staging_reason", "exited_ranks", "loss_is_finite"
)


def _may_change_plan(old: ObservedSession, new: ObservedSession, claimed: bool) -> bool:
    """Whether a plan could differ: steps and saves alone only move progress, unless a claim waits for the saves.

    What of saves never comes grows with every step, and whoever drops by it may wait as long as the step's own report.
    """
    if _URGENT(old) != _URGENT(new) or (claimed and _OF_SAVES(old) != _OF_SAVES(new)):
        return True
    if (old.step_at_seconds is None) != (new.step_at_seconds is None):  # the epoch's first step
        return True
    return old.progress is not new.progress and bool(_OF_PROGRESS(old.progress) != _OF_PROGRESS(new.progress))
