"""A whole job in memory: nodes, workers, agents, holders and a persistent tier that do as plans and maintenance say.

Not a model of failures in time (the simulator is that): everything answers at once, steps are lockstep, one worker
fits on a node. It is there so that properties of decisions can be tried over many histories in little time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from support.builders import COVERED, manifest, told
from support.fakes import fake_nodes
from support.fakes.fake_copies import FakeTiers, Node
from support.fakes.fake_workers import Agent, Worker
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import Barrier
from surefoot.protocol.progress import Progress
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.api.time_spent import seconds_spent
from surefoot_operator.job_snapshot import (
    JobSnapshot,
    ObservedBarrier,
    ObservedExit,
    ObservedNode,
    ObservedSession,
    ObservedWorker,
    PersistentListing,
)
from surefoot_operator.policy.core.actions import (
    Action,
    ClearJobMemory,
    CreateWorker,
    DeleteUploaded,
    DeleteWorker,
    DropSaves,
    FenceMemoryServer,
    ListPersistentTier,
    MaintenanceAction,
    Plan,
    RequestRepair,
    ShutDownWorkers,
    UploadSaves,
)
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

WARM_SECONDS = 1.0


@dataclass
class FakeWorld:
    job: TrainingJob
    node_count: int = 3
    total_steps: int = 10_000
    now: float = 1000.0
    status: JobStatus = field(default_factory=JobStatus)
    workers: dict[str, Worker] = field(default_factory=dict)
    listing: PersistentListing = field(default_factory=PersistentListing)
    barrier: ObservedBarrier | None = None
    promoted: dict[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    pinned: Checkpoint | None = None
    term: float = 1000.0
    births: int = 0
    written: list[JobStatus] = field(default_factory=list)
    created: set[str] = field(default_factory=set)
    lagging: list[tuple[MemoryServerInstance, RankManifest]] = field(default_factory=list)
    """Second copies, which arrive one tick after the first."""

    def __post_init__(self) -> None:
        self.tiers = FakeTiers(self.job.spec.checkpoint.memory.replicas)
        for number in range(self.node_count):
            self.nodes[f"n{number}"] = Node(f"n{number}")
            self.tiers.start_holder(f"n{number}", self.now)

    @property
    def nodes(self) -> dict[str, Node]:
        return self.tiers.nodes

    # ---- what the operator sees and does -----------------------------------------------------------------------

    def observe(self) -> JobSnapshot:
        self._bind()
        for worker in self.workers.values():
            agent = worker.agent
            if agent is not None and agent.seen.connected and not self.frozen(worker):
                warm = self.now >= agent.born + WARM_SECONDS
                agent.seen = replace(agent.seen, last_message_seconds=self.now, warm=warm)
        busy = {w.seen.node for w in self.workers.values()}
        return JobSnapshot(
            now_seconds=self.now,
            term_seconds=self.term,
            job=self.job,
            status=self.status,
            workers=tuple(w.seen for w in self.workers.values()),
            nodes=tuple(ObservedNode(n.name, n.name, n.alive, not n.cordoned) for n in self.nodes.values()),
            sessions=tuple(w.agent.seen for w in self.workers.values() if w.agent is not None),
            servers=tuple(n.holder for n in self.nodes.values() if n.holder is not None),
            persistent=self.listing,
            barrier=self.barrier,
            covers=COVERED,
            uploaded=dict(self.promoted),
            free_nodes=sum(n.takes_pods and n.name not in busy for n in self.nodes.values()),
        )

    def reconcile(self, prefix: int | None = None) -> bool:
        """Observe, plan, apply; with `prefix` the operator dies after so many strokes. Whether anything was done."""
        seen = self.observe()
        decided = plan(seen)
        check_plan(decided, seen)
        strokes = ([decided.status] if decided.status != self.status else []) + list(decided.actions)
        done = strokes if prefix is None else strokes[:prefix]
        for stroke in done:
            if isinstance(stroke, JobStatus):
                self._write(stroke)
            else:
                self._act(stroke)
        self._tell()
        if prefix is not None:
            self.restart_operator()
        elif not strokes:
            return self._keep_up(decided)
        return bool(strokes)

    def _keep_up(self, decided: Plan) -> bool:
        asked = plan_maintenance(replace(self.observe(), status=decided.status), self.pinned)
        self.pinned = asked.pinned
        changed = asked.status != self.status
        if changed:
            assert asked.status.membership == self.status.membership, "upkeep never changes the world"
            self._write(asked.status)
        for action in asked.actions:
            self._run(action, asked)
        return changed or bool(asked.actions)

    def settle(self, rounds: int = 60) -> None:
        """Until there is nothing left to do at this moment: decisions come to rest."""
        for _ in range(rounds):
            if not self.reconcile():
                return
        raise AssertionError(f"plans do not come to rest: {plan(self.observe()).reason}")

    def restart_operator(self) -> None:
        self.term, self.barrier, self.pinned, self.listing = self.now, None, None, PersistentListing()
        for node in self.nodes.values():
            if node.holder is not None:
                node.holder = replace(node.holder, read_generation=None)

    def run(self, seconds: float, tick: float = 0.1) -> None:
        """Time passes: trainers step, agents answer, the operator reconciles."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            self._step()
            self.settle()

    # ---- faults ------------------------------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        node = self.nodes[name]
        node.alive, node.frozen = False, False
        if node.holder is not None:
            node.holder = replace(node.holder, state="Gone", entries=())
        for worker in self._on(name):
            self._end(worker, "Failed", 137)

    def return_node(self, name: str) -> None:
        node = self.nodes[name]
        if not node.alive:
            node.alive = True
            self.tiers.start_holder(name, self.now)

    freeze, thaw, drain, uncordon = fake_nodes.freeze, fake_nodes.thaw, fake_nodes.drain, fake_nodes.uncordon

    def kill_trainer(self, index: int, code: int = 1) -> None:
        for worker in self.workers.values():
            agent = worker.agent
            world = self.status.membership
            if agent is None or world is None or worker.seen.index != index or agent.seen.exit is not None:
                continue
            if (
                agent.seen.generation == world.generation
                and agent.seen.stopped <= agent.seen.generation
                and not self.frozen(worker)
            ):
                agent.seen = replace(
                    agent.seen, exit=ObservedExit(agent.seen.generation, index, code, "RuntimeError", False, self.now)
                )

    def kill_agent(self, index: int) -> None:
        for worker in self.workers.values():
            if worker.seen.index == index and worker.agent is not None and not self.frozen(worker):
                self._end(worker, "Failed", -9)

    # ---- how it answers ----------------------------------------------------------------------------------------

    def _write(self, status: JobStatus) -> None:
        if status.membership != self.status.membership:
            self.barrier = None
            if status.membership is not None and status.membership.state == "Claimed":
                self.listing = PersistentListing()
            if (
                status.membership is not None
                and status.membership.state == "Committed"
                and status.membership.parent is not None
            ):
                assert self.tiers.readable(status.membership.parent), (
                    f"nobody can read the parent of {status.membership}"
                )
        if status.start_seconds is not None:
            age = (self.now if status.completion_seconds is None else status.completion_seconds) - status.start_seconds
            accounted = sum(seconds_spent(status.time_spent, self.now).values())
            assert abs(accounted - age) < 0.001, f"{accounted} s of {age} s are accounted for: {status.time_spent}"
        self.status = status
        self.written.append(status)

    def _act(self, action: Action) -> None:
        match action:
            case CreateWorker(index, attempt):
                name = f"w{index}-{attempt}"
                assert name not in self.created, f"{name} is created twice"
                self.created.add(name)
                seen = ObservedWorker(index, attempt, name, f"uid-{name}", None, "Pending", created_seconds=self.now)
                self.workers[name] = Worker(seen)
            case DeleteWorker(name, uid, force):
                worker = self.workers.get(name)
                if worker is not None and worker.seen.uid == uid:
                    if self.frozen(worker) and not force:
                        worker.seen = replace(worker.seen, deleting=True)
                    else:
                        del self.workers[name]
            case ShutDownWorkers(indexes, exit_code):
                for worker in self.workers.values():
                    if worker.seen.index in indexes and not self.frozen(worker):
                        self._end(worker, "Failed" if exit_code else "Succeeded", exit_code)
            case FenceMemoryServer(holder, epoch):
                self._seal(holder, epoch)
            case ListPersistentTier(epoch):
                self.listing = PersistentListing(epoch, tuple(self.tiers.s3.values()), self.now)
            case Barrier(step=step, phase="proposed"):
                ahead = all(s.progress.step < step for s in self._members())
                self.barrier = ObservedBarrier(replace(action, phase="bound" if ahead else "cancelled"), self.now)
            case Barrier():
                if self.barrier is not None:
                    self.barrier = replace(self.barrier, barrier=replace(self.barrier.barrier, phase="cancelled"))
            case ClearJobMemory():
                for node in self.nodes.values():
                    if node.holder is not None and node.holder.state == "Ready":
                        node.holder = replace(node.holder, fence=None, read_generation=None, entries=())

    def _run(self, action: MaintenanceAction, asked: MaintenancePlan) -> None:
        world = self.status.membership
        assert world is not None
        match action:
            case FenceMemoryServer(holder, epoch):
                self._seal(holder, epoch)
            case DropSaves(holder, epoch, saves):
                self.tiers.drop(holder, epoch, saves, self.status)
            case RequestRepair(_, epoch, save, source, target):
                taken = self.tiers.holder(source)
                node = self.tiers.holder(target)
                if taken is not None and node is not None and (node.fence or 0) <= epoch:
                    self.tiers.store(target, next(m for m in taken.entries if m.save == save))
            case UploadSaves(_, _, saves):
                for save in saves:
                    self.tiers.s3[save] = self.tiers.all()[save]
                    self.promoted[save.checkpoint] = self.promoted.get(save.checkpoint, frozenset()) | {save}
            case DeleteUploaded(_, _, checkpoints):
                self.tiers.s3 = {s: m for s, m in self.tiers.s3.items() if s.checkpoint not in checkpoints}
                self.listing = replace(self.listing, entries=tuple(self.tiers.s3.values()))
            case ListPersistentTier(epoch):
                self.listing = PersistentListing(epoch, tuple(self.tiers.s3.values()), self.now)
        parent = world.parent
        if parent is not None and asked.watermark is None and isinstance(action, DropSaves | DeleteUploaded):
            newer = self.status.last_uploaded is not None and self.status.last_uploaded.step > parent.step
            assert newer or self.tiers.readable(parent), f"{action} took the parent"

    def _seal(self, holder: MemoryServerInstance, epoch: int) -> None:
        if self.tiers.seal(holder, epoch):
            self.listing = replace(self.listing, read_generation=None, requested_seconds=None)

    def _tell(self) -> None:
        """Agents hear what status.membership says, and nobody but a member hears an assignment."""
        world = self.status.membership
        if world is None:
            return
        for worker in self.workers.values():
            agent = worker.agent
            if agent is None or not agent.seen.connected or self.frozen(worker) or fake_nodes.ends(worker):
                continue
            if world.state == "Claimed":
                agent.seen = replace(agent.seen, stopped=max(agent.seen.stopped, world.generation))
            elif (
                any(m.incarnation == agent.incarnation for m in world.members) and world.generation not in agent.started
            ):
                agent.started.add(world.generation)
                self._assign(agent, world)

    def _assign(self, agent: Agent, world: Membership) -> None:
        step = world.parent.step if world.parent else 0
        agent.seen = replace(
            agent.seen, generation=world.generation, step_at_seconds=None, progress=Progress(step, restored=True, restored_from="memory"),
            exit=None, finished=None, final_saves_reported=False, barrier_step=None, saved=None,
        )  # fmt: skip

    def _members(self) -> list[ObservedSession]:
        return [w.agent.seen for w in self._member_workers() if w.agent is not None]

    def _member_workers(self) -> list[Worker]:
        world = self.status.membership
        names = {m.incarnation for m in world.members} if world is not None and world.state == "Committed" else set()
        return [w for w in self.workers.values() if w.agent is not None and w.agent.incarnation in names]

    def _step(self) -> None:
        """All members step together, or those that are left lose their peers."""
        for identity, copy in self.lagging:
            target = self.tiers.holder(identity)
            if target is not None and (target.fence or 0) <= copy.save.generation:
                self.tiers.store(identity, copy)
        self.lagging = []
        world = self.status.membership
        if world is None or world.state != "Committed" or not world.members:
            return
        there = [
            w for w in self._member_workers() if w.agent is not None and w.agent.seen.generation == world.generation
        ]
        well = [w for w in there if w.seen.phase == "Running" and w.agent is not None and w.agent.seen.exit is None]
        if any(self.frozen(w) for w in well):
            return
        if len(well) < len(world.members):
            for worker in well:
                agent = worker.agent
                if agent is not None and agent.seen.stopped <= world.generation and len(there) > 0:
                    gone = ObservedExit(world.generation, worker.seen.index, 1, "connection reset", True, self.now)
                    agent.seen = replace(agent.seen, exit=gone)
            return
        for worker in well:
            agent = worker.agent
            if agent is None or agent.seen.finished is not None:
                continue
            step = agent.seen.progress.step
            if self.barrier is not None and self.barrier.barrier == Barrier(world.generation, step, "bound"):
                agent.seen = replace(agent.seen, barrier_step=step, saved=Checkpoint(world.generation, step))
                self._save(worker, world, step)
                continue
            step += 1
            agent.seen = told(agent.seen, step=step, step_at_seconds=self.now, step_seconds=0.1)
            if step % self.job.spec.checkpoint.memory.base_steps == 0:
                self._save(worker, world, step)
            if step >= self.total_steps:
                agent.seen = replace(agent.seen, finished=0, finished_steps=step, final_saves_reported=True)

    def _save(self, worker: Worker, world: Membership, step: int) -> None:
        rank = [m.incarnation for m in world.members].index(worker.agent.incarnation if worker.agent else "")
        mine = manifest(world.generation, step, rank, world.world_size)
        ready = [n.holder for n in self.nodes.values() if n.holder is not None and n.holder.state == "Ready"]
        ready = [h for h in ready if h.fence == world.generation and h.endpoint in self.status.assigned_servers]
        ready.sort(key=lambda h: (h.endpoint.instance.node != worker.seen.node, h.endpoint.instance))
        first, rest = ready[:1], ready[1:]
        place = rank % len(rest) if rest else 0
        for holder in first:
            self.tiers.store(holder.endpoint.instance, mine)
        if self.job.spec.checkpoint.memory.replicas > 1:
            self.lagging += [(holder.endpoint.instance, mine) for holder in rest[place : place + 1]]
        if worker.agent is not None:
            worker.agent.seen = replace(worker.agent.seen, saved=Checkpoint(world.generation, step))

    def _bind(self) -> None:
        """The fabric's scheduler: one worker a node; agents connect as soon as they run."""
        for worker in list(self.workers.values()):
            if worker.seen.phase != "Pending":
                continue
            busy = {w.seen.node for w in self.workers.values() if w.seen.phase in ("Running", "Pending")}
            free = [n for n in self.nodes.values() if n.takes_pods and n.name not in busy]
            if free:
                self.births += 1
                name, incarnation = free[0].name, f"inc-{self.births}"
                worker.seen = replace(worker.seen, node=name, phase="Running")
                seen = ObservedSession(
                    worker.seen.index, worker.seen.attempt, incarnation, name, True, self.now, self.now
                )
                worker.agent = Agent(incarnation, self.now, seen)
        self._tell()
        fake_nodes.end_who_parted(self)

    def _on(self, node: str) -> list[Worker]:
        return [w for w in self.workers.values() if w.seen.node == node]

    def frozen(self, worker: Worker) -> bool:
        return worker.seen.node is not None and self.nodes[worker.seen.node].frozen

    def _end(self, worker: Worker, phase: str, code: int) -> None:
        if worker.seen.phase in ("Succeeded", "Failed"):
            return
        worker.seen = replace(worker.seen, phase=phase, exit_code=code)  # type: ignore[arg-type]  # a phase's word
        if worker.agent is not None:
            worker.agent.seen = replace(worker.agent.seen, connected=False, since_seconds=self.now)
