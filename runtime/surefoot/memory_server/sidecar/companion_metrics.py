"""Translates Redis' INFO into this project's Prometheus metrics, in base units.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from surefoot.memory_server.sidecar.memory_watch import Seen

_LABELS = ("server",)
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


def exposition(seen: Sequence[Seen]) -> bytes:
    """The text of /metrics; `seen` is by the servers' numbers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(seen))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        seen = self._seen
        ready = "Whether its memory was touched, or a job uses it already."
        yield from _gauge("up", "Whether the server answers.", [float(one.up) for one in seen])
        yield from _gauge("ready", ready, [float(one.ready) for one in seen])
        yield from _gauge("keys", "Keys of all jobs.", [float(one.keys) if one.up else None for one in seen])
        filled = [float(one.filled_bytes) if one.up else None for one in seen]
        yield from _gauge("filled_bytes", "Memory touched before it was ready.", filled)
        took = [one.fill_seconds if one.up else None for one in seen]
        yield from _gauge("fill_duration_seconds", "How long that took.", took)
        for name, key, text in _GAUGES:
            yield from _gauge(name, text, [_number(one.info, key) for one in seen])
        for name, key, text in _COUNTERS:
            counter = CounterMetricFamily(f"surefoot_holder_{name}", text, labels=_LABELS)
            yield from _of_servers(counter, [_number(one.info, key) for one in seen])


def _gauge(name: str, text: str, values: Sequence[float | None]) -> Iterator[Metric]:
    return _of_servers(GaugeMetricFamily(f"surefoot_holder_{name}", text, labels=_LABELS), values)


def _of_servers(family: GaugeMetricFamily | CounterMetricFamily, values: Sequence[float | None]) -> Iterator[Metric]:
    """The family with a sample for each server that has a value; nothing if none has."""
    for server, value in enumerate(values):
        if value is not None:
            family.add_metric([str(server)], value)
    if family.samples:
        yield family


def _number(info: Mapping[str, str], key: str) -> float | None:
    try:
        return float(info[key])
    except (KeyError, ValueError):  # another server of Redis' protocol may not say it
        return None
