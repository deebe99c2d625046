"""Defines the snapshot that plans are made from.

Built by `reconcile` from the fabric, the coordinator's sessions and the memory tier; read by `planning.plan`. Unknown
values are None or absent, never a guess. All times are Unix seconds of the same clock as `now`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.protocol.checkpoints.completeness import Covers, UnreadRecord
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.hangs import Collective, RankStack
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave, SourceJob, WorkerId
from surefoot.protocol.messages import Barrier, NodeFinding
from surefoot.protocol.progress import NO_PROGRESS, Progress, RankActivity
from surefoot_operator.api.spec import Gang, TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.rejected_calls import RefusedCall

# ---- pod groups ------------------------------------------------------------------------------------------------------
# Defines what a snapshot says of a job's pod groups. Pure. Of a group that nobody could look at nothing is guessed: a
# worker that is made without its group is held back by its scheduler.


@dataclass(frozen=True, slots=True)
class PodGroup:
    """What a gang scheduler is told of a job's workers."""

    gang: Gang
    min_members: int
    """So many are placed together, or none; what is beyond is placed one by one."""
    schedule_timeout_seconds: int | None = None
    """None leaves it to the cluster."""


@dataclass(frozen=True, slots=True)
class ObservedPodGroup:
    """A job's pod group as its fabric reports it."""

    group: PodGroup
    uid: str
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class ObservedPodGroups:
    """A job's pod groups: at most one a gang scheduler."""

    groups: tuple[ObservedPodGroup, ...] = ()
    unavailable: Mapping[Gang, str] = field(default_factory=dict)
    """Gang schedulers whose groups can neither be looked at nor made, and why."""


@dataclass(frozen=True, slots=True)
class PendingGroupCall:
    """A call for a pod group, under way or refused."""

    gang: Gang
    under_way: bool
    rejection: str = ""
    """What the fabric said the last time; empty: nothing yet."""
    until_seconds: float = 0.0
    """Not asked for again before."""


# ---- both tiers ------------------------------------------------------------------------------------------------------
# Defines what a snapshot says of the two tiers. Pure. A silent holder is unknown and never empty, a record that a
# listing left out is unread and never absent: either may be the only copy.

HIGHEST_EPOCH = 2**31 - 1
"""No job comes this far: a greater number in a listing is damage or malice, and decides nothing."""


@dataclass(frozen=True, slots=True)
class ObservedMemoryServer:
    """One instance of the memory tier, as the operator last reached it."""

    endpoint: MemoryServerEndpoint
    state: Literal["Ready", "Unreachable", "Gone"]
    """Ready: provisioned for this job and answering. Silent: unknown. Gone: the fabric knows that it no longer is."""
    since_seconds: float
    fence: int | None = None
    """Epoch that it was last sealed to by us or read to have; None: not known."""
    read_generation: int | None = None
    """Claimed epoch for which `entries` were read *after* sealing; None: `entries` are not fit to decide."""
    entries: tuple[RankManifest, ...] = ()
    used_bytes: int | None = None
    """What the server holds for all jobs when `entries` were read, rounded up by a hundredth of its limit at most."""
    limit_bytes: int | None = None
    """What it may hold. Both None: not known, or without a limit."""
    quota_violation: str = ""
    """Why the job may not write there: it holds more than its part. Empty: it may."""
    last_error: str = ""
    """Of a silent one: how the operator's last call to it ended."""
    rejects_operator: bool = False
    """Of a silent one: something answers there, and refuses the operator (password, authority)."""


@dataclass(frozen=True, slots=True)
class PersistentListing:
    """The persistent tier as one agent listed it.

    `read_epoch`: as for holders, and no holder was read later.
    """

    read_generation: int | None = None
    entries: tuple[RankManifest, ...] | None = None
    requested_seconds: float | None = None
    error: str | None = None
    source_job: SourceJob | None = None
    """Whose folder was listed, if not this job's: the saves among `entries` have their epochs negated."""
    unread_records: tuple[UnreadRecord, ...] = ()
    """Records that the listing could not read."""
    undecidable: frozenset[Checkpoint] = frozenset()
    """Checkpoints that may be complete for all that could be read: never deleted, never taken for absent."""
    requested_from: frozenset[WorkerId] = frozenset()
    """Workers whose agents were asked and have not answered yet."""
    newest_epoch: int = 0
    """The newest epoch that the tier has a save or a claim of, the claim that was asked for aside."""
    deleting: frozenset[Checkpoint] = frozenset()
    """Those whose deletion this leader has asked for and that may still be there; not among `entries`."""

    def unreadable_checkpoints(self, negated: bool) -> frozenset[Checkpoint]:
        """Lists checkpoints of which a manifest or layout could not be read."""
        told = {one.checkpoint for one in self.unread_records if one.checkpoint is not None}
        told = {c.negated() for c in told} if negated else told
        return frozenset(told | {m.save.checkpoint for m in self.entries or () if m.layout in self.lost_layouts})

    def without_checkpoints(self, going: frozenset[Checkpoint]) -> PersistentListing:
        """Takes out checkpoints that are being deleted."""
        entries = None if self.entries is None else tuple(m for m in self.entries if m.save.checkpoint not in going)
        return replace(self, entries=entries, deleting=self.deleting | going)

    @property
    def lost_layouts(self) -> frozenset[str]:
        return frozenset(one.digest for one in self.unread_records if one.digest is not None)


