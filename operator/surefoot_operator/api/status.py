"""Defines the job status: the operator's only durable state.

Pure values; `api.status_json` turns them into JSON and back. Times are Unix seconds; None: not yet known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from surefoot.protocol.checkpoints.completeness import Lineage
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, SourceJob

Phase = Literal["Pending", "Starting", "Running", "Recovering", "Resizing", "Suspended", "Complete", "Failed"]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of a committed generation; its position among the members is its group rank.

    `incarnation` is the random id of one start of an agent: an agent with another one is not this member.
    """

    index: int
    """Index of the worker."""
    attempt: int
    """Attempt number of the worker; a replacement has a higher one."""
    incarnation: str
    """Random id of one start of the worker's agent."""
    node: str
    """Node of the worker."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers of the current generation in the order of their ranks: the fence.

    A write changes it only after testing the stored generation and state. While it is Claimed, `members` and `parent` are
    still those of the last committed generation.
    """

    generation: int
    """Number of this assignment of ranks to workers. It only grows: the fencing token."""
    state: Literal["Claimed", "Committed"]
    """Claimed: the workers of the previous generation are being stopped. Committed: members know their ranks."""
    parent: Checkpoint | None = None
    """Checkpoint from which the generation starts. Omitted: it starts at step 0."""
    world_size: int = 0
    """Number of ranks."""
    members: tuple[Member, ...] = ()
    """Workers in the order of their ranks, one text each: index and attempt of the worker, its node, and the random id
    of one start of its agent. "3.1 node-c 5f0e9a1b2c3d" at position 3 is worker 3, attempt 1, with group rank 3."""
    reason: str = ""
    """Why the generation was claimed."""
    changed_seconds: float = 0.0
    """When the generation or its state last changed."""

    @property
    def start_step(self) -> int:
        """The step of the parent; 0 without one."""
        return self.parent.step if self.parent is not None else 0


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure or planned change, with the time of each phase until the first new step."""

    kind: str
    """node-lost, worker-silent, trainer-failed, agent-lost, hang, planned, unreadable or another kind of failure."""
    reason: str
    """The event and its cause, in a sentence."""
    worker: int | None
    """Index of the worker that failed; null: no single worker did."""
    node: str | None
    """Node that failed or whose worker failed; null: no single node did."""
    generation: int
    """The generation that this incident ended."""
    detected_seconds: float
    """When the first sign of the failure was observed."""
    claimed_seconds: float | None = None
    """When the next generation was claimed."""
    stopped_seconds: float | None = None
    """When all trainers of the old generation had stopped."""
    fenced_seconds: float | None = None
    """When the memory tier rejected the old generation and its contents had been read."""
    committed_seconds: float | None = None
    """When the members of the next generation were committed."""
    first_step_seconds: float | None = None
    """When the next generation finished its first step."""
    last_step: int = 0
    """Last step that was finished before the incident."""
    restored_step: int | None = None
    """Step of the checkpoint from which training continued; 0: it began again."""
    steps_lost: int | None = None
    """Finished steps that had to be run again."""
    restored_from: str | None = None
    """Tier from which the checkpoint was restored."""
    world_size_before: int = 0
    """Number of ranks before the incident."""
    world_size_after: int | None = None
    """Number of ranks after the incident."""
    rank: int | None = None
    """Rank that caused the failure. Omitted: no single rank did."""
    detail: str = ""
    """Details from the workers in addition to the reason, such as the stack of each rank in a hang; shortened."""
    unexplained: bool = False
    """True if no failed process, pod or node explains this incident."""
    replaced_seconds: float | None = None
    """When as many workers as before the incident were warm again, as members or spares."""


MIN_STEPS = 3
"""Minimum number of steps for a median step time: the first step is slow, and would be half of two."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval that the operator chose for one tier, with the inputs of that choice."""

    steps: int
    """Steps between two saves: the tier's base interval times 2^exponent."""
    exponent: int
    """How many times the tier's base interval is doubled."""
    reason: str
    """Why this interval was chosen, in a sentence."""
    since_seconds: float
    """When this interval was chosen."""
    since_step: int
    """The step at which this interval took effect."""
    measured_seconds: float
    """When the inputs below were measured."""
    target_seconds: float | None = None
    """The interval that the spec asks for, or the one with the lowest expected cost."""
    step_seconds: float | None = None
    """Duration of one step."""
    cost_seconds: float | None = None
    """Training time that one save costs."""
    flush_seconds: float | None = None
    """Time from the end of staging until a save has all its copies (memory), or until an upload is complete
    (persistent)."""
    mtbf_seconds: float | None = None
    """Mean time between the incidents against which this tier protects."""
    memory_loss_probability: float | None = None
    """Probability that an incident destroys every copy in memory; 0 to 1."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart, or `count` restarts close to each other; restart budgets count these."""

    time_seconds: float
    """When the restart happened."""
    count: int = 1
    """Number of restarts that this entry represents."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition, as in the status of other Kubernetes objects."""

    type: str
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: str
    """Cause of the status, in one CamelCase word."""
    message: str
    """Details of the status and its cause, in a sentence."""
    last_transition_seconds: float
    """When the status last changed."""


