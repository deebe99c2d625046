"""Monitors every Redis server of the node, in one thread each.

With one thread for all, a server that hangs would delay the prefaulting of the others and freeze their metrics.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from surefoot.errors import ConfigurationError, SurefootError, TierUnavailable
from surefoot.memory_server import provisioning, scripts
from surefoot.memory_server.connection import Credentials, RespConnection, translate_redis_errors
from surefoot.memory_server.sidecar.sidecar_settings import SidecarSettings

_log = logging.getLogger(__name__)


# Polls one local Redis and prefaults the memory of each new instance, after which the server counts as ready. One
# thread runs `run`; other threads read `seen`. A server that a job uses is only polled, so no save ever waits for this.


@dataclass(frozen=True, slots=True)
class ServerState:
    """The last known state of a server."""

    is_up: bool = False
    """Whether it replied to the last poll."""
    is_ready: bool = False
    """Whether it replied, and its memory is prefaulted or a job uses it already."""
    reason: str = "it was not polled yet"
    """Why it is not ready; empty: it is."""
    info: dict[str, str] = field(default_factory=dict)
    """Its INFO; empty while it does not reply."""
    keys: int = 0
    """Number of keys of all jobs."""
    prefaulted_bytes: int = 0
    """Memory that was prefaulted before it was ready."""
    prefault_seconds: float = 0.0
    """How long that took."""


class ServerMonitor:
    """Polls one server in `run` until `ended` is set.

    Any thread may read `seen`, an immutable object that is replaced.
    """

    def __init__(self, settings: SidecarSettings, server: int = 0) -> None:
        self._settings = settings
        self._port = settings.redis_port + server
        self._where = f"the Redis at {settings.redis_host}:{self._port}"
        self._wire: RespConnection | None = None
        self._instance = ""
        self._polled_seconds = 0.0
        self._certificate = ""
        self.stop_requested = threading.Event()
        self.state = ServerState()

    def run(self) -> None:
        """Polls until stopped; a failed poll makes the server not ready, and the next one starts with a new connection."""
        while not self.stop_requested.is_set():
            try:
                self.poll()
            except SurefootError as error:
                self._mark_down(str(error))
            except Exception as error:  # noqa: BLE001  the thread must survive, or the last state would stay for ever
                self._mark_down(f"cannot poll {self._where}: {error!r}", error)
            self.stop_requested.wait(self._settings.poll_seconds)
        self._close_connection()

    def poll(self) -> None:
        """Polls once, and prefaults the memory of a new instance.

        Raises:
            TierError, ConfigurationError: The server or a mounted file cannot be read.
        """
        wire = self._open_connection()
        with translate_redis_errors(self._where, "polling it"):
            self._store_figures(wire)
        instance = self.state.info.get("run_id", "")
        # a new run id means an empty server, whose pages the kernel has not provided yet
        if instance != self._instance:
            self.state = replace(
                self.state, is_ready=False, reason="its memory is being prefaulted", prefaulted_bytes=0
            )
            self._prefault_memory(wire)
            self._instance = instance
        if self._settings.tls_folder:
            self._load_renewed_certificate(wire)
        self.state = replace(self.state, is_ready=True, reason="")

    def _load_renewed_certificate(self, wire: RespConnection) -> None:
        """Makes the server load a renewed certificate, since it reads its files only on command."""
        folder = Path(self._settings.tls_folder)
        certificate, key = folder / "tls.crt", folder / "tls.key"
        content = _read_mounted(certificate)
        if content == self._certificate:
            return
        with translate_redis_errors(self._where, "loading its renewed certificate"):
            wire.call("CONFIG SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
        if self._certificate:
            _log.info("%s has loaded its renewed certificate", self._where)
        self._certificate = content

    def _prefault_memory(self, wire: RespConnection) -> None:
        """Prefaults the memory of a server without keys, until a job gets an account."""
        with translate_redis_errors(self._where, "prefaulting its memory"):
            start_seconds = time.monotonic()
            # first the flag, then the check for jobs: provisioning does both in the opposite order, so neither misses the other
            expiry_seconds = max(1, round(self._settings.prefault_timeout_seconds))
            wire.call("SET", scripts.PREFAULTING_KEY, "1", "EX", expiry_seconds)
            try:
                provisioning.remove_prefault_leftovers(wire)
                size = self._prefault_size(wire)
                prefaulted_bytes = provisioning.prefault_memory(
                    wire, size, lambda written: self._may_prefault(wire, written)
                )
            finally:
                wire.call("DEL", scripts.PREFAULTING_KEY)
            seconds = time.monotonic() - start_seconds
        _log.info("prefaulted %d of %d bytes of %s in %.1f s", prefaulted_bytes, size, self._where, seconds)
        self.state = replace(self.state, prefaulted_bytes=prefaulted_bytes, prefault_seconds=seconds)

    def _prefault_size(self, wire: RespConnection) -> int:
        """Returns how many bytes to prefault; 0 if the server has no limit."""
        info = wire.info("memory")
        limit, used = int(info["maxmemory"]), int(info["used_memory"])
        if limit == 0:
            _log.warning(
                "%s has no maxmemory: its memory is not prefaulted, and its first saves will be slow", self._where
            )
            return 0
        return max(0, int(limit * self._settings.prefault_ratio) - used)

    def _may_prefault(self, wire: RespConnection, written: int) -> bool:
        """Returns whether prefaulting may continue: the monitor runs, and no job has stored a key."""
        if self.stop_requested.is_set():
            return False
        # prefaulting may take longer than a poll interval: keep the metrics current
        if time.monotonic() - self._polled_seconds > self._settings.poll_seconds:
            self._store_figures(wire)
        own_keys = written + int(wire.call("EXISTS", scripts.PREFAULTING_KEY))
        if int(wire.call("DBSIZE")) <= own_keys:
            return True
        _log.info("%s: prefaulting stops after %d values, because a job uses the server now", self._where, written)
        return False

    def _store_figures(self, wire: RespConnection) -> None:
        """Stores the server's present figures."""
        info = wire.info("default")
        self._polled_seconds = time.monotonic()
        self.state = replace(self.state, is_up=True, info=info, keys=int(wire.call("DBSIZE")))

    def _open_connection(self) -> RespConnection:
        """Returns the connection, made with the present password and authority if there is none."""
        if self._wire is None:
            settings = self._settings
            tls = bool(settings.tls_folder)
            password = _read_mounted(Path(settings.password_file)).strip() if settings.password_file else ""
            account = Credentials("", password, _read_mounted(Path(settings.tls_folder) / "ca.crt") if tls else "")
            self._wire = RespConnection(settings.redis_host, self._port, account, settings.call_timeout_seconds, tls)
        return self._wire

    def _mark_down(self, reason: str, error: Exception | None = None) -> None:
        """Marks the server as not replying, and logs the reason if it is a new one."""
        if self.state.reason != reason:
            _log.warning("%s", reason, exc_info=error)
        self._close_connection()
        self.state = ServerState(reason=reason)

    def _close_connection(self) -> None:
        """Closes the connection, so that the next poll reads the mounted files again."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _read_mounted(path: Path) -> str:
    """Reads a mounted file; raises TierUnavailable if it does not exist yet."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TierUnavailable(f"{path} does not exist yet: it is mounted from a Secret") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


