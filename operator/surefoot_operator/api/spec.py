"""Declares the specification of a TrainingJob: each field once, with type, unit, range, default and text.

Pure values, built by `api.parse`. The docstring of a field is its row in docs/api.md and its description in the CRD; both
are made from this module by `make manifests`. Durations are seconds, sizes bytes.
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
"""An annotation: how many steps the program makes. For people who watch; nothing is decided from it."""
ACCEPT_LOSS = f"{GROUP}/accept-loss"
"""An annotation: a person accepts what was lost to the epoch that it names."""
ROLLBACK = f"{GROUP}/rollback"
"""An annotation: a person wants the epoch that it names to go back to a step: `EPOCH/STEP`, or `EPOCH/STEP/keep-data`."""
FINALIZER = f"{GROUP}/persistent-data"
"""On a job whose persistent data shall go with it; nothing else ever holds a job back."""

# ---- kinds of fields -------------------------------------------------------------------------------------------------

Workers = Annotated[int, Field(unit="workers", least=1, most=100_000)]
Restarts = Annotated[int, Field(unit="restarts")]
Steps = Annotated[int, Field(unit="steps", least=1)]
Seconds = Annotated[float, Field(unit="seconds")]
PositiveSeconds = Annotated[float, Field(unit="seconds", least=0.001)]
"""A time that is waited for: no loop here is faster than a millisecond."""
Bytes = Annotated[int, Field(unit="bytes", quantity=True)]
Bandwidth = Annotated[int, Field(unit="bytes a second", least=1 << 20, quantity=True, name="bandwidth")]
"""Slower than a chunk every few seconds nothing would ever be saved."""
_OBJECT_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_FOLDER_OR_BUCKET = "^(file:///.+|s3://[^/].*)$"
_CREDENTIALS = "^([A-Za-z0-9+.-]+://)?[^/]*@"


def _has_credentials(uri: str | None) -> bool:
    return uri is not None and re.match(_CREDENTIALS, uri) is not None


# ---- the job's policies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """The numbers of workers that a world may have. Absent: exactly `replicas`."""

    min_replicas: Workers
    """The smallest world that may train. Below it the job waits."""
    max_replicas: Workers
    """The largest world."""
    replica_increment_step: Workers = 1
    """Worlds have min, min + step, … up to max workers."""
    replica_discrete_values: Annotated[
        tuple[int, ...], Field(unit="workers", least=1, most=100_000, items=64, unique="value")
    ] = ()
    """Allowed numbers of workers, each between `minReplicas` and `maxReplicas`. Cannot be combined with
    `replicaIncrementStep`."""
    faulty_scale_down_timeout_seconds: Seconds | None = None
    """After a loss, wait exactly this long for a replacement before training on with fewer workers. Without it the job
    waits [as long as that is cheaper](operations.md#waiting-shrinking-and-growing)."""
    scale_up_snooze_seconds: Seconds | None = None
    """Do not grow earlier than this after a change of the world, and then at once. Without it the job grows
    [when that pays](operations.md#waiting-shrinking-and-growing)."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "gracefulShutdownTimeoutSeconds": "checkpoint.drainGraceSeconds bounds the wait for saves"
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
    """Limits of a job's run, and its cleanup afterwards."""

    backoff_limit: Restarts = 6
    """Restarts caused by the program itself before the job fails: an exception, an exit code, a signal (the OOM killer's
    too, where [the container's own limit](operations.md#out-of-memory) was reached), a hang in which every worker is heard;
    also how often in a row Surefoot replaces workers that end before they can train (after 5 s, 10 s, 20 s, …, 160 s), or
    whose init containers fail before the job has trained. Lost nodes, lost workers and
    [workers that cannot be started](operations.md#workers-that-cannot-be-started) do not count."""
    active_deadline_seconds: PositiveSeconds | None = None
    """The job fails if it is not complete this long after its start. Before that, Surefoot stops the trainers and spends
    at most ten minutes on uploading the newest complete checkpoint."""
    startup_deadline_seconds: PositiveSeconds = 600.0
    """From the assignment of a world to its first step. Compilation may take minutes."""
    scheduling_deadline_seconds: PositiveSeconds = 600.0
    """A job that holds nodes for so long with fewer workers than its smallest world gives them back, so that others can
    have them: its pods are deleted (`PodsScheduled` has the reason `Released`, event `WorkersReleased`), and asked for
    again after a tenth of this time, doubled each time up to the whole, less a jitter of up to a half. Checkpoints stay
    where they are. Jobs that train, or have enough workers, are never touched."""
    ttl_seconds_after_finished: Seconds | None = None
    """The job is deleted so long after its end, as if by hand. A failed job's checkpoints stay in memory until then, but
    at most 600 seconds, also without a limit."""
    clean_pod_policy: Annotated[
        Literal["Running", "All"],
        Field(
            foreign=("None",),
            instead="write Running (the default): pods that ended by themselves stay for their logs, and one that still"
            " runs would hold its node for ever, because nothing would delete it",
        ),
    ] = "Running"
    """Which pods are deleted when the job has ended: those that still run (`Running`), or `All`. The others stay for their
    logs: agents have a minute to end by themselves, so the pods of a failed job stay, too."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "schedulingPolicy": "write it as spec.schedulingPolicy",
        "faultDeadlineSeconds": "checkpoint.holderReturnSeconds bounds the wait for lost memory",
    }


Gang = Literal["Coscheduling"]
"""A scheduler that places a minimum of a group's pods together, or none of them."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """Whose pod group the workers are in."""

    gang: Gang
    """Whose PodGroup the workers are in: `Coscheduling` (the plugin of scheduler-plugins,
    `scheduling.x-k8s.io/v1alpha1`). Its minimum is the smallest world. A template without `schedulerName` gets
    `scheduler-plugins-scheduler`; one that the template names stays."""
    schedule_timeout_seconds: Annotated[int | None, Field(unit="seconds", least=1, most=2**31 - 1)] = None
    """How long coscheduling holds nodes for the first workers of a group that is not complete; without it as the plugin is
    configured. Whole seconds."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "minAvailable": "the group's minimum is the smallest world: elasticPolicy.minReplicas, or replicas",
        "minResources": "the scheduler adds up what the pods request",
        "queue": "a gang has no queue; Kueue's is named by a label of the template",
        "priorityClass": "set template.spec.priorityClassName: a gang has no priority of its own",
    }


@dataclass(frozen=True, slots=True)
class ExitCodes:
    """Exit codes that a rule is for."""

    values: Annotated[tuple[int, ...], Field(least=-64, most=255, least_items=1, items=64, unique="value")]
    """Exit codes; −N is death by signal N."""
    operator: Literal["In", "NotIn"] = "In"
    """`In`: these codes match. `NotIn`: all others do."""


@dataclass(frozen=True, slots=True)
class FailureRule:
    """Action for a trainer's exit codes; the first rule that matches wins."""

    name: Annotated[str, Field(characters=253)]
    """For messages; each rule has its own."""
    action: Literal["FailJob", "Restart", "RestartAndIgnoreMaxRestarts"]
    """`FailJob`, `Restart`, or `RestartAndIgnoreMaxRestarts`, which no budget counts."""
    on_exit_codes: ExitCodes
    """[The exit codes that it is for](#specfailurepolicyrulesonexitcodes): `{operator: In, values: [42]}`."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"onPodConditions": "rules match exit codes"}


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Limits of restarts, and rules by exit code."""

    max_restarts: Restarts | None = None
    """Restarts of any cause, lost nodes included and workers whose end was announced left out, within `evalPeriodSeconds`
    before the job fails. Planned changes are none. Above 32 restarts in the window their times are kept more and more
    roughly; their number is not."""
    eval_period_seconds: PositiveSeconds = 3600.0
    """The window of `maxRestarts`."""
    max_no_progress_restarts: Annotated[int, Field(unit="restarts", least=1)] = 3
    """Restarts in a row without one new step before the job fails, whatever the program says of its end, except those of a
    node, an agent or a worker that was seen to be lost. After the first, the next epoch is paused for: 1 s, 2 s, 4 s, … up
    to 60 s."""
    max_num_repeat_offenders_to_avoid: Annotated[int | None, Field(unit="nodes")] = None
    """Maximum number of nodes that the job vacates (by a planned change, no steps lost) and avoids for
    `evalPeriodSeconds`, after two or more failures there within that time; 0: none. Without a number it vacates
    [one at a time, where leaving it costs less than its failures](operations.md#waiting-shrinking-and-growing). They stand
    in `status.excludedNodes`."""
    rules: Annotated[tuple[FailureRule, ...], Field(items=32, unique="name")] = ()
    """[What an exit code means](#specfailurepolicyrules); the first that matches wins."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "restartStrategy": "trainers are always restarted in place while their worker runs"
    }


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """Taints, conditions and labels that announce a node's end.

    Workers of such a node move to other nodes at a saved step.
    """

    taints: Annotated[tuple[str, ...], Field(characters=512, items=64)] = ()
    """Keys of taints."""
    conditions: Annotated[
        tuple[str, ...], Field(characters=512, items=64, pattern="[^=]+=.+", allowed="Type=Status of a condition")
    ] = ()
    """Conditions of the node, as `Type=Status`: `GpuUnhealthy=True`."""
    # a label may have no value; a condition always has a status
    labels: Annotated[
        tuple[str, ...], Field(characters=512, items=64, pattern="[^=]+=.*", allowed="key=value of a label")
    ] = ()
    """Labels of the node, as `key=value`."""


NumericsAction = Literal["Warn", "Stop", "Rollback"]


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """Actions where a loss is no number, or spikes."""

    on_not_finite: NumericsAction = "Rollback"
    """A loss is NaN or infinite, on any rank, and still is at its newest step: `Warn` says so, `Stop` fails the job,
    `Rollback` goes back to the last good checkpoint and leaves out the batches since."""
    on_spike: NumericsAction = "Warn"
    """A loss or gradient norm is far above those of the steps before; the same three."""
    spike_steps: Annotated[int, Field(unit="steps", least=1, most=1000)] = 3
    """So many steps in a row, on at least half of the workers, are a spike."""
    good_after_steps: Annotated[int, Field(unit="steps", least=1, most=100_000)] = 10
    """A checkpoint is good once so many later steps were finite and in band."""
    max_rollbacks: Annotated[int, Field(least=1, most=100)] = 3
    """In a row, without a good checkpoint beyond where the one before had come: the next one fails the job."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Timeouts after which an agent or a training step counts as failed."""

    heartbeat_seconds: Annotated[float, Field(unit="seconds", least=0.05, most=60)] = 0.5
    """How often an agent speaks, if nothing makes it speak earlier."""
    heartbeat_timeout_seconds: PositiveSeconds = 3.0
    """A silent worker is lost after this. Broken connections and ended processes are noticed at once. At least two
    heartbeats."""
    step_timeout_seconds: PositiveSeconds = 600.0
    """Once a world has made its first step, it counts as hung if it makes no step for this long, and the job restarts from
    its last checkpoint. The job restarts sooner where the stacks of all ranks show that nothing moves
    ([docs/operations.md](operations.md#a-job-that-makes-no-step)), and later while the program is within
    `Checkpointer.pause`. Surefoot blames a rank, and avoids its node, only if that rank's stack differs from all others', or
    if every worker reports its step and the rank's worker alone is behind. Otherwise it blames no rank and avoids no node."""
    node_signals: NodeSignals | None = None
    """[Node taints, conditions and labels that make the job move its workers off a node](#spechealthpolicynodesignals).
    Without it those listed there."""
    node_findings: Literal["Leave", "Show"] = "Leave"
    """What is done about a node [whose hardware its agent finds at fault](node-health.md#what-agents-find): `Leave` has its
    workers leave it in order and avoids it for an hour, `Show` tells people."""
    pre_join_check: Literal["Off", "Warn", "Enforce"] = "Off"
    """Whether a node is [tried before a worker there gets a rank](node-health.md#before-a-node-joins):
    `Enforce` gives none to a node that fails, and avoids it (with `nodeFindings: Show` too it only tells people), `Warn`
    tells people, `"Off"` does not try. `Off` is written in quotes, as YAML reads it as false otherwise."""
    on_straggler: Literal["Warn", "Replace"] = "Warn"
    """What is done about [a rank that all others wait for](operations.md#a-rank-that-all-others-wait-for): `Warn` tells
    people, `Replace` has its worker leave that node at a saved step too."""
    numerics: NumericsPolicy | None = None
    """[What follows where the loss is NaN or spikes](#spechealthpolicynumerics). Without it that is said, and nothing
    done."""

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
"""Steps between saves to a tier of which a job says nothing."""

_INTERVALS = ("intervalSteps", "intervalSeconds", "interval")
_ONE_INTERVAL: Rule[Any] = Rule(
    _INTERVALS,
    "one of intervalSteps, intervalSeconds and interval is allowed",  # two would contradict each other
    lambda tier: (tier.interval_steps, tier.interval_seconds, tier.interval).count(None) >= 2,
    f"[{', '.join(f'has(self.{name})' for name in _INTERVALS)}].filter(given, given).size() <= 1",
)


@dataclass(frozen=True, slots=True)
class MemoryTierSpec:
    """The tier in memory: interval, copies, retention.

    One of the three intervals is given; without any, saves are `DEFAULT_MEMORY_STEPS` apart.
    """

    interval_steps: Steps | None = None
    """Save every so many steps. At most so many are run again after a loss. 1 saves each step. With none of
    `intervalSteps`, `intervalSeconds` and `interval`: 10."""
    interval_seconds: PositiveSeconds | None = None
    """Or at most so many seconds apart: [the operator chooses the steps](#intervals-that-the-operator-chooses)."""
    interval: Literal["auto"] | None = None
    """Or `auto`: the operator chooses what costs least."""
    replicas: Annotated[int, Field(unit="copies", least=1, most=16)] = 2
    """On so many different nodes; fewer where there are fewer nodes."""
    keep: Annotated[int, Field(unit="checkpoints", least=1, most=1000)] = 2
    """Complete checkpoints that stay. The newest complete one is never deleted."""
    size_limit_bytes: Annotated[int | None, Field(unit="bytes", quantity=True, name="sizeLimit")] = None
    """The memory that this job's checkpoints may take on each node. On a cluster the chart's `memoryTier.maxMemory` limits
    the node's memory servers for all jobs together; `sizeLimit` limits this job: the condition `CheckpointsFit` compares
    the job's need with it, and a job that exceeds it [may not write to that node's memory server](memory-tier.md#what-one-job-may-take)
    until it is below again. `surefoot local` starts each node's Redis with this limit, with 2Gi if it is left out. While the
    memory is full, the training goes on and saves wait."""
    topology_key: Annotated[
        str,
        Field(
            characters=317,
            pattern=r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
            allowed="the key of a node label, such as topology.kubernetes.io/zone,",
        ),
    ] = "kubernetes.io/hostname"
    """Node label that keeps the copies of a save apart, for example `topology.kubernetes.io/zone`. With the default,
    Surefoot takes the highest well-known label by which the job's nodes differ.
    [Copies are always on different nodes](memory-tier.md#which-nodes-hold-the-copies)."""
    bandwidth_bytes: Bandwidth | None = None
    """What a worker's copies to other nodes, repairs among them, take of the network while it trains: `500Mi`.
    [Where nothing trains there is no limit](memory-tier.md#the-training-has-the-network-first)."""

    RULES: ClassVar[tuple[Rule[MemoryTierSpec], ...]] = (_ONE_INTERVAL,)

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
    """`file:///absolute/folder` or `s3://bucket/prefix`. No credentials in it. If the folder is missing when the job
    starts, the first worker creates it for its owner alone (0700). After the first complete checkpoint, a missing folder
    (or a missing folder of the job in it) counts as unavailable: `TierFailed` names it, and Surefoot never creates it again.
    Files are as accessible as the folder, so create a shared one yourself: `mkdir -m 2770`."""
    interval_steps: Steps | None = None
    """Every so many steps a checkpoint is also kept here; rounded up to a multiple of the memory tier's `intervalSteps`.
    With none of `intervalSteps`, `intervalSeconds` and `interval`: 100."""
    interval_seconds: PositiveSeconds | None = None
    """Or at most so many seconds apart: [the operator chooses](#intervals-that-the-operator-chooses) among what memory
    has."""
    interval: Literal["auto"] | None = None
    """Or `auto`: the operator chooses what costs least."""
    keep: Annotated[int, Field(unit="checkpoints", least=1)] = 3
    """Newest complete checkpoints that stay."""
    keep_every_steps: Steps | None = None
    """Also keep, permanently, the first checkpoint at or after every multiple of this many steps."""
    keep_seconds: PositiveSeconds | None = None
    """Also keep the checkpoints that were saved in the last so many seconds. What is there then grows with the interval's
    shortness, and so does what it takes."""
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
            characters=63,
            pattern="[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
            allowed="the name of a region, such as eu-central-1,",
        ),
    ] = None
    """The bucket's region."""
    secret_ref: Annotated[
        str | None, Field(characters=253, pattern=_OBJECT_NAME, allowed="the name of a secret (a-z, 0-9, - and .)")
    ] = None
    """Name of a secret with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. Without it the pod's own identity;
    `surefoot local` takes both from its environment."""
    ca_bundle: str | None = None
    """File with the certificates to trust."""
    sse: Annotated[
        str | None,
        Field(pattern=r"AES256|aws:kms(:dsse)?|aws:kms:\S+", allowed="AES256, aws:kms or aws:kms:KEY"),
    ] = None
    """Server-side encryption: `AES256` or `aws:kms`."""
    bandwidth_bytes: Bandwidth | None = None
    """What a worker's uploads take of the network while it trains."""
    on_job_deletion: Literal["Keep", "Delete"] = "Keep"
    """What becomes of what lies here when the job is [deleted](#deletion): `Keep`, or `Delete`."""

    RULES: ClassVar[tuple[Rule[PersistentTierSpec], ...]] = (
        Rule(
            ("uri",),
            "credentials are not allowed in uri: use secretRef",
            lambda tier: not _has_credentials(tier.uri),
            f"!self.uri.matches('{_CREDENTIALS}')",
            secret=True,
        ),
        Rule(
            ("uri",),
            "uri must be file:///absolute/folder or s3://bucket/prefix",
            lambda tier: re.match(_FOLDER_OR_BUCKET, tier.uri) is not None,
            f"self.uri.matches('{_FOLDER_OR_BUCKET}')",
        ),
        Rule(
            ("endpoint",),
            "endpoint is for s3:// alone: leave it out with a file:// uri",
            lambda tier: tier.endpoint is None or tier.uri.startswith("s3://"),
            "!has(self.endpoint) || self.uri.startsWith('s3://')",
        ),
        _ONE_INTERVAL,
    )

    @property
    def adaptive(self) -> bool:
        """Whether the operator chooses which saves in memory are promoted."""
        return self.interval is not None or self.interval_seconds is not None

    @property
    def fixed_steps(self) -> int | None:
        """Steps between saves at every level; None: the operator chooses."""
        return None if self.adaptive else self.interval_steps or DEFAULT_PERSISTENT_STEPS


