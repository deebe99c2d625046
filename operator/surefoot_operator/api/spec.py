"""Defines the specification of a TrainingJob; docs/api.md describes each field.

Pure values, built and validated by `api.parse`. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GROUP = "surefoot.dev"
VERSION = "v1alpha1"
KIND = "TrainingJob"
MANAGER = "surefoot.dev/operator"
TOTAL_STEPS = f"{GROUP}/total-steps"
"""An annotation: how many steps the program makes. For people who watch; nothing is decided from it."""
ACCEPT_LOSS = f"{GROUP}/accept-loss"
"""An annotation: a person accepts what was lost to the epoch that it names."""
ROLLBACK = f"{GROUP}/rollback"
"""An annotation: a person wants the epoch that it names to go back to a step: `EPOCH/STEP`, or `EPOCH/STEP/keep-data`."""
FINALIZER = f"{GROUP}/persistent-data"
"""On a job whose persistent data shall go with it; nothing else ever holds a job back."""


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """The numbers of workers that a world may have. Absent: exactly `replicas`."""

    min_replicas: int
    max_replicas: int
    replica_increment_step: int = 1
    """Worlds are min, min + step, …, max; exclusive with `replica_discrete_values`."""
    replica_discrete_values: tuple[int, ...] = ()
    faulty_scale_down_timeout_seconds: float | None = None
    """Wait this long for a replacement before shrinking; None: as long as the job's own record makes it worth."""
    scale_up_snooze_seconds: float | None = None
    """Do not grow earlier than this after a change of the world; None: once the job's own record says that it pays."""


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Limits of a job's run, and its cleanup afterwards."""

    backoff_limit: int = 6
    """Restarts caused by the application before the job fails. Node faults do not count."""
    active_deadline_seconds: float | None = None
    startup_deadline_seconds: float = 600.0
    """From an epoch's commit to its first step."""
    scheduling_deadline_seconds: float = 600.0
    """How long workers may hold nodes while they are too few for any world."""
    ttl_seconds_after_finished: float | None = None
    """The job is deleted so long after its end."""
    clean_pod_policy: Literal["Running", "All"] = "Running"
    """Which pods are deleted at the end: those that still run, or all."""


Gang = Literal["Volcano", "Coscheduling"]
"""A scheduler that places a minimum of a group's pods together, or none of them."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Whose pod group the workers are in."""

    gang: Gang
    queue: str | None = None
    """Of Volcano; None: the namespace's, or its queue `default`."""
    priority_class: str | None = None
    """Of Volcano's group, among the groups of a queue."""
    schedule_timeout_seconds: int | None = None
    """How long coscheduling holds nodes for a group that is not complete; None: as the plugin is configured."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """Action for a trainer's exit codes; the first rule that matches wins."""

    name: str
    action: Literal["FailJob", "Restart", "RestartAndIgnoreMaxRestarts"]
    exit_codes: tuple[int, ...] = ()
    operator: Literal["In", "NotIn"] = "In"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limits of restarts, and rules by exit code."""

    max_restarts: int | None = None
    """Restarts caused by the application within `eval_period_seconds` before the job fails; None: no limit."""
    eval_period_seconds: float = 3600.0
    max_no_progress_restarts: int = 3
    """Consecutive application restarts without one new step before the job fails."""
    max_num_repeat_offenders_to_avoid: int | None = None
    """Nodes that are left, and avoided for `eval_period_seconds`, because this job failed there twice or more within it; None: one
    at a time, where leaving it costs less than its failures."""
    rules: tuple[FailureRule, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """Taints, conditions and labels that announce a node's end.

    Workers of such a node move to other nodes at a saved step.
    """

    taints: tuple[str, ...] = ()
    """Keys."""
    conditions: tuple[str, ...] = ()
    """`Type=Status`."""
    labels: tuple[str, ...] = ()
    """`key=value`."""


NumericsAction = Literal["Warn", "Stop", "Rollback"]


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """Actions where a loss is no number, or spikes."""

    on_not_finite: NumericsAction = "Rollback"
    on_spike: NumericsAction = "Warn"
    spike_steps: int = 3
    """Steps in a row whose loss or gradient norm is out of band, on half of the workers: a spike."""
    good_after_steps: int = 10
    """Steps without either after which a checkpoint counts as good."""
    max_rollbacks: int = 3
    """In a row, without a new good checkpoint beyond the step where the first began: then the job fails."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Timeouts after which an agent or a training step counts as failed."""

    heartbeat_seconds: float = 0.5
    heartbeat_timeout_seconds: float = 3.0
    step_timeout_seconds: float = 600.0
    """No step for so long, after an epoch's first, is a hang."""
    node_signals: NodeSignals | None = None
    """None: those of `known_node_signals`."""
    node_findings: Literal["Leave", "Show"] = "Leave"
    """What is done about a node whose hardware its agent finds at fault."""
    pre_join_check: Literal["Off", "Warn", "Enforce"] = "Off"
    """Whether a node is tried before a worker there gets a rank, and what follows where it fails."""
    on_straggler: Literal["Warn", "Replace"] = "Warn"
    """What is done about a rank that is persistently slower than its peers."""
    numerics: NumericsPolicy | None = None
    """None: what is odd is said, and nothing done."""


DEFAULT_MEMORY_STEPS = 10
DEFAULT_PERSISTENT_STEPS = 100
"""Steps between saves to a tier of which a job says nothing."""