# ---- job snapshot ----------------------------------------------------------------------------------------------------

MIN_STEPS = 3
"""Of fewer the first, slow one would be half."""

MAX_WINDOWS = 4
"""Newest windows of looks at ranks, in each of which a slow one must stand out."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A pod or process as its fabric reports it."""

    index: int
    attempt: int
    name: str
    uid: str
    node: str | None
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    exit_code: int | None = None
    message: str = ""
    created_seconds: float = 0.0
    deleting: bool = False
    disruption_announced: bool = False
    """Its cluster has said that it will end it (`message`: why), and may not have begun to."""
    sidecar_running: bool = False
    """Its trainer ended, and something beside it still runs: a sidecar."""
    oom_killed: bool = False
    """The OOM killer ended its trainer's container, agent and all: by which limit its fabric does not know."""
    start_blocker: str = ""
    """Why its agent cannot be started, in its fabric's own words; empty: nothing is known to be in the way."""

    @property
    def exit_description(self) -> str:
        """How it ended, with its exit code where that is known."""
        return "ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class PendingCreate:
    """A worker whose creation is under way or was refused."""

    index: int
    attempt: int
    in_progress: bool
    rejection: str = ""
    """What the fabric said the last time; empty: nothing yet."""
    permanent: bool = False
    """Asked for again unchanged it is refused again."""
    until_seconds: float = 0.0
    """Not asked for again before."""


@dataclass(frozen=True, slots=True)
class ObservedPurge:
    """One attempt to delete a deleted job's persistent data."""

    attempt: int
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    message: str = ""
    created_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PurgeCallSeen:
    """What became of this leader's requests to begin such an attempt."""

    attempt: int = 0
    """The newest that the fabric accepted; its pod may have been removed since."""
    made_seconds: float = 0.0
    """When it accepted that."""
    under_way: bool = False
    refusals: int = 0
    """How many it refused in this term; an answer that never came is none, nor is a busy server's."""
    refusal: str = ""
    """Why the newest request failed; empty: it did not."""
    refused_attempt: int = 1
    """The attempt that it was for: it may exist all the same, if no answer came."""
    since_seconds: float = 0.0
    """When the first of them failed that failed in a row."""
    last_seconds: float = 0.0
    """When the newest of them failed."""
    closing: bool = False
    """The namespace is being deleted: nothing is created there any more."""


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node as its fabric reports it."""

    name: str
    domain: str
    ready: bool
    """Alive as far as the fabric can tell; a frozen node may be ready for a while."""
    schedulable: bool = True
    reason: str = ""
    evacuation_reason: str = ""
    """Why others want it left, though it lives; empty: nobody does."""
    informational: str = ""
    """What others say of it that is too little to leave it."""
    unconfirmed_failure: str = ""
    """What says that it is gone, where its observer may only not have heard it. Of one that is ready: it is said of most nodes at once."""
    path: tuple[str, ...] = ()
    """Where it stands, the highest level first; see `topology_levels`. Empty: nobody says."""


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """A worker's first failed trainer in `epoch`, or a hang of all.

    `rank` −1: all hang and none is behind the others.
    """

    generation: int
    rank: int
    code: int
    cause: str
    secondary: bool
    at_seconds: float
    kind: Literal["failed", "hang"] = "failed"
    detail: str = ""
    """More lines for people."""
    oom: Literal["", "limit", "node"] = ""
    """Whose memory was used up, where the kernel's OOM killer ended it."""


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """One agent's word where its ranks are without a step.

    True as long as their step is still `step`. Where something `moves` in them, a hang is not proven by it.
    """

    step: int
    stacks: tuple[RankStack, ...]
    is_progressing: bool = False
    collectives: tuple[Collective, ...] = ()
    """What its ranks are in or made last; empty where that is not known of every one."""


@dataclass(frozen=True, slots=True)
class ActivityWindow:
    """How often one worker's ranks were found at work over some steps."""

    since_step: int
    paces: tuple[RankActivity, ...]


@dataclass(frozen=True, slots=True)
class ActivityHistory:
    """The newest windows of one agent's ranks, oldest first.

    `marked`: totals at step `marked_step`, with which the next window begins.
    """

    window_start_totals: tuple[RankActivity, ...] = ()
    window_start_step: int = 0
    windows: tuple[ActivityWindow, ...] = ()
    warmed_up: bool = False
    """Whether the first of the epoch is over."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Recent steps, stalls and drains of one agent, in seconds.

    Medians, because one evaluation, one slow disk or the first step's compilation is no trend. Computed when asked for:
    few jobs ask, and heartbeats are many.
    """

    steps: tuple[float, ...] = ()
    stalls: tuple[float, ...] = ()
    """How long saves held the training up."""
    flushes: tuple[float, ...] = ()
    """From a save's staging to all its copies."""
    pending: Mapping[Checkpoint, float] = field(default_factory=dict)
    """Since when saves that still drain are known to."""
    pace: ActivityHistory = ActivityHistory()

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(self.steps) if len(self.steps) >= MIN_STEPS else None

    @property
    def stall_seconds(self) -> float | None:
        return statistics.median(self.stalls) if self.stalls else None

    @property
    def flush_seconds(self) -> float | None:
        return statistics.median(self.flushes) if self.flushes else None


