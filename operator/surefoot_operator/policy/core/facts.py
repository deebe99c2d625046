"""Indexes a snapshot and derives the facts every decision uses.

Pure; read by every decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from surefoot.protocol.checkpoints.completeness import (
    Covers,
    TierReading,
)
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.identities import (
    Checkpoint,
    HolderEndpoint,
    HolderId,
    RankSave,
    WorkerId,
)
from surefoot.protocol.messages import Barrier
from surefoot.protocol.progress import mean_passes
from surefoot_operator.api.spec import (
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.api.status import DataRead, JobStatus, Member, World
from surefoot_operator.job_snapshot import (
    CreateSeen,
    GroupCallSeen,
    HolderSeen,
    NodeSeen,
    Observed,
    ObservedBarrier,
    PersistentSeen,
    PodGroupsSeen,
    PurgeCallSeen,
    PurgeSeen,
    SessionSeen,
    WorkerSeen,
)
from surefoot_operator.rejected_calls import RefusedCall

# ---- derived facts that are kept -------------------------------------------------------------------------------------
# Keeps derived values while what they came from is unchanged. Nodes, holders and members of two thousand workers change
# seldom and are asked for in each round; indexes made anew each time cost more than the decisions that use them.

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
MOST_KEPT = 16
"""Of each function: as many jobs as reconcile beside each other, and a few."""


def kept_while_same(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Derives a value once for one and the same first argument.

    That argument is told by identity, others by equality. Nobody may change the value, or the argument. What it was
    derived from is kept as long, so that no other object can come to have its identity.
    """
    kept: OrderedDict[tuple[Hashable, ...], tuple[S, T]] = OrderedDict()

    @wraps(function)
    def once(source: S, /, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "arguments are given by position, so that they can be looked up"
        key = (id(source), *arguments)
        found = kept.get(key)
        if found is None:
            found = kept[key] = (source, function(source, *arguments, **named))
            if len(kept) > MOST_KEPT:
                kept.popitem(last=False)
        else:
            kept.move_to_end(key)
        return found[1]

    return once


# ---- indexes ---------------------------------------------------------------------------------------------------------
# Indexes the parts of a snapshot that seldom change. Each is made once for one and the same tuple: a round in which one
# agent spoke looks at what it said, and not at two thousand nodes and holders again.


def worker_id(one: Member | SessionSeen | WorkerSeen) -> WorkerId:
    return WorkerId(one.index, one.attempt)


@kept_while_same
def workers_by_id(workers: tuple[WorkerSeen, ...]) -> Mapping[WorkerId, WorkerSeen]:
    return {worker_id(worker): worker for worker in workers}


@kept_while_same
def sessions_by_id(sessions: tuple[SessionSeen, ...]) -> Mapping[WorkerId, SessionSeen]:
    """Of several of one worker the last that connected."""
    found: dict[WorkerId, SessionSeen] = {}
    for session in sessions:
        worker = worker_id(session)
        other = found.get(worker)
        if other is None or _latest(session) >= _latest(other):
            found[worker] = session
    return found


def _latest(session: SessionSeen) -> tuple[bool, float, str]:
    return session.connected, session.since_seconds, session.incarnation


@kept_while_same
def nodes_by_name(nodes: tuple[NodeSeen, ...]) -> Mapping[str, NodeSeen]:
    return {node.name: node for node in nodes}


@kept_while_same
def doubtful_nodes(nodes: tuple[NodeSeen, ...]) -> frozenset[str]:
    """Names of nodes that may be lost: few are."""
    return frozenset(node.name for node in nodes if not node.ready or node.doubt)


@kept_while_same
def holders_by_id(holders: tuple[HolderSeen, ...]) -> Mapping[HolderId, HolderSeen]:
    return {one.endpoint.holder: one for one in holders}


@kept_while_same
def members_by_id(members: tuple[Member, ...]) -> Mapping[WorkerId, Member]:
    return {worker_id(member): member for member in members}


@kept_while_same
def signalled_nodes(nodes: tuple[NodeSeen, ...]) -> Mapping[str, str]:
    return {node.name: node.signal for node in nodes if node.signal}


@kept_while_same
def ending_workers(workers: tuple[WorkerSeen, ...]) -> Mapping[WorkerId, str]:
    return {worker_id(worker): _announced(worker) for worker in workers if worker.deleting or worker.disrupted}


def _announced(worker: WorkerSeen) -> str:
    return f"is being deleted ({worker.message})" if worker.message else "is being deleted"


@kept_while_same
def sealed_at(holders: tuple[HolderSeen, ...], epoch: int) -> tuple[HolderSeen, ...]:
    read = (h for h in holders if h.state == "Ready" and h.read_epoch == epoch)
    return tuple(h for h in read if h.fence is not None and h.fence >= epoch)


@kept_while_same
def sealed_endpoints(holders: tuple[HolderSeen, ...], epoch: int) -> Mapping[HolderId, HolderEndpoint]:
    return {h.endpoint.holder: h.endpoint for h in sealed_at(holders, epoch)}


@kept_while_same
def holders_reading(holders: tuple[HolderSeen, ...], epoch: int) -> TierReading:
    return TierReading({h.endpoint.holder: h.entries for h in sealed_at(holders, epoch)}, None)


@kept_while_same
def topology_of(nodes: tuple[NodeSeen, ...], job_uid: str) -> Topology:
    """Where nodes stand, for the placement of one job's copies."""
    return Topology(job_uid, _paths(nodes))


@kept_while_same
def _paths(nodes: tuple[NodeSeen, ...]) -> dict[str, tuple[str, ...]]:
    """Shared by all jobs: made for each, the nodes of a thousand jobs would be read in each of their rounds."""
    return {node.name: node.path for node in nodes if node.path}


@kept_while_same
def holder_domains(holders: tuple[HolderSeen, ...]) -> dict[HolderId, str]:
    return {h.endpoint.holder: h.endpoint.domain for h in holders}


# ---- facts -----------------------------------------------------------------------------------------------------------

RECONNECT_GRACE_SECONDS = 0.25
"""How long a first cause may trail its echoes on other ranks, and a step the death of one of them."""


# A decision names in its signature what it may read: the job alone, its world (workers, agents' sessions, members), its
# nodes, its tiers (memory servers and the persistent tier), two of these, or all. `Facts` has all of them; a function that
# has it passes it on as it is. mypy refuses a decision that reads more than it declares.


@dataclass(frozen=True)
class JobFacts:
    """The job's spec and status, and the time: what every decision may read."""

    _seen: Observed
    """The snapshot that all facts come from."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was derived from this snapshot before; see `derived_once`."""

    @property
    def now(self) -> float:
        return self._seen.now

    @property
    def spec(self) -> TrainingJobSpec:
        return self._seen.job.spec

    @property
    def status(self) -> JobStatus:
        return self._seen.status

    @property
    def world(self) -> World:
        """The present world; only where one was claimed already."""
        world = self._seen.status.world
        if world is None:
            raise LookupError("this job has no world yet")
        return world

    @property
    def running_epoch(self) -> int:
        """The newest epoch that was committed, 0 before the first."""
        return self._seen.status.lineage[-1].epoch if self._seen.status.lineage else 0

    @property
    def job(self) -> TrainingJob:
        return self._seen.job

    @property
    def term_seconds(self) -> float:
        return self._seen.term_seconds

    @property
    def refusal(self) -> str:
        return self._seen.refusal

    @property
    def refused_calls(self) -> tuple[RefusedCall, ...]:
        return self._seen.refused_calls


@dataclass(frozen=True)
class WorldFacts(JobFacts):
    """The job's workers, what their agents report, and the members of its world."""

    workers: Mapping[WorkerId, WorkerSeen]
    sessions: Mapping[WorkerId, SessionSeen]
    silent_agents: int
    """Number of agents that are not heard now."""
    members: Mapping[WorkerId, Member]
    """Members of the present world, claimed or committed; none before the first."""

    @property
    def worker_list(self) -> tuple[WorkerSeen, ...]:
        return self._seen.workers

    @property
    def creates(self) -> tuple[CreateSeen, ...]:
        return self._seen.creates

    @property
    def pod_groups(self) -> PodGroupsSeen | None:
        return self._seen.pod_groups

    @property
    def group_calls(self) -> tuple[GroupCallSeen, ...]:
        return self._seen.group_calls

    @property
    def deletions(self) -> frozenset[str]:
        return self._seen.deletions

    @property
    def turned_away_seconds(self) -> float:
        return self._seen.turned_away_seconds

    @property
    def barrier(self) -> ObservedBarrier | None:
        return self._seen.barrier


@dataclass(frozen=True)
class NodeFacts(JobFacts):
    """The nodes that the job may use, and when an agent on each was last heard."""

    nodes: Mapping[str, NodeSeen]
    heard_on: Mapping[str, bool]
    """By node that an agent said hello from in this term: whether an agent there is heard now."""
    told_on: Mapping[str, float]
    """By node: when an agent on it was last heard, whether or not its connection broke since."""

    @property
    def node_list(self) -> tuple[NodeSeen, ...]:
        return self._seen.nodes

    @property
    def free_nodes(self) -> int | None:
        return self._seen.free_nodes


@dataclass(frozen=True)
class TierFacts(JobFacts):
    """What was read of the memory servers and of the persistent tier, and what is known of their copies."""

    holders: Mapping[HolderId, HolderSeen]

    @property
    def holder_list(self) -> tuple[HolderSeen, ...]:
        return self._seen.holders

    @property
    def persistent(self) -> PersistentSeen:
        return self._seen.persistent

    @property
    def older(self) -> PersistentSeen:
        return self._seen.older

    @property
    def covers(self) -> Covers:
        return self._seen.covers

    @property
    def promoted(self) -> Mapping[Checkpoint, frozenset[RankSave]]:
        return self._seen.promoted

    @property
    def stumbled(self) -> Mapping[RankSave, int]:
        return self._seen.stumbled

    @property
    def unreadable(self) -> frozenset[RankSave]:
        return self._seen.unreadable

    @property
    def promotion_seconds(self) -> float | None:
        return self._seen.promotion_seconds

    @property
    def refused_records(self) -> tuple[str, ...]:
        return self._seen.refused_records

    @property
    def memory_cleaned(self) -> bool:
        return self._seen.memory_cleaned

    @property
    def purges(self) -> tuple[PurgeSeen, ...]:
        return self._seen.purges

    @property
    def purge_call(self) -> PurgeCallSeen:
        return self._seen.purge_call

    @property
    def uploads(self) -> bool:
        return self._seen.uploads


@dataclass(frozen=True)
class WorldNodeFacts(WorldFacts, NodeFacts):
    """The world and the nodes."""


@dataclass(frozen=True)
class WorldTierFacts(WorldFacts, TierFacts):
    """The world and the tiers."""


@dataclass(frozen=True)
class Facts(WorldNodeFacts, WorldTierFacts):
    """A snapshot with its indexes, built once per plan.

    Without the indexes each decision about a worker would search every list.
    """

    @property
    def seen(self) -> Observed:
        return self._seen

    def with_status(self, status: JobStatus) -> Facts:
        """Returns these facts under another status of the same world; `gather` them anew if its members differ."""
        return replace(self, _seen=replace(self._seen, status=status))


F = TypeVar("F", bound=JobFacts)


def derived_once(function: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Caches a fact per snapshot; callers must not change the value.

    A fact that reads every worker, computed for each of them, would cost the square of their number.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def once(facts: F, /, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "arguments are given by position, so that they can be looked up"
        key = (name, *arguments) if arguments else name
        try:
            return cast(T, facts._derived[key])
        except KeyError:
            found = facts._derived[key] = function(facts, *arguments, **named)
            return found

    return once


def gather(seen: Observed) -> Facts:
    """Indexes the snapshot once for all decisions."""
    sessions = sessions_by_id(seen.sessions)
    silence = seen.job.spec.health_policy.heartbeat_timeout_seconds
    heard_on: dict[str, bool] = {}
    told_on: dict[str, float] = {}
    silent = 0
    for session in sessions.values():
        heard = session.connected and seen.now - session.heard_seconds <= silence
        silent += not heard
        heard_on[session.node] = heard_on.get(session.node, False) or heard
        told_on[session.node] = max(told_on.get(session.node, session.heard_seconds), session.heard_seconds)
    world = seen.status.world
    return Facts(
        seen,
        workers=workers_by_id(seen.workers),
        sessions=sessions,
        silent_agents=silent,
        members={} if world is None else members_by_id(world.members),
        nodes=nodes_by_name(seen.nodes),
        heard_on=heard_on,
        told_on=told_on,
        holders=holders_by_id(seen.holders),
    )


def is_responsive(facts: JobFacts, session: SessionSeen) -> bool:
    """Whether an agent is connected and within its heartbeat timeout."""
    return session.connected and facts.now - session.heard_seconds <= facts.spec.health_policy.heartbeat_timeout_seconds


@derived_once
def member_sessions(facts: WorldFacts) -> tuple[tuple[Member, SessionSeen | None], ...]:
    """Pairs each member with its agent's session.

    None if no agent speaks, or one of another incarnation.
    """
    found: list[tuple[Member, SessionSeen | None]] = []
    for worker, member in facts.members.items():
        session = facts.sessions.get(worker)
        own = session is not None and session.incarnation == member.incarnation
        found.append((member, session if own else None))
    return tuple(found)


@derived_once
def barrier_checkpoint(facts: WorldFacts) -> Checkpoint | None:
    """The step at which every rank waits at a bound barrier, if any."""
    world, observed = facts.status.world, facts.barrier
    if world is None or world.state != "Committed" or not world.members or observed is None:
        return None
    barrier = observed.sent
    if (barrier.generation, barrier.phase) != (world.epoch, "bound"):
        return None
    reached = all(s is not None and waits_at(s, barrier) for _, s in member_sessions(facts))
    return Checkpoint(barrier.generation, barrier.step) if reached else None


def waits_at(session: SessionSeen, barrier: Barrier) -> bool:
    """Whether all ranks of this agent wait at the barrier."""
    return (session.epoch, session.barrier_step) == (barrier.generation, barrier.step)


@derived_once
def final_checkpoint(facts: WorldFacts) -> Checkpoint | None:
    """The last step's checkpoint once every member finished, saved or not.

    An epoch that made no step of its own ended where it began.
    """
    sessions = [s for _, s in member_sessions(facts)]
    if not sessions or any(s is None or s.epoch != facts.world.epoch or s.finished != 0 for s in sessions):
        return None
    steps = [s.finished_steps for s in sessions if s is not None]
    return Checkpoint(facts.world.epoch, max(steps)) if any(steps) else facts.world.parent


@derived_once
def is_broken(facts: WorldFacts) -> bool:
    """Whether a trainer of the committed world has failed."""
    epoch = facts.world.epoch
    return any(s is not None and s.exit is not None and s.exit.epoch == epoch for _, s in member_sessions(facts))


@derived_once
def in_epoch(facts: WorldFacts, epoch: int) -> tuple[SessionSeen, ...]:
    """Sessions whose facts (step, exit, barrier …) are about this epoch."""
    return tuple(s for s in facts.sessions.values() if s.epoch == epoch)


@derived_once
def step_of(facts: WorldFacts, epoch: int) -> int:
    """The highest step that any rank of `epoch` finished; 0: none."""
    return max((s.progress.step for s in in_epoch(facts, epoch)), default=0)


def last_step(facts: WorldFacts) -> int:
    """The last step that the world finished or restored."""
    return max(step_of(facts, facts.world.epoch), facts.world.begun_step)


@derived_once
def has_stepped(facts: WorldFacts, epoch: int) -> bool:
    """Whether `epoch` made a step after the one it restored."""
    begun = facts.world.begun_step
    return any(s.step_at_seconds is not None or s.progress.step > begun for s in in_epoch(facts, epoch))


@derived_once
def last_step_seconds(facts: WorldFacts, epoch: int) -> float | None:
    """When a step of `epoch` was last reported.

    A new operator counts from its first report.
    """
    world = facts.status.world
    parent = world.begun_step if world is not None else 0
    times = [
        s.step_at_seconds if s.step_at_seconds is not None else s.since_seconds
        for s in in_epoch(facts, epoch)
        if s.step_at_seconds is not None or s.progress.step > parent
    ]
    return max(times, default=None)


@derived_once
def seconds_per_step(facts: WorldFacts) -> float | None:
    """The slowest rank's step time; None while unknown."""
    return max(
        (s.progress.step_seconds for s in facts.sessions.values() if s.progress.step_seconds is not None), default=None
    )


def moving_until(facts: WorldFacts, since_seconds: float) -> float | None:
    """Until when the epoch advances after `since_seconds`; None: it stands.

    One step may still be reported just after a rank died, so a step is proof of life for two step times only, and until
    the next could have been told.
    """
    last = last_step_seconds(facts, facts.world.epoch)
    if last is None or last <= since_seconds:
        return None
    until = (
        last
        + facts.spec.health_policy.heartbeat_seconds
        + max(RECONNECT_GRACE_SECONDS, 2 * (seconds_per_step(facts) or 0.0))
    )
    return until if facts.now < until else None


def data_read(facts: WorldFacts, epoch: int) -> DataRead | None:
    """Progress of `epoch` through its data; None without an elastic loader."""
    told = [s.progress for s in in_epoch(facts, epoch)]
    passes, pace = mean_passes(told), seconds_per_step(facts)
    if passes is None:
        return None
    samples = sum(one.step_samples or 0 for one in told)
    return DataRead(round(passes, 4), float(f"{samples / pace:.3g}") if samples and pace else None)


def loss_told(facts: WorldFacts, epoch: int) -> float | None:
    """The mean loss of an epoch's workers; None where none told any."""
    told = [s.progress.loss for s in in_epoch(facts, epoch) if s.progress.loss is not None]
    return sum(told) / len(told) if told else None


def saving_steps(facts: JobFacts) -> int:
    """Steps between saves to memory: as chosen, else the tier's base."""
    chosen = facts.status.memory_interval
    return facts.spec.checkpoint.memory.base_steps if chosen is None else chosen.steps


def sealed_holders(facts: TierFacts, epoch: int) -> tuple[HolderSeen, ...]:
    """Returns the holders that the operator sealed at `epoch` and whose index it has read since."""
    return sealed_at(facts.holder_list, epoch)


@derived_once
def reading_at(facts: TierFacts, epoch: int) -> TierReading:
    """What was read of all tiers for `epoch`.

    Holders that were not read are left out, not taken as empty.
    """
    persistent = facts.persistent
    listed = persistent.entries if persistent.read_epoch == epoch else None
    memory = memory_reading(facts, epoch)
    return memory if listed is None else TierReading(memory.holders, listed)


def memory_reading(facts: TierFacts, epoch: int) -> TierReading:
    """What was read for `epoch` of the holders alone."""
    return holders_reading(facts.holder_list, epoch)


def topology_of_job(facts: NodeFacts) -> Topology:
    """Where its nodes stand: the placement of its copies goes by it."""
    return topology_of(facts.node_list, facts.job.uid)


def domains_of(facts: TierFacts) -> dict[HolderId, str]:
    """The failure domain of each holder."""
    return holder_domains(facts.holder_list)


@derived_once
def bad_of(facts: JobFacts) -> frozenset[Checkpoint]:
    return frozenset(facts.status.bad)


def soonest(times: Iterable[float | None]) -> float | None:
    """The earliest of some times; None without any."""
    return min((t for t in times if t is not None), default=None)
