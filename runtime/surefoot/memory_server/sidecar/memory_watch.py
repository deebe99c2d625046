"""Polls one local Redis and pre-touches the memory of each new instance.

A server counts as ready behind that. One thread runs `run`; others read `seen`. A server that a job uses is only
looked at: saves never wait for this.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from surefoot.errors import ConfigurationError, SurefootError, TierUnavailable
from surefoot.memory_server import filling, keys
from surefoot.memory_server.connection import Credentials, Wire, explained
from surefoot.memory_server.sidecar.sidecar_settings import CompanionSettings

_log = logging.getLogger(__name__)


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

    def __init__(self, settings: CompanionSettings, server: int = 0) -> None:
        self._settings = settings
        self._port = settings.redis_port + server
        self._where = f"the Redis at {settings.redis_host}:{self._port}"
        self._wire: Wire | None = None
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
            self.ended.wait(self._settings.look_seconds)
        self._close()

    def look(self) -> None:
        """Polls once, and fills the memory of a server that is new.

        Raises TierError or ConfigurationError.
        """
        wire = self._opened()
        with explained(self._where, "asking for its figures"):
            self._note(wire)
        instance = self.seen.info.get("run_id", "")
        if instance != self._instance:
            self.seen = replace(self.seen, ready=False, reason="its memory is touched first", filled_bytes=0)
            self._fill(wire)
            self._instance = instance
        if self._settings.tls_folder:
            self._hand_in(wire)
        self.seen = replace(self.seen, ready=True, reason="")

    def _hand_in(self, wire: Wire) -> None:
        """Makes the server read a renewed certificate: it reads its files only on command."""
        folder = Path(self._settings.tls_folder)
        certificate, key = folder / "tls.crt", folder / "tls.key"
        now = _text(certificate)
        if now == self._certificate:
            return
        with explained(self._where, "handing in its renewed certificate"):
            wire.call("CONFIG SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
        if self._certificate:
            _log.info("%s: its certificate was renewed", self._where)
        self._certificate = now

    def _fill(self, wire: Wire) -> None:
        """Fills the memory of a server without keys, until a job gets some."""
        with explained(self._where, "touching its memory"):
            began = time.monotonic()
            # first the sign, then the look at who is there: whoever provisions does it in the other order
            hold = max(1, round(self._settings.hold_seconds))
            wire.call("SET", keys.FILLING, "1", "EX", hold)
            try:
                filling.remove_leftovers(wire)
                size = self._room(wire)
                done = filling.fill(wire, size, lambda written: self._alone(wire, written))
            finally:
                wire.call("DEL", keys.FILLING)
            seconds = time.monotonic() - began
        _log.info("%s: %d of %d bytes touched in %.1f s", self._where, done, size, seconds)
        self.seen = replace(self.seen, filled_bytes=done, fill_seconds=seconds)

    def _room(self, wire: Wire) -> int:
        info = wire.info("memory")
        limit, used = int(info["maxmemory"]), int(info["used_memory"])
        if limit == 0:
            _log.warning("%s has no maxmemory: it is not filled, and its first saves are slow", self._where)
            return 0
        return max(0, int(limit * self._settings.fill_share) - used)

    def _alone(self, wire: Wire, written: int) -> bool:
        if self.ended.is_set():
            return False
        if time.monotonic() - self._looked_at > self._settings.look_seconds:
            self._note(wire)
        own = written + int(wire.call("EXISTS", keys.FILLING))
        if int(wire.call("DBSIZE")) <= own:
            return True
        _log.info("%s: a job has come, %d values were written until then", self._where, written)
        return False

    def _note(self, wire: Wire) -> None:
        info = wire.info("default")
        self._looked_at = time.monotonic()
        self.seen = replace(self.seen, up=True, info=info, keys=int(wire.call("DBSIZE")))

    def _opened(self) -> Wire:
        if self._wire is None:
            settings = self._settings
            tls = bool(settings.tls_folder)
            password = _text(Path(settings.password_file)).strip() if settings.password_file else ""
            account = Credentials("", password, _text(Path(settings.tls_folder) / "ca.crt") if tls else "")
            self._wire = Wire(settings.redis_host, self._port, account, settings.call_seconds, tls)
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
