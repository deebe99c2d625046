"""Declares the specification of a TrainingJob: each field once, with type, unit, range, default and text.

Pure values, built by `api.parse`. The docstring of a field is its row in docs/api.md and its description in the CRD;
`make manifests` generates both from this module. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from surefoot_operator.api.fields import Field, Rule, quantity_of

GROUP = "surefoot.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
MANAGER = "surefoot.dev/operator"
TOTAL_STEPS = f"{GROUP}/total-steps"
"""Annotation: number of steps that the program makes in total. It is only displayed; no decision depends on it."""
ACCEPT_LOSS = f"{GROUP}/accept-loss"
"""Annotation: a user accepts the loss for which the generation named here waits, so that the job continues without it."""
ROLLBACK = f"{GROUP}/rollback"
"""Annotation: a user asks that a generation is rolled back to a step: `GENERATION/STEP`, or `GENERATION/STEP/keep-data`."""
FINALIZER = f"{GROUP}/persistent-data"
"""Finalizer of a job whose persistent data is deleted with it. No other job has one, so that none can hang in deletion."""

# ---- kinds of fields -------------------------------------------------------------------------------------------------

Workers = Annotated[int, Field(unit="workers", min_value=1, max_value=100_000)]
Restarts = Annotated[int, Field(unit="restarts")]
Steps = Annotated[int, Field(unit="steps", min_value=1)]
Seconds = Annotated[float, Field(unit="seconds")]
PositiveSeconds = Annotated[float, Field(unit="seconds", min_value=0.001)]
"""A timeout or a delay: at least a millisecond, because no loop of the operator is faster."""
Bytes = Annotated[int, Field(unit="bytes", quantity=True)]
Bandwidth = Annotated[int, Field(unit="bytes a second", min_value=1 << 20, quantity=True, name="bandwidth")]
"""At least 1 MiB a second: with less, each chunk would take seconds and saves would never complete."""
_OBJECT_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_FOLDER_OR_BUCKET = "^(file:///.+|s3://[^/].*)$"
_CREDENTIALS = "^([A-Za-z0-9+.-]+://)?[^/]*@"


def _has_credentials(uri: str | None) -> bool:
    return uri is not None and re.match(_CREDENTIALS, uri) is not None


# ---- the job's policies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """The numbers of workers with which the job may train. Without it: exactly `replicas`."""

    min_replicas: Workers
    """Minimum number of workers. With fewer, the job waits."""
    max_replicas: Workers
    """Maximum number of workers."""
    replica_increment_step: Workers = 1
    """Allowed numbers of workers are `minReplicas`, `minReplicas` + step, and so on up to `maxReplicas`."""
    replica_discrete_values: Annotated[
        tuple[int, ...], Field(unit="workers", min_value=1, max_value=100_000, max_items=64, unique="value")
    ] = ()
    """Allowed numbers of workers, each between `minReplicas` and `maxReplicas`. Cannot be combined with
    `replicaIncrementStep`."""
    faulty_scale_down_timeout_seconds: Seconds | None = None
    """Exact time to wait for a replacement of a lost worker before training continues with fewer workers. Without it,
    the job waits [as long as waiting is cheaper](nodes.md#waiting-shrinking-and-growing)."""
    scale_up_snooze_seconds: Seconds | None = None
    """Minimum time between a change of the number of workers and the next growth, which then follows at once. Without it,
    the job grows [when that pays](nodes.md#waiting-shrinking-and-growing)."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "gracefulShutdownTimeoutSeconds": "checkpoint.flushGraceSeconds bounds the wait for saves"
    }
    RULES: ClassVar[tuple[Rule[ElasticPolicy], ...]] = (
        Rule(
            ("minReplicas",),
            "minReplicas must not be above maxReplicas",
            lambda policy: policy.min_replicas <= policy.max_replicas,
            "self.minReplicas <= self.maxReplicas",
        ),
        Rule(
            ("replicaIncrementStep",),
            "replicaIncrementStep and replicaDiscreteValues exclude each other: leave one of them out",
            lambda policy: not policy.replica_discrete_values or policy.replica_increment_step == 1,
            "!has(self.replicaDiscreteValues) || size(self.replicaDiscreteValues) == 0 || self.replicaIncrementStep == 1",
        ),
        Rule(
            ("replicaDiscreteValues",),
            "each of replicaDiscreteValues must be between minReplicas and maxReplicas",
            lambda policy: all(policy.min_replicas <= n <= policy.max_replicas for n in policy.replica_discrete_values),
            "!has(self.replicaDiscreteValues)"
            " || self.replicaDiscreteValues.all(n, self.minReplicas <= n && n <= self.maxReplicas)",
        ),
    )


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Limits of the job's run, and the cleanup after its end."""

    backoff_limit: Restarts = 6
    """Maximum number of restarts that the program itself causes before the job fails: an exception, an exit code, a signal
    (also the OOM killer's if [the container's own limit](diagnosis.md#out-of-memory) was reached), or a hang in which
    every agent answers. The same limit applies to consecutive starts in which workers exit before they can train (retried
    after 5 s, 10 s, 20 s, …, 160 s) or whose init containers fail before the job has trained. Lost nodes, lost workers and
    [workers that cannot be started](nodes.md#workers-that-cannot-be-started) do not count."""
    active_deadline_seconds: PositiveSeconds | None = None
    """The job fails if it is not complete this long after its start. Surefoot then first stops the trainers and spends at
    most ten minutes on uploading the newest complete checkpoint."""
    startup_deadline_seconds: PositiveSeconds = 600.0
    """Maximum time from the assignment of ranks to the first step. Compilation may take minutes."""
    scheduling_deadline_seconds: PositiveSeconds = 600.0
    """Maximum time for which the job occupies nodes while it has too few workers to train. After it, the job deletes its
    pods so that other jobs can use the nodes (`PodsScheduled` has the reason `NodesReleased`, event `WorkersReleased`). It
    asks for workers again after a tenth of this time, doubled each time up to all of it, minus a random part of up to a
    half. Checkpoints stay where they are. Jobs that train, or have enough workers, are never affected."""
    ttl_seconds_after_finished: Seconds | None = None
    """Time after the end of the job at which it is deleted, as if by a user. Without it, the job is never deleted. The
    checkpoints of a failed job stay in memory until then, but at most 600 seconds."""
    clean_pod_policy: Annotated[
        Literal["Running", "All"],
        Field(
            rejected_values=("None",),
            rejection_hint="write Running (the default): pods that ended by themselves stay for their logs; a pod that still runs"
            " would occupy its node for ever, because nothing would delete it",
        ),
    ] = "Running"
    """Pods to delete when the job has ended: those that still run (`Running`), or `All`. With `Running`, the logs of all
    pods stay: agents have a minute to exit by themselves, also those of a failed job."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "schedulingPolicy": "write it as spec.schedulingPolicy",
        "faultDeadlineSeconds": "checkpoint.memoryServerTimeoutSeconds bounds the wait for lost memory",
    }


Gang = Literal["Coscheduling"]
"""A scheduler that places a minimum number of a group's pods together, or none of them."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """The gang scheduler that places the workers together or not at all."""

    gang: Gang
    """Gang scheduler whose PodGroup the workers belong to: `Coscheduling` (the plugin of scheduler-plugins,
    `scheduling.x-k8s.io/v1alpha1`). The minimum of the group is the smallest allowed number of workers. If the template has
    no `schedulerName`, Surefoot sets `scheduler-plugins-scheduler`."""
    schedule_timeout_seconds: Annotated[int | None, Field(unit="seconds", min_value=1, max_value=2**31 - 1)] = None
    """Time for which coscheduling reserves nodes for the first workers of an incomplete group. Whole seconds. Without it,
    the configuration of the plugin applies."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "minAvailable": "the minimum of the group is elasticPolicy.minReplicas, or replicas without it",
        "minResources": "the scheduler adds up the requests of the pods",
        "queue": "coscheduling has no queue; for Kueue, name the queue in a label of the template",
        "priorityClass": "set template.spec.priorityClassName: a pod group has no priority of its own",
    }


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """The exit codes to which a rule applies."""

    values: Annotated[tuple[int, ...], Field(min_value=-64, max_value=255, min_items=1, max_items=64, unique="value")]
    """Exit codes. −N means that signal N ended the trainer."""
    operator: Literal["In", "NotIn"] = "In"
    """`In`: the rule applies to these codes. `NotIn`: it applies to all others."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """An action for certain exit codes of a trainer. The first rule that matches applies."""

    name: Annotated[str, Field(max_characters=253)]
    """Name of the rule in messages; unique in the list."""
    action: Literal["FailJob", "Restart", "RestartAndIgnoreMaxRestarts"]
    """`FailJob`: fail the job. `Restart`: restart all ranks. `RestartAndIgnoreMaxRestarts`: restart without counting it
    towards any limit."""
    on_exit_codes: ExitCodes
    """[Exit codes to which the rule applies](#specfailurepolicyrulesonexitcodes), for example
    `{operator: In, values: [42]}`."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"onPodConditions": "rules match exit codes only"}


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limits of restarts, and actions by exit code."""

    max_restarts: Restarts | None = None
    """Maximum number of restarts of any cause within `evalPeriodSeconds` before the job fails. Lost nodes count; planned
    changes and workers whose end was announced do not. After 32 restarts in the window, their times are stored less and
    less exactly, but their number stays exact. Without it, there is no such limit."""
    eval_period_seconds: PositiveSeconds = 3600.0
    """Window in which `maxRestarts` counts restarts and `maxExcludedNodes` counts failures of a node."""
    max_no_progress_restarts: Annotated[int, Field(unit="restarts", min_value=1)] = 3
    """Maximum number of consecutive restarts without a new step before the job fails, whatever the exit codes. Restarts that
    a lost node, agent or worker explains do not count. After the first, the operator pauses before the next restart: 1 s,
    2 s, 4 s, … up to 60 s."""
    max_excluded_nodes: Annotated[int | None, Field(unit="nodes")] = None
    """Maximum number of nodes that the job evacuates (by a planned change that loses no steps) and avoids for
    `evalPeriodSeconds`, after two or more failures there within that time. 0: none. Without it, the job evacuates
    [one node at a time, if that costs less than its failures](nodes.md#waiting-shrinking-and-growing). The nodes are
    listed in `status.excludedNodes`."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_items=32, unique="name")] = ()
    """[Actions by exit code](#specfailurepolicyrules). The first rule that matches applies."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "restartStrategy": "trainers are always restarted in place while their worker runs"
    }


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """Taints, conditions and labels that announce that a node will be removed or should not be used.

    Workers of such a node move to other nodes after all ranks have saved one step.
    """

    taints: Annotated[tuple[str, ...], Field(max_characters=512, max_items=64)] = ()
    """Keys of node taints, whatever their value and effect."""
    conditions: Annotated[
        tuple[str, ...],
        Field(max_characters=512, max_items=64, pattern="[^=]+=.+", allowed="Type=Status of a condition"),
    ] = ()
    """Node conditions as `Type=Status`, for example `GpuUnhealthy=True`."""
    # a label may have no value; a condition always has a status
    labels: Annotated[
        tuple[str, ...], Field(max_characters=512, max_items=64, pattern="[^=]+=.*", allowed="key=value of a label")
    ] = ()
    """Node labels as `key=value`."""


NumericsAction = Literal["Warn", "Stop", "Rollback"]


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """Actions when the training loss is not finite or spikes."""

    on_non_finite: NumericsAction = "Rollback"
    """Action when the loss of any rank is NaN or infinite and still is at its newest step. `Warn`: only report it. `Stop`:
    fail the job. `Rollback`: return to the last known good checkpoint and skip the batches since."""
    on_spike: NumericsAction = "Warn"
    """Action when a loss or gradient norm is far above those of the steps before: `Warn`, `Stop` or `Rollback`."""
    spike_steps: Annotated[int, Field(unit="steps", min_value=1, max_value=1000)] = 3
    """Number of consecutive anomalous steps, on at least half of the workers, that count as a spike."""
    good_after_steps: Annotated[int, Field(unit="steps", min_value=1, max_value=100_000)] = 10
    """Number of later steps without a loss anomaly after which a checkpoint counts as known good."""
    max_rollbacks: Annotated[int, Field(min_value=1, max_value=100)] = 3
    """Maximum number of consecutive rollbacks without a known good checkpoint beyond the step that the former one had
    reached. The next rollback fails the job instead."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Timeouts for workers and steps, and actions for unhealthy nodes, stragglers and loss anomalies."""

    heartbeat_seconds: Annotated[float, Field(unit="seconds", min_value=0.05, max_value=60)] = 0.5
    """Time between two heartbeats of an agent that has nothing else to send."""
    heartbeat_timeout_seconds: PositiveSeconds = 3.0
    """Time without any message of its agent after which a worker counts as lost. Broken connections and exited processes are
    detected at once. At least twice `heartbeatSeconds`."""
    step_timeout_seconds: PositiveSeconds = 600.0
    """Time without a step, after the first one since a restart, that counts as a hang, whether the operator or an agent
    detects it first. A hang is detected earlier if the stacks of all ranks show that
    [nothing moves](diagnosis.md#a-job-that-makes-no-step), and later within `Checkpointer.pause`. A rank is blamed, and
    its node possibly avoided, only if its stack differs from all others', or its worker is at an earlier step than all
    others and every agent answers."""
    node_signals: NodeSignals | None = None
    """[Node taints, conditions and labels that make the job move its workers off a node](#spechealthpolicynodesignals).
    Without it, the default list given there applies."""
    on_unhealthy_node: Literal["Replace", "Warn"] = "Replace"
    """Action when an agent [reports faulty hardware](node-health.md#agent-health-checks). `Replace`: move the job's workers
    to other nodes after all ranks have saved one step, and avoid this node for an hour. `Warn`: only report it."""
    pre_join_check: Literal["Disabled", "Warn", "Enforce"] = "Disabled"
    """Whether a node is [tested before a worker there gets a rank](node-health.md#before-a-node-joins). `Enforce`: a worker
    on a node that fails gets no rank, and the job avoids the node (with `onUnhealthyNode: Warn`, it is only reported).
    `Warn`: only report failures. `Disabled`: no test."""
    on_straggler: Literal["Warn", "Replace"] = "Warn"
    """Action when [one rank makes all others wait](diagnosis.md#a-rank-that-all-others-wait-for). `Warn`: only report it.
    `Replace`: also move its worker to another node after all ranks have saved one step."""
    numerics: NumericsPolicy | None = None
    """[Actions when the loss is NaN or spikes](#spechealthpolicynumerics). Without it, loss anomalies are only reported."""

    RULES: ClassVar[tuple[Rule[HealthPolicy], ...]] = (
        Rule(
            ("heartbeatTimeoutSeconds",),
            "heartbeatTimeoutSeconds must be at least twice heartbeatSeconds: one late heartbeat must not count as a"
            " lost worker",
            lambda policy: policy.heartbeat_timeout_seconds >= 2 * policy.heartbeat_seconds,
            "self.heartbeatTimeoutSeconds >= 2.0 * self.heartbeatSeconds",
        ),
    )


DEFAULT_MEMORY_STEPS = 10
DEFAULT_PERSISTENT_STEPS = 100
"""Steps between two saves to a tier for which the job gives no interval."""

_INTERVALS = ("intervalSteps", "intervalSeconds", "interval")
_ONE_INTERVAL: Rule[Any] = Rule(
    _INTERVALS,
    "one of intervalSteps, intervalSeconds and interval is allowed",  # two would contradict each other
    lambda tier: (tier.interval_steps, tier.interval_seconds, tier.interval).count(None) >= 2,
    f"[{', '.join(f'has(self.{name})' for name in _INTERVALS)}].filter(given, given).size() <= 1",
)


@dataclass(frozen=True, slots=True)
class MemoryTierSpec:
    """The memory tier: save interval, copies and retention.

    At most one of the three intervals is given. Without any, saves are `DEFAULT_MEMORY_STEPS` steps apart.
    """

    interval_steps: Steps | None = None
    """Save every this many steps: a failure costs at most this many. 1 saves every step. Without `intervalSteps`,
    `intervalSeconds` and `interval`: 10."""
    interval_seconds: PositiveSeconds | None = None
    """Alternative to `intervalSteps`: maximum time between two saves.
    [The operator chooses the steps](#intervals-that-the-operator-chooses)."""
    interval: Literal["auto"] | None = None
    """Alternative to `intervalSteps`: with `auto`, the operator chooses the interval with the lowest expected cost."""
    replicas: Annotated[int, Field(unit="copies", min_value=1, max_value=16)] = 2
    """Number of nodes that keep a copy of each save; fewer if the job has fewer nodes."""
    keep: Annotated[int, Field(unit="checkpoints", min_value=1, max_value=1000)] = 2
    """Number of complete checkpoints to keep. The newest complete one is never deleted."""
    size_limit_bytes: Annotated[int | None, Field(unit="bytes", quantity=True, name="sizeLimit")] = None
    """Maximum size of the job's checkpoints on one node. On a cluster, `CheckpointsFit` compares the job with it and
    [enforces it](memory-tier.md#what-one-job-may-take); the limit of the memory server itself is `memoryTier.maxMemory` of
    the chart. Under `surefoot local`, it is the limit of each Redis; default 2Gi. When memory is full, training continues
    and saving waits."""
    topology_key: Annotated[
        str,
        Field(
            max_characters=317,
            pattern=r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
            allowed="the key of a node label, such as topology.kubernetes.io/zone,",
        ),
    ] = "kubernetes.io/hostname"
    """Node label whose values the copies of a save should differ in, for example `topology.kubernetes.io/zone`. With the
    default, Surefoot uses the highest well-known label in which the job's nodes differ.
    [Copies are always on different nodes](memory-tier.md#which-nodes-store-the-copies)."""
    bandwidth_bytes: Bandwidth | None = None
    """Maximum bandwidth of a worker's copies to other nodes, including repairs, while it trains; for example `500Mi`.
    [While nothing trains, there is no limit](memory-tier.md#the-training-has-the-network-first)."""

    RULES: ClassVar[tuple[Rule[MemoryTierSpec], ...]] = (_ONE_INTERVAL,)

    @property
    def is_adaptive(self) -> bool:
        """Whether the operator chooses the interval and sends trainers its exponent."""
        return self.interval is not None or self.interval_seconds is not None

    @property
    def base_steps(self) -> int:
        """Steps between two saves at interval exponent 0; the steps are multiplied by 2^exponent."""
        return 1 if self.is_adaptive else self.interval_steps or DEFAULT_MEMORY_STEPS


@dataclass(frozen=True, slots=True)
class PersistentTierSpec:
    """The persistent tier, a folder or a bucket: interval, retention and access."""

    uri: str
    """`file:///absolute/folder` or `s3://bucket/prefix`, without credentials. If the folder is missing when the job starts,
    the first worker creates it for its owner only (0700). After the first complete checkpoint, a missing folder (or a
    missing folder of the job in it) counts as unavailable: `StorageOperationFailed` names it, and Surefoot never creates it
    again. Files get the access rights of the folder, so create a shared folder yourself: `mkdir -m 2770`."""
    interval_steps: Steps | None = None
    """Upload a checkpoint every this many steps, rounded up to a multiple of the memory tier's `intervalSteps`. Without
    `intervalSteps`, `intervalSeconds` and `interval`: 100."""
    interval_seconds: PositiveSeconds | None = None
    """Alternative to `intervalSteps`: maximum time between two uploads.
    [The operator chooses](#intervals-that-the-operator-chooses) among the checkpoints in memory."""
    interval: Literal["auto"] | None = None
    """Alternative to `intervalSteps`: with `auto`, the operator chooses the interval with the lowest expected cost."""
    keep: Annotated[int, Field(unit="checkpoints", min_value=1)] = 3
    """Number of newest complete checkpoints to keep."""
    keep_every_steps: Steps | None = None
    """Also keep, permanently, the first checkpoint at or after every multiple of this many steps."""
    keep_seconds: PositiveSeconds | None = None
    """Also keep all checkpoints saved within this time. The shorter the interval, the more checkpoints these are, and the
    more storage they need."""
    endpoint: Annotated[
        str | None,
        Field(
            pattern=r"https?://[^\s/?#@]+(/[^\s?#]*)?",
            allowed="http://host:port or https://host:port, without credentials (use secretRef),",
        ),
    ] = None
    """URL of an S3 service other than AWS."""
    region: Annotated[
        str | None,
        Field(
            max_characters=63,
            pattern="[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
            allowed="the name of a region, such as eu-central-1,",
        ),
    ] = None
    """Region of the bucket."""
    secret_ref: Annotated[
        str | None, Field(max_characters=253, pattern=_OBJECT_NAME, allowed="the name of a secret (a-z, 0-9, - and .)")
    ] = None
    """Name of a Secret with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. Without it, the identity of the pod is used.
    `surefoot local` takes both from its environment."""
    ca_bundle: str | None = None
    """Path of a file with the CA certificates to trust, as the workers see it."""
    sse: Annotated[
        str | None,
        Field(pattern=r"AES256|aws:kms(:dsse)?|aws:kms:\S+", allowed="AES256, aws:kms or aws:kms:KEY"),
    ] = None
    """Server-side encryption: `AES256`, `aws:kms`, or `aws:kms:` followed by a key."""
    bandwidth_bytes: Bandwidth | None = None
    """Maximum bandwidth of a worker's uploads while it trains."""
    on_job_deletion: Literal["Keep", "Delete"] = "Keep"
    """Whether the job's checkpoints here are kept or deleted when the job is [deleted](#deletion): `Keep` or `Delete`."""

    RULES: ClassVar[tuple[Rule[PersistentTierSpec], ...]] = (
        Rule(
            ("uri",),
            "credentials are not allowed in uri: use secretRef",
            lambda tier: not _has_credentials(tier.uri),
            f"!self.uri.matches('{_CREDENTIALS}')",
            is_secret=True,
        ),
        Rule(
            ("uri",),
            "uri must be file:///absolute/folder or s3://bucket/prefix",
            lambda tier: re.match(_FOLDER_OR_BUCKET, tier.uri) is not None,
            f"self.uri.matches('{_FOLDER_OR_BUCKET}')",
        ),
        Rule(
            ("endpoint",),
            "endpoint applies to s3:// only: remove it for a file:// uri",
            lambda tier: tier.endpoint is None or tier.uri.startswith("s3://"),
            "!has(self.endpoint) || self.uri.startsWith('s3://')",
        ),
        _ONE_INTERVAL,
    )

    @property
    def is_adaptive(self) -> bool:
        """Whether the operator chooses which checkpoints in memory are uploaded."""
        return self.interval is not None or self.interval_seconds is not None

    @property
    def fixed_steps(self) -> int | None:
        """Steps between two uploads, whatever the memory tier's interval; None: the operator chooses."""
        return None if self.is_adaptive else self.interval_steps or DEFAULT_PERSISTENT_STEPS


_JOB_FOLDER = "^(file:///.*[^/.]|s3://[^/]+/.*[^/.])/*$"


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """Checkpoint of another job, the source job, from which this job starts. It is chosen once."""

    uid: str | None = None
    """`metadata.uid` of the source job, if its folder is in this job's own `persistent.uri`."""
    uri: str | None = None
    """Folder of the source job, which ends in its uid: `file:///folder/UID` or `s3://bucket/prefix/UID`. It is read with
    the endpoint and credentials of this job's `persistent`. Give exactly one of `uid` and `uri`."""
    step: Steps | Literal["latest"] = "latest"
    """Step of the complete checkpoint to start from, or `latest`."""

    RULES: ClassVar[tuple[Rule[RestoreFrom], ...]] = (
        Rule(
            ("uri",),
            "credentials are not allowed in uri: use persistent.secretRef",
            lambda source: not _has_credentials(source.uri),
            f"!has(self.uri) || !self.uri.matches('{_CREDENTIALS}')",
            is_secret=True,
        ),
        Rule(
            ("uid", "uri"),
            "exactly one of uid (of the source job) and uri (of its folder) is required",
            lambda source: (source.uid is None) != (source.uri is None),
            "has(self.uid) != has(self.uri)",
        ),
        Rule(
            ("uid",),
            "uid must be the metadata.uid of the source job, which is the name of its folder",
            lambda source: source.uid is None or not (source.uid in (".", "..") or "/" in source.uid),
            "!has(self.uid) || !(self.uid in ['.', '..'] || self.uid.contains('/'))",
        ),
        Rule(
            ("uri",),
            "uri must be the folder of one job: file:///folder/UID or s3://bucket/prefix/UID",
            lambda source: source.uri is None or re.match(_JOB_FOLDER, source.uri) is not None,
            f"!has(self.uri) || self.uri.matches('{_JOB_FOLDER}')",
        ),
    )


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Both tiers, and actions for lost checkpoints."""

    memory: MemoryTierSpec = field(default_factory=MemoryTierSpec)
    """[Copies in the memory of other nodes](#speccheckpointmemory)."""
    persistent: PersistentTierSpec | None = None
    """[Copies that outlive all nodes](#speccheckpointpersistent)."""
    flush_grace_seconds: Seconds = 1.0
    """Time that saves under way have to complete after training stops for a failure or a planned change."""
    memory_server_timeout_seconds: Seconds = 10.0
    """How long to wait for an unreachable memory server before checkpoints that only it holds are declared lost."""
    on_total_loss: Literal["Wait", "Fail", "Restart"] = "Wait"
    """Action when every copy of every checkpoint is lost. `Wait`: wait until a copy returns or
    [a user decides](#when-every-checkpoint-is-lost). `Fail`: fail the job. `Restart`: start again from step 0."""
    restore_from: RestoreFrom | None = None
    """[Checkpoint of another job to start from](#speccheckpointrestorefrom)."""
    expected_bytes: Bytes | None = None
    """Size of one checkpoint, if known. With it, a job whose `memory.sizeLimit` is too small is rejected at once."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "onEviction": "before a pod is evicted, all ranks save one step and its worker is replaced"
    }
    RULES: ClassVar[tuple[Rule[CheckpointPolicy], ...]] = (
        Rule(
            ("restoreFrom.uid",),
            "restoreFrom.uid requires checkpoint.persistent, whose uri contains the folder of the source job",
            lambda policy: (
                policy.restore_from is None or policy.restore_from.uid is None or policy.persistent is not None
            ),
            "!has(self.restoreFrom) || !has(self.restoreFrom.uid) || has(self.persistent)",
        ),
    )


@dataclass(frozen=True, slots=True)
class Template:
    """The pod template, and the program of its container `trainer`."""

    command: tuple[str, ...]
    """Program and its first arguments. `python` means the interpreter that runs surefoot. Python scripts and modules start
    from a fork server."""
    args: tuple[str, ...] = ()
    """More arguments, appended to `command`."""
    env: tuple[tuple[str, str], ...] = ()
    """Names and values of environment variables. Those with `valueFrom` are not listed here: only a cluster can resolve them."""
    working_dir: str | None = None
    """Working directory of the program. Without it, that of the image; under `surefoot local`, the current one."""
    raw: Annotated[dict[str, Any], Field(name="")] = field(default_factory=dict, compare=False, hash=False)
    """The whole pod template as the user wrote it."""


@dataclass(frozen=True, slots=True)
class TrainingJobSpec:
    """The `spec` of a TrainingJob: its program, its workers, and policies for failures and checkpoints."""

    template: Template
    """[Pod template of the workers](#spectemplate): a Kubernetes PodTemplateSpec with a container named `trainer` that
    states its command. Surefoot puts its agent in front of the command and keeps everything else as given."""
    replicas: Workers = 1
    """Number of workers that the job should have. A worker is a pod, or a node of `surefoot local`."""
    nproc_per_node: Annotated[
        int,
        Field(
            unit="ranks",
            min_value=1,
            max_value=1024,
            rejected_values=("auto", "gpu", "cpu"),
            rejection_hint="write the number of trainers in each worker, usually that of its GPUs: the world size and the"
            " placement of checkpoints depend on it before any worker runs on a node",
        ),
    ] = 1
    """Trainers in each worker, one for each rank. The world size is the number of workers × `nprocPerNode`."""
    spares: Annotated[int, Field(unit="workers", max_value=1000)] = 0
    """Warm workers in addition to `replicas`, [each on a node of its own](nodes.md#spares): started, connected, with the
    program's imports done, but without a rank. A spare takes the ranks of a lost worker at once and is then replaced.
    Spares never increase the number of training workers above `replicas`."""
    warm_imports: Literal["auto", "none"] = "auto"
    """`none`: start each trainer as a new process, without [imports in advance](python.md#imports-in-advance)."""
    suspend: bool = False
    """If true, the job saves, uploads that checkpoint if it has a persistent tier (for ten minutes at most), stops the
    trainers and deletes the workers, until this is false again. `surefoot local` rejects true."""
    managed_by: Annotated[
        str,
        Field(
            max_characters=63,
            pattern="[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
            allowed="the name of a controller, domain/name,",
        ),
    ] = MANAGER
    """Name of the controller that manages the job. The Surefoot operator ignores jobs of any other controller."""
    elastic_policy: ElasticPolicy | None = None
    """[Allowed numbers of workers](#specelasticpolicy). Without it, the job trains with exactly `replicas` workers."""
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    """[Limits of the whole run, and cleanup](#specrunpolicy)."""
    scheduling_policy: SchedulingPolicy | None = None
    """[Gang scheduling](#specschedulingpolicy): workers are placed together or not at all."""
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    """[Limits of restarts, and actions by exit code](#specfailurepolicy)."""
    health_policy: HealthPolicy = field(default_factory=HealthPolicy)
    """[Timeouts, node health, stragglers and loss anomalies](#spechealthpolicy)."""
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    """[Where and how often checkpoints are saved](#speccheckpoint)."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"nodeSelector": "put it into template.spec"}
    RULES: ClassVar[tuple[Rule[TrainingJobSpec], ...]] = (
        Rule(
            ("replicas",),
            "replicas must be a number that elasticPolicy allows: one of replicaDiscreteValues, or from minReplicas to"
            " maxReplicas in steps of replicaIncrementStep",
            lambda spec: spec.replicas in allowed_sizes(spec),
            "!has(self.elasticPolicy) || (self.elasticPolicy.?replicaDiscreteValues.orValue([]).size() > 0"
            " ? self.replicas in self.elasticPolicy.replicaDiscreteValues"
            " : self.elasticPolicy.minReplicas <= self.replicas && self.replicas <= self.elasticPolicy.maxReplicas"
            " && (self.replicas - self.elasticPolicy.minReplicas) % self.elasticPolicy.replicaIncrementStep == 0)",
            lambda spec: ", ".join(map(str, allowed_sizes(spec)[:8])) + ", …" * (len(allowed_sizes(spec)) > 8),
        ),
        # not in CEL: it cannot read the template's metadata, whose fields the CRD does not declare
        Rule(
            ("template.metadata",),
            "the template must not name a pod group: with schedulingPolicy, workers belong to the job's own group",
            lambda spec: spec.scheduling_policy is None or not group_labels_of(spec.template.raw),
            detail=lambda spec: ", ".join(f"metadata.labels {label}" for label in group_labels_of(spec.template.raw)),
            is_secret=True,
        ),
        # not in CEL: this arithmetic over three policies would be an unreadable rule
        Rule(
            ("checkpoint.memory.sizeLimit",),
            "sizeLimit is too small for the checkpoints of the smallest allowed number of workers",
            lambda spec: not 0 < (spec.checkpoint.memory.size_limit_bytes or 0) < size_limit_needed(spec)[0],
            detail=lambda spec: size_limit_needed(spec)[1],
        ),
    )
    FIXED_WHILE_RUNNING: ClassVar[tuple[str, ...]] = (
        "template",
        "nprocPerNode",
        "warmImports",
        "schedulingPolicy",
        "healthPolicy.heartbeatSeconds",
        "checkpoint.memory",
        *(f"checkpoint.persistent.{name}" for name in ("uri", *_INTERVALS, "keep")),
    )
    """Fields that workers read once, when they are created: they can change only while `suspend` is true."""
    FIXED: ClassVar[tuple[str, ...]] = ("managedBy", "checkpoint.persistent.uri")
    """Fields that can never change once they are set."""


def allowed_sizes(spec: TrainingJobSpec) -> tuple[int, ...]:
    """Returns the numbers of workers with which the job may train, ascending."""
    policy = spec.elastic_policy
    if policy is None:
        return (spec.replicas,)
    if policy.replica_discrete_values:
        # users may write the values in any order
        return tuple(sorted(policy.replica_discrete_values))
    return tuple(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step))


_GOOD_KEPT = 2
"""Checkpoints kept for a rollback: the last known good one, and the next that may become known good."""


def good_checkpoints_kept(spec: TrainingJobSpec) -> int:
    """Returns the number of checkpoints that a memory server keeps for a rollback, in addition to `keep`."""
    numerics, memory = spec.health_policy.numerics, spec.checkpoint.memory
    if numerics is None:
        return 0
    # if saves are further apart than a checkpoint needs to become known good, the last such one is among the newest two
    are_saves_rare = memory.interval_steps is not None and memory.interval_steps >= numerics.good_after_steps
    return 0 if are_saves_rare and memory.keep > 1 else _GOOD_KEPT


def checkpoints_in_memory(spec: TrainingJobSpec) -> int:
    """Returns the largest number of a job's checkpoints that a memory server stores at a time.

    These are the kept ones, one being written, one pinned while it is uploaded, and those for a rollback. The validation of
    a spec and the memory budget of a running job both use this: with a formula each, valid jobs were rejected.
    """
    policy = spec.checkpoint
    return policy.memory.keep + 1 + (policy.persistent is not None) + good_checkpoints_kept(spec)


def size_limit_needed(spec: TrainingJobSpec) -> tuple[int, str]:
    """Returns (bytes, explanation): memory that each node needs with the smallest number of workers.

    0 bytes: not known, because the spec has no `expectedBytes`.
    """
    expected_bytes, memory = spec.checkpoint.expected_bytes, spec.checkpoint.memory
    if expected_bytes is None:
        return 0, ""
    nodes, checkpoint_count = min(allowed_sizes(spec)), checkpoints_in_memory(spec)
    # copies are on different nodes, so a small job has fewer of them; the total is spread evenly and rounded up
    copies = min(memory.replicas, nodes)
    needed_bytes = -(-checkpoint_count * copies * expected_bytes // nodes)
    explanation = (
        f"at least {quantity_of(needed_bytes)} a node are needed, because {nodes} workers store {checkpoint_count}"
        f" checkpoints at a time ({memory.keep} kept), with {copies} copies of {quantity_of(expected_bytes)}"
    )
    return needed_bytes, explanation


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A job as stored in the API, without its status, which is `JobSnapshot.status`."""

    name: str
    namespace: str
    uid: str
    metadata_generation: int
    """`metadata.generation` of `spec`. Kubernetes increments it with each change of the spec."""
    spec: TrainingJobSpec
    deleted: bool = False
    """Whether a user has deleted the job (`metadata.deletionTimestamp`)."""
    has_finalizer: bool = False
    """Whether the job's deletion waits until this operator has deleted its persistent data."""
    accepted_loss: str = ""
    """Value of the annotation `ACCEPT_LOSS`; empty: none."""
    rollback: str = ""
    """Value of the annotation `ROLLBACK`; empty: none."""


# ---- gang schedulers -------------------------------------------------------------------------------------------------
# Describes the gang schedulers that can place a job's workers; read by `fields` and the Kubernetes platform.


@dataclass(frozen=True, slots=True)
class GangScheduler:
    """The API of one gang scheduler, and the label by which it finds pods."""

    api_version: str
    """API version of its PodGroup."""
    scheduler_name: str
    """Scheduler name under which its own chart installs it."""
    group_label: str
    """Key of the pod label whose value is the name of the group."""


GANG_SCHEDULERS: Mapping[Gang, GangScheduler] = {
    "Coscheduling": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", "scheduling.x-k8s.io/pod-group"
    ),
}


def group_labels_of(template: Mapping[str, Any]) -> list[str]:
    """Returns the gang schedulers' labels with which a pod template names a pod group itself."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return [gang.group_label for gang in GANG_SCHEDULERS.values() if gang.group_label in labels]
