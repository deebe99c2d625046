"""Exports the metrics of each job, read from its last reconcile when Prometheus scrapes.

This module declares each metric, and `JobMetrics.series` yields its series; docs/operations.md says what it means. No
series outlives a scrape, so none has to be removed: once the reconciler calls `forget`, because the job was deleted or
another replica leads it, the next scrape shows nothing of the job.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.timeouts import BUCKETS_SECONDS
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Incident, JobStatus, Phase
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.maintenance.maintenance_plan import Maintenance
from surefoot_operator.policy.maintenance.memory_budget import HolderShare
from surefoot_operator.policy.report.time_spent import goodput, seconds_spent

Labels = tuple[str, ...]
_JobName: TypeAlias = tuple[str, str]
"""Its namespace and its name."""
_Durations: TypeAlias = tuple[float, ...]
"""Of a histogram's series: the sum of its seconds, then the count in each bucket."""

_PHASES = get_args(Phase)
_HOLDER_STATES = ("Ready", "Silent", "Gone")
_KINDS = (
    "node-lost",
    "agent-lost",
    "worker-silent",
    "trainer-failed",
    "checkpoint-lost",
    "unreadable",
    "startup",
    "hang",
    "numerics",
    "planned",
)
_RECOVERY = ("claimed", "stopped", "sealed", "assigned", "first-step")
_BOUNDS = (*BUCKETS_SECONDS, math.inf)
_BOUND_TEXTS = tuple(floatToGoString(bound) for bound in _BOUNDS)  # type: ignore[no-untyped-call]
_NO_DURATIONS: _Durations = (0.0,) * (len(_BOUNDS) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class JobFamily:
    """One metric that each job has."""

    name: str
    text: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: Labels


FAMILIES: list[JobFamily] = []


def _gauge(name: str, text: str, *labels: str) -> JobFamily:
    return _declare(name, text, "gauge", labels)


def _counter(name: str, text: str, *labels: str) -> JobFamily:
    return _declare(name, text, "counter", labels)


def _declare(name: str, text: str, kind: Literal["gauge", "counter", "histogram"], labels: Labels) -> JobFamily:
    FAMILIES.append(JobFamily(name, text, kind, ("namespace", "job", *labels)))
    return FAMILIES[-1]


phase = _gauge("surefoot_job_phase", "1 for the phase that the job is in, 0 for the others.", "phase")
world_size = _gauge("surefoot_world_size", "Ranks in the committed world.")
job_epoch = _gauge("surefoot_job_epoch", "Epoch of the world, claimed or committed.")
job_step = _gauge("surefoot_job_step", "Highest step that any rank of the world has finished.")
data_passes = _gauge("surefoot_job_data_passes", "Passes over the data, the share of the present one included.")
samples_per_second = _gauge(
    "surefoot_job_samples_per_second", "Samples a second at the pace of the last steps; NaN where nobody tells."
)
agents_connected = _gauge("surefoot_agents_connected", "Agents of the job whose line is open.")
holders = _gauge("surefoot_holders", "Memory-tier instances as the job finds them.", "state")
protected = _gauge("surefoot_checkpoint_protected", "1 while a failure now would find a checkpoint in safety.")
copies = _gauge(
    "surefoot_checkpoint_copies", "Copies of the newest complete checkpoint in memory, the least over its ranks."
)
memory_needed = _gauge(
    "surefoot_memory_needed_bytes", "What a node's holder must take of the job's checkpoints.", "node"
)
memory_available = _gauge(
    "surefoot_memory_available_bytes", "What a node's holder may take of the job's checkpoints.", "node"
)
complete_step = _gauge("surefoot_checkpoint_complete_step", "Newest complete checkpoint's step.", "tier")
complete_at = _gauge(
    "surefoot_checkpoint_complete_timestamp_seconds",
    "When the newest complete checkpoint was first seen to be complete.",
    "tier",
)
interval_steps = _gauge(
    "surefoot_checkpoint_interval_steps", "Steps between two saves to a tier now, asked for or chosen.", "tier"
)
interval_input_seconds = _gauge(
    "surefoot_checkpoint_interval_input_seconds",
    "What the interval of a tier was chosen from (input: wanted, step, cost, drain, incident).",
    "tier",
    "input",
)
memory_loss_odds = _gauge(
    "surefoot_checkpoint_memory_loss_odds", "Estimated share of incidents that take every copy in memory."
)
incomplete = _counter(
    "surefoot_incomplete_checkpoints_total",
    "Checkpoints that a rank never saved its part of, so that the other parts were dropped.",
)
promotions_abandoned = _counter(
    "surefoot_promotions_abandoned_total", "Checkpoints that could not be uploaded and were left for a newer one."
)
rollbacks = _counter("surefoot_rollbacks_total", "Returns to an earlier checkpoint, by policy or as a person asked.")
straggler_slowdown_ratio = _gauge(
    "surefoot_straggler_slowdown_ratio",
    "How many times as long as its peers the worst straggler works; 1: no rank is persistently slower.",
)
good_step = _gauge("surefoot_good_checkpoint_step", "Step of the newest checkpoint that is proven to be good.")
incidents = _counter("surefoot_incidents_total", "Failures and planned changes that a new world answered.", "kind")
incident_at = _gauge("surefoot_incident_timestamp_seconds", "First sign of the newest incident.", "kind")
recovery_seconds = _declare(
    "surefoot_recovery_duration_seconds",
    "From the first sign of a failure to the end of each phase of its recovery.",
    "histogram",
    ("phase",),
)
restarts = _counter("surefoot_restarts_total", "Changes of the world after a failure.", "cause")
lost_steps = _counter("surefoot_lost_steps_total", "Steps that had to be run again.")
time_seconds = _gauge(
    "surefoot_job_time_seconds",
    "Where a job's seconds went since it started; the categories add up to its age.",
    "category",
)
goodput_ratio = _gauge(
    "surefoot_job_goodput_ratio", "Share of training that was not run again, of all time but suspension."
)

_Key: TypeAlias = tuple[JobFamily, Labels]
_Series: TypeAlias = tuple[JobFamily, Labels, float | _Durations]

# a rate sees the first of anything only if the series was there before it
_COUNTERS_AT_ZERO: dict[_Key, float] = {
    **{(family, ()): 0.0 for family in (lost_steps, promotions_abandoned, incomplete, rollbacks)},
    **{(family, (kind,)): 0.0 for family in (incidents, restarts) for kind in _KINDS},
}
_DURATIONS_AT_ZERO: dict[str, _Durations] = dict.fromkeys(_RECOVERY, _NO_DURATIONS)


class JobMetrics:
    """What one job shows: its last reconcile, and what was counted since it is looked after here."""

    def __init__(self) -> None:
        self._shown_as: _JobName | None = None
        self._last: tuple[Observed, JobStatus] | None = None
        self._counts: dict[_Key, float] = {}
        self._durations: dict[str, _Durations] = {}
        self._incident_seconds: dict[str, float] = {}
        self._newest: dict[str, tuple[Checkpoint, float]] = {}
        """Tier -> its newest complete checkpoint, and when it was first seen to be complete."""
        self._copies: int | None = None
        self._slowdown_ratio: float | None = None
        """Of the worst straggler in the newest committed world."""
        self._shares: tuple[HolderShare, ...] = ()
        self._unrecoverable: frozenset[Checkpoint] = frozenset()

    def show(self, seen: Observed, status: JobStatus, kept: Maintenance | None) -> None:
        """Shows this reconcile from now on."""
        self._begin_counters(status)
        if kept is not None:
            self._copies = kept.copies if _has_committed(status) else self._copies
            self._shares = kept.shares or self._shares
            self._count(promotions_abandoned, sum(e.reason == reasons.PROMOTION_ABANDONED for e in kept.events))
            unrecoverable = frozenset(h.checkpoint for h in kept.unrecoverable)
            self._count(incomplete, len(unrecoverable - self._unrecoverable))
            self._unrecoverable = unrecoverable
        if status.world is not None and status.world.members and _has_committed(status):
            self._slowdown_ratio = max((straggler.slowdown_ratio for straggler in status.stragglers), default=1.0)
        for tier, checkpoint in (("memory", status.last_complete), ("persistent", status.floor)):
            if checkpoint is not None and (tier not in self._newest or self._newest[tier][0] != checkpoint):
                self._newest[tier] = checkpoint, seen.now
        self._last = seen, status
        self._show_as(seen.job)

    def count_changes(self, old: JobStatus, new: JobStatus, job: TrainingJob) -> None:
        """Counts what is new in a status that was just written."""
        self._begin_counters(new)
        if new.restarts > old.restarts and new.incidents:
            self._count(restarts, new.restarts - old.restarts, new.incidents[-1].kind)
        self._count(rollbacks, new.rollbacks - old.rollbacks)
        answered = {_name(i) for i in old.incidents if i.assigned_seconds is not None}
        over = {_name(i) for i in old.incidents if i.first_step_seconds is not None}
        for incident in new.incidents:
            # counted once it is answered: until then its kind may still turn out to be another
            if incident.assigned_seconds is not None and _name(incident) not in answered:
                self._count(incidents, 1, incident.kind)
                self._incident_seconds[incident.kind] = incident.detected_seconds
            if incident.first_step_seconds is not None and _name(incident) not in over:
                self._count_recovery(incident)
        self._show_as(job)

    def forget(self) -> None:
        """The job is not looked after here any more."""
        if self._shown_as is not None:
            job_collector.forget(self._shown_as, self)

    def _show_as(self, job: TrainingJob) -> None:
        self._shown_as = job.namespace, job.name
        job_collector.show(self._shown_as, self)

    def series(self) -> Iterator[_Series]:
        """Yields what the job shows now. Prometheus asks in a thread of its own: `copy` of a dictionary is one step."""
        for (family, labels), count in self._counts.copy().items():
            yield family, labels, count
        for recovery_phase, durations in self._durations.copy().items():
            yield recovery_seconds, (recovery_phase,), durations
        for kind, detected_seconds in self._incident_seconds.copy().items():
            yield incident_at, (kind,), detected_seconds
        if self._last is not None:
            seen, status = self._last
            time_spent = seconds_spent(status.time_spent, seen.now)
            yield from self._series_while_it_exists(seen, status, time_spent)
            if not _is_over(status):
                yield from self._series_until_it_ends(seen, status, time_spent)

    def _series_while_it_exists(
        self, seen: Observed, status: JobStatus, time_spent: Mapping[str, float]
    ) -> Iterator[_Series]:
        world = status.world
        for name in _PHASES if world is not None or self._durations else (status.phase,):
            yield phase, (name,), status.phase == name
        yield world_size, (), world.size if world is not None and _has_committed(status) else 0
        epoch = world.epoch if world is not None else 0
        yield job_epoch, (), epoch
        # 0 is what a rank has told that made no step in this world yet: the job is where it was
        steps = [s.progress.step for s in seen.sessions if s.epoch == epoch and s.progress.step]
        yield job_step, (), max(steps, default=status.step)
        goodput_now = goodput(time_spent)
        if goodput_now is not None:
            yield goodput_ratio, (), goodput_now

    def _series_until_it_ends(
        self, seen: Observed, status: JobStatus, time_spent: Mapping[str, float]
    ) -> Iterator[_Series]:
        for category, seconds in time_spent.items():
            if seconds:
                yield time_seconds, (category,), seconds
        if status.data is not None:
            yield data_passes, (), status.data.passes
            yield samples_per_second, (), status.data.samples_per_second or math.nan
        yield agents_connected, (), sum(s.connected for s in seen.sessions)
        for state in _HOLDER_STATES:
            yield holders, (state,), sum(h.state == state for h in seen.holders)
        yield (
            protected,
            (),
            any(c.type == reasons.CHECKPOINT_PROTECTED and c.status == "True" for c in status.conditions),
        )
        if self._copies is not None:
            yield copies, (), self._copies
        for family, bytes_by_node in zip((memory_needed, memory_available), _memory_by_node(self._shares), strict=True):
            for node, node_bytes in bytes_by_node.items():
                yield family, (node,), node_bytes
        for tier, (checkpoint, complete_seconds) in self._newest.copy().items():
            yield complete_step, (tier,), checkpoint.step
            yield complete_at, (tier,), complete_seconds
        yield from _interval_series(seen.job, status)
        if self._slowdown_ratio is not None:
            yield straggler_slowdown_ratio, (), self._slowdown_ratio
        if status.last_good is not None:
            yield good_step, (), status.last_good.step

    def _begin_counters(self, status: JobStatus) -> None:
        """A job that never had a world counts nothing: a thousand of them may wait for one."""
        if not self._durations and _may_count(status):
            self._counts, self._durations = _COUNTERS_AT_ZERO | self._counts, dict(_DURATIONS_AT_ZERO)

    def _count(self, family: JobFamily, amount: float, *labels: str) -> None:
        assert amount >= 0, "counters only grow"
        if amount or self._counts:
            self._counts[family, labels] = self._counts.get((family, labels), 0.0) + amount

    def _count_recovery(self, incident: Incident) -> None:
        moments = (
            incident.claimed_seconds,
            incident.stopped_seconds,
            incident.sealed_seconds,
            incident.assigned_seconds,
            incident.first_step_seconds,
        )
        for recovery_phase, at_seconds in zip(_RECOVERY, moments, strict=True):
            if at_seconds is not None:
                seconds = max(0.0, at_seconds - incident.detected_seconds)
                total, *counts = self._durations[recovery_phase]
                counts[bisect_left(_BOUNDS, seconds)] += 1.0
                self._durations[recovery_phase] = (total + seconds, *counts)
        self._count(lost_steps, incident.steps_lost or 0)


def _rendered(family: JobFamily, series: Iterable[tuple[Labels, float | _Durations]]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, durations in series:
            assert isinstance(durations, tuple)
            total, *counts = durations
            histogram.add_metric(labels, list(zip(_BOUND_TEXTS, accumulate(counts), strict=True)), total)
        return histogram
    metric = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
        family.name, family.text, labels=family.labels
    )
    for labels, value in series:
        assert not isinstance(value, tuple)
        metric.add_metric(labels, value)
    return metric


def _interval_series(job: TrainingJob, status: JobStatus) -> Iterator[_Series]:
    """Steps as they are now; what a choice was made from only where the operator chose."""
    policy = job.spec.checkpoint
    fixed = policy.persistent.fixed_steps if policy.persistent is not None else None
    for tier, chosen, asked_steps in (
        ("memory", status.memory_interval, policy.memory.base_steps),
        ("persistent", status.persistent_interval, fixed),
    ):
        steps = chosen.steps if chosen is not None else asked_steps
        if steps is not None:
            yield interval_steps, (tier,), steps
        if chosen is None:
            continue
        for name in ("wanted", "step", "cost", "drain", "incident"):
            seconds = getattr(chosen, f"{name}_seconds")
            if seconds is not None:
                yield interval_input_seconds, (tier, name), seconds
        if chosen.memory_loss_odds is not None:
            yield memory_loss_odds, (), chosen.memory_loss_odds


def _memory_by_node(shares: Iterable[HolderShare]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that each node's servers must take, and may take."""
    needed, available = Counter[str](), Counter[str]()
    for share in shares:
        needed[share.node] += share.needed_bytes
        if share.available_bytes is not None:
            available[share.node] += share.available_bytes
    return needed, available


def _is_over(status: JobStatus) -> bool:
    return status.phase in ("Complete", "Failed")


def _has_committed(status: JobStatus) -> bool:
    return status.world is not None and status.world.state == "Committed" and not _is_over(status)


def _may_count(status: JobStatus) -> bool:
    """Whether a world of the job runs or ran, or something befell it before."""
    committed = status.world is not None and status.world.state == "Committed"
    return committed or bool(status.lineage or status.incidents)


def _name(incident: Incident) -> tuple[int, float]:
    return incident.epoch, incident.detected_seconds


class JobCollector(Collector):
    """Renders the series of every job that is looked after here, as prometheus-client collects them."""

    def __init__(self) -> None:
        self._jobs: dict[_JobName, JobMetrics] = {}

    def show(self, name: _JobName, shown: JobMetrics) -> None:
        self._jobs[name] = shown

    def forget(self, name: _JobName, shown: JobMetrics) -> None:
        """The job is not shown any more; a later one of its name is."""
        if self._jobs.get(name) is shown:
            del self._jobs[name]

    def describe(self) -> Iterator[Metric]:
        """Names the families, so that nothing else takes their names."""
        return (_rendered(family, ()) for family in FAMILIES)

    def collect(self) -> Iterator[Metric]:
        series: dict[JobFamily, list[tuple[Labels, float | _Durations]]] = {family: [] for family in FAMILIES}
        for name, shown in self._jobs.copy().items():
            for family, labels, value in shown.series():
                series[family].append(((*name, *labels), value))
        for family in FAMILIES:
            yield _rendered(family, series.pop(family))


job_collector = JobCollector()
REGISTRY.register(job_collector)
