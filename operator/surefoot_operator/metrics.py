"""Defines the operator's Prometheus metrics.

Whatever carries `namespace` and `job` goes with the job: `forget` is called when it is not looked after any more,
here or by this operator. docs/operations.md says what each of them means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from surefoot.protocol.timeouts import BUCKETS_SECONDS

# ---- job series ------------------------------------------------------------------------------------------------------
# Keeps the figures of many jobs in little memory. A series of prometheus-client is an object with a lock of its own,
# and a job that runs has a hundred and thirty: fifty kilobytes a job. Here a series is one entry of its job. Where jobs
# are many its line is written straight away: a sample for each of a thousand jobs' series took a second of CPU, and
# thirty megabytes, at each scrape.

Job = tuple[str, str]
"""Namespace and name."""
Labels = tuple[str, ...]

_JOB: Labels = ("namespace", "job")
_ENDLESS: Labels = ("node",)
"""Labels that take ever new values."""
LINES_AT_A_TIME = 256
"""Series that are written in one turn: about a millisecond."""
_MOST: Sequence[float] = (*BUCKETS_SECONDS, float("inf"))
_Seconds: TypeAlias = tuple[float, ...]
"""Of a histogram: the sum, then the count in each bucket; empty where nothing was observed."""
_Figure: TypeAlias = float | _Seconds


@dataclass(frozen=True, slots=True, eq=False)
class JobFamily:
    """One metric that each job has."""

    name: str
    text: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    more: Labels = ()
    """Labels beside the job's own."""

    @property
    def labels(self) -> Labels:
        return (*_JOB, *self.more)

    def shown(self, found: Sequence[tuple[Labels, _Figure]]) -> Metric:
        """Renders these series of the family, given by their labels' values."""
        if self.kind == "histogram":
            timed = HistogramMetricFamily(self.name, self.text, labels=self.labels)
            for values, figure in found:
                assert isinstance(figure, tuple)
                total, *counts = figure or (0.0,) * (len(_MOST) + 1)
                timed.add_metric(values, _cumulative(counts), total)
            return timed
        made = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(
            self.name, self.text, labels=self.labels
        )
        for values, figure in found:
            assert isinstance(figure, float)
            made.add_metric(values, figure)
        return made

    def head(self) -> str:
        """The lines above the family's series."""
        # the older of the two formats that prometheus-client writes names a counter's head as its series
        return f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"

    def line(self, values: Labels, figure: _Figure) -> str:
        """One series as text, as Prometheus reads it."""
        shown = dict(zip(self.labels, map(_escaped, values), strict=True))
        if isinstance(figure, float):
            return f"{self.name}{_in_braces(shown)} {floatToGoString(figure)}\n"  # type: ignore[no-untyped-call]
        total, *counts = figure or (0.0,) * (len(_MOST) + 1)
        buckets = _cumulative(counts)
        lines = [f"{self.name}_bucket{_in_braces({**shown, 'le': most})} {count}\n" for most, count in buckets]
        inside, told = _in_braces(shown), floatToGoString(total)  # type: ignore[no-untyped-call]
        return f"{''.join(lines)}{self.name}_count{inside} {buckets[-1][1]}\n{self.name}_sum{inside} {told}\n"


_Key: TypeAlias = tuple[JobFamily, Labels]
_Figures: TypeAlias = dict[_Key, _Figure]


class JobSeries:
    """One series of one job, for whoever sets it."""

    __slots__ = ("_figures", "_key")

    def __init__(self, figures: _Figures, key: _Key) -> None:
        self._figures, self._key = figures, key

    @property
    def value(self) -> float:
        """What a gauge or a counter shows now."""
        figure = self._figures[self._key]
        assert isinstance(figure, float)
        return figure

    def set(self, value: float) -> None:
        self._figures[self._key] = float(value)

    def inc(self, amount: float = 1.0) -> None:
        assert amount >= 0, "counters only grow"
        self._figures[self._key] = self.value + amount

    def observe(self, seconds: float) -> None:
        figure = self._figures[self._key]
        assert isinstance(figure, tuple)
        total, *counts = figure or (0.0,) * (len(_MOST) + 1)
        counts[bisect_left(_MOST, seconds)] += 1.0
        self._figures[self._key] = (total + seconds, *counts)  # another tuple: a scrape may be reading this one