@dataclass(frozen=True, slots=True)
class MemoryTierSpec:
    """The tier in memory: interval, copies, retention.

    One of the three intervals is given; without any, saves are `DEFAULT_MEMORY_STEPS` apart.
    """

    interval_steps: int | None = None
    interval_seconds: float | None = None
    interval: Literal["auto"] | None = None
    replicas: int = 2
    keep: int = 2
    size_limit_bytes: int | None = None
    """Per holder; enforced as Redis maxmemory. None: the fabric's default."""
    topology_key: str = "kubernetes.io/hostname"
    """The label over whose values copies are spread where that is possible; this one: over zones or racks, as they are known."""
    bandwidth_bytes: int | None = None
    """A second, of one worker's copies to other nodes while it trains. None: as fast as it goes."""

    @property
    def adaptive(self) -> bool:
        """Whether the operator chooses the interval, and tells trainers a level."""
        return self.interval is not None or self.interval_seconds is not None

    @property
    def base_steps(self) -> int:
        """Steps between saves at level 0; each level doubles them."""
        return 1 if self.adaptive else self.interval_steps or DEFAULT_MEMORY_STEPS


@dataclass(frozen=True, slots=True)
class PersistentTierSpec:
    """The persistent tier, a folder or S3: interval, retention, access."""

    uri: str
    """`file:///…` or `s3://bucket/prefix`."""
    interval_steps: int | None = None
    """Rounded up to a multiple of the memory tier's base. One of these three, else every `DEFAULT_PERSISTENT_STEPS`."""
    interval_seconds: float | None = None
    interval: Literal["auto"] | None = None
    keep: int = 3
    keep_every_steps: int | None = None
    """Beside the newest: the first one at or after each multiple, for good."""
    keep_seconds: float | None = None
    """Beside the newest: those that were saved no longer ago."""
    endpoint: str | None = None
    region: str | None = None
    secret_ref: str | None = None
    """Name of a secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; None: the pod's own identity."""
    ca_bundle: str | None = None
    sse: str | None = None
    bandwidth_bytes: int | None = None
    """A second, of one worker's uploads while it trains. None: as fast as it goes."""
    on_job_deletion: Literal["Keep", "Delete"] = "Keep"
    """What becomes of what lies there when the job is deleted."""

    @property
    def adaptive(self) -> bool:
        """Whether the operator chooses which saves in memory are promoted."""
        return self.interval is not None or self.interval_seconds is not None

    @property
    def fixed_steps(self) -> int | None:
        """Steps between saves at every level; None: the operator chooses."""
        return None if self.adaptive else self.interval_steps or DEFAULT_PERSISTENT_STEPS


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """An older job's checkpoint to start from, read-only, chosen once."""

    uid: str | None = None
    """Of a job whose folder lies in this job's own persistent tier."""
    uri: str | None = None
    """Or the folder itself, wherever it lies: its last part is that job's uid."""
    step: int | Literal["latest"] = "latest"


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Both tiers, and the policy for lost checkpoints."""

    memory: MemoryTierSpec = field(default_factory=MemoryTierSpec)
    persistent: PersistentTierSpec | None = None
    drain_grace_seconds: float = 1.0
    holder_return_seconds: float = 10.0
    on_total_loss: Literal["Wait", "Fail", "Restart"] = "Wait"
    """When every copy of every checkpoint is gone: wait for a person or for one that comes back, fail, or begin anew."""
    restore_from: RestoreFrom | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """The pod template, and the program of its container `trainer`."""

    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True, slots=True)
class TrainingJobSpec:
    """What a user asks for; `spec` of a TrainingJob."""

    template: Template
    replicas: int = 1
    nproc_per_node: int = 1
    spares: int = 0
    """Workers beside `replicas` that are warm and hold no rank, to take a lost one's at once."""
    suspend: bool = False
    managed_by: str = MANAGER
    """Another name: that controller looks after the job, and this one leaves it alone."""
    elastic_policy: ElasticPolicy | None = None
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    scheduling_policy: SchedulingPolicy | None = None
    """None: each worker is scheduled by itself."""
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    health_policy: HealthPolicy = field(default_factory=HealthPolicy)
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One job as stored in the API; its status is `Observed.status`."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: TrainingJobSpec
    deleted: bool = False
    held: bool = False
    """Its deletion waits for this operator, which has something to delete first."""
    accepted_loss: str = ""
    """What its annotation `ACCEPT_LOSS` says; empty: nothing."""
    rollback: str = ""
    """What its annotation `ROLLBACK` says; empty: nothing."""


# ---- gang schedulers -------------------------------------------------------------------------------------------------
# Describes the gang schedulers that place a job's workers. Pure; read by `fields` and the Kubernetes fabric. Each reads
# a PodGroup of its own API, and finds a pod's group by a mark of its own: a pod with the other one's mark is a pod
# without a group.


@dataclass(frozen=True, slots=True)
class GangScheduler:
    """One gang scheduler's API, and its mark on pods."""

    api_version: str
    """Of its PodGroup."""
    scheduler_name: str
    """Under which it is installed by its own chart."""
    marked_in: Literal["labels", "annotations"]
    mark: str
    """Key of a pod's label or annotation; the value is the group's name."""


GANG_SCHEDULERS: Mapping[Gang, GangScheduler] = {
    "Volcano": GangScheduler("scheduling.volcano.sh/v1beta1", "volcano", "annotations", "scheduling.k8s.io/group-name"),
    "Coscheduling": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", "labels", "scheduling.x-k8s.io/pod-group"
    ),
}


def marks_of(template: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lists (path, key) of marks that a pod template bears itself."""
    metadata = template.get("metadata") or {}
    return [
        (f"metadata.{one.marked_in}", one.mark)
        for one in GANG_SCHEDULERS.values()
        if one.mark in (metadata.get(one.marked_in) or {})
    ]