_JOB_FOLDER = "^(file:///.*[^/.]|s3://[^/]+/.*[^/.])/*$"


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """An older job's checkpoint to start from, read-only, chosen once."""

    uid: str | None = None
    """The older job's uid, if its folder lies in this job's own `persistent.uri`."""
    uri: str | None = None
    """Or its folder itself, the uid being the last part: `file:///folder/UID` or `s3://bucket/prefix/UID`. Reached with
    this job's `persistent` endpoint and account. Exactly one of `uid` and `uri`."""
    step: Steps | Literal["latest"] = "latest"
    """The step whose complete checkpoint is taken, or `latest`."""

    RULES: ClassVar[tuple[Rule[RestoreFrom], ...]] = (
        Rule(
            ("uri",),
            "credentials are not allowed in uri: use persistent.secretRef",
            lambda source: not _has_credentials(source.uri),
            f"!has(self.uri) || !self.uri.matches('{_CREDENTIALS}')",
            secret=True,
        ),
        Rule(
            ("uid", "uri"),
            "either uid (of an older job) or uri (of its folder) is allowed, and one of them is required",
            lambda source: (source.uid is None) != (source.uri is None),
            "has(self.uid) != has(self.uri)",
        ),
        Rule(
            ("uid",),
            "uid is the name of a folder: the older job's metadata.uid",
            lambda source: source.uid is None or not (source.uid in (".", "..") or "/" in source.uid),
            "!has(self.uid) || !(self.uid in ['.', '..'] || self.uid.contains('/'))",
        ),
        Rule(
            ("uri",),
            "uri is the folder of one job: file:///folder/UID or s3://bucket/prefix/UID",
            lambda source: source.uri is None or re.match(_JOB_FOLDER, source.uri) is not None,
            f"!has(self.uri) || self.uri.matches('{_JOB_FOLDER}')",
        ),
    )


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Both tiers, and the policy for lost checkpoints."""

    memory: MemoryTierSpec = field(default_factory=MemoryTierSpec)
    """[Copies in the memory of other nodes](#speccheckpointmemory)."""
    persistent: PersistentTierSpec | None = None
    """[Copies that outlive all nodes](#speccheckpointpersistent)."""
    drain_grace_seconds: Seconds = 1.0
    """When a world ends, how long saves under way may still complete."""
    holder_return_seconds: Seconds = 10.0
    """How long to wait for an unreachable memory server before checkpoints that only it holds are declared lost."""
    on_total_loss: Literal["Wait", "Fail", "Restart"] = "Wait"
    """When every copy of every checkpoint is gone: `Wait` until one comes back or
    [a person ends it](#when-every-checkpoint-is-lost), `Fail`, or `Restart` from step 0."""
    restore_from: RestoreFrom | None = None
    """[An older job's checkpoint to begin from](#speccheckpointrestorefrom)."""
    expected_bytes: Bytes | None = None
    """The size of one checkpoint, if known: then a memory limit that cannot hold enough of them is refused at once."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "onEviction": "before a pod is evicted, the world halts at a saved step"
    }
    RULES: ClassVar[tuple[Rule[CheckpointPolicy], ...]] = (
        Rule(
            ("restoreFrom.uid",),
            "restoreFrom.uid needs checkpoint.persistent too: the older job's folder is there",
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
    """The program and its first arguments. `python` is the interpreter that surefoot runs in; a Python script or module
    starts from a warm process."""
    args: tuple[str, ...] = ()
    """More arguments."""
    env: tuple[tuple[str, str], ...] = ()
    """Names and values. `valueFrom` needs a cluster."""
    working_dir: str | None = None
    """Where it runs; without it, under `surefoot local`, where that was started."""
    raw: Annotated[dict[str, Any], Field(name="")] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True, slots=True)
class TrainingJobSpec:
    """What a user asks for; `spec` of a TrainingJob."""

    template: Template
    """[What a worker runs](#spectemplate): a PodTemplateSpec of Kubernetes with a container named `trainer` that states its
    command. The agent is put in front of the command; everything else is kept as given."""
    replicas: Workers = 1
    """How many workers the job should have. One worker is one pod, or one node of `surefoot local`."""
    nproc_per_node: Annotated[
        int,
        Field(
            unit="ranks",
            least=1,
            most=1024,
            foreign=("auto", "gpu", "cpu"),
            instead="write the number of trainers in each worker, as a rule that of its GPUs: the world size and the"
            " placement of checkpoints follow from it before any worker runs on a node",
        ),
    ] = 1
    """Trainers in each worker. A world has workers × `nprocPerNode` ranks."""
    spares: Annotated[int, Field(unit="workers", most=1000)] = 0
    """Workers in addition to `replicas`, [each on a node of its own](operations.md#spares): started, connected and with the
    program's imports made, without a rank. One takes a lost worker's rank at once, and is then replaced. No world gets
    larger than `replicas` by them."""
    suspend: bool = False
    """Save, bring that checkpoint to the persistent tier where there is one (for ten minutes at most), stop the trainers
    and give the workers back, until it is false again. `surefoot local` refuses true."""
    managed_by: Annotated[
        str,
        Field(
            characters=63,
            pattern="[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
            allowed="the name of a controller, domain/name,",
        ),
    ] = MANAGER
    """The controller that looks after the job; any other leaves it alone."""
    elastic_policy: ElasticPolicy | None = None
    """[Which sizes a world may have](#specelasticpolicy). Without it a world has exactly `replicas` workers."""
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    """[Limits of the whole run](#specrunpolicy)."""
    scheduling_policy: SchedulingPolicy | None = None
    """[Workers that are placed together or not at all](#specschedulingpolicy)."""
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    """[When failures end the job](#specfailurepolicy)."""
    health_policy: HealthPolicy = field(default_factory=HealthPolicy)
    """[When a worker counts as lost](#spechealthpolicy)."""
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    """[Where and how often state is saved](#speccheckpoint)."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"nodeSelector": "put it into template.spec"}
    RULES: ClassVar[tuple[Rule[TrainingJobSpec], ...]] = (
        Rule(
            ("replicas",),
            "replicas must be a size that elasticPolicy allows: one of replicaDiscreteValues, or from minReplicas to"
            " maxReplicas in steps of replicaIncrementStep",
            lambda spec: spec.replicas in allowed_sizes(spec),
            "!has(self.elasticPolicy) || (self.elasticPolicy.?replicaDiscreteValues.orValue([]).size() > 0"
            " ? self.replicas in self.elasticPolicy.replicaDiscreteValues"
            " : self.elasticPolicy.minReplicas <= self.replicas && self.replicas <= self.elasticPolicy.maxReplicas"
            " && (self.replicas - self.elasticPolicy.minReplicas) % self.elasticPolicy.replicaIncrementStep == 0)",
            lambda spec: ", ".join(map(str, allowed_sizes(spec)[:8])) + ", …" * (len(allowed_sizes(spec)) > 8),
        ),
        # not in CEL: it reads no fields of the template's metadata, which keeps what the CRD does not know
        Rule(
            ("template.metadata",),
            "the template must not name a pod group: with schedulingPolicy the workers are in the job's own group",
            lambda spec: spec.scheduling_policy is None or not group_labels_of(spec.template.raw),
            detail=lambda spec: ", ".join(f"metadata.labels {label}" for label in group_labels_of(spec.template.raw)),
            secret=True,
        ),
        # not in CEL: this arithmetic of three policies is more than a rule that can be read
        Rule(
            ("checkpoint.memory.sizeLimit",),
            "sizeLimit is too small for the checkpoints that the smallest world keeps",
            lambda spec: not 0 < (spec.checkpoint.memory.size_limit_bytes or 0) < size_limit_needed(spec)[0],
            detail=lambda spec: size_limit_needed(spec)[1],
        ),
    )
    FIXED_WHILE_RUNNING: ClassVar[tuple[str, ...]] = (
        "template",
        "nprocPerNode",
        "schedulingPolicy",
        "healthPolicy.heartbeatSeconds",
        "checkpoint.memory",
        *(f"checkpoint.persistent.{name}" for name in ("uri", *_INTERVALS, "keep")),
    )
    """Fields that workers read once, when they are made: they change only while `suspend` is true."""
    FIXED: ClassVar[tuple[str, ...]] = ("managedBy", "checkpoint.persistent.uri")
    """Fields that never change once they are given."""


def allowed_sizes(spec: TrainingJobSpec) -> tuple[int, ...]:
    """Lists the numbers of workers that a world may have, ascending."""
    policy = spec.elastic_policy
    if policy is None:
        return (spec.replicas,)
    if policy.replica_discrete_values:
        return tuple(sorted(policy.replica_discrete_values))
    return tuple(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step))


_GOOD_KEPT = 2
"""Checkpoints for a rollback: the last one whose losses were normal, and the next that may turn out to be one."""


def good_checkpoints_kept(spec: TrainingJobSpec) -> int:
    """Returns how many checkpoints with normal losses a memory server keeps for a rollback, in addition to `keep`."""
    numerics, memory = spec.health_policy.numerics, spec.checkpoint.memory
    if numerics is None:
        return 0
    # with saves further apart than it takes to prove one, the last good one is among the newest two
    seldom = memory.interval_steps is not None and memory.interval_steps >= numerics.good_after_steps
    return 0 if seldom and memory.keep > 1 else _GOOD_KEPT


def checkpoints_in_memory(spec: TrainingJobSpec) -> int:
    """Returns the largest number of a job's checkpoints that a memory server holds at a time.

    Those kept, one being written, one pinned while it is uploaded, and the good ones for a rollback. The check of a spec
    and the budget of a running job both ask here: when each had a formula of its own, valid jobs were refused.
    """
    policy = spec.checkpoint
    return policy.memory.keep + 1 + (policy.persistent is not None) + good_checkpoints_kept(spec)


def size_limit_needed(spec: TrainingJobSpec) -> tuple[int, str]:
    """Returns the bytes that each node of the smallest world needs for checkpoints, and why; 0 where it is unknown."""
    expected, memory = spec.checkpoint.expected_bytes, spec.checkpoint.memory
    if expected is None:
        return 0, ""
    nodes, held = min(allowed_sizes(spec)), checkpoints_in_memory(spec)
    copies = min(memory.replicas, nodes)
    needed = -(-held * copies * expected // nodes)
    why = (
        f"at least {quantity_of(needed)} a node are needed at the smallest world ({nodes} workers), which holds {held}"
        f" checkpoints at a time ({memory.keep} kept), with {copies} copies of {quantity_of(expected)}"
    )
    return needed, why


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
    """It has this operator's finalizer: once deleted, its object stays until the operator has deleted its persistent data."""
    accepted_loss: str = ""
    """The value of the job's annotation `ACCEPT_LOSS`; empty: the job has no such annotation."""
    rollback: str = ""
    """The value of the job's annotation `ROLLBACK`; empty: the job has no such annotation."""


# ---- gang schedulers -------------------------------------------------------------------------------------------------
# Describes the gang schedulers that place a job's workers. Pure; read by `fields` and the Kubernetes fabric.


@dataclass(frozen=True, slots=True)
class GangScheduler:
    """One gang scheduler's API, and its mark on pods."""

    api_version: str
    """Of its PodGroup."""
    scheduler_name: str
    """Under which it is installed by its own chart."""
    group_label: str
    """Key of a pod's label; its value is the group's name."""


GANG_SCHEDULERS: Mapping[Gang, GangScheduler] = {
    "Coscheduling": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", "scheduling.x-k8s.io/pod-group"
    ),
}


def group_labels_of(template: Mapping[str, Any]) -> list[str]:
    """Lists the labels by which a pod template names a pod group itself."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return [one.group_label for one in GANG_SCHEDULERS.values() if one.group_label in labels]
