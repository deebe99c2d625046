"""Exports the metrics of each job. Prometheus scrapes read the job's last reconcile.

Metrics are declared here, and `JobMetrics.series` yields their series; docs/monitoring.md describes them. No series
outlives its job: when a job ends or another replica takes it over, it is not read, so nothing has to be removed.
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
from surefoot_operator.api.time_spent import goodput, seconds_spent
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan
from surefoot_operator.policy.maintenance.memory_budget import MemoryServerBudget

Labels = tuple[str, ...]
_JobName: TypeAlias = tuple[str, str]
"""Namespace and name of a job."""
_Durations: TypeAlias = tuple[float, ...]
"""Values of a histogram series: the sum of its seconds, then the count in each bucket."""

_PHASES = get_args(Phase)
_SERVER_STATES = ("Ready", "Unreachable", "Gone")
_INCIDENT_KINDS = (
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
_RECOVERY_PHASES = ("claimed", "stopped", "fenced", "committed", "first-step")
_BOUNDS = (*BUCKETS_SECONDS, math.inf)
_BOUND_TEXTS = tuple(floatToGoString(bound) for bound in _BOUNDS)  # type: ignore[no-untyped-call]
_NO_DURATIONS: _Durations = (0.0,) * (len(_BOUNDS) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class JobFamily:
    """Declares one metric that every job exports."""

    name: str
    """Name of the metric in Prometheus."""
    text: str
    """Help text of the metric."""
    kind: Literal["gauge", "counter", "histogram"]
    labels: Labels
    """Names of its labels, `namespace` and `job` first."""


FAMILIES: list[JobFamily] = []


def _declare_gauge(name: str, text: str, *labels: str) -> JobFamily:
    return _declare(name, text, "gauge", labels)


def _declare_counter(name: str, text: str, *labels: str) -> JobFamily:
    return _declare(name, text, "counter", labels)


def _declare(name: str, text: str, kind: Literal["gauge", "counter", "histogram"], labels: Labels) -> JobFamily:
    FAMILIES.append(JobFamily(name, text, kind, ("namespace", "job", *labels)))
    return FAMILIES[-1]


phase = _declare_gauge("surefoot_job_phase", "1 for the phase that the job is in, 0 for the others.", "phase")
world_size = _declare_gauge("surefoot_world_size", "Ranks in the committed generation.")
requested_world_size = _declare_gauge(
    "surefoot_requested_world_size", "Ranks that the job asks for; an elastic job also trains with fewer."
)
job_generation = _declare_gauge("surefoot_job_generation", "Current generation, claimed or committed.")
job_step = _declare_gauge("surefoot_job_step", "Highest step that any rank of the current generation has finished.")
data_epochs = _declare_gauge(
    "surefoot_job_data_epochs", "Passes over the data so far, including the part of the current one."
)
samples_per_second = _declare_gauge(
    "surefoot_job_samples_per_second", "Samples a second over the last steps; NaN if the data does not report them."
)
agents_connected = _declare_gauge("surefoot_agents_connected", "Agents of the job that are connected to the operator.")
memory_servers = _declare_gauge("surefoot_memory_servers", "Memory servers as the job observes them.", "state")
protected = _declare_gauge(
    "surefoot_checkpoint_protected", "1 while a failure now would leave a checkpoint to restore."
)
copies = _declare_gauge(
    "surefoot_checkpoint_copies", "Copies of the newest complete checkpoint in memory, the minimum over its ranks."
)
memory_needed = _declare_gauge(
    "surefoot_memory_needed_bytes", "Bytes of the job's checkpoints that a node's memory server must store.", "node"
)
memory_available = _declare_gauge(
    "surefoot_memory_available_bytes", "Bytes of the job's checkpoints that a node's memory server may store.", "node"
)
complete_step = _declare_gauge("surefoot_checkpoint_complete_step", "Newest complete checkpoint's step.", "tier")
complete_seconds = _declare_gauge(
    "surefoot_checkpoint_complete_timestamp_seconds",
    "When the newest complete checkpoint was first observed to be complete.",
    "tier",
)
interval_steps = _declare_gauge(
    "surefoot_checkpoint_interval_steps", "Steps between two saves to a tier now, requested or chosen.", "tier"
)
interval_input_seconds = _declare_gauge(
    "surefoot_checkpoint_interval_input_seconds",
    "Values that the interval of a tier was chosen from (input: target, step, cost, flush, mtbf).",
    "tier",
    "input",
)
memory_loss_probability = _declare_gauge(
    "surefoot_checkpoint_memory_loss_probability", "Estimated share of incidents that take every copy in memory."
)
incomplete = _declare_counter(
    "surefoot_incomplete_checkpoints_total",
    "Checkpoints that were dropped because one rank never saved its part.",
)
uploads_abandoned = _declare_counter(
    "surefoot_uploads_abandoned_total", "Checkpoints that could not be uploaded and were left for a newer one."
)
rollbacks = _declare_counter(
    "surefoot_rollbacks_total", "Returns to an earlier checkpoint, by policy or because a user requested it."
)
straggler_slowdown_ratio = _declare_gauge(
    "surefoot_straggler_slowdown_ratio",
    "How many times as long as its peers the worst straggler works; 1: no rank is persistently slower.",
)
good_step = _declare_gauge("surefoot_good_checkpoint_step", "Step of the newest checkpoint that is known good.")
incidents = _declare_counter(
    "surefoot_incidents_total", "Failures and planned changes that led to a new generation.", "kind"
)
incident_seconds = _declare_gauge("surefoot_incident_timestamp_seconds", "First sign of the newest incident.", "kind")
recovery_seconds = _declare(
    "surefoot_recovery_duration_seconds",
    "From the first sign of a failure to the end of each phase of its recovery.",
    "histogram",
    ("phase",),
)
restarts = _declare_counter("surefoot_restarts_total", "New generations after a failure.", "cause")
lost_steps = _declare_counter("surefoot_lost_steps_total", "Steps that had to be run again.")
time_seconds = _declare_gauge(
    "surefoot_job_time_seconds",
    "Where a job's seconds went since it started; the categories add up to its age.",
    "category",
)
goodput_ratio = _declare_gauge(
    "surefoot_job_goodput_ratio", "Share of training that was not run again, of all time but suspension."
)

_Key: TypeAlias = tuple[JobFamily, Labels]
_Series: TypeAlias = tuple[JobFamily, Labels, float | _Durations]

# Start counters at 0: `rate()` misses the first increment of a series that did not exist before.
_COUNTERS_AT_ZERO: dict[_Key, float] = {
    **{(family, ()): 0.0 for family in (lost_steps, uploads_abandoned, incomplete, rollbacks)},
    **{(family, (kind,)): 0.0 for family in (incidents, restarts) for kind in _INCIDENT_KINDS},
}
_DURATIONS_AT_ZERO: dict[str, _Durations] = dict.fromkeys(_RECOVERY_PHASES, _NO_DURATIONS)


class JobMetrics:
    """Metrics of one job: its last reconcile, and counts since this replica leads it."""

    def __init__(self) -> None:
        self._last_reconcile: tuple[JobSnapshot, JobStatus] | None = None
        self._counts: dict[_Key, float] = {}
        self._durations: dict[str, _Durations] = {}
        self._incident_seconds: dict[str, float] = {}
        self._newest_complete_by_tier: dict[str, tuple[Checkpoint, float]] = {}
        """By tier: its newest complete checkpoint, and when it was first observed to be complete."""
        self._copies: int | None = None
        """Copies of the newest complete checkpoint, the minimum over its ranks; None: not known yet."""
        self._slowdown_ratio: float | None = None
        """Slowdown of the worst straggler of the newest committed generation; None: none was committed yet."""
        self._name: _JobName | None = None
        """Name under which the metrics are exported."""
        self._memory_budgets: tuple[MemoryServerBudget, ...] = ()
        self._unrecoverable: frozenset[Checkpoint] = frozenset()

    def update_gauges(self, snapshot: JobSnapshot, status: JobStatus, maintenance: MaintenancePlan | None) -> None:
        """Exports this reconcile from now on; `maintenance` is None if none was planned."""
        self._start_counters_at_zero(status)
        if maintenance is not None:
            self._copies = maintenance.copies if _has_committed(status) else self._copies
            self._memory_budgets = maintenance.memory_budgets or self._memory_budgets
            self._count(uploads_abandoned, sum(e.reason == reasons.UPLOAD_ABANDONED for e in maintenance.events))
            unrecoverable = frozenset(h.checkpoint for h in maintenance.unrecoverable)
            self._count(incomplete, len(unrecoverable - self._unrecoverable))
            self._unrecoverable = unrecoverable
        if status.membership is not None and status.membership.members and _has_committed(status):
            # kept while the next generation is claimed: a series that vanishes at each restart breaks its graph
            self._slowdown_ratio = max((straggler.slowdown_ratio for straggler in status.stragglers), default=1.0)
        for tier, checkpoint in (("memory", status.last_complete), ("persistent", status.last_uploaded)):
            if checkpoint is not None and (
                tier not in self._newest_complete_by_tier or self._newest_complete_by_tier[tier][0] != checkpoint
            ):
                self._newest_complete_by_tier[tier] = checkpoint, snapshot.now_seconds
        self._last_reconcile = snapshot, status
        self._export(snapshot.job)

    def count_changes(self, old: JobStatus, new: JobStatus, job: TrainingJob) -> None:
        """Counts the incidents, restarts and rollbacks that a status just written adds."""
        self._start_counters_at_zero(new)
        if new.restarts > old.restarts and new.incidents:
            self._count(restarts, new.restarts - old.restarts, new.incidents[-1].kind)
        self._count(rollbacks, new.rollback_count - old.rollback_count)
        committed_before = {_incident_key(i) for i in old.incidents if i.committed_seconds is not None}
        recovered_before = {_incident_key(i) for i in old.incidents if i.first_step_seconds is not None}
        for incident in new.incidents:
            # Count an incident when it is committed: before that, its kind may still change.
            if incident.committed_seconds is not None and _incident_key(incident) not in committed_before:
                self._count(incidents, 1, incident.kind)
                self._incident_seconds[incident.kind] = incident.detected_seconds
            if incident.first_step_seconds is not None and _incident_key(incident) not in recovered_before:
                self._count_recovery(incident)
        self._export(job)

    def stop_export(self) -> None:
        """Ends the export: the job ended or this replica no longer leads it."""
        if self._name is not None:
            job_collector.unregister(self._name, self)

    def _export(self, job: TrainingJob) -> None:
        self._name = job.namespace, job.name
        job_collector.register(self._name, self)

    def series(self) -> Iterator[_Series]:
        """Yields the job's current series."""
        # Scrapes run in another thread. Copying a dictionary is atomic, iterating over it is not.
        for (family, labels), count in self._counts.copy().items():
            yield family, labels, count
        for recovery_phase, durations in self._durations.copy().items():
            yield recovery_seconds, (recovery_phase,), durations
        for kind, detected_seconds in self._incident_seconds.copy().items():
            yield incident_seconds, (kind,), detected_seconds
        if self._last_reconcile is not None:
            snapshot, status = self._last_reconcile
            time_spent = seconds_spent(status.time_spent, snapshot.now_seconds)
            yield from self._series_of_any_job(snapshot, status, time_spent)
            if not _has_ended(status):
                yield from self._series_of_active_job(snapshot, status, time_spent)

    def _series_of_any_job(
        self, snapshot: JobSnapshot, status: JobStatus, time_spent: Mapping[str, float]
    ) -> Iterator[_Series]:
        membership = status.membership
        for name in _PHASES if membership is not None or self._durations else (status.phase,):
            yield phase, (name,), status.phase == name
        yield world_size, (), membership.world_size if membership is not None and _has_committed(status) else 0
        generation = membership.generation if membership is not None else 0
        yield job_generation, (), generation
        # Ranks report step 0 until their first step of this generation: the job is still where it was.
        steps = [s.progress.step for s in snapshot.sessions if s.generation == generation and s.progress.step]
        yield job_step, (), max(steps, default=status.step)
        goodput_now = goodput(time_spent)
        if goodput_now is not None:
            yield goodput_ratio, (), goodput_now

    def _series_of_active_job(
        self, snapshot: JobSnapshot, status: JobStatus, time_spent: Mapping[str, float]
    ) -> Iterator[_Series]:
        for category, seconds in time_spent.items():
            if seconds:
                yield time_seconds, (category,), seconds
        if status.data is not None:
            yield data_epochs, (), status.data.epochs
            yield samples_per_second, (), status.data.samples_per_second or math.nan
        yield requested_world_size, (), snapshot.job.spec.replicas * snapshot.job.spec.nproc_per_node
        yield agents_connected, (), sum(s.connected for s in snapshot.sessions)
        for state in _SERVER_STATES:
            yield memory_servers, (state,), sum(h.state == state for h in snapshot.servers)
        yield (
            protected,
            (),
            any(c.type == reasons.CHECKPOINT_PROTECTED and c.status == "True" for c in status.conditions),
        )
        if self._copies is not None:
            yield copies, (), self._copies
        for family, bytes_by_node in zip(
            (memory_needed, memory_available), _memory_by_node(self._memory_budgets), strict=True
        ):
            for node, node_bytes in bytes_by_node.items():
                yield family, (node,), node_bytes
        for tier, (checkpoint, at_seconds) in self._newest_complete_by_tier.copy().items():
            yield complete_step, (tier,), checkpoint.step
            yield complete_seconds, (tier,), at_seconds
        yield from _interval_series(snapshot.job, status)
        if self._slowdown_ratio is not None:
            yield straggler_slowdown_ratio, (), self._slowdown_ratio
        if status.last_good is not None:
            yield good_step, (), status.last_good.step

    def _start_counters_at_zero(self, status: JobStatus) -> None:
        """Starts all counters at 0 once the job has trained: a thousand waiting jobs export no zeros."""
        if not self._durations and _has_history(status):
            self._counts, self._durations = _COUNTERS_AT_ZERO | self._counts, dict(_DURATIONS_AT_ZERO)

    def _count(self, family: JobFamily, amount: float, *labels: str) -> None:
        assert amount >= 0, "counters only grow"
        if amount or self._counts:
            self._counts[family, labels] = self._counts.get((family, labels), 0.0) + amount

    def _count_recovery(self, incident: Incident) -> None:
        phase_ends = (
            incident.claimed_seconds,
            incident.stopped_seconds,
            incident.fenced_seconds,
            incident.committed_seconds,
            incident.first_step_seconds,
        )
        for recovery_phase, at_seconds in zip(_RECOVERY_PHASES, phase_ends, strict=True):
            if at_seconds is not None:
                seconds = max(0.0, at_seconds - incident.detected_seconds)
                total, *counts = self._durations[recovery_phase]
                counts[bisect_left(_BOUNDS, seconds)] += 1.0
                self._durations[recovery_phase] = (total + seconds, *counts)
        self._count(lost_steps, incident.steps_lost or 0)


