"""Defines the job snapshot: the immutable input of one plan.

Built by `reconcile` from the platform, the coordinator's sessions and both tiers; read by `planning.plan`. Unknown values are
None or absent, never a guess: an unreachable server is not an empty one. All times are Unix seconds of the same clock as
`now_seconds`.
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
from surefoot_operator.api.status import MIN_STEPS, JobStatus
from surefoot_operator.rejected_calls import RejectedCall

# ---- pod groups ------------------------------------------------------------------------------------------------------
# Pod groups of a job, as observed. A group that could not be read is unknown: a scheduler would block a worker that is created
# without its group.


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The PodGroup by which a gang scheduler places a job's workers."""

    gang: Gang
    """Gang scheduler that the group belongs to."""
    min_members: int
    """Number of pods that are placed together or not at all; further pods are placed one by one."""
    schedule_timeout_seconds: int | None = None
    """Time for which the scheduler reserves nodes for an incomplete group; None: as the cluster configures it."""


@dataclass(frozen=True, slots=True)
class ObservedPodGroup:
    """A job's pod group as the platform reports it."""

    group: PodGroup
    uid: str
    """`metadata.uid` of the group."""
    deleting: bool = False
    """Whether its deletion has begun."""


@dataclass(frozen=True, slots=True)
class ObservedPodGroups:
    """A job's pod groups: at most one for each gang scheduler."""

    groups: tuple[ObservedPodGroup, ...] = ()
    unavailable: Mapping[Gang, str] = field(default_factory=dict)
    """Gang schedulers whose groups can neither be read nor created, with the cause."""


@dataclass(frozen=True, slots=True)
class PendingGroupCall:
    """A call to create or delete a pod group that is under way or was rejected."""

    gang: Gang
    """Gang scheduler of the group."""
    in_progress: bool
    """Whether the platform has not replied yet."""
    rejection: str = ""
    """The platform's last rejection; empty: none."""
    until_seconds: float = 0.0
    """The call is not repeated before this time."""


# ---- both tiers ------------------------------------------------------------------------------------------------------
# Contents of the two tiers, as observed. An unreachable memory server is unknown and never empty, and a record that a listing
# could not read is unread and never absent: either may be the only copy.

MAX_GENERATION = 2**31 - 1
"""Largest plausible generation. A larger number in a listing is damage or an attack, and no decision depends on it."""


@dataclass(frozen=True, slots=True)
class ObservedMemoryServer:
    """An instance of a memory server, as the operator or an agent last read it."""

    endpoint: MemoryServerEndpoint
    """Address and instance of the server."""
    state: Literal["Ready", "Unreachable", "Gone"]
    """Ready: provisioned for this job and answering. Unreachable: its contents are unknown. Gone: the platform has confirmed
    that this instance no longer exists."""
    since_seconds: float
    """Since when it is in this state."""
    fence: int | None = None
    """Generation up to which the server rejects older writers, as last set or read by the operator; None: not known."""
    read_generation: int | None = None
    """Claimed generation for which `entries` were read *after* fencing; None: `entries` must not decide anything."""
    entries: tuple[RankManifest, ...] = ()
    """Manifests of the job's saves on the server."""
    used_bytes: int | None = None
    """Memory of all jobs on the server when `entries` were read, rounded up by at most a hundredth of its limit."""
    limit_bytes: int | None = None
    """Memory limit of the server. None, like `used_bytes`: not known, or no limit."""
    quota_violation: str = ""
    """Why the job may not write to the server: it uses more than its share. Empty: it may."""
    last_error: str = ""
    """How the operator's last call to an unreachable server failed."""
    rejects_operator: bool = False
    """Whether an unreachable server answers but rejects the operator's password or certificate authority."""


