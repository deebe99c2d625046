"""Defines the messages between agents and the coordinator; `wire` encodes them.

A field's name is also its name on the wire. Facts that must survive a lost message (Hello, Heartbeat, Assign) are sent
again on every connection; a request carries an id, and its reply repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.codec import inlined_field
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave, SourceJob
from surefoot.protocol.progress import NO_PROGRESS, Progress

# ---- node findings ---------------------------------------------------------------------------------------------------
# Faults that an agent finds on its node. The operator acts upon `blame` alone: workers are moved off a node because of
# its hardware, never because of a program, nor for a merely unusual observation.

Blame = Literal["node", "application", "unknown"]
"""Cause of a fault by the evidence. node: its hardware; application: a program; unknown: it is only reported."""

MAX_FINDINGS = 16
"""Findings in one message; more would not change the verdict on the node."""

MAX_FINDING_CHARACTERS = 300
"""Longest text of a finding."""

NODE_TEST_REASONS = frozenset(
    {"CpuComputeError", "GpuComputeError", "MemoryTestFailed", "DiskTestFailed", "LoopbackTestFailed"}
)
"""Reasons of findings from the node tests that run before a worker on the node gets a rank."""


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """Describes one fault of a node."""

    reason: str
    """Kind of the fault in CamelCase; does not change between versions."""
    text: str
    """Description in one sentence."""
    blame: Blame
    """Cause of the fault by the evidence."""


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """All faults that an agent finds on its node; replaces its earlier report.

    Sent on every new connection, at each change, and every few minutes.
    """

    findings: tuple[NodeFinding, ...] = ()
    """Present faults; empty: none."""
    clock_seconds: float = 0.0
    """The node's clock as Unix time, to detect clock skew; 0: not reported."""


# ---- request for all memory servers ----------------------------------------------------------------------------------
# An agent is sent the memory servers that it is expected to need. Data that a restore or an upload does not find there
# may be on others, so nothing counts as absent until the agent has received the whole list and asked all of them.


@dataclass(frozen=True, slots=True)
class ListAllServers:
    """Requests the complete list of memory servers, because data is missing on those sent before."""

    generation: int
    """Generation of the assignment whose list is requested."""


# ---- hang report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HangReport:
    """Reports where each local rank waits while no step finishes.

    The stacks are those that two observations found unchanged. Without stacks the hang is over.
    """

    generation: int
    """Generation whose trainers are observed."""
    step: int
    """Last step that every local rank had finished."""
    stacks: tuple[RankStack, ...] = ()
    """Stacks of the local ranks; empty: the ranks make steps again."""
    moves: bool = False
    """A rank did I/O or used CPU between the observations, or may have: outliers can be named, but a hang is not proven."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of all local ranks, unchanged in two observations; empty if a rank's flight recorder gave none."""


# ---- barrier ---------------------------------------------------------------------------------------------------------
# The barrier before a planned change. The same objects travel on both connections: from a rank to its agent, and from
# the agent to the coordinator once all its ranks agree.


@dataclass(frozen=True, slots=True)
class Barrier:
    """Orders all ranks to save at one step and to wait there for a planned change.

    It is proposed first and bound once every rank accepted it. A new connection gets the barrier again, and the agent
    answers again: with BarrierReply to a proposal, with BarrierReached if its ranks already wait there.
    """

    generation: int
    """Generation whose ranks shall wait."""
    step: int
    """Step after which they save and wait; 0 in a cancellation: any barrier that the agent knows (a restarted coordinator
    knows none)."""
    phase: Literal["proposed", "bound", "cancelled"]
    """proposed: asks the ranks; bound: all accepted; cancelled: ranks that wait at it continue."""

    def __str__(self) -> str:
        return f"barrier at step {self.step} of generation {self.generation}: {self.phase}"


@dataclass(frozen=True, slots=True)
class BarrierReply:
    """Answers a proposed barrier, for one rank or for all ranks of a worker."""

    generation: int
    """Generation of the barrier."""
    step: int
    """Step of the barrier."""
    accepted: bool
    """Whether all of them will wait there. False if one is already at the step or past it."""


@dataclass(frozen=True, slots=True)
class BarrierReached:
    """Reports that a rank, or every rank of a worker, finished the barrier's step, staged its save and waits."""

    generation: int
    """Generation of the barrier."""
    step: int
    """Step of the barrier."""


# ---- messages --------------------------------------------------------------------------------------------------------

