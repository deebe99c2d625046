"""Reads mappings into frozen dataclasses; defines the limits and the YAML names of spec fields.

Pure; called by `parse`, for what type hints can express. No value is ever converted: `"3"` is not a number and `1.0`
not a whole number, because a wrong guess becomes a world of the wrong size later.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from surefoot_operator.api import spec
from surefoot_operator.api.spec import (
    CheckpointPolicy,
    ElasticPolicy,
    MemoryTierSpec,
    NodeSignals,
    PersistentTierSpec,
    RestoreFrom,
    SchedulingPolicy,
    TrainingJobSpec,
    marks_of,
)
from surefoot_operator.errors import Hidden, SpecError

# ---- spec limits -----------------------------------------------------------------------------------------------------
# Defines the limits of each spec field and of their combinations.


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
    """Returns how many checkpoints with normal losses a memory server keeps for a rollback, beside `keep`."""
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


# ---- yaml names ------------------------------------------------------------------------------------------------------
# Maps dataclass fields to YAML names, and lists unsupported fields. Pure; called below, by `parse`, and by the test
# that compares docs/api.md with the dataclasses.

RENAMED = {
    ("MemoryTierSpec", "size_limit_bytes"): "sizeLimit",
    ("MemoryTierSpec", "bandwidth_bytes"): "bandwidth",
    ("PersistentTierSpec", "bandwidth_bytes"): "bandwidth",
    ("FailureRule", "exit_codes"): "onExitCodes",
    ("Template", "raw"): "",
    ("FailureRule", "operator"): "",
}
"""Where YAML does not simply say the field in camelCase; empty: it is part of another field."""

NOT_YET: dict[str, dict[str, str]] = {
    "TrainingJobSpec": {
        "nodeSelector": "put it into template.spec",
    },
    "ElasticPolicy": {"gracefulShutdownTimeoutSeconds": "checkpoint.drainGraceSeconds bounds the wait for saves"},
    "RunPolicy": {
        "schedulingPolicy": "write it as spec.schedulingPolicy",
        "faultDeadlineSeconds": "checkpoint.holderReturnSeconds bounds the wait for lost memory",
    },
    "SchedulingPolicy": {
        "minAvailable": "the group's minimum is the smallest world: elasticPolicy.minReplicas, or replicas",
        "minResources": "the scheduler adds up what the pods request",
    },
    "FailurePolicy": {
        "restartStrategy": "trainers are always restarted in place while their worker runs",
    },
    "FailureRule": {"onPodConditions": "rules match exit codes"},
    "CheckpointPolicy": {
        "onEviction": "before a pod is evicted, the world halts at a saved step",
    },
}
"""Fields that a person may expect from the API or from its neighbours: refused by name, never swallowed."""


REFUSED_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("RunPolicy", "clean_pod_policy"): {
        "None": "write Running (the default): pods that ended by themselves stay for their logs, and one that still runs"
        " would hold its node for ever, because nothing would delete it"
    },
    ("TrainingJobSpec", "nproc_per_node"): dict.fromkeys(
        ("auto", "gpu", "cpu"),
        "write the number of trainers in each worker, as a rule that of its GPUs: the world size and the placement of"
        " checkpoints follow from it before any worker runs on a node",
    ),
}
"""What neighbouring systems take in a field that is here as well: refused with the reason and what to write instead."""


def camel_case(name: str) -> str:
    """Converts `min_replicas` to `minReplicas`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def yaml_name(cls: type[Any], field: str) -> str:
    """The field's name in YAML; empty where it has none."""
    return RENAMED.get((cls.__name__, field), camel_case(field))


