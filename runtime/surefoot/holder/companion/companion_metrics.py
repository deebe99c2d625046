"""Translates Redis' INFO into this project's Prometheus metrics, in base units.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from surefoot.holder.companion.memory_watch import Seen

_GAUGES = (
    ("memory_used_bytes", "used_memory", "Bytes that the server counts as used."),
    ("memory_max_bytes", "maxmemory", "Its limit (maxmemory); 0: none."),
    ("memory_resident_bytes", "used_memory_rss", "Bytes that the kernel counts; touched pages stay."),
    ("memory_fragmentation_ratio", "mem_fragmentation_ratio", "Resident by used bytes; high after filling, by design."),
    ("connected_clients", "connected_clients", "Open connections."),
    ("uptime_seconds", "uptime_in_seconds", "Since the server started: then it was empty."),
)
_COUNTERS = (
    ("evicted_keys", "evicted_keys", "Keys pushed out by the memory limit: must stay 0 (noeviction)."),
    ("commands", "total_commands_processed", "Commands carried out."),
    ("connections_received", "total_connections_received", "Connections accepted."),
    ("network_receive_bytes", "total_net_input_bytes", "Bytes received from clients."),
    ("network_transmit_bytes", "total_net_output_bytes", "Bytes sent to clients."),
)


def exposition(seen: Seen) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(seen))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        seen = self._seen
        yield _gauge("up", "Whether the server answers.", float(seen.up))
        yield _gauge("ready", "Whether its memory was touched, or a job uses it already.", float(seen.ready))
        if not seen.up:
            return
        yield _gauge("keys", "Keys of all jobs.", float(seen.keys))
        yield _gauge("filled_bytes", "Memory touched before it was ready.", float(seen.filled_bytes))
        yield _gauge("fill_duration_seconds", "How long that took.", seen.fill_seconds)
        for name, key, text in _GAUGES:
            if (value := _number(seen.info, key)) is not None:
                yield _gauge(name, text, value)
        for name, key, text in _COUNTERS:
            if (value := _number(seen.info, key)) is not None:
                yield CounterMetricFamily(f"surefoot_holder_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"surefoot_holder_{name}", text, value=value)


def _number(info: Mapping[str, str], key: str) -> float | None:
    try:
        return float(info[key])
    except (KeyError, ValueError):  # another server of Redis' protocol may not say it
        return None
