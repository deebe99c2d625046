"""Defines the messages of agents and coordinator; `wire` encodes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from surefoot.protocol.checkpoints.completeness import UnreadRecord
from surefoot.protocol.codec import inlined
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave, SourceJob
from surefoot.protocol.progress import NO_PROGRESS, Progress

# ---- findings of nodes -----------------------------------------------------------------------------------------------
# Defines what an agent finds wrong with its node, and its message. Pure values. Whoever reads them acts upon `blame`
# alone: a node is left for what its hardware did, never for what a program did, nor for what is merely odd.

Blame = Literal["node", "application", "unknown"]

MAX_FINDINGS = 16
"""In one message: a node with more is as sick with fewer."""

MAX_TEXT_CHARACTERS = 300

TRIED = frozenset({"CpuComputeError", "GpuComputeError", "MemoryTestFailed", "DiskTestFailed", "LoopbackTestFailed"})
"""Reasons of what fails on a node that is tried before a worker there gets a rank."""


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One fault; `reason` is CamelCase and stable, `text` a sentence.

    `blame`: what the evidence names. unknown: it is told to people, and nothing else follows.
    """

    reason: str
    text: str
    blame: Blame


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Replaces what an agent found wrong with its node; empty: nothing is.

    Said on every connection, at each change, and every few minutes.
    """

    findings: tuple[NodeFinding, ...] = ()
    clock_seconds: float = 0.0
    """Unix time by the node's own clock."""


# ---- request for all memory servers ----------------------------------------------------------------------------------
# Defines the message that asks for every holder. Pure. An agent is told of the holders that it is known to need. What a
# restore or an upload does not find there may lie on others: nothing is absent before all were told of and asked.


@dataclass(frozen=True, slots=True)
class ListAllServers:
    """Asks for all holders of `epoch`; those told of do not suffice."""

    generation: int


# ---- message of a hang -----------------------------------------------------------------------------------------------
# Defines the message that says where ranks without a step are.


@dataclass(frozen=True, slots=True)
class HangReport:
    """Where every local rank is without a step; without `places`, no more.

    Stack and I/O were the same in two looks, unless something `moves`, or may: no proof of a hang, and yet who is elsewhere.
    """

    generation: int
    step: int
    """Last step that every local rank had finished."""
    stacks: tuple[RankStack, ...] = ()
    moves: bool = False
    collectives: tuple[Collective, ...] = ()
    """Of all these ranks, where two looks found the same; none where a rank's flight recorder is silent."""


# ---- barrier ---------------------------------------------------------------------------------------------------------
# Defines the barrier before a planned change. All hops pass these values whole: a rank to its agent, and the agent to
# the coordinator once all its ranks agree.


@dataclass(frozen=True, slots=True)
class Barrier:
    """The step at which every rank saves and then waits for a planned change.

    The plan's action, and what coordinator, agents and trainers receive. `proposed` asks; `bound` follows once all
    accepted; `cancelled` lets a rank that waits at an unbound step continue. A new connection gets it again, and the agent
    answers again: BarrierReply to a proposal, BarrierReached if its ranks wait there already. Cancelled at step 0: whatever
    barrier the agent knows of (a coordinator that returned knows of none).
    """

    generation: int
    step: int
    phase: Literal["proposed", "bound", "cancelled"]

    def __str__(self) -> str:
        return f"barrier at step {self.step} of generation {self.generation}: {self.phase}"


@dataclass(frozen=True, slots=True)
class BarrierReply:
    """Whether a rank, or every rank of a worker, will wait at `step`; false: one passed it.

    A rank that is at `step` already counts as past it.
    """

    generation: int
    step: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class BarrierReached:
    """A rank, or every rank of a worker, completed `step`, staged its save, and waits."""

    generation: int
    step: int


# ---- messages --------------------------------------------------------------------------------------------------------

# ---- agent → coordinator ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens every connection; `epoch`'s trainers run here, 0: none."""

    job: str
    index: int
    attempt: int
    incarnation: str
    node: str
    token: str
    generation: int
    stopped: int
    """Every trainer of epochs below this is reaped."""
    is_warm: bool
    store: str | None = None
    """host:port of the epoch's store, if this agent hosts it."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Reports the running epoch every heartbeatSeconds and at each change."""

    generation: int
    stopped: int
    is_warm: bool
    progress: Progress = inlined(NO_PROGRESS)  # noqa: RUF009  it makes a field
    pending: tuple[Checkpoint, ...] = ()
    """Checkpoints staged here and not yet on all their holders."""
    saved: Checkpoint | None = None
    """Newest checkpoint all of whose local rank saves are committed."""
    copies: int = 0
    """On how many holders `saved` is."""
    terminating: bool = False
    """This worker was told to end: by the deletion of its pod, or by its node alone, which nobody else may have seen."""