def _build_metric_family(family: JobFamily, series: Iterable[tuple[Labels, float | _Durations]]) -> Metric:
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
    """Yields each tier's current interval, and the inputs of the choice where the operator chose it."""
    policy = job.spec.checkpoint
    fixed_steps = policy.persistent.fixed_steps if policy.persistent is not None else None
    for tier, interval, requested_steps in (
        ("memory", status.memory_interval, policy.memory.base_steps),
        ("persistent", status.persistent_interval, fixed_steps),
    ):
        steps = interval.steps if interval is not None else requested_steps
        if steps is not None:
            yield interval_steps, (tier,), steps
        if interval is None:
            continue
        for name in ("target", "step", "cost", "flush", "mtbf"):
            seconds = getattr(interval, f"{name}_seconds")
            if seconds is not None:
                yield interval_input_seconds, (tier, name), seconds
        if interval.memory_loss_probability is not None:
            yield memory_loss_probability, (), interval.memory_loss_probability


def _memory_by_node(budgets: Iterable[MemoryServerBudget]) -> tuple[Counter[str], Counter[str]]:
    """Sums the bytes that each node's servers must store, and may store."""
    needed, available = Counter[str](), Counter[str]()
    for budget in budgets:
        needed[budget.node] += budget.needed_bytes
        if budget.available_bytes is not None:
            available[budget.node] += budget.available_bytes
    return needed, available