class JobCollector(Collector):
    """The series of all jobs, as prometheus-client collects them."""

    def __init__(self) -> None:
        self._families: dict[JobFamily, None] = {}
        self._jobs: dict[Job, _Figures] = {}
        self._keys: dict[_Key, _Key] = {}
        """One key for all jobs, but where a label takes ever new values."""

    def add(self, family: JobFamily) -> JobFamily:
        """Knows one more family, and returns it."""
        self._families[family] = None
        return family

    def of(self, family: JobFamily, job: Job, *more: str) -> JobSeries:
        """Returns a series of this job, begun if it was not there."""
        figures, key = self._jobs.setdefault(job, {}), (family, more)
        if key not in figures:
            if not set(_ENDLESS) & set(family.more):
                key = self._keys.setdefault(key, key)
            figures[key] = () if family.kind == "histogram" else 0.0
        return JobSeries(figures, key)

    def end(self, family: JobFamily, job: Job, *more: str) -> None:
        """One series of this job ends, if it is there."""
        self._jobs.get(job, {}).pop((family, more), None)

    def end_all(self, job: Job, families: Sequence[JobFamily] | None = None) -> None:
        """Every series of this job ends, or those of some families."""
        if families is None:
            self._jobs.pop(job, None)
            return
        figures = self._jobs.get(job, {})
        for key in [key for key in figures if key[0] in families]:
            del figures[key]

    def describe(self) -> Iterator[Metric]:
        """Names the families, so that nothing else takes their names."""
        return (family.shown(()) for family in self._families)

    def collect(self) -> Iterator[Metric]:
        """Renders every series as samples: for few jobs."""
        found = self._found()
        for family in list(found):
            yield family.shown(found.pop(family))

    def text(self) -> Iterator[bytes]:
        """Renders every series as text, a little at a time."""
        found = self._found()
        for family in list(found):
            lines = [family.head()]
            for values, figure in found.pop(family):
                lines.append(family.line(values, figure))
                if len(lines) >= LINES_AT_A_TIME:
                    yield "".join(lines).encode()
                    lines.clear()
            yield "".join(lines).encode()

    def _found(self) -> dict[JobFamily, list[tuple[Labels, _Figure]]]:
        """All series. Others may change them meanwhile, in threads of their own: `copy` is one step, and `list` of items is not."""
        found: dict[JobFamily, list[tuple[Labels, _Figure]]] = {family: [] for family in self._families}
        for job, figures in self._jobs.copy().items():
            for (family, more), figure in figures.copy().items():
                found[family].append(((*job, *more), figure))
        return found


def _in_braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _cumulative(counts: Sequence[float]) -> list[tuple[str, float]]:
    buckets, below = [], 0.0
    for most, count in zip(_MOST, counts, strict=True):
        below += count
        buckets.append((floatToGoString(most), below))  # type: ignore[no-untyped-call]
    return buckets


# ---- metrics ---------------------------------------------------------------------------------------------------------

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter: nobody asks for it

# ---- the operator itself -------------------------------------------------------------------------------------------