@dataclass(frozen=True, slots=True)
class ExcludedNode:
    """A node that gets no new worker of this job until a given time."""

    name: str
    """Name of the node."""
    reason: str
    """Why the job avoids the node."""
    until_seconds: float
    """When the exclusion ends."""
    lost_time_ratio: float | None = None
    """Part of the job's time that failures on this node cost; 0 to 1. Omitted: the exclusion does not depend on lost
    time."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is persistently slower than its peers."""

    rank: int
    """The slow rank."""
    worker: int
    """Index of its worker."""
    node: str
    """Node of its worker."""
    slowdown_ratio: float
    """Its working time per step, divided by that of its peers."""
    wait_seconds: float
    """Time in each step during which all other ranks wait for it."""
    since_step: int
    """First step at which the rank was measured to be slow."""
    since_seconds: float
    """When the rank was first reported."""
    action: str = ""
    """Action of the operator, or why it takes none. Omitted: the spec only asks for a report."""
    divergent_line: int | None = None
    """Line of the training loop that only this rank executes; 0 if there are several. Omitted if the rank runs the same
    code, only slower."""
    divergent_callee_line: int = 0
    """Line of the function that `divergentLine` calls; 0: not known."""


@dataclass(frozen=True, slots=True)
class ReplacedStraggler:
    """A straggler whose worker was moved to another node."""

    rank: int
    """The rank that was slow."""
    group_rank: int
    """Position of its worker in the order of ranks: a worker that takes this position does the same work."""
    node: str
    """Node that the worker left, avoided until `untilTime`."""
    time_seconds: float
    """When the worker was moved."""
    until_seconds: float
    """When the node is no longer avoided."""
    wait_ratio: float = 0.0
    """Part of each step in which all other ranks waited for it; 0 to 1."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Attempts to schedule enough workers for a generation since the last commit."""

    since_seconds: float | None = None
    """Since when scheduled workers occupy nodes but are too few to train. Omitted: none do."""
    releases: int = 0
    """How often workers gave their nodes back for that reason since the last committed generation."""
    until_seconds: float | None = None
    """No worker is created before this time. Omitted: workers may be created."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Progress through the training data, where the loader reports it."""

    epochs: float
    """Passes over the data: 1.25 is a quarter of the second pass."""
    samples_per_second: float | None = None
    """Samples per second over the last steps."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The newest return to an earlier checkpoint of the job."""

    generation: int
    """The generation that the rollback ended. Until a newer one is committed, no checkpoint after `toStep` is restored."""
    to_step: int
    """Last step that may be restored; 0: training begins again."""
    reached_step: int
    """Last step that the ended generation had finished."""
    anomaly_step: int
    """First step with a loss anomaly; 0: a user asked for the rollback."""
    reason: str
    """Why the job was rolled back, in a sentence."""
    consecutive: int = 1
    """Number of rollbacks in a row without a newer known-good checkpoint; 0: a user asked for the rollback."""
    target_known_good: bool = True
    """True, or omitted: the target checkpoint was known good, or a user chose it."""
    keep_data: bool = False
    """True if the batches of the steps that were taken back are trained on again."""
    parent: Checkpoint | None = None
    """Checkpoint that the next generation restored. Omitted: step 0, or not decided yet."""
    skipped_steps: int = 0
    """Number of steps after `parent` whose batches the loaders skip, in every generation that restores it."""