@dataclass(frozen=True, slots=True)
class TrainerFailure:
    """A trainer failed, first on its node; the agent killed the others.

    `rank` is −1 for a hang in which none is behind the others. `code` is −N for signal N, `cause` one line.
    """

    generation: int
    rank: int
    code: int
    cause: str
    is_secondary: bool
    """The error is the echo of another rank's death (its connection broke)."""
    step: int
    kind: Literal["failed", "hang"] = "failed"
    """hang: the agent ended its trainers, none of which made a step for too long."""
    detail: str = ""
    """More lines for people, as where each rank stood. Whoever keeps them shortens them."""
    oom_scope: Literal["", "limit", "node"] = ""
    """The kernel's OOM killer ended it: by the container's own limit, or because the node's memory was used up."""


@dataclass(frozen=True, slots=True)
class TrainersStopped:
    """Every trainer of epochs below `epoch` is reaped on this worker."""

    generation: int


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The epoch's store answers at this host:port."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class UnreadableSave:
    """Every copy of a part that `rank` needs of `checkpoint` failed verification.

    `absent` means instead that every holder answered and none has it any more: the holder restarted after being read.
    """

    generation: int
    checkpoint: Checkpoint
    rank: int
    absent: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every local rank exited with 0 and all staged saves are drained."""

    generation: int
    exit_code: int
    steps: int
    """Last finished step; 0 means that the program never called step."""


@dataclass(frozen=True, slots=True)
class PersistentPage:
    """Answers ListPersistent with a page of manifests and layout records.

    Manifests are JSON of `RankManifest` and name their layouts by digest; layout records come by digest, as far as they
    were asked for. Pages of one request come in order; the last has `more` false, and alone says what was left out.
    """

    request: int
    manifests: tuple[str, ...] = ()
    layouts: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    unread_records: tuple[UnreadRecord, ...] = ()
    page: int = 0
    more: bool = False
    newest_epoch: int = 0
    """The newest epoch that the tier has a save or a claim of, apart from the claim that was asked for; 0: none."""


@dataclass(frozen=True, slots=True)
class RepairReply:
    """Answer to RepairSave."""

    request: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class UploadReply:
    """Answer to PromoteSave, one a rank save."""

    save: RankSave
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    unreadable: bool = False
    """Every copy in memory answered, and each is damaged or lacks a part: asking again finds the same."""


@dataclass(frozen=True, slots=True)
class DeleteReply:
    """Answer to DropPersistent."""

    request: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Becomes an event for people; `reason` is CamelCase and stable."""

    reason: str
    text: str


FromAgent = (
    Hello | Heartbeat | TrainerFailure | TrainersStopped | StoreReady | BarrierReply | BarrierReached
    | UnreadableSave | Finished | PersistentPage | RepairReply | UploadReply | DeleteReply | HangReport
    | NodeHealth | Notice | ListAllServers
)  # fmt: skip

# ---- coordinator → agent ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hello was accepted; `term` identifies this coordinator process."""

    term: str
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class HelloRejected:
    """Precedes the connection's end; with `retry` the agent tries again.

    No leader is here, or its API server is away.
    """

    reason: str
    retry: bool
    after_seconds: float = 0.0
    """Not sooner than this, where many come at once; 0: as the agent likes."""
    address: str = ""
    """Where the agent's job is led, if elsewhere; empty: ask here again."""