leader = Gauge("surefoot_operator_leader", "1 in the replica that leads the shard, 0 in the others.", ["shard"])
standing_by = Gauge(
    "surefoot_operator_standing_by", "1 while another installation of the operator looks after the same jobs."
)
loop_lag_seconds = Histogram(
    "surefoot_operator_loop_lag_seconds", "How much later than asked the event loop woke up.", buckets=BUCKETS_SECONDS
)
reconcile_seconds = Histogram(
    "surefoot_reconcile_duration_seconds", "One observe, plan and apply.", buckets=BUCKETS_SECONDS
)
reconcile_failures = Counter("surefoot_reconcile_failures_total", "Reconciles that ended in an error.", ["error"])
watch_age_seconds = Gauge("surefoot_watch_age_seconds", "Since the API server was last heard of each kind.", ["kind"])
watch_failures = Counter("surefoot_watch_failures_total", "Watches of the API server that broke.", ["kind"])
api_refused_calls = Gauge(
    "surefoot_api_refused_calls",
    "Calls that the API server keeps refusing and that the operator still retries.",
    ["verb", "resource", "cause"],
)
holder_failures = Counter("surefoot_holder_call_failures_total", "Operator calls to a holder that failed.", ["call"])
holder_damaged = Counter("surefoot_holder_damaged_entries_total", "Index entries or layouts that could not be read.")
shared_objects_refused = Counter(
    "surefoot_shared_objects_refused_total",
    "Secrets and Services of running jobs that could not be made anew.",
    ["kind"],
)
holder_accounts_closed = Counter(
    "surefoot_memory_accounts_closed_total",
    "Times that a job was kept from writing to a holder: it had more than its part.",
)
orphans = Gauge("surefoot_memory_orphaned_jobs", "Jobs that holders still know and the API server does not.")
outdated_holders = Gauge("surefoot_memory_outdated_holders", "Holders whose pod is not of the newest revision.")
agents_refused = Counter("surefoot_agents_refused_total", "Connections of agents that were refused.", ["reason"])
agents_slow = Counter("surefoot_agents_slow_total", "Connections closed because the agent did not take its messages.")
agents_garbled = Counter("surefoot_agents_garbled_total", "Connections closed because a message could not be read.")
events_left_out = Counter("surefoot_events_left_out_total", "Events that are in the log only: too many in a minute.")

# ---- each job ------------------------------------------------------------------------------------------------------

jobs = JobCollector()
"""Every job's series; whoever shows this process' metrics shows these beside the library's."""


def _of_jobs(name: str, text: str, kind: Literal["gauge", "counter", "histogram"] = "gauge", *more: str) -> JobFamily:
    return jobs.add(JobFamily(name, text, kind, more))


