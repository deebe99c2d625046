"""Defines the metrics of a cluster's operator process, which have few labels."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

jobs = Gauge("surefoot_operator_jobs", "Jobs that this replica manages.")
token_reviews = Counter("surefoot_token_reviews_total", "Agents' tokens that the API server was asked to review.")
node_unhealthy = Gauge(
    "surefoot_node_unhealthy", "Nodes that agents found unhealthy, as reported to the cluster.", ["node", "reason"]
)
node_condition_failures = Counter("surefoot_node_condition_failures_total", "Failures to report unhealthy nodes.")
admission_reviews = Counter(
    "surefoot_admission_reviews_total", "Requests of the API server to admit an operation.", ["path", "result"]
)
evictions_rejected = Counter(
    "surefoot_evictions_rejected_total", "Evictions rejected until data that only their node has is copied."
)
