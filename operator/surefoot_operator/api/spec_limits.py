"""Defines the limits of each spec field and of their combinations.

Pure; called by `fields` and `parse`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from surefoot_operator.api.gang_schedulers import marks_of
from surefoot_operator.api.spec import (
    CheckpointPolicy,
    ElasticPolicy,
    MemoryTierSpec,
    NodeSignals,
    PersistentTierSpec,
    RestoreFrom,
    SchedulingPolicy,
    TrainingJobSpec,
)
from surefoot_operator.errors import SpecError


@dataclass(frozen=True, slots=True)
class Limit:
    """The allowed range of a number, or form of a text.

    `quantity`: bytes in Kubernetes' notation. `allowed`: `pattern`, or a quantity's range, in words.
    """

    least: float = 0
    most: float | None = None
    quantity: bool = False
    characters: int = 1024
    pattern: re.Pattern[str] | None = None
    allowed: str = ""
    items: int = 1000

    def holds(self, value: float) -> bool:
        most = _LARGEST if self.most is None else self.most
        return (
            self.least <= value <= most
        )  # not so for NaN; and never converted: a whole number may be too large for it

    def sentence(self) -> str:
        low = f"of at least {self.least:g}"
        return low if self.most is None else f"{low} and at most {self.most:g}"


ANYTHING = Limit()
_LARGEST = sys.float_info.max
_GOOD_KEPT = 2
"""Checkpoints for a rollback: the last one whose losses were normal, and the next that may turn out to be one."""


_MANAGER = re.compile(r"(?=.{3,63}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")

_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

_COUNT = Limit(least=1, most=100_000)
_POSITIVE = Limit(least=0.001)
"""A time that is waited for, in seconds: no loop here is faster than a millisecond."""
_STEPS = Limit(least=1)
_BYTES = Limit(quantity=True)
_BANDWIDTH = Limit(least=1 << 20, quantity=True, allowed="at least 1Mi, in bytes a second, is allowed")
"""Bytes a second; slower than a chunk every few seconds nothing would ever be saved."""

LIMITS = {
    ("TrainingJobSpec", "replicas"): _COUNT,
    ("TrainingJobSpec", "nproc_per_node"): Limit(least=1, most=1024),
    ("TrainingJobSpec", "spares"): Limit(most=1000),
    ("ElasticPolicy", "min_replicas"): _COUNT,
    ("ElasticPolicy", "max_replicas"): _COUNT,
    ("ElasticPolicy", "replica_increment_step"): _COUNT,
    ("ElasticPolicy", "replica_discrete_values"): Limit(least=1, most=100_000, items=64),
    ("RunPolicy", "active_deadline_seconds"): _POSITIVE,
    ("RunPolicy", "startup_deadline_seconds"): _POSITIVE,
    ("RunPolicy", "scheduling_deadline_seconds"): _POSITIVE,
    ("SchedulingPolicy", "queue"): Limit(
        characters=253, pattern=_OBJECT, allowed="the name of a Volcano queue (a-z, 0-9, - and .)"
    ),
    ("SchedulingPolicy", "priority_class"): Limit(
        characters=253, pattern=_OBJECT, allowed="the name of a PriorityClass (a-z, 0-9, - and .)"
    ),
    ("SchedulingPolicy", "schedule_timeout_seconds"): Limit(least=1, most=2**31 - 1),
    ("FailurePolicy", "eval_period_seconds"): _POSITIVE,
    ("FailurePolicy", "max_no_progress_restarts"): _STEPS,
    ("FailureRule", "exit_codes"): Limit(least=-64, most=255, items=64),
    ("FailurePolicy", "rules"): Limit(items=32),
    ("HealthPolicy", "heartbeat_seconds"): Limit(least=0.05, most=60),
    ("HealthPolicy", "heartbeat_timeout_seconds"): _POSITIVE,
    ("HealthPolicy", "step_timeout_seconds"): _POSITIVE,
    ("NumericsPolicy", "spike_steps"): Limit(least=1, most=1000),
    ("NumericsPolicy", "good_after_steps"): Limit(least=1, most=100_000),
    ("NumericsPolicy", "max_rollbacks"): Limit(least=1, most=100),
    ("MemoryTierSpec", "interval_steps"): _STEPS,
    ("MemoryTierSpec", "interval_seconds"): _POSITIVE,
    ("MemoryTierSpec", "replicas"): Limit(least=1, most=16),
    ("MemoryTierSpec", "keep"): Limit(least=1, most=1000),
    ("MemoryTierSpec", "size_limit_bytes"): _BYTES,
    ("MemoryTierSpec", "bandwidth_bytes"): _BANDWIDTH,
    ("MemoryTierSpec", "topology_key"): Limit(
        characters=317, pattern=_LABEL, allowed="the key of a node label, such as topology.kubernetes.io/zone,"
    ),
    ("PersistentTierSpec", "bandwidth_bytes"): _BANDWIDTH,
    ("PersistentTierSpec", "interval_steps"): _STEPS,
    ("PersistentTierSpec", "interval_seconds"): _POSITIVE,
    ("PersistentTierSpec", "keep"): Limit(least=1),
    ("PersistentTierSpec", "keep_every_steps"): _STEPS,
    ("PersistentTierSpec", "keep_seconds"): _POSITIVE,
    ("PersistentTierSpec", "endpoint"): Limit(
        pattern=re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?"),
        allowed="http://host:port or https://host:port, without credentials,",
    ),
    ("PersistentTierSpec", "region"): Limit(
        pattern=re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"),
        allowed="the name of a region, such as eu-central-1,",
    ),
    ("PersistentTierSpec", "secret_ref"): Limit(
        characters=253, pattern=_OBJECT, allowed="the name of a secret (a-z, 0-9, - and .)"
    ),
    ("PersistentTierSpec", "sse"): Limit(
        pattern=re.compile(r"AES256|aws:kms(:dsse)?|aws:kms:\S+"), allowed="AES256, aws:kms or aws:kms:KEY"
    ),
    ("FailureRule", "name"): Limit(characters=253),
    ("NodeSignals", "taints"): Limit(characters=512, items=64),
    ("NodeSignals", "conditions"): Limit(characters=512, items=64),
    ("NodeSignals", "labels"): Limit(characters=512, items=64),
    ("RestoreFrom", "step"): _STEPS,
    ("CheckpointPolicy", "expected_bytes"): _BYTES,
}
"""Of fields whose numbers are not just any from 0 up, or whose texts are not just any line."""


def allowed_sizes(spec: TrainingJobSpec) -> tuple[int, ...]:
    """Lists the numbers of workers that a world may have, ascending."""
    policy = spec.elastic_policy
    if policy is None:
        return (spec.replicas,)
    if policy.replica_discrete_values:
        return tuple(sorted(set(policy.replica_discrete_values)))
    return tuple(range(policy.min_replicas, policy.max_replicas + 1, policy.replica_increment_step))


def check_spec(spec: TrainingJobSpec) -> None:
    """Refuses fields that contradict each other, or exclude every world. Raises SpecError."""
    if spec.elastic_policy is not None:
        _check_sizes(spec, spec.elastic_policy)
    if not _MANAGER.fullmatch(spec.managed_by):
        sentence = "the name of a controller, domain/name of at most 63 characters, is allowed"
        raise SpecError("spec.managedBy", spec.managed_by, sentence)
    health = spec.health_policy
    if health.heartbeat_timeout_seconds < 2 * health.heartbeat_seconds:
        raise SpecError(
            "spec.healthPolicy.heartbeatTimeoutSeconds",
            health.heartbeat_timeout_seconds,
            f"at least two heartbeats, {2 * health.heartbeat_seconds:g} seconds, are allowed:"
            " one late heartbeat must not count as a lost worker",
        )
    _check_signals(health.node_signals or NodeSignals())
    names = [rule.name for rule in spec.failure_policy.rules]
    for name in names:
        if names.count(name) > 1:
            raise SpecError("spec.failurePolicy.rules", name, "each rule needs a name of its own")
    if spec.scheduling_policy is not None:
        _check_scheduling(spec.scheduling_policy, marks_of(spec.template.raw))
    _check_checkpoint(spec.checkpoint)
    _check_size_limit(spec)


def _check_scheduling(policy: SchedulingPolicy, marks: list[tuple[str, str]]) -> None:
    """What the chosen scheduler does not read would be waited for in vain."""
    path = "spec.schedulingPolicy"
    if policy.gang == "Coscheduling" and policy.queue is not None:
        raise SpecError(f"{path}.queue", policy.queue, "leave it out with gang Coscheduling: only Volcano has queues")
    if policy.gang == "Coscheduling" and policy.priority_class is not None:
        sentence = "leave it out with gang Coscheduling, and set template.spec.priorityClassName: its groups have none"
        raise SpecError(f"{path}.priorityClass", policy.priority_class, sentence)
    if policy.gang == "Volcano" and policy.schedule_timeout_seconds is not None:
        sentence = "leave it out with gang Volcano, which holds no nodes for a group that is not complete"
        raise SpecError(f"{path}.scheduleTimeoutSeconds", policy.schedule_timeout_seconds, sentence)
    for place, key in marks:
        sentence = "leave it out beside schedulingPolicy, which puts the workers into the job's own group"
        raise SpecError(f"spec.template.{place}", key, sentence)


def _check_signals(signals: NodeSignals) -> None:
    path = "spec.healthPolicy.nodeSignals"
    for name, wanted in (("conditions", signals.conditions), ("labels", signals.labels)):
        for place, entry in enumerate(wanted):
            left, sign, right = entry.partition("=")
            # a label may have no value; a condition always has a status
            if not (left and sign) or (name == "conditions" and not right):
                raise SpecError(f"{path}.{name}[{place}]", entry, "name=value is allowed")


def quantity_of(size_bytes: int) -> str:
    """Writes bytes as Kubernetes does, in the largest unit that leaves no rest: `3200Mi`."""
    for exponent, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes and size_bytes % (1 << exponent) == 0:
            return f"{size_bytes >> exponent}{unit}"
    return str(size_bytes)


def good_checkpoints_kept(spec: TrainingJobSpec) -> int:
    """How many checkpoints whose losses were normal are kept beside `keep`, for a rollback."""
    numerics, memory = spec.health_policy.numerics, spec.checkpoint.memory
    if numerics is None:
        return 0
    # with saves further apart than it takes to prove one, the last good one is among the newest two
    seldom = memory.interval_steps is not None and memory.interval_steps >= numerics.good_after_steps
    return 0 if seldom and memory.keep > 1 else _GOOD_KEPT


def checkpoints_in_memory(spec: TrainingJobSpec) -> int:
    """The most checkpoints of a job that a memory server holds at a time.

    Those kept, one being written, one pinned while it is uploaded, and the good ones for a rollback. The check of a spec
    and the budget of a running job both ask here: when each had a formula of its own, valid jobs were refused.
    """
    policy = spec.checkpoint
    return policy.memory.keep + 1 + (policy.persistent is not None) + good_checkpoints_kept(spec)


def _check_sizes(spec: TrainingJobSpec, policy: ElasticPolicy) -> None:
    path = "spec.elasticPolicy"
    if policy.min_replicas > policy.max_replicas:
        raise SpecError(f"{path}.minReplicas", policy.min_replicas, f"at most maxReplicas ({policy.max_replicas})")
    if policy.replica_discrete_values and policy.replica_increment_step != 1:
        raise SpecError(
            f"{path}.replicaIncrementStep", policy.replica_increment_step, "leave it out beside replicaDiscreteValues"
        )
    for size in policy.replica_discrete_values:
        if not policy.min_replicas <= size <= policy.max_replicas:
            bounds = f"sizes from minReplicas ({policy.min_replicas}) to maxReplicas ({policy.max_replicas})"
            raise SpecError(f"{path}.replicaDiscreteValues", size, f"{bounds} are allowed")
    sizes = allowed_sizes(spec)
    if spec.replicas not in sizes:
        shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
        raise SpecError("spec.replicas", spec.replicas, f"the elasticPolicy allows worlds of {shown} workers")


def _check_checkpoint(policy: CheckpointPolicy) -> None:
    memory, persistent = policy.memory, policy.persistent
    _check_interval("spec.checkpoint.memory", memory)
    if persistent is not None:
        _check_uri("spec.checkpoint.persistent", persistent.uri, persistent.endpoint)
        _check_interval("spec.checkpoint.persistent", persistent)
    if policy.restore_from is not None:
        _check_restore_from(policy.restore_from, persistent)


def _check_size_limit(spec: TrainingJobSpec) -> None:
    """Refuses a `sizeLimit` that the checkpoints of the smallest world do not fit in."""
    expected, memory = spec.checkpoint.expected_bytes, spec.checkpoint.memory
    if expected is None or memory.size_limit_bytes is None:
        return
    nodes, held = min(allowed_sizes(spec)), checkpoints_in_memory(spec)
    copies = min(memory.replicas, nodes)
    needed = -(-held * copies * expected // nodes)
    if needed > memory.size_limit_bytes:
        raise SpecError(
            "spec.checkpoint.memory.sizeLimit",
            quantity_of(memory.size_limit_bytes),
            f"at least {quantity_of(needed)} a node are needed at the smallest world ({nodes} workers), which holds"
            f" {held} checkpoints at a time ({memory.keep} kept), with {copies} copies of {quantity_of(expected)}",
        )


def _check_interval(path: str, tier: MemoryTierSpec | PersistentTierSpec) -> None:
    """One way to say how often: two of them would contradict each other sooner or later."""
    said = {
        "intervalSteps": tier.interval_steps,
        "intervalSeconds": tier.interval_seconds,
        "interval": tier.interval,
    }
    given = [name for name, value in said.items() if value is not None]
    if len(given) > 1:
        sentence = f"one of intervalSteps, intervalSeconds and interval is allowed; {given[0]} says {said[given[0]]}"
        raise SpecError(f"{path}.{given[1]}", said[given[1]], sentence)


def _check_restore_from(given: RestoreFrom, persistent: PersistentTierSpec | None) -> None:
    path = "spec.checkpoint.restoreFrom"
    if (given.uid is None) == (given.uri is None):
        shown = f"uid {given.uid!r} and a uri" if given.uid is not None else None
        raise SpecError(path, shown, "either the uid of an older job or the uri of its folder is allowed")
    if given.uid is not None:
        if persistent is None:
            raise SpecError(
                f"{path}.uid", given.uid, "give spec.checkpoint.persistent too, where that job's folder lies"
            )
        if given.uid in (".", "..") or "/" in given.uid:
            raise SpecError(f"{path}.uid", given.uid, "the name of a folder is allowed: the older job's metadata.uid")
    if given.uri is not None:
        _check_uri(path, given.uri, None)
        place, _, job = given.uri.rstrip("/").rpartition("/")
        if place in ("", "s3:/") or job in (".", ".."):
            sentence = "the folder of one job, file:///folder/UID or s3://bucket/prefix/UID, is allowed"
            raise SpecError(f"{path}.uri", given.uri, sentence)


def _check_uri(path: str, uri: str, endpoint: str | None) -> None:
    for name, value in (("uri", uri), ("endpoint", endpoint or "")):
        if "@" in value.split("://", 1)[-1].split("/", 1)[0]:
            # never repeat it: what stands before the @ is a password
            raise SpecError(f"{path}.{name}", "(not shown)", "credentials are not allowed here; use secretRef")
    scheme, _, rest = uri.partition("://")
    if scheme == "file" and rest.startswith("/") and len(rest) > 1:
        if endpoint is not None:
            raise SpecError(f"{path}.endpoint", endpoint, "leave it out: a folder has none")
        return
    if scheme == "s3" and rest.strip("/") and not rest.startswith("/"):
        return
    raise SpecError(f"{path}.uri", uri, "file:///absolute/folder or s3://bucket/prefix is allowed")