# ---- agent → coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduces an agent; the first message on every connection."""

    job: str
    """Uid of the job."""
    index: int
    """Index of the worker."""
    attempt: int
    """How often the worker of this index was replaced."""
    incarnation: str
    """Random id of this start of the agent: a restarted agent is no member of the running generation."""
    node: str
    """Name of the node."""
    token: str
    """Token that authenticates the agent to the coordinator."""
    generation: int
    """Generation whose trainers run here; 0: none run."""
    stopped: int
    """All trainers of generations below this one have ended and were reaped."""
    is_warm: bool
    """Whether the fork server is ready, so that trainers can start within a second."""
    store: str | None = None
    """host:port of the generation's torch store if this agent hosts it; else None."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Reports a worker's state, every heartbeatSeconds and at each change."""

    generation: int
    """Generation whose trainers run here; 0: none run."""
    stopped: int
    """All trainers of generations below this one have ended and were reaped."""
    is_warm: bool
    """Whether the fork server is ready, so that trainers can start within a second."""
    progress: Progress = inlined_field(NO_PROGRESS)  # noqa: RUF009  it makes a field
    """Progress of the worker's ranks; its fields are written into this message."""
    pending: tuple[Checkpoint, ...] = ()
    """Checkpoints staged here that are not yet on all their target servers."""
    saved: Checkpoint | None = None
    """Newest checkpoint whose local rank saves are all committed to memory servers; None: none is."""
    copies: int = 0
    """Number of memory servers that have `saved`; 0 without one."""
    terminating: bool = False
    """Whether this worker was asked to end, by deletion of its pod or by a node that shuts down without the API showing it."""


@dataclass(frozen=True, slots=True)
class TrainerFailure:
    """Reports the first failed trainer of a worker; the agent has killed the others."""

    generation: int
    """Generation of the trainer."""
    rank: int
    """Rank that failed; −1: a hang in which no rank is an outlier."""
    code: int
    """Exit code; −N: ended by signal N."""
    cause: str
    """Why it failed, in one line."""
    is_secondary: bool
    """Whether the error only follows from another rank's death, as a broken connection does."""
    step: int
    """Last step that the worker finished; 0: none."""
    kind: Literal["failed", "hang"] = "failed"
    """hang: the agent killed its trainers because no step finished within the limit."""
    detail: str = ""
    """Further lines, such as each rank's stack; they may be shortened where they are stored."""
    oom_scope: Literal["", "limit", "node"] = ""
    """Memory limit at which the kernel's OOM killer ended it: the container's own, or the node's; empty: it did not."""


@dataclass(frozen=True, slots=True)
class TrainersStopped:
    """Reports that trainers of older generations have ended on this worker."""

    generation: int
    """All trainers of generations below this one have ended and were reaped."""


@dataclass(frozen=True, slots=True)
class StoreReady:
    """Reports that the generation's torch store accepts connections."""

    generation: int
    """Generation of the store."""
    address: str
    """host:port of the store."""


@dataclass(frozen=True, slots=True)
class UnreadableSave:
    """Reports that a rank cannot restore its checkpoint, because some part of it has no readable copy."""

    generation: int
    """Generation whose rank restores."""
    checkpoint: Checkpoint
    """Checkpoint that is unreadable."""
    rank: int
    """Rank that needs the part."""
    absent: bool
    """True: every memory server answered and none has the part any longer, as after a restart. False: every copy failed
    verification."""
    detail: str
    """Names the part and how each copy failed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Reports that every local rank exited with 0 and that all staged saves are flushed."""

    generation: int
    """Generation of the trainers."""
    exit_code: int
    """Exit code of the worker: 0."""
    steps: int
    """Last finished step; 0: the program never called `step`."""


@dataclass(frozen=True, slots=True)
class PersistentPage:
    """Replies to ListPersistent with one page of manifests and layout records.

    The pages of a request come in order.
    """

    request: int
    """Id of the request."""
    manifests: tuple[str, ...] = ()
    """`RankManifest`s as JSON; they name their layouts by digest."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Layout records by digest, of those that were requested."""
    error: str | None = None
    """Why the listing failed; None: it did not."""
    unread_records: tuple[UnreadRecord, ...] = ()
    """Records that could not be read, named in the last page only."""
    page: int = 0
    """Index of this page, from 0."""
    more: bool = False
    """Whether further pages follow."""
    newest_generation: int = 0
    """Newest generation with a save or a claim in the tier, apart from the claim of the request; 0: none."""


@dataclass(frozen=True, slots=True)
class RepairReply:
    """Replies to RepairSave."""

    request: int
    """Id of the request."""
    error: str | None = None
    """Why the copy failed; None: it is committed."""