# ---- server monitor --------------------------------------------------------------------------------------------------


class NodeServersMonitor:
    """Monitors all servers of the node, each in a thread of its own; any thread may read the states."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._watches = tuple(ServerMonitor(settings, server) for server in range(settings.servers))

    @property
    def states(self) -> tuple[ServerState, ...]:
        """The last known state of each server, by server index."""
        return tuple(watch.state for watch in self._watches)

    @property
    def not_ready_reason(self) -> str:
        """Each server that is not ready, and why, in lines; empty: all are ready."""
        states = enumerate(self.states)
        return "\n".join(f"server {server}: {state.reason}" for server, state in states if not state.is_ready)

    @contextmanager
    def run_monitors(self) -> Iterator[None]:
        """Monitors until the block ends, then waits for polls in progress and joins the threads."""
        threads = [
            threading.Thread(target=watch.run, name=f"server-{server}") for server, watch in enumerate(self._watches)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for watch in self._watches:
                watch.stop_requested.set()
            for thread in threads:
                thread.join()


# ---- sidecar metrics -------------------------------------------------------------------------------------------------
# Translates Redis' INFO into Prometheus metrics in base units. Pure.

_LABELS = ("server",)
_GAUGES = (
    ("used_bytes", "used_memory", "Bytes that the server counts as used."),
    ("max_bytes", "maxmemory", "The server's limit (maxmemory); 0: none."),
    ("resident_bytes", "used_memory_rss", "Resident bytes of the server's process, prefaulted memory included."),
    ("fragmentation_ratio", "mem_fragmentation_ratio", "Resident by used bytes; high after prefaulting, by design."),
    ("connected_clients", "connected_clients", "Open connections."),
    ("uptime_seconds", "uptime_in_seconds", "Time since the server started, empty."),
)
"""Metric, field of INFO, and help text of each gauge."""
_COUNTERS = (
    ("evicted_keys", "evicted_keys", "Keys evicted by the memory limit: must stay 0 (noeviction)."),
    ("commands", "total_commands_processed", "Commands processed."),
    ("connections_received", "total_connections_received", "Connections accepted."),
    ("network_receive_bytes", "total_net_input_bytes", "Bytes received from clients."),
    ("network_transmit_bytes", "total_net_output_bytes", "Bytes sent to clients."),
)
"""Metric without `_total`, field of INFO, and help text of each counter."""


def render_metrics(states: Sequence[ServerState]) -> bytes:
    """Returns the text of /metrics; `states` are by server index."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(states))
    return generate_latest(registry)


