"""Watches every Redis server of the node, one thread each.

With one thread for all, a server that hangs would keep the others from being filled, and their figures would stand still.
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


# ---- memory watch ----------------------------------------------------------------------------------------------------
# Polls one local Redis and pre-touches the memory of each new instance. A server counts as ready behind that. One
# thread runs `run`; others read `seen`. A server that a job uses is only looked at: saves never wait for this.


@dataclass(frozen=True, slots=True)
class Seen:
    """Holds the server's last known state; `ready` only while it answers."""

    up: bool = False
    ready: bool = False
    reason: str = "nobody was asked yet"
    info: dict[str, str] = field(default_factory=dict)
    keys: int = 0
    filled_bytes: int = 0
    fill_seconds: float = 0.0


class Watch:
    """Polls the server in `run` until `ended` is set.

    Any thread may read `seen`: it is replaced, never changed.
    """

    def __init__(self, settings: SidecarSettings, server: int = 0) -> None:
        self._settings = settings
        self._port = settings.redis_port + server
        self._where = f"the Redis at {settings.redis_host}:{self._port}"
        self._wire: RespConnection | None = None
        self._instance = ""
        self._looked_at = 0.0
        self._certificate = ""
        self.ended = threading.Event()
        self.seen = Seen()

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self.look()
            except SurefootError as error:
                self._away(str(error))
            except Exception as error:  # noqa: BLE001  a thread that died would leave its server as it was seen last
                self._away(f"{self._where} could not be looked at: {error!r}", error)
            self.ended.wait(self._settings.poll_seconds)
        self._close()

    def look(self) -> None:
        """Polls once, and fills the memory of a server that is new.

        Raises TierError or ConfigurationError.
        """
        wire = self._opened()
        with translate_redis_errors(self._where, "asking for its figures"):
            self._note(wire)
        instance = self.seen.info.get("run_id", "")
        if instance != self._instance:
            self.seen = replace(self.seen, ready=False, reason="its memory is touched first", filled_bytes=0)
            self._fill(wire)
            self._instance = instance
        if self._settings.tls_folder:
            self._hand_in(wire)
        self.seen = replace(self.seen, ready=True, reason="")

    def _hand_in(self, wire: RespConnection) -> None:
        """Makes the server read a renewed certificate: it reads its files only on command."""
        folder = Path(self._settings.tls_folder)
        certificate, key = folder / "tls.crt", folder / "tls.key"
        now = _text(certificate)
        if now == self._certificate:
            return
        with translate_redis_errors(self._where, "handing in its renewed certificate"):
            wire.call("CONFIG SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
        if self._certificate:
            _log.info("%s: its certificate was renewed", self._where)
        self._certificate = now

    def _fill(self, wire: RespConnection) -> None:
        """Fills the memory of a server without keys, until a job gets some."""
        with translate_redis_errors(self._where, "touching its memory"):
            began = time.monotonic()
            # first the sign, then the look at who is there: whoever provisions does it in the other order
            hold = max(1, round(self._settings.prefault_timeout_seconds))
            wire.call("SET", scripts.FILLING_KEY, "1", "EX", hold)
            try:
                provisioning.remove_filled_leftovers(wire)
                size = self._room(wire)
                done = provisioning.fill_memory(wire, size, lambda written: self._alone(wire, written))
            finally:
                wire.call("DEL", scripts.FILLING_KEY)
            seconds = time.monotonic() - began
        _log.info("%s: %d of %d bytes touched in %.1f s", self._where, done, size, seconds)
        self.seen = replace(self.seen, filled_bytes=done, fill_seconds=seconds)

    def _room(self, wire: RespConnection) -> int:
        info = wire.info("memory")
        limit, used = int(info["maxmemory"]), int(info["used_memory"])
        if limit == 0:
            _log.warning("%s has no maxmemory: it is not filled, and its first saves are slow", self._where)
            return 0
        return max(0, int(limit * self._settings.prefault_ratio) - used)

    def _alone(self, wire: RespConnection, written: int) -> bool:
        if self.ended.is_set():
            return False
        if time.monotonic() - self._looked_at > self._settings.poll_seconds:
            self._note(wire)
        own = written + int(wire.call("EXISTS", scripts.FILLING_KEY))
        if int(wire.call("DBSIZE")) <= own:
            return True
        _log.info("%s: a job has come, %d values were written until then", self._where, written)
        return False

    def _note(self, wire: RespConnection) -> None:
        info = wire.info("default")
        self._looked_at = time.monotonic()
        self.seen = replace(self.seen, up=True, info=info, keys=int(wire.call("DBSIZE")))

    def _opened(self) -> RespConnection:
        if self._wire is None:
            settings = self._settings
            tls = bool(settings.tls_folder)
            password = _text(Path(settings.password_file)).strip() if settings.password_file else ""
            account = Credentials("", password, _text(Path(settings.tls_folder) / "ca.crt") if tls else "")
            self._wire = RespConnection(settings.redis_host, self._port, account, settings.call_timeout_seconds, tls)
        return self._wire

    def _away(self, why: str, unforeseen: Exception | None = None) -> None:
        if self.seen.reason != why:
            _log.warning("%s", why, exc_info=unforeseen)
        self._close()
        self.seen = Seen(reason=why)

    def _close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TierUnavailable(f"{path} is not there yet: it is mounted from a Secret") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


# ---- server monitor --------------------------------------------------------------------------------------------------


class ServersWatch:
    """Owns a Watch and a thread for each server.

    Any thread may ask it.
    """

    def __init__(self, settings: SidecarSettings) -> None:
        self._watches = tuple(Watch(settings, server) for server in range(settings.servers))

    @property
    def states(self) -> tuple[Seen, ...]:
        """The last known state of each server, by number."""
        return tuple(watch.seen for watch in self._watches)

    @property
    def reason(self) -> str:
        """Names each server that is not ready and why; empty: all are."""
        seen = enumerate(self.states)
        return "\n".join(f"server {server}: {one.reason}" for server, one in seen if not one.ready)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches until the block ends, and joins the threads.

        A look that is under way is waited for.
        """
        threads = [
            threading.Thread(target=watch.run, name=f"server-{server}") for server, watch in enumerate(self._watches)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for watch in self._watches:
                watch.ended.set()
            for thread in threads:
                thread.join()


# ---- companion metrics -----------------------------------------------------------------------------------------------
# Translates Redis' INFO into this project's Prometheus metrics, in base units. Pure.

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


def render_metrics(seen: Sequence[Seen]) -> bytes:
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
