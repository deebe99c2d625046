"""Joins one job's sessions and connections, and sends what agents must know.

Holds state, decides nothing: every change goes through `sessions`, `pending_requests` and `desired_messages`. Called by
`surefoot_operator.coordinator.agent_server` with agents' messages and by `reconcile` with the stored state. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter

from surefoot.protocol.bounds import max_records
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import FromAgent, Heartbeat, Hello, ListPersistent, Refused, Stopped, Welcome
from surefoot.protocol.sighting_messages import LookAtHolders
from surefoot_operator.coordinator import sessions as transitions
from surefoot_operator.coordinator.agent_connection import AgentConnection
from surefoot_operator.coordinator.desired_messages import DesiredState, concerned, desired_messages
from surefoot_operator.coordinator.sessions import Session, Sessions
from surefoot_operator.job_snapshot import SessionSeen

TURN = 64
"""Agents that are told in one turn of the loop: some milliseconds."""

Changed = Callable[[bool], None]
"""Called after each change; True if a plan should be made at once, False if it may wait for the next progress write."""


class AgentChannel:
    """Everything between the operator and the agents of one job."""

    def __init__(self, job: str, heartbeat_seconds: float, clock: Callable[[], float], changed: Changed) -> None:
        self._sessions: Sessions = transitions.begin(job, clock())
        self._by_worker: dict[WorkerId, Session] = {}
        self.term = uuid.uuid4().hex
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._changed = changed
        self._known: frozenset[WorkerId] | None = None
        self._rule: DesiredState | None = None
        self._lines: dict[WorkerId, AgentConnection] = {}
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

    def know(self, workers: Iterable[WorkerId]) -> None:
        """Sets the workers that may connect, those just created included."""
        self._known = frozenset(workers)
        self.sessions = transitions.forgotten(self.sessions, self._known)

    def bound(self, ranks: int) -> None:
        """Bounds what is kept of agents' listings, by how many ranks the job may run."""
        orders = self.sessions.orders
        if orders.max_records != max_records(ranks):
            self.sessions = replace(self.sessions, orders=replace(orders, max_records=max_records(ranks)))

    def rule(self, rule: DesiredState) -> None:
        """Takes the state now stored and sends agents what follows from it."""
        before, old = self.sessions, self._rule
        if old is not None and rule.holders == old.holders:
            rule = replace(rule, holders=old.holders)  # the same value for all time: what is made of it is made once
        self._rule = rule
        self.sessions = transitions.ruled(before, rule.status.world)
        everybody = old is None or rule.told != old.told
        self._tell(None if everybody else concerned(before, self.sessions))

    def change(self, transition: Callable[[Sessions], Sessions]) -> None:
        """Applies a pure transition and sends agents what follows from it."""
        before, self.sessions = self.sessions, transition(self.sessions)
        self._tell(concerned(before, self.sessions))

    def taken(self) -> tuple[Sessions, float]:
        """Copies the sessions and the time; empties notices and failures."""
        whole = self.sessions
        self.sessions = replace(whole, notices=(), orders=replace(whole.orders, failures=()))
        return replace(whole, by_worker=dict(whole.by_worker)), self._clock()

    # -- from the server

    def refusal(self, hello: Hello) -> Refused | None:
        return transitions.refusal(self.sessions, hello, self._known)

    def turn_away(self) -> None:
        """Records that an agent of this job was asked to come again."""
        self.sessions = transitions.turned_away(self.sessions, self._clock())

    def join(self, hello: Hello, line: AgentConnection) -> None:
        """Accepts a hello; its connection replaces the worker's older one."""
        worker = WorkerId(hello.index, hello.attempt)
        older = self._lines.pop(worker, None)
        if older is not None:
            older.cut()
        line.worker = worker
        self._lines[worker] = line
        before = self.sessions
        self.sessions = transitions.connected(before, hello, self._clock())
        line.send(Welcome(self.term, self._heartbeat_seconds))
        self._tell(concerned(before, self.sessions), worker)
        self._changed(not transitions.is_adopted(self.sessions, worker))

    def hear(self, line: AgentConnection, message: FromAgent) -> None:
        """Applies one message; those of a replaced connection are ignored."""
        worker = line.worker
        if worker is None or self._lines.get(worker) is not line:
            return
        before, claimed = self.sessions, self.sessions.world is not None and self.sessions.world.state == "Claimed"
        old = before.by_worker[worker]
        if isinstance(message, Heartbeat | Stopped):  # what all agents say, and says nothing to any other
            now = self._clock()
            if isinstance(message, Heartbeat):
                new = transitions.beaten(before.world, old, message, now)
            else:
                new = transitions.stopped(old, message.epoch, now)
            self._by_worker[worker] = new
            self._changed(_matters(old.seen, new.seen, claimed))
            return
        self.sessions = transitions.heard(before, worker, message, self._clock())
        self._tell(concerned(before, self.sessions), worker)
        spoke = self.sessions.orders is not before.orders or self.sessions.notices is not before.notices
        self._changed(spoke or _matters(old.seen, self.sessions.by_worker[worker].seen, claimed))

    def awaits_answer(self, line: AgentConnection) -> bool:
        """Whether this line's agent was asked what a tier has, and may send a large answer."""
        outstanding = self.sessions.orders.outstanding.values()
        return any(
            o.worker == line.worker and isinstance(o.message, ListPersistent | LookAtHolders) for o in outstanding
        )

    def leave(self, line: AgentConnection) -> None:
        """Records that a connection ended."""
        worker = line.worker
        if worker is not None and self._lines.get(worker) is line:
            del self._lines[worker]
            self.sessions = transitions.broken(self.sessions, worker, self._clock())
            self._changed(True)

    @property
    def lines(self) -> tuple[AgentConnection, ...]:
        return tuple(self._lines.values())

    def _tell(self, workers: Iterable[WorkerId] | None, first: WorkerId | None = None) -> None:
        """Says to these (None: to all), and to `first`, what they must know by now; to many in turns.

        A word to two thousand agents takes longer than a lease's renewal may wait.
        """
        if first is not None:
            self._tell_one(first)
        due = self._lines if workers is None else [w for w in workers if w in self._lines and w != first]
        if len(due) <= TURN and not self._due:
            for worker in tuple(due):
                self._tell_one(worker)
            return
        if not self._due:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._due.update(dict.fromkeys(due))

    def _take_turn(self) -> None:
        """Tells a few of those that wait, as things stand by now, and lets others on the loop."""
        try:
            for worker in tuple(islice(self._due, TURN)):
                del self._due[worker]
                self._tell_one(worker)
        finally:
            if self._due:
                asyncio.get_running_loop().call_soon(self._take_turn)

    def _tell_one(self, worker: WorkerId) -> None:
        line = self._lines.get(worker)
        if line is not None and self._rule is not None:
            line.tell(desired_messages(self._rule, self.sessions, worker, line.hears_all))


_CALM = {"heard_seconds", "progress", "timings", "step_at_seconds"}
_SAVES = {"pending", "saved", "copies"}
_URGENT = attrgetter(*(f.name for f in fields(SessionSeen) if f.name not in _CALM | _SAVES))
_OF_SAVES = attrgetter(*sorted(_SAVES))
_OF_PROGRESS = attrgetter("restored", "restored_from", "save_bytes", "unstaged", "ended", "loss_is_finite")


def _matters(old: SessionSeen, new: SessionSeen, claimed: bool) -> bool:
    """Whether a plan could differ: steps and saves alone only move progress, unless a claim waits for the saves.

    What of saves never comes grows with every step, and whoever drops by it may wait as long as the step's own report.
    """
    if _URGENT(old) != _URGENT(new) or (claimed and _OF_SAVES(old) != _OF_SAVES(new)):
        return True
    if (old.step_at_seconds is None) != (new.step_at_seconds is None):  # the epoch's first step
        return True
    return old.progress is not new.progress and bool(_OF_PROGRESS(old.progress) != _OF_PROGRESS(new.progress))
