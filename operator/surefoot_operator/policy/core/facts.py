"""Indexes a snapshot and derives the facts that every decision uses.

Pure. Decisions get facts instead of the snapshot, so that indexes are built once, and a decision's signature states which
parts it may read.
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
    ObservedPurgeCall,
    ObservedSession,
    ObservedWorker,
    PendingCreate,
    PendingGroupCall,
    PersistentListing,
)
from surefoot_operator.rejected_calls import RejectedCall

# ---- cached values ---------------------------------------------------------------------------------------------------
# Caches derived values while their source is unchanged. Nodes, memory servers and members of two thousand workers change
# seldom and are used in each reconcile; indexes built each time would cost more than the decisions that use them.

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
MAX_CACHED_VALUES = 16
"""Cached values per function: the number of jobs that reconcile concurrently, and a few more."""


def cached_by_identity(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Caches a function's value for the same first argument.

    That argument is compared by identity, others by equality. Neither it nor the value may be changed by anyone. The argument is
    kept alive with the value, so that no other object can get its identity.
    """
    cache: OrderedDict[tuple[Hashable, ...], tuple[S, T]] = OrderedDict()

    @wraps(function)
    def once(source: S, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        assert not keywords, "arguments are given by position, so that they can be looked up"
        key = (id(source), *arguments)
        entry = cache.get(key)
        if entry is None:
            entry = cache[key] = (source, function(source, *arguments, **keywords))
            if len(cache) > MAX_CACHED_VALUES:
                cache.popitem(last=False)
        else:
            cache.move_to_end(key)
        return entry[1]

    return once


# ---- indexes ---------------------------------------------------------------------------------------------------------
# Indexes the parts of a snapshot that seldom change. Each index is built once for the same tuple: a reconcile after one
# agent's message reads that message, and not two thousand nodes and servers again.


def worker_id(worker: Member | ObservedSession | ObservedWorker) -> WorkerId:
    """Returns the key of a worker: its index and attempt."""
    return WorkerId(worker.index, worker.attempt)


@cached_by_identity
def workers_by_id(workers: tuple[ObservedWorker, ...]) -> Mapping[WorkerId, ObservedWorker]:
    return {worker_id(worker): worker for worker in workers}


@cached_by_identity
def sessions_by_id(sessions: tuple[ObservedSession, ...]) -> Mapping[WorkerId, ObservedSession]:
    """Indexes sessions by worker; of several sessions of one worker, the one that connected last counts."""
    newest: dict[WorkerId, ObservedSession] = {}
    for session in sessions:
        worker = worker_id(session)
        previous = newest.get(worker)
        if previous is None or _connection_order(session) >= _connection_order(previous):
            newest[worker] = session
    return newest


def _connection_order(session: ObservedSession) -> tuple[bool, float, str]:
    return session.connected, session.since_seconds, session.incarnation


@cached_by_identity
def nodes_by_name(nodes: tuple[ObservedNode, ...]) -> Mapping[str, ObservedNode]:
    return {node.name: node for node in nodes}


@cached_by_identity
def doubtful_nodes(nodes: tuple[ObservedNode, ...]) -> frozenset[str]:
    """Returns the names of the few nodes that may be lost."""
    return frozenset(node.name for node in nodes if not node.ready or node.unconfirmed_failure)


@cached_by_identity
def servers_by_id(servers: tuple[ObservedMemoryServer, ...]) -> Mapping[MemoryServerInstance, ObservedMemoryServer]:
    return {server.endpoint.instance: server for server in servers}


@cached_by_identity
def members_by_id(members: tuple[Member, ...]) -> Mapping[WorkerId, Member]:
    return {worker_id(member): member for member in members}


@cached_by_identity
def signalled_nodes(nodes: tuple[ObservedNode, ...]) -> Mapping[str, str]:
    """Returns the nodes with an evacuation signal (a taint, condition or label), each with the reason."""
    return {node.name: node.evacuation_reason for node in nodes if node.evacuation_reason}


@cached_by_identity
def ending_workers(workers: tuple[ObservedWorker, ...]) -> Mapping[WorkerId, str]:
    """Returns the workers whose deletion or disruption was announced, each with the reason."""
    return {
        worker_id(worker): _announcement_of(worker)
        for worker in workers
        if worker.deleting or worker.disruption_announced
    }


def _announcement_of(worker: ObservedWorker) -> str:
    return f"is being deleted ({worker.message})" if worker.message else "is being deleted"


@cached_by_identity
def fenced_servers_at(servers: tuple[ObservedMemoryServer, ...], generation: int) -> tuple[ObservedMemoryServer, ...]:
    """Lists the ready servers that are fenced at `generation` or later and were read since."""
    read = (h for h in servers if h.state == "Ready" and h.read_generation == generation)
    return tuple(h for h in read if h.fence is not None and h.fence >= generation)


@cached_by_identity
def fenced_endpoints(
    servers: tuple[ObservedMemoryServer, ...], generation: int
) -> Mapping[MemoryServerInstance, MemoryServerEndpoint]:
    return {h.endpoint.instance: h.endpoint for h in fenced_servers_at(servers, generation)}


@cached_by_identity
def servers_reading(servers: tuple[ObservedMemoryServer, ...], generation: int) -> TierReading:
    return TierReading({h.endpoint.instance: h.entries for h in fenced_servers_at(servers, generation)}, None)


@cached_by_identity
def topology_of(nodes: tuple[ObservedNode, ...], job_uid: str) -> Topology:
    """Returns the topology of the nodes, for the placement of one job's copies."""
    return Topology(job_uid, _topology_paths(nodes))


@cached_by_identity
def _topology_paths(nodes: tuple[ObservedNode, ...]) -> dict[str, tuple[str, ...]]:
    """Returns each node's topology path. Shared by all jobs, because a thousand jobs would else read all nodes each."""
    return {node.name: node.path for node in nodes if node.path}


@cached_by_identity
def server_domains(servers: tuple[ObservedMemoryServer, ...]) -> dict[MemoryServerInstance, str]:
    return {h.endpoint.instance: h.endpoint.domain for h in servers}


# ---- facts -----------------------------------------------------------------------------------------------------------

RECONNECT_GRACE_SECONDS = 0.25
"""How long the first cause of a failure may be reported after its effects on other ranks, and a step after a rank's death."""


# A decision declares in its signature the facts that it may read: the job alone, its membership (workers, agents' sessions, members), its
# nodes, its tiers (memory servers and the persistent tier), two of these, or all. `Facts` has all of them and can be passed
# wherever fewer are declared. mypy rejects undeclared reads.


@dataclass(frozen=True)
class JobFacts:
    """The job's spec and status, and the time: what every decision may read."""

    _snapshot: JobSnapshot
    """The snapshot that all facts come from."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Values already derived from this snapshot; see `cached_per_snapshot`."""

    @property
    def now(self) -> float:
        """Unix time of the snapshot, in seconds."""
        return self._snapshot.now_seconds

    @property
    def spec(self) -> TrainingJobSpec:
        return self._snapshot.job.spec

    @property
    def status(self) -> JobStatus:
        return self._snapshot.status

    @property
    def membership(self) -> Membership:
        """The present membership; raises LookupError before the first claim."""
        world = self._snapshot.status.membership
        if world is None:
            raise LookupError("this job has no membership yet")
        return world

    @property
    def running_generation(self) -> int:
        """The newest committed generation; 0 before the first."""
        return self._snapshot.status.lineage[-1].generation if self._snapshot.status.lineage else 0

    @property
    def job(self) -> TrainingJob:
        return self._snapshot.job

    @property
    def term_seconds(self) -> float:
        """Unix time since which this operator leads."""
        return self._snapshot.term_seconds

    @property
    def spec_rejection(self) -> str:
        """Why the platform rejects the job's spec; empty: it does not."""
        return self._snapshot.spec_rejection

    @property
    def rejected_calls(self) -> tuple[RejectedCall, ...]:
        return self._snapshot.rejected_calls


@dataclass(frozen=True)
class MembershipFacts(JobFacts):
    """Facts about the job's workers, their agents' reports, and the members of its membership."""

    workers: Mapping[WorkerId, ObservedWorker]
    sessions: Mapping[WorkerId, ObservedSession]
    silent_agents: int
    """Number of agents without a heartbeat within the timeout."""
    members: Mapping[WorkerId, Member]
    """Members of the present membership, claimed or committed; empty before the first."""

    @property
    def worker_list(self) -> tuple[ObservedWorker, ...]:
        return self._snapshot.workers

    @property
    def pending_creates(self) -> tuple[PendingCreate, ...]:
        return self._snapshot.creates

    @property
    def pod_groups(self) -> ObservedPodGroups | None:
        return self._snapshot.pod_groups

    @property
    def group_calls(self) -> tuple[PendingGroupCall, ...]:
        return self._snapshot.group_calls

    @property
    def pending_deletions(self) -> frozenset[str]:
        return self._snapshot.deletion_uids

    @property
    def retry_later_seconds(self) -> float:
        """Unix time at which agents last were asked to reconnect later; such agents may still be connecting."""
        return self._snapshot.retry_later_seconds

    @property
    def barrier(self) -> ObservedBarrier | None:
        return self._snapshot.barrier


@dataclass(frozen=True)
class NodeFacts(JobFacts):
    """Facts about the nodes that the job may use, and the last message from an agent on each."""

    nodes: Mapping[str, ObservedNode]
    connected_nodes: Mapping[str, bool]
    """By node with an agent that connected in this term: whether an agent there is responsive now."""
    last_message_seconds: Mapping[str, float]
    """By node: Unix time of the last message from an agent on it, whether or not its connection broke since."""

    @property
    def node_list(self) -> tuple[ObservedNode, ...]:
        return self._snapshot.nodes

    @property
    def free_nodes(self) -> int | None:
        """Number of nodes free for new workers; None: unknown."""
        return self._snapshot.free_nodes


@dataclass(frozen=True)
class TierFacts(JobFacts):
    """Facts about the last readings of the memory servers and of the persistent tier."""

    servers: Mapping[MemoryServerInstance, ObservedMemoryServer]

    @property
    def server_list(self) -> tuple[ObservedMemoryServer, ...]:
        return self._snapshot.servers

    @property
    def persistent(self) -> PersistentListing:
        return self._snapshot.persistent

    @property
    def source_listing(self) -> PersistentListing:
        """The listing of the source job's folder."""
        return self._snapshot.source_listing

    @property
    def layout_covers(self) -> Covers:
        return self._snapshot.covers

    @property
    def uploaded(self) -> Mapping[Checkpoint, frozenset[RankSave]]:
        """By checkpoint, the rank saves that agents reported as uploaded."""
        return self._snapshot.uploaded

    @property
    def failed_uploads(self) -> Mapping[RankSave, int]:
        """By rank save, how often its upload failed."""
        return self._snapshot.failed_uploads

    @property
    def unreadable(self) -> frozenset[RankSave]:
        return self._snapshot.unreadable

    @property
    def upload_seconds(self) -> float | None:
        """How long an upload takes; None: not measured yet."""
        return self._snapshot.upload_seconds

    @property
    def rejected_records(self) -> tuple[str, ...]:
        return self._snapshot.rejected_records

    @property
    def is_memory_cleared(self) -> bool:
        return self._snapshot.memory_cleared

    @property
    def purges(self) -> tuple[ObservedPurge, ...]:
        return self._snapshot.purges

    @property
    def purge_call(self) -> ObservedPurgeCall:
        return self._snapshot.purge_call

    @property
    def uploads_newest(self) -> bool:
        return self._snapshot.upload_now


@dataclass(frozen=True)
class MembershipNodeFacts(MembershipFacts, NodeFacts):
    """Facts about the membership and the nodes."""


@dataclass(frozen=True)
class MembershipTierFacts(MembershipFacts, TierFacts):
    """Facts about the membership and the tiers."""


@dataclass(frozen=True)
class Facts(MembershipNodeFacts, MembershipTierFacts):
    """All facts of a snapshot, with its indexes, built once per plan.

    Without the indexes, each decision about a worker would search every list.
    """

    @property
    def snapshot(self) -> JobSnapshot:
        return self._snapshot

    def with_status(self, status: JobStatus) -> Facts:
        """Returns these facts under another status of the same membership; if its members differ, call `gather` again."""
        return replace(self, _snapshot=replace(self._snapshot, status=status))


F = TypeVar("F", bound=JobFacts)


def cached_per_snapshot(function: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Caches a fact per snapshot; callers must not change the value.

    A fact that reads every worker and is computed for each would cost the square of their number.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def once(facts: F, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        assert not keywords, "arguments are given by position, so that they can be looked up"
        key = (name, *arguments) if arguments else name
        try:
            return cast(T, facts._derived[key])
        except KeyError:
            value = facts._derived[key] = function(facts, *arguments, **keywords)
            return value

    return once


def build_facts(snapshot: JobSnapshot) -> Facts:
    """Indexes the snapshot once for all decisions."""
    # Which agents are responsive changes with time alone, so it is computed for every snapshot.
    sessions = sessions_by_id(snapshot.sessions)
    timeout_seconds = snapshot.job.spec.health_policy.heartbeat_timeout_seconds
    connected_nodes: dict[str, bool] = {}
    last_message_seconds: dict[str, float] = {}
    silent_agents = 0
    for session in sessions.values():
        is_connected = session.connected and snapshot.now_seconds - session.last_message_seconds <= timeout_seconds
        silent_agents += not is_connected
        connected_nodes[session.node] = connected_nodes.get(session.node, False) or is_connected
        last_message_seconds[session.node] = max(
            last_message_seconds.get(session.node, session.last_message_seconds), session.last_message_seconds
        )
    membership = snapshot.status.membership
    return Facts(
        snapshot,
        workers=workers_by_id(snapshot.workers),
        sessions=sessions,
        silent_agents=silent_agents,
        members={} if membership is None else members_by_id(membership.members),
        nodes=nodes_by_name(snapshot.nodes),
        connected_nodes=connected_nodes,
        last_message_seconds=last_message_seconds,
        servers=servers_by_id(snapshot.servers),
    )


def is_responsive(facts: JobFacts, session: ObservedSession) -> bool:
    """Whether an agent is connected and its last message within the heartbeat timeout."""
    return (
        session.connected
        and facts.now - session.last_message_seconds <= facts.spec.health_policy.heartbeat_timeout_seconds
    )


@cached_per_snapshot
def member_sessions(facts: MembershipFacts) -> tuple[tuple[Member, ObservedSession | None], ...]:
    """Pairs each member with its agent's session; None if that is missing or belongs to another incarnation."""
    pairs: list[tuple[Member, ObservedSession | None]] = []
    for worker, member in facts.members.items():
        session = facts.sessions.get(worker)
        is_same_incarnation = session is not None and session.incarnation == member.incarnation
        pairs.append((member, session if is_same_incarnation else None))
    return tuple(pairs)


@cached_per_snapshot
def barrier_checkpoint(facts: MembershipFacts) -> Checkpoint | None:
    """Returns the bound barrier's checkpoint once every rank waits there; None: not every rank does."""
    membership, observed = facts.status.membership, facts.barrier
    if membership is None or membership.state != "Committed" or not membership.members or observed is None:
        return None
    barrier = observed.barrier
    if (barrier.generation, barrier.phase) != (membership.generation, "bound"):
        return None
    all_wait = all(s is not None and does_wait_at_barrier(s, barrier) for _, s in member_sessions(facts))
    return Checkpoint(barrier.generation, barrier.step) if all_wait else None


def does_wait_at_barrier(session: ObservedSession, barrier: Barrier) -> bool:
    """Whether all ranks of this agent wait at the barrier."""
    return (session.generation, session.barrier_step) == (barrier.generation, barrier.step)


@cached_per_snapshot
def final_checkpoint(facts: MembershipFacts) -> Checkpoint | None:
    """Returns the checkpoint of the last step once every member finished, saved or not; None: not finished.

    A generation without a step of its own ended at the checkpoint that it restored.
    """
    sessions = [s for _, s in member_sessions(facts)]
    if not sessions or any(
        s is None or s.generation != facts.membership.generation or s.finished != 0 for s in sessions
    ):
        return None
    steps = [s.finished_steps for s in sessions if s is not None]
    return Checkpoint(facts.membership.generation, max(steps)) if any(steps) else facts.membership.parent


@cached_per_snapshot
def has_trainer_failed(facts: MembershipFacts) -> bool:
    """Whether a trainer of the committed generation has failed."""
    generation = facts.membership.generation
    return any(
        s is not None and s.exit is not None and s.exit.generation == generation for _, s in member_sessions(facts)
    )


@cached_per_snapshot
def sessions_in_generation(facts: MembershipFacts, generation: int) -> tuple[ObservedSession, ...]:
    """Lists the sessions whose reports (step, exit, barrier …) are about this generation."""
    return tuple(s for s in facts.sessions.values() if s.generation == generation)


@cached_per_snapshot
def step_of(facts: MembershipFacts, generation: int) -> int:
    """Returns the highest step that any rank of this generation finished; 0: none."""
    return max((s.progress.step for s in sessions_in_generation(facts, generation)), default=0)


def last_step(facts: MembershipFacts) -> int:
    """Returns the last step that the present generation finished or restored."""
    return max(step_of(facts, facts.membership.generation), facts.membership.start_step)


@cached_per_snapshot
def has_stepped(facts: MembershipFacts, generation: int) -> bool:
    """Whether this generation made a step after the one it restored."""
    start_step = facts.membership.start_step
    return any(
        s.step_at_seconds is not None or s.progress.step > start_step for s in sessions_in_generation(facts, generation)
    )


@cached_per_snapshot
def last_step_seconds(facts: MembershipFacts, generation: int) -> float | None:
    """Returns when a step of this generation was last reported (Unix time); None: no step was.

    A new operator, which cannot know when a step was made before its term, counts from the agent's connection.
    """
    membership = facts.status.membership
    start_step = membership.start_step if membership is not None else 0
    times = [
        s.step_at_seconds if s.step_at_seconds is not None else s.since_seconds
        for s in sessions_in_generation(facts, generation)
        if s.step_at_seconds is not None or s.progress.step > start_step
    ]
    return max(times, default=None)


@cached_per_snapshot
def seconds_per_step(facts: MembershipFacts) -> float | None:
    """Returns the slowest rank's step time; None while unknown."""
    return max(
        (s.progress.step_seconds for s in facts.sessions.values() if s.progress.step_seconds is not None), default=None
    )


def progress_proof_end(facts: MembershipFacts, since_seconds: float) -> float | None:
    """Returns until when a step reported after `since_seconds` proves that ranks live (Unix time); None: no proof.

    One step may still be reported just after a rank died, so a step counts for two step times only, and until the next could
    have been reported.
    """
    last_step_at_seconds = last_step_seconds(facts, facts.membership.generation)
    if last_step_at_seconds is None or last_step_at_seconds <= since_seconds:
        return None
    deadline = (
        last_step_at_seconds
        + facts.spec.health_policy.heartbeat_seconds
        + max(RECONNECT_GRACE_SECONDS, 2 * (seconds_per_step(facts) or 0.0))
    )
    return deadline if facts.now < deadline else None


def data_progress(facts: MembershipFacts, generation: int) -> DataProgress | None:
    """Returns a generation's progress through its data; None without an elastic loader."""
    progress_reports = [s.progress for s in sessions_in_generation(facts, generation)]
    epochs, step_seconds = mean_epochs(progress_reports), seconds_per_step(facts)
    if epochs is None:
        return None
    samples = sum(report.step_samples or 0 for report in progress_reports)
    return DataProgress(round(epochs, 4), float(f"{samples / step_seconds:.3g}") if samples and step_seconds else None)


def mean_reported_loss(facts: MembershipFacts, generation: int) -> float | None:
    """Returns the mean loss of a generation's workers; None if none reported any."""
    losses = [s.progress.loss for s in sessions_in_generation(facts, generation) if s.progress.loss is not None]
    return sum(losses) / len(losses) if losses else None


def saving_steps(facts: JobFacts) -> int:
    """Returns the steps between saves to memory: as chosen, else the tier's base."""
    interval = facts.status.memory_interval
    return facts.spec.checkpoint.memory.base_steps if interval is None else interval.steps


def fenced_servers(facts: TierFacts, generation: int) -> tuple[ObservedMemoryServer, ...]:
    """Lists memory servers fenced at `generation` or later and read since, directly or via an agent."""
    return fenced_servers_at(facts.server_list, generation)


@cached_per_snapshot
def tier_reading(facts: TierFacts, generation: int) -> TierReading:
    """Returns the readings of all tiers for a generation; servers that were not read are left out."""
    persistent = facts.persistent
    persistent_entries = persistent.entries if persistent.read_generation == generation else None
    memory = memory_reading(facts, generation)
    return memory if persistent_entries is None else TierReading(memory.servers, persistent_entries)


def memory_reading(facts: TierFacts, generation: int) -> TierReading:
    """Returns the reading of the memory servers alone for a generation."""
    return servers_reading(facts.server_list, generation)


def topology_of_job(facts: NodeFacts) -> Topology:
    """Returns the topology of the job's nodes, by which its copies are placed."""
    return topology_of(facts.node_list, facts.job.uid)


def domains_of(facts: TierFacts) -> dict[MemoryServerInstance, str]:
    """Returns the failure domain of each memory server."""
    return server_domains(facts.server_list)


@cached_per_snapshot
def unreadable_checkpoints(facts: JobFacts) -> frozenset[Checkpoint]:
    """Returns the job's unreadable checkpoints as a set, for fast lookup."""
    return frozenset(facts.status.unreadable_checkpoints)


def earliest(times: Iterable[float | None]) -> float | None:
    """Returns the earliest of some times; None if there is none."""
    return min((t for t in times if t is not None), default=None)
