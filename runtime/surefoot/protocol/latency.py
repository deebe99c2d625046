"""Defines the latency buckets of agents and operator; both `metrics` import it."""

from __future__ import annotations

BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The same for every latency, so that panels can be laid over each other."""