@dataclass(frozen=True, slots=True)
class UploadReply:
    """Replies to UploadSave, once for each rank save."""

    save: RankSave
    """The rank save."""
    error: str | None = None
    """Why the upload failed; None: the save is in the persistent tier."""
    bytes: int = 0
    """Bytes that were sent; 0 after an error."""
    seconds: float = 0.0
    """Duration of the upload; 0 after an error."""
    unreadable: bool = False
    """Whether every copy in memory was reached and is damaged or incomplete, so that a retry cannot succeed."""


@dataclass(frozen=True, slots=True)
class DeleteReply:
    """Replies to DeletePersistent."""

    request: int
    """Id of the request."""
    error: str | None = None
    """Why the deletion failed; None: the checkpoints are deleted."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Asks the operator to record an event."""

    reason: str
    """The event's reason in CamelCase; does not change between versions."""
    text: str
    """The event's message."""


FromAgent = (
    Hello | Heartbeat | TrainerFailure | TrainersStopped | StoreReady | BarrierReply | BarrierReached
    | UnreadableSave | Finished | PersistentPage | RepairReply | UploadReply | DeleteReply | HangReport
    | NodeHealth | Notice | ListAllServers
)  # fmt: skip

# ---- coordinator → agent ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a Hello."""

    term: str
    """Random id of this coordinator process."""
    heartbeat_seconds: float
    """Interval at which the agent shall send heartbeats."""


@dataclass(frozen=True, slots=True)
class HelloRejected:
    """Rejects a Hello; the coordinator then closes the connection."""

    reason: str
    """Why it was rejected."""
    retry: bool
    """Whether the agent may try again: true if this replica does not lead the job, or cannot reach its API server."""
    after_seconds: float = 0.0
    """Least wait before the next try, which spreads out many agents; 0: the agent's own backoff."""
    address: str = ""
    """host:port of the replica that leads the agent's job; empty: try this one again."""


@dataclass(frozen=True, slots=True)
class StopTrainers:
    """Orders the worker to stop its trainers; flushing of their saves continues. Sent while a generation is claimed."""

    generation: int
    """The claimed generation: all trainers of lower ones shall be stopped and reaped."""
    reason: str
    """Why the generation was claimed, for the log."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns ranks of a committed generation to one member. An agent starts trainers at most once per generation."""

    generation: int
    """The committed generation."""
    world_size: int
    """Number of ranks in the job."""
    first_rank: int
    """Lowest rank of this worker; its ranks are consecutive."""
    local_ranks: int
    """Number of ranks of this worker."""
    group_rank: int
    """Position of this worker among the members, from 0."""
    group_size: int
    """Number of members."""
    restarts: int
    """How often the job was restarted so far."""
    parent: Checkpoint | None
    """Checkpoint to restore; None: start at step 0."""
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    """Generation, parent (None: step 0) and world size of each entry of the job's lineage, oldest first."""
    token: str
    """Secret of the generation, which the replicas of the operator derive from their shared key."""
    hosts_store: bool
    """Whether this agent shall host the generation's torch store."""
    store: str | None
    """host:port of the generation's torch store; None: not yet known, trainers wait for it."""
    servers: tuple[MemoryServerEndpoint, ...]
    """Memory servers of the job: all, or with `is_partial` those that this worker is expected to need. Not sent in this
    message: the receiver fills in the list from `MemoryServerChanges`."""
    targets: tuple[MemoryServerInstance, ...]
    """Memory servers that this worker's saves are copied to, the one on its own node first."""
    replicas: int
    """Number of copies of each save, on different nodes."""
    source_job: SourceJob | None = None
    """Job whose folder contains the parent; None: this job's own."""
    skip_steps: int = 0
    """Steps after the parent whose batches the loaders skip, because their data spoiled an earlier run; 0: none."""
    servers_unreachable: bool = False
    """Whether this agent deletes old saves from the memory servers, because the coordinator reaches none of them."""
    is_partial: bool = False
    """Whether the job has more memory servers than `servers`; `ListAllServers` requests them."""
    rank_targets: tuple[tuple[MemoryServerInstance, ...], ...] = ()
    """Replaces `targets` for each local rank, where nodes run several servers; empty: `targets` applies to all."""

    @property
    def tier(self) -> MemoryServers:
        """The part of the assignment that may change within its generation."""
        return MemoryServers(
            self.generation,
            self.servers,
            self.targets,
            self.replicas,
            servers_unreachable=self.servers_unreachable,
            is_partial=self.is_partial,
            rank_targets=self.rank_targets,
        )