def yaml_fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Maps YAML names to fields, without those that are refused."""
    refused = NOT_YET.get(cls.__name__, {})
    named = {yaml_name(cls, field.name): field for field in dataclasses.fields(cls)}
    return {name: field for name, field in named.items() if name and name not in refused}


API_VERSION = f"{spec.GROUP}/{spec.VERSION}"


# ---- fields ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")

# what changes how a terminal shows the rest: C0, C1, and overrides of the direction of text
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SUFFIX: dict[str, int] = {s: 1000**n for n, s in enumerate(["", *"kMGTP"])} | {
    f"{s}i": 1024**n for n, s in enumerate("KMGTP", 1)
}
_QUANTITY = re.compile(r"(\d{1,18})(?:\.(\d{1,9}))?([kMGTP]?|[KMGTP]i)")
_QUANTITIES = "a positive number of bytes is allowed, such as 8Gi, 500M or 1048576"


def mapping(body: object, path: str) -> dict[str, Any]:
    """Returns `body` if it is a mapping with text keys. Raises SpecError."""
    if not isinstance(body, dict):
        raise SpecError(path, Hidden() if isinstance(body, str) else body, "a mapping of fields is allowed")
    for key in body:
        if not isinstance(key, str):
            raise SpecError(path, key, "only text is allowed as the name of a field")
    return body


def optional_mapping(body: object, path: str) -> dict[str, Any]:
    """Returns an empty mapping for None, else `mapping`."""
    return {} if body is None else mapping(body, path)


def check_names(body: Mapping[str, Any], allowed: typing.Iterable[str], path: str, owner: str = "") -> None:
    """Refuses the first unknown or unsupported field by name. Raises SpecError."""
    allowed = list(allowed)
    refused = NOT_YET.get(owner, {})
    for name in body:
        if name in allowed:
            continue
        where = f"{path}.{name}" if path else name
        if name in refused:
            raise SpecError(where, body[name], f"this field is not supported, leave it out: {refused[name]}")
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(sorted(allowed))}"
        raise SpecError(path or "the document", name, f"there is no field of that name; {hint}")


@functools.cache
def _hints(cls: typing.Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)  # compiles every annotation, at each call


def read(cls: type[T], body: object, path: str, given: Mapping[str, Any] | None = None) -> T:
    """Reads one `cls` from `body`. Raises SpecError.

    `given` holds fields (by dataclass name) that the caller has read itself.
    """
    given = given or {}
    values = dict(given)
    named = yaml_fields(cls)
    found = mapping(body, path)
    check_names(found, named, path, cls.__name__)
    hints = _hints(typing.cast(typing.Hashable, cls))
    for name, field in named.items():
        if field.name in given:
            continue
        value = found.get(name)
        if value is None:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise SpecError(f"{path}.{name}", None, "this field is required")
            continue
        instead = REFUSED_VALUES.get((cls.__name__, field.name), {}).get(value) if isinstance(value, str) else None
        if instead is not None:
            raise SpecError(f"{path}.{name}", value, instead)
        limit = LIMITS.get((cls.__name__, field.name), ANYTHING)
        values[field.name] = _value(hints[field.name], value, f"{path}.{name}", limit)
    return cls(**values)


def _value(hint: Any, value: Any, path: str, limit: Limit) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if limit.quantity:
        size = quantity(value, path)
        if not limit.holds(size):
            raise SpecError(path, value, limit.allowed)
        return size
    if origin in (Union, types.UnionType):
        return _one_of([a for a in arguments if a is not type(None)], value, path, limit)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            quoted = ", in quotes: without them YAML reads On, Off, Yes and No as true or false"
            allowed = f"allowed are {', '.join(map(str, arguments))}"
            raise SpecError(path, value, allowed + (quoted if isinstance(value, bool) else ""))
        return value
    if origin is tuple:
        return tuple(
            _value(arguments[0], item, f"{path}[{i}]", limit) for i, item in enumerate(items(value, path, limit))
        )
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type[Any], hint), value, path)
    if hint is str:
        return text(value, path, limit)
    if hint is bool:
        if not isinstance(value, bool):
            raise SpecError(path, value, "true or false is allowed")
        return value
    return number(value, path, limit, whole=hint is int)


def _one_of(hints: list[Any], value: Any, path: str, limit: Limit) -> Any:
    """Reads a field that takes a value of the first type, or one of its words: a step, or `latest`."""
    words = [word for hint in hints[1:] if get_origin(hint) is Literal for word in get_args(hint)]
    if words and isinstance(value, str):
        if value in words:
            return value
        raise SpecError(path, value, f"a number, or {' or '.join(words)}, is allowed")
    return _value(hints[0], value, path, limit)


def items(value: object, path: str, limit: Limit) -> list[Any]:
    """Returns `value` if it is a list within the limit. Raises SpecError."""
    if not isinstance(value, list):
        raise SpecError(path, value, "a list is allowed")
    if len(value) > limit.items:
        raise SpecError(path, Hidden(f"a list of {len(value)}"), f"at most {limit.items} are allowed")
    return value


def text(value: object, path: str, limit: Limit = ANYTHING) -> str:
    """Returns `value` if it is one line within `limit`. Raises SpecError."""
    if not isinstance(value, str) or not value:
        raise SpecError(path, value, "text that is not empty is allowed (numbers and true/false in quotes)")
    # an address may hold a password, in the wrong place
    told = Hidden() if "@" in value else value
    if _UNSEEN.search(value):
        raise SpecError(path, told, "text of one line is allowed, without control characters")
    if len(value) > limit.characters:
        raise SpecError(path, told, f"at most {limit.characters} characters are allowed")
    if limit.pattern is not None and not limit.pattern.fullmatch(value):
        raise SpecError(path, told, f"{limit.allowed} is allowed")
    return value


def number(value: object, path: str, limit: Limit, whole: bool) -> int | float:
    """Returns `value` if it is a number within `limit`. Raises SpecError."""
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not limit.holds(typing.cast(float, value)):
        raise SpecError(path, value, f"{kind} {limit.sentence()} is allowed".replace("  ", " "))
    return typing.cast(int, value) if whole else float(typing.cast(float, value))


def quantity(value: object, path: str) -> int:
    """Reads bytes in Kubernetes' notation. Raises SpecError."""
    size = _bytes_of(value)
    if not size:
        raise SpecError(path, value, _QUANTITIES)
    return size


def _bytes_of(quantity: object) -> int | None:
    """The bytes that `quantity` says, or None where it is none. Fractions of a byte round up, as Kubernetes does."""
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        return None
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        return None
    whole, fraction, suffix = match[1], match[2] or "", match[3]
    # in whole numbers: a float would lose bytes above 2**53
    scaled = int(whole + fraction) * _SUFFIX[suffix]
    return -(-scaled // int(10 ** len(fraction)))