@dataclass(frozen=True, slots=True)
class SkippedData:
    """Batches that the loaders of one generation skipped after its parent."""

    generation: int
    """The generation whose loaders skipped batches."""
    steps: int
    """Number of steps whose batches were skipped."""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of a job's life by category; together with the current category they add up to its age."""

    category: str = ""
    """Category since `sinceTime`, not yet added to the sums. Omitted: the job has not started, or is over."""
    since_seconds: float = 0.0
    """When the current category began."""
    training_seconds: float = 0.0
    """Time in steps that did not have to be run again."""
    recomputed_seconds: float = 0.0
    """Steps that were lost in a failure and run again."""
    detecting_seconds: float = 0.0
    """From the last step until a failure was declared."""
    recovering_seconds: float = 0.0
    """From a declared failure until the first new step, without waiting for workers."""
    resizing_seconds: float = 0.0
    """Planned changes: evacuated nodes, growth, and stopping for a suspension."""
    starting_seconds: float = 0.0
    """From the start of a generation that follows no failure until its first step."""
    waiting_seconds: float = 0.0
    """Waiting for enough workers."""
    suspended_seconds: float = 0.0
    """Suspended, with all workers gone."""
    finishing_seconds: float = 0.0
    """From the end of all trainers until the last checkpoint is in its tiers."""
    unknown_seconds: float = 0.0
    """Before an operator recorded categories."""


