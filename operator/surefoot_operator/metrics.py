"""Defines the metrics of the operator itself.

Those of jobs are in `reconcile.job_metrics`. docs/operations.md says what each of them means.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from surefoot.protocol.timeouts import BUCKETS_SECONDS

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter: nobody asks for it

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
memory_call_failures = Counter(
    "surefoot_memory_call_failures_total", "Operator calls to a holder that failed.", ["call"]
)
memory_corrupt_entries = Counter(
    "surefoot_memory_corrupt_entries_total", "Index entries or layouts that could not be read."
)
shared_object_failures = Counter(
    "surefoot_shared_object_failures_total",
    "Secrets and Services of running jobs that could not be made anew.",
    ["kind"],
)
memory_quota_exceeded = Counter(
    "surefoot_memory_quota_exceeded_total",
    "Times that a job was kept from writing to a holder: it had more than its part.",
)
orphans = Gauge("surefoot_memory_orphaned_jobs", "Jobs that holders still know and the API server does not.")
outdated_servers = Gauge("surefoot_memory_outdated_servers", "Holders whose pod is not of the newest revision.")
agent_connections_rejected = Counter(
    "surefoot_agent_connections_rejected_total", "Connections of agents that were refused.", ["reason"]
)
agents_disconnected_slow = Counter(
    "surefoot_agents_disconnected_slow_total", "Connections closed because the agent did not take its messages."
)
agents_disconnected_invalid = Counter(
    "surefoot_agents_disconnected_invalid_total", "Connections closed because a message could not be read."
)
events_suppressed = Counter(
    "surefoot_events_suppressed_total", "Events that are in the log only: too many in a minute."
)

# a rate sees the first of anything only if the series was there before it
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
