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
    """One worker of a committed world; its place is its group rank.

    An agent of the same worker with another incarnation is not the member.
    """

    index: int
    attempt: int
    incarnation: str
    node: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The current epoch; the fencing token of checkpoints.

    Changed only by a patch that tests the old (epoch, state). `size` counts ranks. While Claimed, members and parent
    are those of the previous committed epoch, which the claim is based on; `reason` says why the world changes.
    """

    generation: int
    state: Literal["Claimed", "Committed"]
    parent: Checkpoint | None = None
    world_size: int = 0
    members: tuple[Member, ...] = ()
    reason: str = ""
    changed_seconds: float = 0.0

    @property
    def start_step(self) -> int:
        """The step of its parent; 0: it began at the beginning."""
        return self.parent.step if self.parent is not None else 0


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure, from the first sign to the first new step."""

    kind: str
    """node-lost, worker-silent, trainer-failed, agent-lost, hang, planned, unreadable…"""
    reason: str
    worker: int | None
    node: str | None
    generation: int
    """The epoch that it ended."""
    detected_seconds: float
    claimed_seconds: float | None = None
    stopped_seconds: float | None = None
    fenced_seconds: float | None = None
    committed_seconds: float | None = None
    first_step_seconds: float | None = None
    last_step: int = 0
    """Last step known to be finished when it happened."""
    restored_step: int | None = None
    steps_lost: int | None = None
    restored_from: str | None = None
    world_size_before: int = 0
    world_size_after: int | None = None
    rank: int | None = None
    """Who is to blame, where anybody is."""
    detail: str = ""
    """What workers had to say beside the reason, as where each rank stood in a hang; shortened."""
    unexplained: bool = False
    """Nothing was seen to die that could have caused it."""
    replaced_seconds: float | None = None
    """When as many workers as before were warm again, in the world or beside it."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The save interval chosen for a tier, with its inputs."""

    steps: int
    """Between saves: the tier's base, doubled `level` times."""
    exponent: int
    reason: str
    since_seconds: float
    """Since when these steps are the choice. Unix seconds."""
    since_step: int
    measured_seconds: float
    """When what follows was measured. Unix seconds."""
    target_seconds: float | None = None
    """What was asked for, or what costs least."""
    step_seconds: float | None = None
    cost_seconds: float | None = None
    """Training time that one save costs."""
    flush_seconds: float | None = None
    """From staged to all its copies, or one whole upload."""
    mtbf_seconds: float | None = None
    """Mean time between the incidents that this tier is for."""
    memory_loss_probability: float | None = None
    """That an incident takes every copy in memory."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart, or `count` of them merged; restart budgets count these."""

    time_seconds: float
    caused_by_program: bool
    counted: bool
    made_progress: bool
    count: int = 1


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, as in other Kubernetes objects' status."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    last_transition_seconds: float


@dataclass(frozen=True, slots=True)
class ExcludedNode:
    """A node that this job avoids for a time."""

    name: str
    reason: str
    until_seconds: float
    lost_time_ratio: float | None = None
    """What part of the job's time its failures there cost; None: it is left whatever that costs."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is persistently slower than its peers."""

    rank: int
    worker: int
    node: str
    slowdown_ratio: float
    """How many times as long as its peers it works."""
    wait_seconds: float
    """What all others wait for it in each step."""
    since_step: int
    """The step from which on it was seen; it may have been so before."""
    since_seconds: float
    """When it was named."""
    action: str = ""
    """What is done about it, or why nothing is; empty: nobody asked for more than its name."""
    divergent_line: int | None = None
    """Line of the training loop in which it does what its peers do not; 0: in several. None: it takes longer for the same."""
    divergent_callee_line: int = 0
    """Line of the function that is called there; 0: none."""