@dataclass(frozen=True, slots=True)
class ObservedSession:
    """One agent as the coordinator last heard it; built in `coordinator.sessions`."""

    index: int
    attempt: int
    incarnation: str
    node: str
    connected: bool
    since_seconds: float
    """When it connected, or when its line broke."""
    last_message_seconds: float
    """Last message of any kind."""
    generation: int = 0
    stopped: int = 0
    warm: bool = False
    progress: Progress = NO_PROGRESS
    """What its ranks told in `epoch`, the newest of each."""
    step_at_seconds: float | None = None
    """When the step last grew within this epoch; None: no step yet in it."""
    timings: Timings = Timings()
    pending: tuple[Checkpoint, ...] = ()
    saved: Checkpoint | None = None
    copies: int = 0
    exit: ObservedExit | None = None
    terminating: bool = False
    """It was told to end, as by a node that shuts down."""
    finished: int | None = None
    """Exit code of Finished for `epoch`."""
    finished_steps: int = 0
    final_saves_reported: bool = False
    """Whether `pending` and `saved` were told behind `finished`: before it they may lack the last step's."""
    barrier_step: int | None = None
    """Step of the barrier at which all its ranks wait in `epoch`."""
    unreadable_report: tuple[Checkpoint, bool, str] | None = None
    """(checkpoint, absent, detail) reported in `epoch`."""
    findings: tuple[NodeFinding, ...] = ()
    """What it finds wrong with its node, the gravest first."""
    findings_seconds: float = 0.0
    """Since when it finds just these."""
    clock_skew_seconds: float | None = None
    """How far its node's clock is ahead of this operator's; None: it never said."""
    hang_evidence: HangEvidence | None = None
    """Where its ranks stand in `epoch` without anything moving; None: they step, or it does not know."""


@dataclass(frozen=True, slots=True)
class ObservedBarrier:
    """The newest barrier, as all members received it or will."""

    sent: Barrier
    proposed_seconds: float
    unanswered_by: frozenset[WorkerId] = frozenset()
    """Workers that have yet to accept."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Input of `planning.plan`: one job, its surroundings, and the time."""

    now_seconds: float
    term_seconds: float
    """When this operator's term began: silence is judged only of agents heard in it."""
    job: TrainingJob
    status: JobStatus
    workers: tuple[ObservedWorker, ...] = ()
    nodes: tuple[ObservedNode, ...] = ()
    sessions: tuple[ObservedSession, ...] = ()
    servers: tuple[ObservedMemoryServer, ...] = ()
    persistent: PersistentListing = field(default_factory=PersistentListing)
    source_listing: PersistentListing = field(default_factory=PersistentListing)
    """An older job's folder, where this one takes up its checkpoints. Its `covers` stand among the others."""
    barrier: ObservedBarrier | None = None
    covers: Covers = field(default_factory=dict)
    uploaded: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    failed_uploads: Mapping[RankSave, int] = field(default_factory=dict)
    """How often uploading a save failed."""
    unreadable: frozenset[RankSave] = frozenset()
    """Saves of which an agent found every copy in memory damaged."""
    upload_seconds: float | None = None
    """How long the upload of `status.lastUploaded` took, the longest of its workers; None where this operator did not see it."""
    refused_records: tuple[str, ...] = ()
    """Records of the job that broke a bound and were not read, a sentence each."""
    memory_cleared: bool = False
    """This operator has removed the job from every holder that answers."""
    purges: tuple[ObservedPurge, ...] = ()
    purge_call: PurgeCallSeen = PurgeCallSeen()
    spec_rejection: str = ""
    """Why a newer spec than `job` is not acted upon; empty: `job` is the newest."""
    free_nodes: int | None = None
    """Nodes that could take another worker now; None where only a scheduler knows."""
    retry_later_seconds: float = 0.0
    """When an agent of this job was last asked to come again; 0: none was in this term."""
    creates: tuple[PendingCreate, ...] = ()
    """Workers that were asked for and are not there: under way, or refused."""
    pod_groups: ObservedPodGroups | None = None
    """None: the fabric has no scheduler that knows groups."""
    group_calls: tuple[PendingGroupCall, ...] = ()
    """For pod groups: under way, or refused."""
    uploads: bool = False
    """What this round's plan asks of maintenance: the newest complete checkpoint goes to the persistent tier now."""
    refused_calls: tuple[RefusedCall, ...] = ()
    """What the API server refuses again and again: of this job's calls, and of what every job depends on."""
    deletions: frozenset[str] = frozenset()
    """Uids of workers whose deletion this leader asked for and knows no end of: it may be carried out at any time."""