@dataclass(frozen=True, slots=True)
class TierContents:
    """Saves of a job in one tier, as last listed."""

    bytes: int
    """Bytes of tensors, digests and values; in memory every copy counts."""
    checkpoints: int
    """Number of checkpoints of which at least one save exists, complete or not."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """Saves of a job in each tier."""

    memory: TierContents | None = None
    """Contents of the memory servers that answer. Omitted: nothing, or not known."""
    persistent: TierContents | None = None
    """Contents of the persistent tier. Omitted: nothing, or not known."""
    copies: int | None = None
    """Copies in memory of the newest complete checkpoint: the lowest number over its ranks."""


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """How long something took over the newest saves of all workers: at most nine of each worker."""

    p50_seconds: float
    """Median."""
    p99_seconds: float
    """99th percentile; of fewer than a hundred measurements it is the longest."""


@dataclass(frozen=True, slots=True)
class CheckpointLatency:
    """Checkpoint latency: how long the newest saves took until each stage of safety."""

    stall: LatencyQuantiles | None = None
    """Time for which a save blocked training. Omitted: not measured yet."""
    replicated: LatencyQuantiles | None = None
    """Time from the end of staging until a worker's save had all its copies in memory. Omitted: not measured yet."""
    persistent: LatencyQuantiles | None = None
    """Time of uploading a checkpoint to the persistent tier, of its slowest worker. Omitted: not measured yet."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A decided failure of the job, which is announced after its newest checkpoint was uploaded."""

    reason: str
    """Why the job fails; its final message repeats this."""
    since_seconds: float
    """When the operator decided that the job fails."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """All durable state of a job, which the operator needs again after a restart."""

    phase: Phase = "Pending"
    """Summary of the job's state in one word, derived from the other fields."""
    observed_generation: int = 0
    """The `metadata.generation` of the spec on which the last plan is based."""
    membership: Membership | None = None
    """The current generation and its workers. It is the fence: a write changes it only after testing its generation and
    state."""
    lineage: Lineage = ()
    """All committed generations with the checkpoint that each branched from. Only checkpoints on this lineage can be
    restored."""
    initial_checkpoint: Checkpoint | None = None
    """Checkpoint of the source job from which this job began (`checkpoint.restoreFrom`), chosen once. Its generation is
    stored as a negative number."""
    source_job: SourceJob | None = None
    """The job that saved `initialCheckpoint`."""
    last_uploaded: Checkpoint | None = None
    """Newest checkpoint of the lineage that is complete in the persistent tier."""
    unreadable_checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of which every copy failed verification. They are never restored."""
    next_attempt: int = 1
    """Attempt number of the next worker that the job creates, whatever its index. It only grows."""
    failed_starts: int = 0
    """Consecutive failed worker starts since the last committed generation; the delay doubles after each.
    `failedStartsCounted` has those that count towards `backoffLimit`."""
    scheduling: Scheduling = Scheduling()
    """Present while too few workers are scheduled to train, or after their nodes were released for that reason."""
    last_complete: Checkpoint | None = None
    """Newest complete checkpoint."""
    memory_interval: SaveInterval | None = None
    """Save interval of the memory tier. Omitted: the spec fixes it, or none was chosen yet."""
    persistent_interval: SaveInterval | None = None
    """Save interval of the persistent tier. Omitted: the spec fixes it, or none was chosen yet."""
    had_checkpoint: bool = False
    """True once any checkpoint was fully replicated or complete in the persistent tier: from then on there is progress
    to lose."""
    assigned_servers: tuple[MemoryServerEndpoint, ...] = ()
    """Memory servers that the operator assigned to agents since the last fully replicated checkpoint, one text each:
    node, first 12 digits of the server's run id (a restarted server has another) and address. "node-c 9d2c4e6f8a0b
    10.0.0.7:6379"; where they apply, followed by "domain=" with the failure domain, "tls" for a server that accepts
    only TLS, and "server=" with its number on the node."""
    lost_servers: tuple[str, ...] = ()
    """Run ids of memory servers that did not return in time and were declared lost."""
    restarts: int = 0
    """Number of changes of generation after a failure."""
    restarts_counted: int = 0
    """Number of restarts that count towards `runPolicy.backoffLimit`."""
    recent_restarts: tuple[Restart, ...] = ()
    """Restarts that a budget may still count, oldest first."""
    no_progress_restarts: int = 0
    """Consecutive restarts that brought no new step and that no lost node or worker explains."""
    reached_step: int = 0
    """Highest step that any ended generation had finished: only steps after it are progress."""
    incidents: tuple[Incident, ...] = ()
    """The last failures and planned changes with the time of each phase, oldest first. At most ten."""
    conditions: tuple[Condition, ...] = ()
    """Conditions: Suspended, PodsScheduled, Running, Recovering, Resizing, CheckpointProtected, SpecRejected, Complete,
    Failed and others."""
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes that get no new worker for a while because this job failed there."""
    message: str = ""
    """Current activity of the job, or why it ended, in a sentence."""
    start_seconds: float | None = None
    """When the job started."""
    completion_seconds: float | None = None
    """When the job ended."""
    step: int = 0
    """Last finished step of the committed generation."""
    progress_seconds: float | None = None
    """When `step` was last written."""
    serial: int = 0
    """Number of writes of this status. Each write tests it: an operator that decided from an older status decides
    again."""
    memory_cleared: bool = False
    """True after the end of the job, once its workers are gone and no save of the job is left in memory."""
    extra: dict[str, str] = field(default_factory=dict, compare=False, hash=False)
    """Free text for users; no decision depends on it."""
    data: DataProgress | None = None
    """Progress through the training data at `step`, where the loader reports it."""
    loss: float | None = None
    """Mean loss over the workers at `step`. Omitted: no worker reported one, or it was not finite."""
    time_spent: TimeSpent = TimeSpent()
    """Seconds by category since `startTime`."""
    unhealthy_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes whose agents found them unhealthy, avoided for a while."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks for which all others wait, the slowest first."""
    replaced_stragglers: tuple[ReplacedStraggler, ...] = ()
    """Stragglers whose workers were moved to another node, newest last. A position that was slow on two nodes is not
    moved again."""
    last_good: Checkpoint | None = None
    """Newest checkpoint that is known good, because enough later steps had no loss anomaly (`healthPolicy.numerics`)."""
    rollback: Rollback | None = None
    """The newest return to an earlier checkpoint."""
    rollback_count: int = 0
    """Number of rollbacks."""
    skipped_data: tuple[SkippedData, ...] = ()
    """Generations whose loaders skipped batches, oldest first."""
    checkpoints: StoredCheckpoints = StoredCheckpoints()
    """Contents of each tier, as last listed before this status update."""
    checkpoint_latency: CheckpointLatency = CheckpointLatency()
    """How long saves took until each stage of safety, as measured before this status update."""
    failed_starts_counted: int = 0
    """Failed worker starts that count towards `runPolicy.backoffLimit`: those in which a container exited by itself.
    Failures of the environment (an image, a secret, a quota) do not count, nor do failures of init containers once
    the job has trained."""
    ending: Ending | None = None
    """Present while the operator uploads the newest complete checkpoint of a job that is about to fail, for ten minutes
    at most."""