@dataclass(frozen=True, slots=True)
class ReplacedStraggler:
    """A straggler whose worker was moved to another node."""

    rank: int
    group_rank: int
    """Its worker's, in the order of ranks: whoever follows it there has the same work."""
    node: str
    """The one that was left, and is avoided until then."""
    time_seconds: float
    until_seconds: float
    wait_ratio: float = 0.0
    """The part of each step in which all others waited for it."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Attempts to schedule enough workers for a world since the last commit."""

    since_seconds: float | None = None
    """Since when they hold nodes without being enough; None: they do not."""
    releases: int = 0
    """How often they gave their nodes back."""
    until_seconds: float | None = None
    """None are asked for before; None: they may be."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Progress through the training data, where the loader reports it."""

    epochs: float
    """Over the data, the share of the present one included: 1.25 is a quarter of the second."""
    samples_per_second: float | None = None
    """At the pace of the last steps."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The newest return to an earlier checkpoint of the job."""

    generation: int
    """The epoch that it ended. While no newer one is committed, nothing beyond `to_step` may be restored."""
    to_step: int
    """The last step that may be restored; 0: training begins again."""
    reached_step: int
    """The last step that the epoch had finished."""
    anomaly_step: int
    """The first step whose loss was odd; 0: a person asked for it."""
    reason: str
    consecutive: int = 1
    """How many in a row, without a good checkpoint beyond where the one before had come; 0: a person asked for it."""
    target_known_good: bool = True
    """`to_step` is that of a checkpoint that later steps had proven to be good, or what a person asked for."""
    keep_data: bool = False
    """The batches of the steps that are taken back are trained on again."""
    parent: Checkpoint | None = None
    """What the next epoch restored; None: step 0, or not decided yet."""
    skipped_steps: int = 0
    """Steps behind it whose batches are left out, in every epoch that restores it."""


@dataclass(frozen=True, slots=True)
class SkippedData:
    """Steps whose batches an epoch's loaders left out behind its parent."""

    generation: int
    steps: int


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Where a job's seconds went; they add up to its age."""

    category: str = ""
    """What is under way, not added yet; empty: the job has not started, or is over."""
    since_seconds: float = 0.0
    """Since when. Unix seconds."""
    training_seconds: float = 0.0
    """Steps that count."""
    recomputed_seconds: float = 0.0
    """Steps that a failure took back: they were run again."""
    detecting_seconds: float = 0.0
    """From the last step to the decision that something failed."""
    recovering_seconds: float = 0.0
    """From there to the first new step, without waiting for workers."""
    resizing_seconds: float = 0.0
    """Planned changes: nodes left, growth, what a suspension stops."""
    starting_seconds: float = 0.0
    """From a world's begin without a failure to its first step."""
    waiting_seconds: float = 0.0
    """For enough workers."""
    suspended_seconds: float = 0.0
    finishing_seconds: float = 0.0
    """From the end of all trainers until the last checkpoint is where it belongs."""
    unknown_seconds: float = 0.0
    """Before an operator counted."""


