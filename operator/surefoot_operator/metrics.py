"""Prometheus metrics of the operator: base units, bounded labels (job and namespace go with the job)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

reconcile_seconds = Histogram("surefoot_reconcile_duration_seconds", "One observe, plan and apply.", buckets=SECONDS)
reconcile_failures = Counter("surefoot_reconcile_failures_total", "Reconciles that ended in an error.", ["error"])
recovery_seconds = Histogram(
    "surefoot_recovery_duration_seconds", "From the first sign of a failure, by phase.", ["phase"], buckets=SECONDS
)
world_size = Gauge("surefoot_world_size", "Ranks in the committed world.", ["namespace", "job"])
restarts = Counter("surefoot_restarts_total", "Changes of the world after a failure.", ["namespace", "job", "cause"])
lost_steps = Counter("surefoot_lost_steps_total", "Steps that had to be run again.", ["namespace", "job"])
holder_failures = Counter("surefoot_holder_call_failures_total", "Operator calls to a holder that failed.", ["call"])
agents_refused = Counter("surefoot_agents_refused_total", "Connections of agents that were refused.", ["reason"])
agents_slow = Counter("surefoot_agents_slow_total", "Connections closed because the agent did not take its messages.")
agents_garbled = Counter("surefoot_agents_garbled_total", "Connections closed because a message could not be read.")
holder_damaged = Counter("surefoot_holder_damaged_entries_total", "Index entries or layouts that could not be read.")
watch_failures = Counter("surefoot_watch_failures_total", "Watches of the API server that broke.", ["kind"])
