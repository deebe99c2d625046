"""Sends increments of a trainer's metrics to its agent, which sums them.

A trainer calls `MetricGrowth.taken` within a second or so of saves, and after a restore; the agent adds it to `MetricSums` and shows both
as one. Counters and histograms only: they can be added, over ranks and over trainers that come and go. What a killed
trainer had not said yet is lost with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]
Grown = tuple[tuple[str, dict[str, str], float], ...]
"""(sample's name, its labels, by how much it grew)."""

_ADDED = ("counter", "histogram")
MAX_SERIES = 1000
"""A trainer that names more than so many is not believed: the agent's memory is bounded."""


class MetricDeltas:
    """Computes how much this process' counters grew since last taken; thread-safe."""

    def __init__(self, families: Sequence[Collector]) -> None:
        self._families = families
        self._lock = threading.Lock()
        self._reported = _values(families)

    def take(self) -> Grown:
        """Takes the growth since the last call; empty if nothing grew."""
        with self._lock:
            said, now = self._reported, _values(self._families)
            self._reported = now
        # a new histogram is told with its empty buckets: without them its first bound would be another
        grown = [(key, value - said.get(key, 0.0)) for key, value in now.items() if value != said.get(key)]
        return tuple((name, dict(labels), by) for (name, labels), by in grown)


class MetricSums:
    """Sums the metrics of all this agent's trainers, on its loop."""

    def __init__(self) -> None:
        self._sums: dict[Key, float] = {}

    def add(self, grown: Grown) -> None:
        for name, labels, by in grown:
            key = _key(name, labels)
            if key in self._sums or len(self._sums) < MAX_SERIES:
                self._sums[key] = self._sums.get(key, 0.0) + by

    def with_agent_metrics(self, families: Iterable[Collector]) -> Iterable[Metric]:
        """The agent's own families with the trainers' sums in them."""
        left = dict(self._sums)
        for collector in families:
            for family in collector.collect():
                yield _merged(family, left)


def _merged(family: Metric, sums: dict[Key, float]) -> Metric:
    merged = Metric(family.name, family.documentation, family.type, family.unit)
    own = [s for s in family.samples if not s.name.endswith("_created")]
    if family.type not in _ADDED:
        merged.samples = own
        return merged
    names = {s.name for s in own} | {family.name + suffix for suffix in ("_total", "_bucket", "_sum", "_count")}
    values = {_key(s.name, s.labels): s.value for s in own}
    for key in [key for key in sums if key[0] in names]:
        values[key] = values.get(key, 0.0) + sums.pop(key)
    merged.samples = [Sample(name, dict(labels), value) for (name, labels), value in sorted(values.items(), key=_order)]
    return merged


def _order(entry: tuple[Key, float]) -> tuple[tuple[tuple[str, str], ...], str, float]:
    """Sorts one label set's samples together, its buckets by their bounds, as scrapers rely on."""
    (name, labels), _ = entry
    bound = dict(labels).get("le")
    rest = tuple((label, value) for label, value in labels if label != "le")
    return rest, name, 0.0 if bound is None else float(bound)


def _values(families: Iterable[Collector]) -> dict[Key, float]:
    return {
        _key(sample.name, sample.labels): sample.value
        for collector in families
        for family in collector.collect()
        if family.type in _ADDED
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _key(name: str, labels: dict[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))