phase = _of_jobs("surefoot_job_phase", "1 for the phase that the job is in, 0 for the others.", "gauge", "phase")
world_size = _of_jobs("surefoot_world_size", "Ranks in the committed world.")
job_epoch = _of_jobs("surefoot_job_epoch", "Epoch of the world, claimed or committed.")
job_step = _of_jobs("surefoot_job_step", "Highest step that any rank of the world has finished.")
data_passes = _of_jobs("surefoot_job_data_passes", "Passes over the data, the share of the present one included.")
samples_per_second = _of_jobs(
    "surefoot_job_samples_per_second", "Samples a second at the pace of the last steps; NaN where nobody tells."
)
agents_connected = _of_jobs("surefoot_agents_connected", "Agents of the job whose line is open.")
holders = _of_jobs("surefoot_holders", "Memory-tier instances as the job finds them.", "gauge", "state")
protected = _of_jobs("surefoot_checkpoint_protected", "1 while a failure now would find a checkpoint in safety.")
copies = _of_jobs(
    "surefoot_checkpoint_copies", "Copies of the newest complete checkpoint in memory, the least over its ranks."
)
memory_needed = _of_jobs(
    "surefoot_memory_needed_bytes", "What a node's holder must take of the job's checkpoints.", "gauge", "node"
)
memory_available = _of_jobs(
    "surefoot_memory_available_bytes", "What a node's holder may take of the job's checkpoints.", "gauge", "node"
)
complete_step = _of_jobs("surefoot_checkpoint_complete_step", "Newest complete checkpoint's step.", "gauge", "tier")
complete_at = _of_jobs(
    "surefoot_checkpoint_complete_timestamp_seconds",
    "When the newest complete checkpoint was first seen to be complete.",
    "gauge",
    "tier",
)
interval_steps = _of_jobs(
    "surefoot_checkpoint_interval_steps", "Steps between two saves to a tier now, asked for or chosen.", "gauge", "tier"
)
interval_input_seconds = _of_jobs(
    "surefoot_checkpoint_interval_input_seconds",
    "What the interval of a tier was chosen from (input: wanted, step, cost, drain, incident).",
    "gauge",
    "tier",
    "input",
)
memory_loss_odds = _of_jobs(
    "surefoot_checkpoint_memory_loss_odds", "Estimated share of incidents that take every copy in memory."
)
incomplete = _of_jobs(
    "surefoot_incomplete_checkpoints_total",
    "Checkpoints that a rank never saved its part of, so that the other parts were dropped.",
    "counter",
)
promotions_abandoned = _of_jobs(
    "surefoot_promotions_abandoned_total",
    "Checkpoints that could not be uploaded and were left for a newer one.",
    "counter",
)
rollbacks = _of_jobs(
    "surefoot_rollbacks_total", "Returns to an earlier checkpoint, by policy or as a person asked.", "counter"
)
straggler_slowdown_ratio = _of_jobs(
    "surefoot_straggler_slowdown_ratio",
    "How many times as long as its peers the worst straggler works; 1: no rank is persistently slower.",
)
good_step = _of_jobs("surefoot_good_checkpoint_step", "Step of the newest checkpoint that is proven to be good.")
incidents = _of_jobs(
    "surefoot_incidents_total", "Failures and planned changes that a new world answered.", "counter", "kind"
)
incident_at = _of_jobs("surefoot_incident_timestamp_seconds", "First sign of the newest incident.", "gauge", "kind")
recovery_seconds = _of_jobs(
    "surefoot_recovery_duration_seconds",
    "From the first sign of a failure to the end of each phase of its recovery.",
    "histogram",
    "phase",
)
restarts = _of_jobs("surefoot_restarts_total", "Changes of the world after a failure.", "counter", "cause")
lost_steps = _of_jobs("surefoot_lost_steps_total", "Steps that had to be run again.", "counter")
time_seconds = _of_jobs(
    "surefoot_job_time_seconds",
    "Where a job's seconds went since it started; the categories add up to its age.",
    "gauge",
    "category",
)
goodput_ratio = _of_jobs(
    "surefoot_job_goodput_ratio", "Share of training that was not run again, of all time but suspension."
)

RUNNING = (
    time_seconds,
    data_passes,
    samples_per_second,
    agents_connected,
    holders,
    protected,
    copies,
    memory_needed,
    memory_available,
    complete_step,
    complete_at,
    interval_steps,
    interval_input_seconds,
    memory_loss_odds,
    good_step,
    straggler_slowdown_ratio,
)
"""What a job has only until it ends."""


def of(family: JobFamily, job: Job, *more: str) -> JobSeries:
    """Returns the job's own series of a family.

    It ends with `forget`. `job`: namespace and name.
    """
    return jobs.of(family, job, *more)


def end(family: JobFamily, job: Job, *more: str) -> None:
    """One series of this job ends, if it is there."""
    jobs.end(family, job, *more)


def forget(namespace: str, job: str) -> None:
    """Every series of this job ends."""
    jobs.end_all((namespace, job))


def ended(namespace: str, job: str) -> None:
    """Ends the series that only a running job has.

    The job is over, and still there.
    """
    jobs.end_all((namespace, job), RUNNING)


# a rate sees the first of anything only if the series was there before it
for _reason in (
    "not-leading",
    "elsewhere",
    "foreign-job",
    "token",
    "timeout",
    "protocol",
    "worker",
    "crowd",
    "size",
    "full",
):
    agents_refused.labels(_reason)
for _call in ("away", "fenced", "refused", "drop", "mark", "sweep", "clean"):
    holder_failures.labels(_call)
for _error in ("FabricError", "InvariantBroken"):
    reconcile_failures.labels(_error)
for _kind in ("trainingjobs", "pods", "nodes", "leases"):
    watch_failures.labels(_kind)
