"""One operator instance: the real policy, sessions, orders and desired messages, with I/O that takes time, fails and can be cut.

It observes, plans, writes status by compare-and-swap, then acts: a crash can fall between any two actions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.calls import Calls
from simulator.clocks import LeaderClock
from simulator.dropping import Dropping
from simulator.engine import Line, Process
from simulator.holder_watches import HolderWatches
from simulator.janitor import Janitor
from simulator.layouts import KnownLayouts
from simulator.views import FEW_HOLDERS, Connection, Todo, Uploads, copy_request, seen_holders
from surefoot.protocol import messages as said
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, WorkerId
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.coordinator import (
    conversations,
    desired_messages,
    listings,
    pending_requests,
    sessions,
    uploads,
)
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.desired_messages import update_scope
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer
from surefoot_operator.policy.core import actions as act
from surefoot_operator.policy.failure import memory_server_liveness

if TYPE_CHECKING:
    from simulator.world import Simulation


class Operator:
    """One process of the operator, believing to lead from its start to its end."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation, self.engine, self.network = simulation, simulation.engine, simulation.network
        self.process = Process(f"operator {number}", "operator")
        self.clock = LeaderClock(self.engine, simulation.skew_seconds, simulation.drift)
        self.sessions = sessions.create_sessions("job", self.now)
        self.connections: list[Connection] = []
        self._holder_watches = HolderWatches(self)
        self.watches = self._holder_watches.by_holder
        self.pinned: Checkpoint | None = None
        self.going: dict[Checkpoint, float] = {}
        self._ruled: (
            tuple[JobStatus, memory_server_liveness.UsableMemoryServers, desired_messages.DesiredState] | None
        ) = None
        self._status: JobStatus = simulation.store.status
        self._planned = False
        self._calls = Calls(simulation.fabric, self.process, self.poke)
        self.listed_at: float | None = None
        """When the persistent tier gave what this operator last took for its listing."""
        self.read_at: dict[MemoryServerInstance, float] = {}
        self.known = KnownLayouts()
        self.applying = False
        self.outdated = False
        """Another one leads: its lease keeps it from writing, and its watch stands still. It does not know yet."""
        self._again = False
        self._wake_at = float("inf")
        self.engine.after(0.02, self.process, self._tick)
        Janitor(self).begin()
        self._dropping = Dropping(self)
        self.engine.after(0.03, self.process, self.poke)

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.clock.read()

    # ---- agents -----------------------------------------------------------------------------------------------------

    def accept(self, line: Line) -> None:
        connection = Connection(line)
        line.hear[self.process] = lambda message: self._hear(connection, message)
        line.broken[self.process] = lambda: self._broken(connection)
        self.connections.append(connection)

    def _hear(self, connection: Connection, message: said.FromAgent) -> None:
        now = self.now
        self.engine.spend(self.process, self.simulation.message_seconds)
        if isinstance(message, said.Hello):
            self._hello(connection, message)
        elif connection.worker is not None and self._current(connection):
            before, eyes = self.sessions.requests, self.simulation.oracle.eyes
            self.sessions = sessions.apply_message(self.sessions, connection.worker, message, now)
            if (
                isinstance(message, said.PersistentPage)
                and self.sessions.requests.persistent_listing is not before.persistent_listing
            ):
                self.listed_at = eyes.served.get(message.request)
        self._speak()
        self.poke()

    def _hello(self, connection: Connection, hello: said.Hello) -> None:
        known = frozenset(WorkerId(w.index, w.attempt) for w in self.simulation.fabric.workers())
        refused = sessions.hello_rejection(self.sessions, hello, known)
        if refused is not None:
            self.sessions = sessions.record_retry_later(self.sessions, self.now) if refused.retry else self.sessions
            connection.line.send(self.process, refused)
            connection.line.close(self.process)
            self.connections.remove(connection)
            return
        connection.worker, connection.incarnation = WorkerId(hello.index, hello.attempt), hello.incarnation
        for other in [c for c in self.connections if c.worker == connection.worker and c is not connection]:
            other.line.close(self.process)
            self.connections.remove(other)
        self.sessions = sessions.apply_hello(self.sessions, hello, self.now)
        connection.line.send(self.process, said.Welcome("term", 0.5))

    def _current(self, connection: Connection) -> bool:
        session = self.sessions.by_worker.get(connection.worker) if connection.worker else None
        return session is not None and session.observed.incarnation == connection.incarnation

    def _broken(self, connection: Connection) -> None:
        if connection not in self.connections:
            return  # its agent has come on another line since
        self.connections.remove(connection)
        if connection.worker is not None and self._current(connection):
            self.sessions = sessions.record_disconnect(self.sessions, connection.worker, self.now)
        self.poke()

    def _speak(self) -> None:
        """Level-triggered: whatever follows from status and was not told yet is told."""
        rule = self.rule()
        self.sessions = sessions.apply_membership(self.sessions, self._status.membership)
        for connection in list(self.connections):
            if connection.worker is None:
                continue
            wanted = desired_messages.list_desired_messages(
                rule, self.sessions, connection.worker, connection.hears_all
            )
            send, connection.told = desired_messages.diff_messages(connection.told, wanted)
            for message in send:
                self.simulation.oracle.eyes.told(message)
                connection.line.send(self.process, message)

    def rule(self) -> desired_messages.DesiredState:
        epoch = self._status.membership.generation if self._status.membership is not None else 0
        usable = memory_server_liveness.usable_servers(self._holders(), self._status.assigned_servers, epoch)
        if self._ruled is None or self._ruled[0] is not self._status or self._ruled[1] != usable:
            replicas = self.simulation.job.spec.checkpoint.memory.replicas
            scope = update_scope(self._ruled and self._ruled[2].scope, self._status, self._holders, FEW_HOLDERS)
            topology = self.simulation.fabric.topology()
            made = desired_messages.update_desired_state(None, self._status, usable, replicas, "", scope, topology)
            self._ruled = (self._status, usable, made)
        return self._ruled[2]

    def hang_up(self) -> None:
        """The lease is lost: every session is closed at once, and nothing is decided any more."""
        for connection in self.connections:
            connection.line.close(self.process)
        self.connections.clear()
        self.engine.kill(self.process)

    # ---- observe, plan, apply ---------------------------------------------------------------------------------------

    def poke(self) -> None:
        if not self._planned:
            self._planned = True
            self.engine.after(0.002, self.process, self._reconcile)

    def _tick(self) -> None:
        """Looks at holders, and at the clock, five times a second."""
        self._holder_watches.look()
        if self.now >= self._wake_at:
            self.poke()
        self.engine.after(0.2, self.process, self._tick)

    def observe(self) -> JobSnapshot:
        fabric, order = self.simulation.fabric, self.sessions.requests
        self.sessions = sessions.drop_removed_workers(
            self.sessions, [WorkerId(w.index, w.attempt) for w in fabric.workers()]
        )
        return JobSnapshot(
            now_seconds=self.now,
            term_seconds=self.sessions.term_seconds,
            job=self.simulation.job,
            status=self._status,
            workers=fabric.workers(),
            nodes=fabric.seen_nodes(),
            sessions=sessions.list_observed_sessions(self.sessions),
            retry_later_seconds=self.sessions.last_retry_later_seconds,
            servers=self._holders(),
            persistent=order.persistent_listing,
            barrier=order.barrier,
            covers=self.known.covers(order.persistent_layouts),
            uploaded=order.uploaded_saves,
            unreadable=order.unreadable_saves,
            failed_uploads=order.failed_uploads,
            free_nodes=fabric.free_nodes(),
            creates=self._calls.seen(),
            deletion_uids=self._calls.deletions(),
        )

    def _holders(self) -> tuple[ObservedMemoryServer, ...]:
        return seen_holders(self.watches, self._status.assigned_servers, self.sessions.term_seconds)

    def _reconcile(self) -> None:
        self._planned = False
        if self.applying:
            self._again = True
            return
        self._status = self._status if self.outdated else self.simulation.store.read(self._status)
        self._speak()
        observed = self.observe()
        self.engine.spend(self.process, self.simulation.plan_seconds)
        plan = self.simulation.decide(self, observed)
        status, errands, wakes = plan.status, (), [plan.wake_after_seconds]
        if status.membership == observed.status.membership:
            kept = self.simulation.upkeep(self, replace(observed, status=status, upload_now=plan.uploads))
            status, errands, self.pinned, self.going = kept.status, kept.actions, kept.pinned, kept.pending_deletions
            wakes.append(kept.wake_after_seconds)
        self._wake_at = self.now + min((w for w in wakes if w is not None), default=30.0)
        if self.engine.tracing and (status != observed.status or plan.actions or errands):
            self.engine.say("{} plans: {}", self.process.name, plan.reason)
        self.applying = True
        uploads = {e.worker: said.UploadSave(e.generation, e.saves) for e in errands if isinstance(e, act.UploadSaves)}
        todo: list[Todo] = [*plan.actions, *(e for e in errands if not isinstance(e, act.UploadSaves))]
        if uploads or self.sessions.requests.uploads:
            todo.append(Uploads(uploads))
        self.engine.after(self.engine.rng.uniform(0.001, 0.01), self.process, self._apply, observed, status, todo)

    def _apply(self, observed: JobSnapshot, status: JobStatus, todo: list[Todo]) -> None:
        if status != observed.status:
            if not self.simulation.store.patch(self, status, observed.status):
                self.engine.say("{}: status moved, planning again", self.process.name)
                self._applied()
                unkind = self.outdated or self.simulation.store.unkind
                self.engine.after(0.5 if unkind else 0.0, self.process, self.poke)
                return
            self._status = status
            self.engine.after(0.004, self.process, self.poke)
        self._carry_out(todo)

    def _carry_out(self, rest: list[Todo]) -> None:
        if not rest:
            self._applied()
            return
        refused = isinstance(rest[0], act.CreateWorker | act.DeleteWorker) and self.simulation.fabric.answers == "no"
        if refused and not self.simulation.rules.workers_alone:
            self._applied()
            self.engine.after(1.0, self.process, self.poke)
            return
        self._do(rest[0])
        self._speak()
        self.engine.after(self.engine.rng.uniform(0.0005, 0.005), self.process, self._carry_out, rest[1:])

    def _applied(self) -> None:
        self._speak()
        self.applying = False
        if self._again:
            self._again = False
            self.poke()

    def _do(self, action: Todo) -> None:
        if self.engine.tracing:
            self.engine.say("  {}", action)
        match action:
            case act.CreateWorker():
                self._calls.create(action)
            case act.DeleteWorker():
                self._calls.delete(action)
            case act.FenceMemoryServer(holder, epoch):
                self._holder_watches.seal(holder, epoch)
            case act.DropSaves(holder, epoch, saves, expires):
                self._dropping.drop(holder, epoch, list(saves), expires)
            case act.ClearJobMemory():
                self.simulation.cleaned = True
            case _:
                self._ask(action)

    def _ask(self, action: Todo) -> None:
        """What agents are to be told: it goes to the order book, and from there to their lines."""
        order, now, world = self.sessions.requests, self.now, self._status.membership
        match action:
            case act.ShutDownWorkers(indexes, exit_code, reason):
                leaving = [WorkerId(w.index, w.attempt) for w in self.simulation.fabric.workers() if w.index in indexes]
                order = conversations.request_shutdown(order, leaving, said.Shutdown(reason, exit_code))
            case act.ListPersistentTier(epoch, index):
                there = [
                    w for w, known in self.sessions.by_worker.items() if w.index == index and known.observed.connected
                ]
                if there:
                    order = listings.request_listing(
                        order, max(there), epoch, now, known_layouts=self.known.digests,
                        rights=listings.derive_listing_rights(self._status),
                    )  # fmt: skip
            case said.Barrier():
                everyone = [WorkerId(m.index, m.attempt) for m in world.members] if world is not None else []
                order = pending_requests.with_barrier(order, update_barrier(order.barrier, action, everyone, now))
            case act.RequestRepair(worker=worker):
                order = uploads.request_repairs(order, [(worker, copy_request(action, self.watches))], now)
            case Uploads(shares):
                order = uploads.set_uploads(order, shares)
            case act.DeleteUploaded(worker, epoch, checkpoints):
                order = listings.request_deletion(order, worker, epoch, checkpoints, now)
        if order is not self.sessions.requests:
            self.sessions = replace(self.sessions, requests=order)
            self.poke()

    @property
    def told_world(self) -> Membership | None:
        """As this operator last read it."""
        return self._status.membership

    def changed(self) -> None:
        """Something was seen: who waits for it is told, and it is planned with."""
        self._speak()
        self.poke()

    def committed_epoch(self) -> int | None:
        """The epoch that trains, as this operator knows it."""
        world = self._status.membership
        return world.generation if world is not None and world.state == "Committed" else None