@dataclass(frozen=True, slots=True)
class PersistentListing:
    """Contents of the persistent tier, as one agent listed them."""

    read_generation: int | None = None
    """Claimed generation for which the tier was listed, after the last memory server was read for it; None: `entries` must not
    decide anything."""
    entries: tuple[RankManifest, ...] | None = None
    """Manifests in the tier; None: not listed yet."""
    requested_seconds: float | None = None
    """When the listing was requested; None: it was not."""
    error: str | None = None
    """Why the last listing failed; None: it did not."""
    source_job: SourceJob | None = None
    """The source job whose folder was listed; the generations of its saves in `entries` are negated. None: this job."""
    unread_records: tuple[UnreadRecord, ...] = ()
    """Records that the listing could not read."""
    undecidable: frozenset[Checkpoint] = frozenset()
    """Checkpoints that may be complete, because not all their records could be read: never deleted, never taken for absent."""
    requested_from: frozenset[WorkerId] = frozenset()
    """Workers whose agents were asked for a listing and have not answered yet."""
    newest_generation: int = 0
    """Newest generation with a save or a claim in the tier, except the claim that was requested with the listing; 0: none."""
    deleting: frozenset[Checkpoint] = frozenset()
    """Checkpoints whose deletion this leader has requested, which may still exist; they are not in `entries`."""

    def unreadable_checkpoints(self, negated: bool) -> frozenset[Checkpoint]:
        """Returns the checkpoints of which a manifest or layout could not be read.

        Args:
            negated: whether to negate the generations of unread records, as those of a source job in `entries` are.
        """
        unread = {record.checkpoint for record in self.unread_records if record.checkpoint is not None}
        unread = {checkpoint.with_negated_generation() for checkpoint in unread} if negated else unread
        return frozenset(unread | {m.save.checkpoint for m in self.entries or () if m.layout in self.lost_layouts})

    def without_checkpoints(self, removed: frozenset[Checkpoint]) -> PersistentListing:
        """Returns the listing without checkpoints whose deletion was requested."""
        entries = None if self.entries is None else tuple(m for m in self.entries if m.save.checkpoint not in removed)
        return replace(self, entries=entries, deleting=self.deleting | removed)

    @property
    def lost_layouts(self) -> frozenset[str]:
        """Digests of layouts that could not be read."""
        return frozenset(record.digest for record in self.unread_records if record.digest is not None)


# ---- job snapshot ----------------------------------------------------------------------------------------------------

MAX_WINDOWS = 4
"""Number of newest activity windows in each of which a straggler must be slower than its peers."""


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker's pod or process, as the platform reports it."""

    index: int
    """Index of the worker: its position in the job."""
    attempt: int
    """Attempt number: a replacement has a higher one."""
    name: str
    """Name of the pod, or of the process's folder."""
    uid: str
    """`metadata.uid` of the pod."""
    node: str | None
    """Node to which it is bound; None: it is not scheduled."""
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    exit_code: int | None = None
    """Exit code of the trainer's container; None: it runs, or the code is not known."""
    message: str = ""
    """The platform's reason for its state; empty: none."""
    created_seconds: float = 0.0
    deleting: bool = False
    """Whether its deletion has begun."""
    disruption_announced: bool = False
    """Whether the cluster has announced that it will end the worker (`message`: why), possibly without having begun."""
    sidecar_running: bool = False
    """Whether the trainer's container ended while a sidecar in the pod still runs."""
    oom_killed: bool = False
    """Whether the OOM killer ended the trainer's container with its agent. The platform does not know by which limit."""
    start_blocker: str = ""
    """Why its agent cannot be started, in the platform's own words; empty: no obstacle is known."""

    @property
    def exit_description(self) -> str:
        """Returns how it ended, with its exit code if that is known."""
        return "ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class PendingCreate:
    """A worker whose creation is under way or was rejected."""

    index: int
    """Index of the worker."""
    attempt: int
    """Attempt number of the worker."""
    in_progress: bool
    """Whether the platform has not replied yet."""
    rejection: str = ""
    """The platform's last rejection; empty: none."""
    permanent: bool = False
    """Whether the same request would be rejected again."""
    until_seconds: float = 0.0
    """The request is not repeated before this time."""