@dataclass(frozen=True, slots=True)
class TierContents:
    """A job's saves in one tier, as they were read last."""

    bytes: int
    """Tensors, digests and values; in memory every copy counts."""
    checkpoints: int
    """Of which something lies there, complete or not."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """What each tier has of a job; None: nothing, or not known."""

    memory: TierContents | None = None
    """On the holders that answer."""
    persistent: TierContents | None = None
    copies: int | None = None
    """In memory, of the newest complete one: the least over its ranks."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a job is about to fail: its newest checkpoint goes to the persistent tier first, since then."""

    reason: str
    since_seconds: float


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Everything the operator must remember about a job."""

    phase: Phase = "Pending"
    observed_generation: int = 0
    membership: Membership | None = None
    lineage: Lineage = ()
    initial_checkpoint: Checkpoint | None = None
    """The older job's checkpoint that this job began from (`checkpoint.restoreFrom`): decided once, with a commit."""
    source_job: SourceJob | None = None
    """Whose `origin` is."""
    last_uploaded: Checkpoint | None = None
    """Newest lineage checkpoint complete in the persistent tier; only grows along the lineage."""
    unreadable_checkpoints: tuple[Checkpoint, ...] = ()
    next_attempt: int = 1
    failed_starts: int = 0
    """Rounds of workers that could not be started, or ended by themselves, since the last commit: each is waited after for longer."""
    scheduling: Scheduling = Scheduling()
    last_complete: Checkpoint | None = None
    """A hint for people and for 'was anything ever recorded'."""
    memory_interval: SaveInterval | None = None
    """None: the spec says it, or nothing was chosen yet."""
    persistent_interval: SaveInterval | None = None
    had_checkpoint: bool = False
    """Some checkpoint was Full or complete in the persistent tier: from now on there is something to lose."""
    assigned_servers: tuple[MemoryServerEndpoint, ...] = ()
    """Holders named to agents since the last Full checkpoint: while one is silent something may be unknown."""
    lost_servers: tuple[str, ...] = ()
    """Instances of holders that were waited for in vain."""
    restarts: int = 0
    restarts_counted: int = 0
    recent_restarts: tuple[Restart, ...] = ()
    no_progress_restarts: int = 0
    """In a row, without one new step, and not because something was seen to die."""
    reached_step: int = 0
    """Highest step that any epoch had finished when it was lost: only what lies beyond it is new."""
    incidents: tuple[Incident, ...] = ()
    """At most ten, newest last."""
    conditions: tuple[Condition, ...] = ()
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    message: str = ""
    start_seconds: float | None = None
    completion_seconds: float | None = None
    step: int = 0
    progress_seconds: float | None = None
    serial: int = 0
    """How often a status of this job was written. Each write tests it: who decided from an older one decides anew."""
    memory_cleared: bool = False
    """After the end: workers have left, and nothing of the job is in memory any more."""
    extra: dict[str, str] = field(default_factory=dict, compare=False, hash=False)
    data: DataProgress | None = None
    """As of `step`."""
    loss: float | None = None
    """As of `step`, the mean over workers; None: none told one, or it was no number."""
    time_spent: TimeSpent = TimeSpent()
    unhealthy_nodes: tuple[ExcludedNode, ...] = ()
    """Nodes that agents found unfit, avoided until then."""
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that all others wait for, the worst first as they were named."""
    replaced_stragglers: tuple[ReplacedStraggler, ...] = ()
    """At most eight, newest last: a place that was slow on two nodes is not moved again."""
    last_good: Checkpoint | None = None
    """The newest checkpoint that enough later steps have proven; with `healthPolicy.numerics` alone."""
    rollback: Rollback | None = None
    rollback_count: int = 0
    """How many there were in all."""
    skipped_data: tuple[SkippedData, ...] = ()
    """Of the epochs whose loaders left something out, oldest first."""
    checkpoints: StoredCheckpoints = StoredCheckpoints()
    """As they were when this status was written: what moved since is told with the next one."""
    failed_starts_counted: int = 0
    """Those of `failed_starts` that count towards `backoffLimit`: what the environment did counts for nothing."""
    ending: Ending | None = None
    """Decided once and never taken back; the world is claimed then, so that nobody trains on."""


@dataclass(frozen=True, slots=True)
class StatusPrecondition:
    """Precondition of a status write: serial and world must be unchanged.

    The world is tested beside the serial, so that a status edited by hand cannot move the fence.
    """

    serial: int
    generation: int | None
    state: str | None

    def __str__(self) -> str:
        world = "no world" if self.generation is None else f"epoch {self.generation} {self.state}"
        return f"serial {self.serial} with {world}"


def stamp(status: JobStatus) -> StatusPrecondition:
    """The precondition for replacing this status."""
    world = status.membership
    return StatusPrecondition(status.serial, *((world.generation, world.state) if world is not None else (None, None)))


def condition_of(status: JobStatus, kind: str) -> Condition | None:
    """Returns the condition of that type, if there is one."""
    return next((one for one in status.conditions if one.type == kind), None)


def slow_nodes(status: JobStatus, now: float) -> tuple[ExcludedNode, ...]:
    """Nodes that are avoided for a rank that was slow there."""
    lasting = [one for one in status.replaced_stragglers if one.until_seconds > now]
    return tuple(ExcludedNode(one.node, f"rank {one.rank} was slow there", one.until_seconds) for one in lasting)


# ---- times in the status ---------------------------------------------------------------------------------------------
# Writes and reads moments as RFC 3339. Plans count in Unix seconds; Kubernetes and a status write times. One reader for
# all of them: three of their own differed in what they took for a time.

_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
"""`datetime` reads far more: dates alone, weeks, times that name no zone."""

_MAX_CHARACTERS = 64


def to_rfc3339(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, with microseconds."""
    return datetime.fromtimestamp(round(seconds, 6), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment_seconds(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None for anything else."""
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS or _RFC3339.fullmatch(text) is None:
        return None
    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:  # the 31st of February
        return None