@dataclass(frozen=True, slots=True)
class StopTrainers:
    """Stops and reaps every trainer of epochs below `epoch`; drains go on.

    Sent while `epoch` is claimed.
    """

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns the committed epoch to one member; trainers start once per epoch."""

    generation: int
    world_size: int
    """Ranks in all."""
    first_rank: int
    local_ranks: int
    group_rank: int
    group_size: int
    restarts: int
    parent: Checkpoint | None
    lineage: tuple[tuple[int, Checkpoint | None, int], ...]
    token: str
    hosts_store: bool
    store: str | None
    """host:port once known; the trainers wait for it."""
    servers: tuple[MemoryServerEndpoint, ...]
    """Provisioned holders: every one, or with `partial` those that this worker needs as far as is known. A connection
    leaves them out: they are those that `HolderChanges` told of on it."""
    targets: tuple[MemoryServerInstance, ...]
    """Where this worker's saves go, the local one first."""
    replicas: int
    source_job: SourceJob | None = None
    """Where the parent lies, if it is an older job's."""
    skip_steps: int = 0
    """Loaders leave out the batches of so many steps behind the parent: what was read there spoiled a world before."""
    servers_unreachable: bool = False
    """The coordinator reaches none of `holders`: this agent drops old saves from them, as where no coordinator is."""
    is_partial: bool = False
    """There are more than `holders`, which may have what these lack: `HoldersWanted` asks for all."""
    rank_targets: tuple[tuple[MemoryServerInstance, ...], ...] = ()
    """By local rank, where nodes run several servers: those where its saves go in place of `targets`."""

    @property
    def tier(self) -> MemoryServers:
        """The part of it that may change within its epoch."""
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
    """Replaces an assignment's `holders` and their targets within its epoch."""

    generation: int
    servers: tuple[MemoryServerEndpoint, ...]
    """As in `Assign`."""
    targets: tuple[MemoryServerInstance, ...]
    replicas: int
    servers_unreachable: bool = False
    """As in `Assign`."""
    is_partial: bool = False
    """As in `Assign`."""
    rank_targets: tuple[tuple[MemoryServerInstance, ...], ...] = ()
    """As in `Assign`."""

    def targets_of(self, local: int) -> tuple[MemoryServerInstance, ...]:
        """Where saves of this local rank go, the local one first."""
        return self.rank_targets[local] if local < len(self.rank_targets) else self.targets


@dataclass(frozen=True, slots=True)
class MemoryServerChanges:
    """Changes the list of holders sent on this connection; see `memory_server_list`."""

    added: tuple[tuple[str, str, str, int, str, bool, int], ...]
    """Node, instance, host, port, domain (empty: the node's name), whether it speaks TLS, and server; also of one that moved."""
    removed: tuple[MemoryServerInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class ListPersistent:
    """Requests a Listing of the persistent tier or an older job's folder."""

    request: int
    source_job: SourceJob | None = None
    manifests: bool = True
    """Whether manifests are wanted; else the layout records alone."""
    layouts: tuple[str, ...] | None = None
    """Digests of the layout records that are wanted; None: of every one that a manifest names."""
    begin: bool = True
    """A folder that is not there may be made: the job has no checkpoint in it that it could hide."""
    claim_epoch: int = 0
    """Claim this epoch in the tier before listing it; 0: none."""
    claim_ticket: str = ""
    """What the claim says: whose it is, where it is there already."""


@dataclass(frozen=True, slots=True)
class RepairSave:
    """Copies a rank save between holders: verify, write, commit as `epoch`."""

    request: int
    generation: int
    save: RankSave
    source: MemoryServerInstance
    target: MemoryServerInstance
    endpoints: tuple[MemoryServerEndpoint, ...] = ()
    """Where both answer: an agent need not have been told of them."""


@dataclass(frozen=True, slots=True)
class UploadSave:
    """Upload these rank saves of a pinned checkpoint to the persistent tier.

    `round` grows with each upload that failed, and where the wish lapsed: the same again is another message, and sent.
    """

    generation: int
    saves: tuple[RankSave, ...]
    round: int = 0
    begin: bool = True
    """As in `ListPersistent`."""


@dataclass(frozen=True, slots=True)
class DeletePersistent:
    """Delete these checkpoints from the persistent tier, manifests first."""

    request: int
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class IntervalExponent:
    """The least level to save at: every k·2^level steps (seconds and `auto` become a level here)."""

    generation: int
    exponent: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Dismisses this worker: stop trainers, flush, exit with `exit_code`."""

    reason: str
    exit_code: int


ToAgent = (
    Welcome | HelloRejected | StopTrainers | Assign | MemoryServers | MemoryServerChanges | Barrier | ListPersistent | RepairSave | UploadSave | DeletePersistent
    | IntervalExponent | Shutdown
)  # fmt: skip
Message = FromAgent | ToAgent