@dataclass(frozen=True, slots=True)
class ObservedPurge:
    """The pod of one attempt to delete a deleted job's data in the persistent tier."""

    attempt: int
    """Number of the attempt, from 1."""
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    message: str = ""
    """Why it failed; empty: not known."""
    created_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedPurgeCall:
    """Outcome of this leader's requests to start such an attempt."""

    attempt: int = 0
    """Newest attempt that the platform accepted, whose pod may have been removed since; 0: none."""
    accepted_seconds: float = 0.0
    """When the platform accepted it."""
    in_progress: bool = False
    """Whether a request has not been answered yet."""
    rejections: int = 0
    """Requests that were rejected in this term, without those that were not answered or met a busy server."""
    rejection: str = ""
    """Why the newest request failed; empty: it did not."""
    rejected_attempt: int = 1
    """Attempt for which the newest request failed. It may exist all the same if no reply came."""
    since_seconds: float = 0.0
    """When the first of the consecutive failed requests failed."""
    last_seconds: float = 0.0
    """When the newest of them failed."""
    closing: bool = False
    """Whether the namespace is being deleted, so that nothing can be created there."""


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node, as the platform reports it."""

    name: str
    domain: str
    """Failure domain of the node."""
    ready: bool
    """Whether it is alive as far as the platform knows; a frozen node may stay ready for a while."""
    schedulable: bool = True
    """Whether new pods may be placed on it: it is not cordoned."""
    reason: str = ""
    """Why it is not ready; empty: it is, or no cause is known."""
    evacuation_reason: str = ""
    """Why workers should leave it although it is alive, by its node signals; empty: they need not."""
    informational: str = ""
    """Node signals that are displayed but move no worker; empty: none."""
    unconfirmed_failure: str = ""
    """Sign that the node is lost which may come from a failure of its observer instead. Of a ready node: most nodes show it at
    once."""
    path: tuple[str, ...] = ()
    """Its topology labels, the highest level first; see `topology_levels`. Empty: it has none."""


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """The first failed trainer of a worker in one generation, or a hang of all its ranks."""

    generation: int
    """Generation in which the trainer failed."""
    rank: int
    """Rank of the trainer; −1: all ranks hang and none is at an earlier step than the others."""
    code: int
    """Exit code; −N: signal N."""
    cause: str
    """Cause of the failure in a sentence."""
    secondary: bool
    """Whether the failure follows from another rank's, such as a closed connection."""
    received_seconds: float
    """When it was received."""
    kind: Literal["failed", "hang"] = "failed"
    detail: str = ""
    """More lines for users, such as a traceback or stacks."""
    oom: Literal["", "limit", "node"] = ""
    """Whether the OOM killer ended it because of the container's limit or the node's memory; empty: it did not."""


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """Observations of one agent about its ranks while they make no step.

    Valid as long as their step is `step`.
    """

    step: int
    """Step at which the ranks were observed."""
    stacks: tuple[RankStack, ...]
    """Stack of each rank."""
    is_progressing: bool = False
    """Whether something moves in the ranks: then the evidence proves no hang."""
    collectives: tuple[Collective, ...] = ()
    """Collective that each rank is in or called last; empty: not known of every rank."""


@dataclass(frozen=True, slots=True)
class ActivityWindow:
    """How often each rank of one worker was observed working rather than waiting, over some steps."""

    since_step: int
    """First step of the window."""
    activities: tuple[RankActivity, ...]
    """Activity of each rank."""


@dataclass(frozen=True, slots=True)
class ActivityHistory:
    """The newest activity windows of one agent's ranks."""

    window_start_totals: tuple[RankActivity, ...] = ()
    """Totals at the start of the open window."""
    window_start_step: int = 0
    """Step at the start of the open window."""
    windows: tuple[ActivityWindow, ...] = ()
    """Completed windows, oldest first."""
    warmed_up: bool = False
    """Whether the first window of the generation, which includes its slow start, is over."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of the recent steps, stalls and flushes of one agent, in seconds.

    Medians are used, because one evaluation, one slow disk or the first step's compilation is no trend. They are computed on
    demand: few jobs need them, and heartbeats are frequent.
    """

    steps: tuple[float, ...] = ()
    """Duration of each step."""
    stalls: tuple[float, ...] = ()
    """Time for which each save blocked training."""
    flushes: tuple[float, ...] = ()
    """Time of each save from the end of staging until it had all its copies."""
    pending: Mapping[Checkpoint, float] = field(default_factory=dict)
    """Saves that are being flushed, with the time at which they were first reported."""
    activity: ActivityHistory = ActivityHistory()
    """Activity of the agent's ranks."""

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
    """The state of one agent by its messages; built in `coordinator.sessions`."""

    index: int
    """Index of its worker."""
    attempt: int
    """Attempt number of its worker."""
    incarnation: str
    """Random id of this start of the agent."""
    node: str
    """Node of its worker."""
    connected: bool
    since_seconds: float
    """When it connected, or when its connection broke."""
    last_message_seconds: float
    """When its last message of any kind arrived."""
    generation: int = 0
    """Generation in which its ranks run or ran last; 0: none. Fields without another note refer to it."""
    stopped: int = 0
    """All trainers of generations below this one have ended."""
    warm: bool = False
    """Whether it can start trainers at once: the program's imports are done."""
    progress: Progress = NO_PROGRESS
    """Newest progress that its ranks reported."""
    step_at_seconds: float | None = None
    """When the step last increased; None: no step yet."""
    timings: Timings = Timings()
    pending: tuple[Checkpoint, ...] = ()
    """Checkpoints whose saves are being flushed."""
    saved: Checkpoint | None = None
    """Newest checkpoint whose saves of its ranks are all on memory servers; None: none is."""
    copies: int = 0
    """Number of memory servers that have `saved`; 0 without one."""
    exit: ObservedExit | None = None
    """First failure of its trainers; None: none failed."""
    terminating: bool = False
    """Whether it was asked to end, for example because its node shuts down."""
    finished: int | None = None
    """Exit code of its trainers that have all finished; None: they have not."""
    finished_steps: int = 0
    """Last step of its finished trainers; 0: the program never called `step`."""
    final_saves_reported: bool = False
    """Whether `pending` and `saved` were reported after `finished`: before, they may lack the last step's saves."""
    barrier_step: int | None = None
    """Step of the barrier at which all its ranks wait; None: they do not."""
    unreadable_report: tuple[Checkpoint, bool, str] | None = None
    """(checkpoint, absent, detail) of a restore that failed; None: none failed."""
    findings: tuple[NodeFinding, ...] = ()
    """Faults that it found on its node, the most severe first."""
    findings_seconds: float = 0.0
    """Since when `findings` are unchanged."""
    clock_skew_seconds: float | None = None
    """Time by which its node's clock is ahead of this operator's; None: not reported."""
    hang_evidence: HangEvidence | None = None
    """Its observations of ranks that make no step; None: they make steps, or it has none."""


