"""Sends the increase of a trainer's metrics to its agent, which adds them up.

A trainer calls `MetricDeltas.take` about a second after a save, and after a restore. The agent adds the result to
`MetricSums` and exports both its own and the trainers' metrics. Only counters and histograms can be added over ranks
and over trainers that come and go. An increase that a killed trainer has not sent yet is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample and its labels, sorted."""
Grown = tuple[tuple[str, dict[str, str], float], ...]
"""Name of each sample, its labels, and its increase."""

_ADDITIVE_TYPES = ("counter", "histogram")
"""Types of metrics that can be added over processes."""
MAX_SERIES = 1000
"""Time series that an agent keeps for its trainers; further ones are ignored, so that its memory stays bounded."""


class MetricDeltas:
    """Computes the increase of this process' counters since the last call; thread-safe."""

    def __init__(self, families: Sequence[Collector]) -> None:
        self._families = families
        self._lock = threading.Lock()
        self._reported = _sample_values(families)

    def take_increases(self) -> Grown:
        """Returns the increase since the last call; empty if nothing increased."""
        with self._lock:
            previous, current = self._reported, _sample_values(self._families)
            self._reported = current
        # a new histogram is sent with its empty buckets, or the sums would lack its lower bounds
        increases = [
            (key, value - previous.get(key, 0.0)) for key, value in current.items() if value != previous.get(key)
        ]
        return tuple((name, dict(labels), increase) for (name, labels), increase in increases)


class MetricSums:
    """Adds up the metrics of all trainers of this agent, on its event loop."""

    def __init__(self) -> None:
        self._sums: dict[Key, float] = {}

    def add_increases(self, grown: Grown) -> None:
        """Adds a trainer's increase; ignores new series beyond `MAX_SERIES`."""
        for name, labels, increase in grown:
            key = _sample_key(name, labels)
            # a trainer runs foreign code, which must not be able to fill the agent's memory
            if key in self._sums or len(self._sums) < MAX_SERIES:
                self._sums[key] = self._sums.get(key, 0.0) + increase

    def with_agent_metrics(self, families: Iterable[Collector]) -> Iterable[Metric]:
        """Returns the agent's own metric families with the trainers' sums added."""
        remaining = dict(self._sums)
        for collector in families:
            for family in collector.collect():
                yield _merge_sums(family, remaining)


def _merge_sums(family: Metric, sums: dict[Key, float]) -> Metric:
    """Returns a family with the sums added that belong to it, and removes these from `sums`."""
    merged = Metric(family.name, family.documentation, family.type, family.unit)
    own_samples = [s for s in family.samples if not s.name.endswith("_created")]
    if family.type not in _ADDITIVE_TYPES:
        merged.samples = own_samples
        return merged
    names = {s.name for s in own_samples} | {family.name + suffix for suffix in ("_total", "_bucket", "_sum", "_count")}
    values = {_sample_key(s.name, s.labels): s.value for s in own_samples}
    for key in [key for key in sums if key[0] in names]:
        values[key] = values.get(key, 0.0) + sums.pop(key)
    merged.samples = [
        Sample(name, dict(labels), value) for (name, labels), value in sorted(values.items(), key=_sample_order)
    ]
    return merged


def _sample_order(entry: tuple[Key, float]) -> tuple[tuple[tuple[str, str], ...], str, float]:
    """Sort key: keeps samples with equal labels together and orders their buckets by bounds, as scrapers expect."""
    (name, labels), _ = entry
    bound = dict(labels).get("le")
    other_labels = tuple((label, value) for label, value in labels if label != "le")
    return other_labels, name, 0.0 if bound is None else float(bound)


def _sample_values(families: Iterable[Collector]) -> dict[Key, float]:
    """Returns the present value of every sample that can be added."""
    return {
        _sample_key(sample.name, sample.labels): sample.value
        for collector in families
        for family in collector.collect()
        if family.type in _ADDITIVE_TYPES
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _sample_key(name: str, labels: dict[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))