@dataclass(frozen=True, slots=True)
class StatusPrecondition:
    """Precondition of a status write: serial number, generation and state of the stored status.

    Generation and state are tested in addition to the serial number, so that a status edited by hand cannot move the fence.
    """

    serial: int
    """`JobStatus.serial` of the status to be replaced."""
    generation: int | None
    """Generation of its membership; None: it has none."""
    state: str | None
    """State of its membership; None: it has none."""

    def __str__(self) -> str:
        membership = "no generation" if self.generation is None else f"generation {self.generation} {self.state}"
        return f"serial {self.serial} with {membership}"


def precondition_of(status: JobStatus) -> StatusPrecondition:
    """Returns the precondition for replacing this status."""
    membership = status.membership
    if membership is None:
        return StatusPrecondition(status.serial, None, None)
    return StatusPrecondition(status.serial, membership.generation, membership.state)


def condition_of(status: JobStatus, kind: str) -> Condition | None:
    """Returns the condition of that type, or None."""
    return next((condition for condition in status.conditions if condition.type == kind), None)


def straggler_nodes(status: JobStatus, now: float) -> tuple[ExcludedNode, ...]:
    """Returns the nodes that are still avoided because a rank was slow there."""
    active = [straggler for straggler in status.replaced_stragglers if straggler.until_seconds > now]
    return tuple(
        ExcludedNode(straggler.node, f"rank {straggler.rank} was slow there", straggler.until_seconds)
        for straggler in active
    )


# ---- times in the status ---------------------------------------------------------------------------------------------
# Writes and reads times as RFC 3339. Plans calculate in Unix seconds; Kubernetes and a status have RFC 3339 times. There is
# one reader for all of them: three separate ones accepted different texts.

_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
"""The form that Kubernetes writes. `datetime` alone would also accept dates, weeks and times without a zone."""

_MAX_CHARACTERS = 64


def to_rfc3339(seconds: float) -> str:
    """Returns Unix seconds as an RFC 3339 time in UTC, with microseconds."""
    return datetime.fromtimestamp(round(seconds, 6), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(text: object) -> float | None:
    """Returns the Unix seconds of an RFC 3339 time; None for anything else."""
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS or _RFC3339.fullmatch(text) is None:
        return None
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:  # a date that does not exist, such as February 31
        return None
