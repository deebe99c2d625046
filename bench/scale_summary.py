"""The figures of the scale bench by name, of what its parts have measured. Pure; called by `bench.scale`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

WORKERS = (10, 100, 500, 1000, 2000)
MOST_JOBS = 1000
NO_CLUSTER = "needs an API server with nodes: `python -m bench scale-cluster` measures it"
ON_A_CLUSTER: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "cold_start_seconds_1000_jobs": ("cold start", lambda row: row["seconds"] if row["jobs"] == MOST_JOBS else None),
    "rss_mb_1000_jobs": ("cold start", lambda row: row["rss_mib"] if row["jobs"] == MOST_JOBS else None),
    "reaction_p99_seconds": ("churn", lambda row: row["reaction_seconds"]["p99"]),
    "api_requests_per_minute": ("churn", lambda row: round(sum(row["api_calls_per_minute"].values()), 1)),
    "pods_300_seconds": ("one job of 300", lambda row: row["seconds"]),
    "pods_2000_seconds": ("one job of 2000", lambda row: row["seconds"]),
}
"""Each key of the summary that `cluster.scenarios.fleet` measures: its row there, and what of it."""
MEASURED_ON_LINES = (
    "orders_out_seconds_2000", "lost_of_2000_over_lost_of_10", "heartbeat_microseconds", "worst_loop_lag_seconds",
)  # fmt: skip


def summary(rows: list[dict[str, Any]], lines: list[dict[str, Any]], cluster: dict[str, Any]) -> dict[str, Any]:
    last = rows[-1]
    known: dict[str, Any] = {n: of(cluster[row]) if row in cluster else None for n, (row, of) in ON_A_CLUSTER.items()}
    known |= dict.fromkeys(MEASURED_ON_LINES)
    if last["workers"] == WORKERS[-1]:
        known["plan_milliseconds_2000"] = last["plan_ms"] + last["check_ms"] + last["maintain_ms"]
        known["status_bytes_2000"] = last["status_bytes"]
    *losses, beating = lines or [{}]
    out = {
        n: median([r["committed_seconds"] for r in losses if r["workers"] == n]) for n in {r["workers"] for r in losses}
    }
    if {WORKERS[0], WORKERS[-1]} <= out.keys():
        known["orders_out_seconds_2000"] = out[WORKERS[-1]]
        known["lost_of_2000_over_lost_of_10"] = out[WORKERS[-1]] / out[WORKERS[0]]
        known["heartbeat_microseconds"] = beating["heartbeat_microseconds"]
        known["worst_loop_lag_seconds"] = max(r["worst_loop_lag_seconds"] for r in losses)
    return known
