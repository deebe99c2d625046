"""Defines the metrics of the operator itself.

The metrics of jobs are in `reconcile.job_metrics`. docs/monitoring.md explains each metric.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from surefoot.protocol.timeouts import BUCKETS_SECONDS

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would add an unused second series to each counter

leader = Gauge("surefoot_operator_leader", "1 in the replica that leads the shard, 0 in the others.", ["shard"])
standing_by = Gauge(
    "surefoot_operator_standing_by", "1 while another installation of the operator manages the same jobs."
)
loop_lag_seconds = Histogram(
    "surefoot_operator_loop_lag_seconds",
    "Delay of the event loop: how much later than scheduled it woke up.",
    buckets=BUCKETS_SECONDS,
)
reconcile_seconds = Histogram(
    "surefoot_reconcile_duration_seconds",
    "Duration of one reconcile: observe, plan and apply.",
    buckets=BUCKETS_SECONDS,
)
reconcile_failures = Counter("surefoot_reconcile_failures_total", "Reconciles that ended in an error.", ["error"])
watch_age_seconds = Gauge(
    "surefoot_watch_age_seconds", "Time since the last message of the API server about each kind of object.", ["kind"]
)
watch_failures = Counter("surefoot_watch_failures_total", "Watches of the API server that broke.", ["kind"])
api_refused_calls = Gauge(
    "surefoot_api_refused_calls",
    "Calls that the API server keeps rejecting and that the operator still retries.",
    ["verb", "resource", "cause"],
)
memory_call_failures = Counter(
    "surefoot_memory_call_failures_total", "Operator calls to a memory server that failed.", ["call"]
)
memory_corrupt_entries = Counter(
    "surefoot_memory_corrupt_entries_total", "Index entries or layouts that could not be read."
)
shared_object_failures = Counter(
    "surefoot_shared_object_failures_total",
    "Secrets and Services of running jobs that could not be created again.",
    ["kind"],
)
memory_quota_exceeded = Counter(
    "surefoot_memory_quota_exceeded_total",
    "Times that a job was kept from writing to a memory server because it exceeded its share.",
)
orphans = Gauge(
    "surefoot_memory_orphaned_jobs",
    "Jobs that memory servers still have data of and that the API server does not know.",
)
outdated_servers = Gauge("surefoot_memory_outdated_servers", "Memory servers whose pod is not of the newest revision.")
agent_connections_rejected = Counter(
    "surefoot_agent_connections_rejected_total", "Connections of agents that were rejected.", ["reason"]
)
agents_disconnected_slow = Counter(
    "surefoot_agents_disconnected_slow_total", "Connections closed because the agent did not read its messages."
)
agents_disconnected_invalid = Counter(
    "surefoot_agents_disconnected_invalid_total", "Connections closed because a message could not be read."
)
events_suppressed = Counter(
    "surefoot_events_suppressed_total", "Events written only to the log, because there were too many in a minute."
)

# create the series at start: rate() misses the first increase of a series that did not exist before
for _reason in (
    "not-leading",
    "other-shard",
    "foreign-job",
    "token",
    "timeout",
    "protocol",
    "worker",
    "too-many-connections",
    "message-too-large",
    "too-many-agents",
):
    agent_connections_rejected.labels(_reason)
for _call in ("away", "fenced", "refused", "drop", "mark", "sweep", "clean"):
    memory_call_failures.labels(_call)
for _error in ("PlatformError", "InvariantViolation"):
    reconcile_failures.labels(_error)
for _kind in ("trainingjobs", "pods", "nodes", "leases"):
    watch_failures.labels(_kind)