@dataclass(frozen=True, slots=True)
class MemoryServers:
    """Replaces the memory servers and targets of an assignment within its generation."""

    generation: int
    """Generation of the assignment."""
    servers: tuple[MemoryServerEndpoint, ...]
    """Memory servers of the job, complete or partial; filled in by the receiver as in `Assign`."""
    targets: tuple[MemoryServerInstance, ...]
    """Memory servers that this worker's saves are copied to, the one on its own node first."""
    replicas: int
    """Number of copies of each save, on different nodes."""
    servers_unreachable: bool = False
    """Whether this agent deletes old saves from the memory servers, because the coordinator reaches none of them."""
    is_partial: bool = False
    """Whether the job has more memory servers than `servers`; `ListAllServers` requests them."""
    rank_targets: tuple[tuple[MemoryServerInstance, ...], ...] = ()
    """Replaces `targets` for each local rank, where nodes run several servers; empty: `targets` applies to all."""

    def targets_of_rank(self, local: int) -> tuple[MemoryServerInstance, ...]:
        """Returns the memory servers that this local rank's saves are copied to, the one on its own node first."""
        return self.rank_targets[local] if local < len(self.rank_targets) else self.targets


@dataclass(frozen=True, slots=True)
class MemoryServerChanges:
    """Changes the list of memory servers that was sent on this connection; see `memory_server_list`."""

    added: tuple[tuple[str, str, str, int, str, bool, int], ...]
    """New or changed endpoints: node, run id, host, port, failure domain (empty: the node's name), TLS, server index.

    A tuple, because the list of a large job is long.
    """
    removed: tuple[MemoryServerInstance, ...] = ()
    """Instances that are no longer in the list."""


@dataclass(frozen=True, slots=True)
class ListPersistent:
    """Requests a listing of the job's folder in the persistent tier, or of its source job's folder."""

    request: int
    """Id of the request, repeated in each page of the reply."""
    source_job: SourceJob | None = None
    """Job whose folder is listed; None: this job's own."""
    manifests: bool = True
    """Whether to send the manifests; else only layout records are sent."""
    layouts: tuple[str, ...] | None = None
    """Digests of the layout records to send; None: of all that a manifest names."""
    begin: bool = True
    """Whether a missing folder may be created: false once the job has a checkpoint there, as the tier may be unmounted."""
    claim_generation: int = 0
    """Generation to claim in the tier before listing it; 0: claim none."""
    claim_ticket: str = ""
    """Text that identifies the claim's owner, to recognise another operator's claim of the same generation."""


@dataclass(frozen=True, slots=True)
class RepairSave:
    """Orders an agent to copy a rank save between memory servers: read, verify, write, commit."""

    request: int
    """Id of the request, repeated in the reply."""
    generation: int
    """Generation under which the copy is committed; a server that is fenced for a newer one rejects it."""
    save: RankSave
    """The rank save to copy."""
    source: MemoryServerInstance
    """Memory server to read from."""
    target: MemoryServerInstance
    """Memory server to write to."""
    endpoints: tuple[MemoryServerEndpoint, ...] = ()
    """Addresses of both servers, which the agent's own list may lack; empty: it has them."""


@dataclass(frozen=True, slots=True)
class UploadSave:
    """Orders an agent to upload rank saves of a pinned checkpoint from memory to the persistent tier."""

    generation: int
    """Generation under which it is ordered."""
    saves: tuple[RankSave, ...]
    """Rank saves that this agent uploads."""
    round: int = 0
    """Grows with each repetition after a failed or withdrawn upload, which makes it a new message that is sent again."""
    begin: bool = True
    """Whether a missing folder may be created: false once the job has a checkpoint there, as the tier may be unmounted."""


@dataclass(frozen=True, slots=True)
class DeletePersistent:
    """Orders an agent to delete checkpoints from the persistent tier, their manifests first."""

    request: int
    """Id of the request, repeated in the reply."""
    checkpoints: tuple[Checkpoint, ...]
    """Checkpoints to delete."""


@dataclass(frozen=True, slots=True)
class IntervalExponent:
    """Sets the least interval exponent; intervals in seconds and `auto` are sent in this form, too."""

    generation: int
    """Generation whose ranks it applies to."""
    exponent: int
    """Ranks save every base interval × 2^exponent steps, or less often if a rank has backed off further."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Orders the agent to stop its trainers, flush and exit."""

    reason: str
    """Why, for the log."""
    exit_code: int
    """Exit code of the agent."""


ToAgent = (
    Welcome | HelloRejected | StopTrainers | Assign | MemoryServers | MemoryServerChanges | Barrier | ListPersistent | RepairSave | UploadSave | DeletePersistent
    | IntervalExponent | Shutdown
)  # fmt: skip
Message = FromAgent | ToAgent
