"""Defines metrics of a cluster's operator process, whose labels are few."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

jobs = Gauge("surefoot_operator_jobs", "Jobs that this replica looks after.")
token_reviews = Counter("surefoot_token_reviews_total", "Tokens of agents that the API server was asked about.")
node_unhealthy = Gauge(
    "surefoot_node_unhealthy", "Nodes that agents found sick, as the cluster is told.", ["node", "reason"]
)
node_reports_failed = Counter(
    "surefoot_node_condition_failures_total", "Troubles with telling the cluster of sick nodes."
)
admission_reviews = Counter(
    "surefoot_admission_reviews_total", "Questions of the API server before it accepts a change.", ["path", "result"]
)
evictions_refused = Counter(
    "surefoot_evictions_rejected_total", "Evictions that were to wait for copies of what only their node keeps."
)