def _has_ended(status: JobStatus) -> bool:
    return status.phase in ("Complete", "Failed")


def _has_committed(status: JobStatus) -> bool:
    return status.membership is not None and status.membership.state == "Committed" and not _has_ended(status)


def _has_history(status: JobStatus) -> bool:
    """Returns whether the job has trained, or had an incident before it could."""
    committed = status.membership is not None and status.membership.state == "Committed"
    return committed or bool(status.lineage or status.incidents)


def _incident_key(incident: Incident) -> tuple[int, float]:
    return incident.generation, incident.detected_seconds


class JobCollector(Collector):
    """Renders the series of every job that this replica leads, for prometheus-client."""

    def __init__(self) -> None:
        self._jobs: dict[_JobName, JobMetrics] = {}

    def register(self, name: _JobName, job_metrics: JobMetrics) -> None:
        """Exports the job's metrics; they replace those of an earlier job of the same name."""
        self._jobs[name] = job_metrics

    def unregister(self, name: _JobName, job_metrics: JobMetrics) -> None:
        """Ends the export of these metrics, unless a later job of the same name has replaced them."""
        if self._jobs.get(name) is job_metrics:
            del self._jobs[name]

    def describe(self) -> Iterator[Metric]:
        """Declares the families without series, so that no other collector can register their names."""
        return (_build_metric_family(family, ()) for family in FAMILIES)

    def collect(self) -> Iterator[Metric]:
        series: dict[JobFamily, list[tuple[Labels, float | _Durations]]] = {family: [] for family in FAMILIES}
        for name, job_metrics in self._jobs.copy().items():
            for family, labels, value in job_metrics.series():
                series[family].append(((*name, *labels), value))
        for family in FAMILIES:
            yield _build_metric_family(family, series.pop(family))


job_collector = JobCollector()
REGISTRY.register(job_collector)
