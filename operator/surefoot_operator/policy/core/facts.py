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
    MemoryServerEndpoint,
    MemoryServerInstance,
    RankSave,
    WorkerId,
)
from surefoot.protocol.messages import Barrier
from surefoot.protocol.progress import mean_epochs
from surefoot_operator.api.spec import (
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.api.status import DataProgress, JobStatus, Member, Membership
from surefoot_operator.job_snapshot import (
    JobSnapshot,
    ObservedBarrier,
    ObservedMemoryServer,
    ObservedNode,
    ObservedPodGroups,
    ObservedPurge,
    ObservedSession,
    ObservedWorker,
    PendingCreate,
    PendingGroupCall,
    PersistentListing,
    PurgeCallSeen,
)
from surefoot_operator.rejected_calls import RefusedCall

# ---- derived facts that are kept -------------------------------------------------------------------------------------
# Keeps derived values while what they came from is unchanged. Nodes, holders and members of two thousand workers change
# seldom and are asked for in each round; indexes made anew each time cost more than the decisions that use them.

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
MAX_KEPT = 16
"""Of each function: as many jobs as reconcile beside each other, and a few."""


def cached_by_identity(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
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
            if len(kept) > MAX_KEPT:
                kept.popitem(last=False)
        else:
            kept.move_to_end(key)
        return found[1]

    return once


# ---- indexes ---------------------------------------------------------------------------------------------------------
# Indexes the parts of a snapshot that seldom change. Each is made once for one and the same tuple: a round in which one
# agent spoke looks at what it said, and not at two thousand nodes and holders again.


def worker_id(one: Member | ObservedSession | ObservedWorker) -> WorkerId:
    return WorkerId(one.index, one.attempt)


@cached_by_identity
def workers_by_id(workers: tuple[ObservedWorker, ...]) -> Mapping[WorkerId, ObservedWorker]:
    return {worker_id(worker): worker for worker in workers}


@cached_by_identity
def sessions_by_id(sessions: tuple[ObservedSession, ...]) -> Mapping[WorkerId, ObservedSession]:
    """Of several of one worker the last that connected."""
    found: dict[WorkerId, ObservedSession] = {}
    for session in sessions:
        worker = worker_id(session)
        other = found.get(worker)
        if other is None or _latest(session) >= _latest(other):
            found[worker] = session
    return found


def _latest(session: ObservedSession) -> tuple[bool, float, str]:
    return session.connected, session.since_seconds, session.incarnation


@cached_by_identity
def nodes_by_name(nodes: tuple[ObservedNode, ...]) -> Mapping[str, ObservedNode]:
    return {node.name: node for node in nodes}


@cached_by_identity
def doubtful_nodes(nodes: tuple[ObservedNode, ...]) -> frozenset[str]:
    """Names of nodes that may be lost: few are."""
    return frozenset(node.name for node in nodes if not node.ready or node.unconfirmed_failure)


@cached_by_identity
def servers_by_id(servers: tuple[ObservedMemoryServer, ...]) -> Mapping[MemoryServerInstance, ObservedMemoryServer]:
    return {one.endpoint.instance: one for one in servers}


@cached_by_identity
def members_by_id(members: tuple[Member, ...]) -> Mapping[WorkerId, Member]:
    return {worker_id(member): member for member in members}


@cached_by_identity
def signalled_nodes(nodes: tuple[ObservedNode, ...]) -> Mapping[str, str]:
    return {node.name: node.evacuation_reason for node in nodes if node.evacuation_reason}


@cached_by_identity
def ending_workers(workers: tuple[ObservedWorker, ...]) -> Mapping[WorkerId, str]:
    return {
        worker_id(worker): _announced(worker) for worker in workers if worker.deleting or worker.disruption_announced
    }


def _announced(worker: ObservedWorker) -> str:
    return f"is being deleted ({worker.message})" if worker.message else "is being deleted"


@cached_by_identity
def fenced_at(servers: tuple[ObservedMemoryServer, ...], generation: int) -> tuple[ObservedMemoryServer, ...]:
    read = (h for h in servers if h.state == "Ready" and h.read_generation == generation)
    return tuple(h for h in read if h.fence is not None and h.fence >= generation)


@cached_by_identity
def fenced_endpoints(
    servers: tuple[ObservedMemoryServer, ...], generation: int
) -> Mapping[MemoryServerInstance, MemoryServerEndpoint]:
    return {h.endpoint.instance: h.endpoint for h in fenced_at(servers, generation)}


@cached_by_identity
def servers_reading(servers: tuple[ObservedMemoryServer, ...], generation: int) -> TierReading:
    return TierReading({h.endpoint.instance: h.entries for h in fenced_at(servers, generation)}, None)


@cached_by_identity
def topology_of(nodes: tuple[ObservedNode, ...], job_uid: str) -> Topology:
    """Where nodes stand, for the placement of one job's copies."""
    return Topology(job_uid, _paths(nodes))


@cached_by_identity
def _paths(nodes: tuple[ObservedNode, ...]) -> dict[str, tuple[str, ...]]:
    """Shared by all jobs: made for each, the nodes of a thousand jobs would be read in each of their rounds."""
    return {node.name: node.path for node in nodes if node.path}


@cached_by_identity
def server_domains(servers: tuple[ObservedMemoryServer, ...]) -> dict[MemoryServerInstance, str]:
    return {h.endpoint.instance: h.endpoint.domain for h in servers}


# ---- facts -----------------------------------------------------------------------------------------------------------

RECONNECT_GRACE_SECONDS = 0.25
"""How long a first cause may trail its echoes on other ranks, and a step the death of one of them."""


# A decision names in its signature what it may read: the job alone, its world (workers, agents' sessions, members), its
# nodes, its tiers (memory servers and the persistent tier), two of these, or all. `Facts` has all of them; a function that
# has it passes it on as it is. mypy refuses a decision that reads more than it declares.


@dataclass(frozen=True)
class JobFacts:
    """The job's spec and status, and the time: what every decision may read."""

    _seen: JobSnapshot
    """The snapshot that all facts come from."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was derived from this snapshot before; see `derived_once`."""

    @property
    def now(self) -> float:
        return self._seen.now_seconds

    @property
    def spec(self) -> TrainingJobSpec:
        return self._seen.job.spec

    @property
    def status(self) -> JobStatus:
        return self._seen.status

    @property
    def membership(self) -> Membership:
        """The present world; only where one was claimed already."""
        world = self._seen.status.membership
        if world is None:
            raise LookupError("this job has no world yet")
        return world

    @property
    def running_generation(self) -> int:
        """The newest epoch that was committed, 0 before the first."""
        return self._seen.status.lineage[-1].generation if self._seen.status.lineage else 0

    @property
    def job(self) -> TrainingJob:
        return self._seen.job

    @property
    def term_seconds(self) -> float:
        return self._seen.term_seconds

    @property
    def refusal(self) -> str:
        return self._seen.spec_rejection

    @property
    def refused_calls(self) -> tuple[RefusedCall, ...]:
        return self._seen.refused_calls


@dataclass(frozen=True)
class WorldFacts(JobFacts):
    """The job's workers, what their agents report, and the members of its world."""

    workers: Mapping[WorkerId, ObservedWorker]
    sessions: Mapping[WorkerId, ObservedSession]
    silent_agents: int
    """Number of agents that are not heard now."""
    members: Mapping[WorkerId, Member]
    """Members of the present world, claimed or committed; none before the first."""

    @property
    def worker_list(self) -> tuple[ObservedWorker, ...]:
        return self._seen.workers

    @property
    def creates(self) -> tuple[PendingCreate, ...]:
        return self._seen.creates

    @property
    def pod_groups(self) -> ObservedPodGroups | None:
        return self._seen.pod_groups

    @property
    def group_calls(self) -> tuple[PendingGroupCall, ...]:
        return self._seen.group_calls

    @property
    def deletions(self) -> frozenset[str]:
        return self._seen.deletions

    @property
    def turned_away_seconds(self) -> float:
        return self._seen.retry_later_seconds

    @property
    def barrier(self) -> ObservedBarrier | None:
        return self._seen.barrier


@dataclass(frozen=True)
class NodeFacts(JobFacts):
    """The nodes that the job may use, and when an agent on each was last heard."""

    nodes: Mapping[str, ObservedNode]
    connected_nodes: Mapping[str, bool]
    """By node that an agent said hello from in this term: whether an agent there is heard now."""
    last_message_seconds: Mapping[str, float]
    """By node: when an agent on it was last heard, whether or not its connection broke since."""

    @property
    def node_list(self) -> tuple[ObservedNode, ...]:
        return self._seen.nodes

    @property
    def free_nodes(self) -> int | None:
        return self._seen.free_nodes


@dataclass(frozen=True)
class TierFacts(JobFacts):
    """What was read of the memory servers and of the persistent tier, and what is known of their copies."""

    servers: Mapping[MemoryServerInstance, ObservedMemoryServer]

    @property
    def holder_list(self) -> tuple[ObservedMemoryServer, ...]:
        return self._seen.servers

    @property
    def persistent(self) -> PersistentListing:
        return self._seen.persistent

    @property
    def older(self) -> PersistentListing:
        return self._seen.source_listing

    @property
    def covers(self) -> Covers:
        return self._seen.covers

    @property
    def promoted(self) -> Mapping[Checkpoint, frozenset[RankSave]]:
        return self._seen.uploaded

    @property
    def stumbled(self) -> Mapping[RankSave, int]:
        return self._seen.failed_uploads

    @property
    def unreadable(self) -> frozenset[RankSave]:
        return self._seen.unreadable

    @property
    def promotion_seconds(self) -> float | None:
        return self._seen.upload_seconds

    @property
    def refused_records(self) -> tuple[str, ...]:
        return self._seen.refused_records

    @property
    def memory_cleaned(self) -> bool:
        return self._seen.memory_cleared

    @property
    def purges(self) -> tuple[ObservedPurge, ...]:
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
    def snapshot(self) -> JobSnapshot:
        return self._seen

    def with_status(self, status: JobStatus) -> Facts:
        """Returns these facts under another status of the same world; `gather` them anew if its members differ."""
        return replace(self, _seen=replace(self._seen, status=status))


F = TypeVar("F", bound=JobFacts)


def cached_per_snapshot(function: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
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


def gather(seen: JobSnapshot) -> Facts:
    """Indexes the snapshot once for all decisions."""
    sessions = sessions_by_id(seen.sessions)
    silence = seen.job.spec.health_policy.heartbeat_timeout_seconds
    heard_on: dict[str, bool] = {}
    told_on: dict[str, float] = {}
    silent = 0
    for session in sessions.values():
        heard = session.connected and seen.now_seconds - session.last_message_seconds <= silence
        silent += not heard
        heard_on[session.node] = heard_on.get(session.node, False) or heard
        told_on[session.node] = max(
            told_on.get(session.node, session.last_message_seconds), session.last_message_seconds
        )
    membership = seen.status.membership
    return Facts(
        seen,
        workers=workers_by_id(seen.workers),
        sessions=sessions,
        silent_agents=silent,
        members={} if membership is None else members_by_id(membership.members),
        nodes=nodes_by_name(seen.nodes),
        connected_nodes=heard_on,
        last_message_seconds=told_on,
        servers=servers_by_id(seen.servers),
    )


def is_responsive(facts: JobFacts, session: ObservedSession) -> bool:
    """Whether an agent is connected and within its heartbeat timeout."""
    return (
        session.connected
        and facts.now - session.last_message_seconds <= facts.spec.health_policy.heartbeat_timeout_seconds
    )


@cached_per_snapshot
def member_sessions(facts: WorldFacts) -> tuple[tuple[Member, ObservedSession | None], ...]:
    """Pairs each member with its agent's session.

    None if no agent speaks, or one of another incarnation.
    """
    found: list[tuple[Member, ObservedSession | None]] = []
    for worker, member in facts.members.items():
        session = facts.sessions.get(worker)
        own = session is not None and session.incarnation == member.incarnation
        found.append((member, session if own else None))
    return tuple(found)


@cached_per_snapshot
def barrier_checkpoint(facts: WorldFacts) -> Checkpoint | None:
    """The step at which every rank waits at a bound barrier, if any."""
    membership, observed = facts.status.membership, facts.barrier
    if membership is None or membership.state != "Committed" or not membership.members or observed is None:
        return None
    barrier = observed.sent
    if (barrier.generation, barrier.phase) != (membership.generation, "bound"):
        return None
    reached = all(s is not None and waits_at(s, barrier) for _, s in member_sessions(facts))
    return Checkpoint(barrier.generation, barrier.step) if reached else None


def waits_at(session: ObservedSession, barrier: Barrier) -> bool:
    """Whether all ranks of this agent wait at the barrier."""
    return (session.generation, session.barrier_step) == (barrier.generation, barrier.step)


@cached_per_snapshot
def final_checkpoint(facts: WorldFacts) -> Checkpoint | None:
    """The last step's checkpoint once every member finished, saved or not.

    An epoch that made no step of its own ended where it began.
    """
    sessions = [s for _, s in member_sessions(facts)]
    if not sessions or any(
        s is None or s.generation != facts.membership.generation or s.finished != 0 for s in sessions
    ):
        return None
    steps = [s.finished_steps for s in sessions if s is not None]
    return Checkpoint(facts.membership.generation, max(steps)) if any(steps) else facts.membership.parent


@cached_per_snapshot
def is_broken(facts: WorldFacts) -> bool:
    """Whether a trainer of the committed world has failed."""
    generation = facts.membership.generation
    return any(
        s is not None and s.exit is not None and s.exit.generation == generation for _, s in member_sessions(facts)
    )


@cached_per_snapshot
def sessions_in_generation(facts: WorldFacts, generation: int) -> tuple[ObservedSession, ...]:
    """Sessions whose facts (step, exit, barrier …) are about this epoch."""
    return tuple(s for s in facts.sessions.values() if s.generation == generation)


@cached_per_snapshot
def step_of(facts: WorldFacts, generation: int) -> int:
    """The highest step that any rank of `epoch` finished; 0: none."""
    return max((s.progress.step for s in sessions_in_generation(facts, generation)), default=0)


def last_step(facts: WorldFacts) -> int:
    """The last step that the world finished or restored."""
    return max(step_of(facts, facts.membership.generation), facts.membership.start_step)


@cached_per_snapshot
def has_stepped(facts: WorldFacts, generation: int) -> bool:
    """Whether `epoch` made a step after the one it restored."""
    begun = facts.membership.start_step
    return any(
        s.step_at_seconds is not None or s.progress.step > begun for s in sessions_in_generation(facts, generation)
    )


@cached_per_snapshot
def last_step_seconds(facts: WorldFacts, generation: int) -> float | None:
    """When a step of `epoch` was last reported.

    A new operator counts from its first report.
    """
    membership = facts.status.membership
    parent = membership.start_step if membership is not None else 0
    times = [
        s.step_at_seconds if s.step_at_seconds is not None else s.since_seconds
        for s in sessions_in_generation(facts, generation)
        if s.step_at_seconds is not None or s.progress.step > parent
    ]
    return max(times, default=None)


@cached_per_snapshot
def seconds_per_step(facts: WorldFacts) -> float | None:
    """The slowest rank's step time; None while unknown."""
    return max(
        (s.progress.step_seconds for s in facts.sessions.values() if s.progress.step_seconds is not None), default=None
    )


def progressing_until(facts: WorldFacts, since_seconds: float) -> float | None:
    """Until when the epoch advances after `since_seconds`; None: it stands.

    One step may still be reported just after a rank died, so a step is proof of life for two step times only, and until
    the next could have been told.
    """
    last = last_step_seconds(facts, facts.membership.generation)
    if last is None or last <= since_seconds:
        return None
    until = (
        last
        + facts.spec.health_policy.heartbeat_seconds
        + max(RECONNECT_GRACE_SECONDS, 2 * (seconds_per_step(facts) or 0.0))
    )
    return until if facts.now < until else None


def data_read(facts: WorldFacts, generation: int) -> DataProgress | None:
    """Progress of `epoch` through its data; None without an elastic loader."""
    told = [s.progress for s in sessions_in_generation(facts, generation)]
    passes, pace = mean_epochs(told), seconds_per_step(facts)
    if passes is None:
        return None
    samples = sum(one.step_samples or 0 for one in told)
    return DataProgress(round(passes, 4), float(f"{samples / pace:.3g}") if samples and pace else None)


def mean_reported_loss(facts: WorldFacts, generation: int) -> float | None:
    """The mean loss of an epoch's workers; None where none told any."""
    told = [s.progress.loss for s in sessions_in_generation(facts, generation) if s.progress.loss is not None]
    return sum(told) / len(told) if told else None


def saving_steps(facts: JobFacts) -> int:
    """Steps between saves to memory: as chosen, else the tier's base."""
    chosen = facts.status.memory_interval
    return facts.spec.checkpoint.memory.base_steps if chosen is None else chosen.steps


def fenced_servers(facts: TierFacts, generation: int) -> tuple[ObservedMemoryServer, ...]:
    """Holders that are sealed at `epoch`, and were read since.

    By the operator, or by an agent in its place.
    """
    return fenced_at(facts.holder_list, generation)


@cached_per_snapshot
def reading_at(facts: TierFacts, generation: int) -> TierReading:
    """What was read of all tiers for `epoch`.

    Holders that were not read are left out, not taken as empty.
    """
    persistent = facts.persistent
    listed = persistent.entries if persistent.read_generation == generation else None
    memory = memory_reading(facts, generation)
    return memory if listed is None else TierReading(memory.servers, listed)


def memory_reading(facts: TierFacts, generation: int) -> TierReading:
    """What was read for `epoch` of the holders alone."""
    return servers_reading(facts.holder_list, generation)


def topology_of_job(facts: NodeFacts) -> Topology:
    """Where its nodes stand: the placement of its copies goes by it."""
    return topology_of(facts.node_list, facts.job.uid)


def domains_of(facts: TierFacts) -> dict[MemoryServerInstance, str]:
    """The failure domain of each holder."""
    return server_domains(facts.holder_list)


@cached_per_snapshot
def unreadable_checkpoints(facts: JobFacts) -> frozenset[Checkpoint]:
    return frozenset(facts.status.unreadable_checkpoints)


def earliest(times: Iterable[float | None]) -> float | None:
    """The earliest of some times; None without any."""
    return min((t for t in times if t is not None), default=None)
