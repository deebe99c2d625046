"""Defines the operator's Prometheus metrics.

Whatever carries `namespace` and `job` goes with the job: `forget` is called when it is not looked after any more,
here or by this operator. docs/operations.md says what each of them means.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from surefoot.protocol.latency import BUCKETS_SECONDS
from surefoot_operator.job_series import Job, JobCollector, JobFamily, JobSeries

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
