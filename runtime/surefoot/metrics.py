"""Prometheus metrics of the runtime: base units, bounded labels. One registry a process; the agent exports for its pod."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""One set of buckets for every latency, so that panels can be laid over each other."""

checkpoint_seconds = Histogram(
    "surefoot_checkpoint_duration_seconds",
    "Time of one rank save by tier and phase (stage, replicate, commit, promote).",
    ["tier", "phase"],
    buckets=SECONDS,
)
checkpoint_bytes = Counter("surefoot_checkpoint_bytes_total", "Bytes written to a tier.", ["tier"])
checkpoint_failures = Counter(
    "surefoot_checkpoint_failures_total", "Rank saves a tier did not take.", ["tier", "reason"]
)
checkpoint_skipped = Counter(
    "surefoot_checkpoint_skipped_total", "Due saves skipped because both slots were still draining."
)
checkpoint_step = Gauge("surefoot_checkpoint_step", "Newest step committed by this worker.", ["tier"])
stall_seconds = Histogram("surefoot_checkpoint_stall_seconds", "Time a save held the training up.", buckets=SECONDS)
restore_seconds = Histogram(
    "surefoot_restore_duration_seconds", "Time of one rank's restore.", ["source"], buckets=SECONDS
)
restore_bytes = Counter("surefoot_restore_bytes_total", "Bytes read to restore.", ["source"])
restore_fallbacks = Counter("surefoot_restore_fallbacks_total", "Ranges read again from another copy.", ["reason"])
fallbacks = Counter("surefoot_fallbacks_total", "Times something took its second-best way.", ["what"])