class _MetricsCollector(Collector):
    """Exports the states of all servers as metrics."""

    def __init__(self, states: Sequence[ServerState]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; values of servers that do not reply are left out."""
        states = self._states
        ready = "Whether the server's memory is prefaulted, or a job uses it already."
        yield from _gauge_of_servers("up", "Whether the server replies.", [float(state.is_up) for state in states])
        yield from _gauge_of_servers("ready", ready, [float(state.is_ready) for state in states])
        yield from _gauge_of_servers(
            "keys", "Keys of all jobs.", [float(state.keys) if state.is_up else None for state in states]
        )
        prefaulted = [float(state.prefaulted_bytes) if state.is_up else None for state in states]
        yield from _gauge_of_servers(
            "prefaulted_bytes", "Memory that was prefaulted before the server was ready.", prefaulted
        )
        durations = [state.prefault_seconds if state.is_up else None for state in states]
        yield from _gauge_of_servers("prefault_duration_seconds", "How long prefaulting took.", durations)
        for name, key, help_text in _GAUGES:
            yield from _gauge_of_servers(name, help_text, [_info_number(state.info, key) for state in states])
        for name, key, help_text in _COUNTERS:
            counter = CounterMetricFamily(f"surefoot_memory_server_{name}", help_text, labels=_LABELS)
            yield from _add_samples(counter, [_info_number(state.info, key) for state in states])


def _gauge_of_servers(name: str, help_text: str, values: Sequence[float | None]) -> Iterator[Metric]:
    """Yields a gauge with the value of each server that has one."""
    return _add_samples(GaugeMetricFamily(f"surefoot_memory_server_{name}", help_text, labels=_LABELS), values)


def _add_samples(family: GaugeMetricFamily | CounterMetricFamily, values: Sequence[float | None]) -> Iterator[Metric]:
    """Yields the family with a sample for each server that has a value; nothing if none has."""
    for server, value in enumerate(values):
        if value is not None:
            family.add_metric([str(server)], value)
    if family.samples:
        yield family


def _info_number(info: Mapping[str, str], key: str) -> float | None:
    """Returns a number of INFO; None if it is missing."""
    try:
        return float(info[key])
    except (KeyError, ValueError):  # a server that is only compatible with Redis may not report it
        return None