@dataclass(frozen=True, slots=True)
class ObservedBarrier:
    """The newest barrier: the step at which all ranks are to save and wait."""

    barrier: Barrier
    """Message that all members receive."""
    proposed_seconds: float
    """When it was first sent."""
    unanswered_by: frozenset[WorkerId] = frozenset()
    """Workers that have not accepted it yet."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Input of `planning.plan`: one job, all that was observed of it, and the time."""

    now_seconds: float
    term_seconds: float
    """When this operator began to lead. An agent counts as silent only if it connected since then."""
    job: TrainingJob
    status: JobStatus
    workers: tuple[ObservedWorker, ...] = ()
    nodes: tuple[ObservedNode, ...] = ()
    sessions: tuple[ObservedSession, ...] = ()
    servers: tuple[ObservedMemoryServer, ...] = ()
    persistent: PersistentListing = field(default_factory=PersistentListing)
    source_listing: PersistentListing = field(default_factory=PersistentListing)
    """Folder of the source job, if this job starts from its checkpoint. Its `covers` are among those of this job."""
    barrier: ObservedBarrier | None = None
    covers: Covers = field(default_factory=dict)
    """Whether the layouts of a checkpoint contain every tensor exactly once, by the set of their digests."""
    uploaded: Mapping[Checkpoint, frozenset[RankSave]] = field(default_factory=dict)
    """Saves of each checkpoint whose upload agents have reported."""
    failed_uploads: Mapping[RankSave, int] = field(default_factory=dict)
    """Failed uploads of each save."""
    unreadable: frozenset[RankSave] = frozenset()
    """Saves of which an agent found every copy in memory corrupt."""
    upload_seconds: float | None = None
    """Duration of the upload of `status.last_uploaded`, of its slowest worker; None: this operator did not observe it."""
    recent_upload_seconds: tuple[float, ...] = ()
    """Duration of each recent upload that this operator observed, of its slowest worker."""
    rejected_records: tuple[str, ...] = ()
    """Records of the job that exceed a limit and were not read, one sentence each."""
    memory_cleared: bool = False
    """Whether this operator has deleted the job's saves from every memory server that answers."""
    purges: tuple[ObservedPurge, ...] = ()
    """Attempts to delete the persistent data of a deleted job."""
    purge_call: ObservedPurgeCall = ObservedPurgeCall()
    spec_rejection: str = ""
    """Why a newer spec than that of `job` was rejected; empty: `job` has the newest."""
    free_nodes: int | None = None
    """Nodes on which another worker could be created now; None: only the scheduler knows."""
    retry_later_seconds: float = 0.0
    """When an agent of this job was last asked to reconnect later; 0: none was in this term."""
    creates: tuple[PendingCreate, ...] = ()
    """Workers whose creation is under way or was rejected."""
    pod_groups: ObservedPodGroups | None = None
    """None: the platform has no gang scheduler."""
    group_calls: tuple[PendingGroupCall, ...] = ()
    """Calls for pod groups that are under way or were rejected."""
    upload_now: bool = False
    """Whether the plan of this reconcile asks maintenance to upload the newest complete checkpoint at once."""
    rejected_calls: tuple[RejectedCall, ...] = ()
    """Calls that the API server keeps rejecting, of this job or of those on which every job depends."""
    deletion_uids: frozenset[str] = frozenset()
    """Uids of workers whose deletion this leader requested without a known outcome: it may happen at any time."""
