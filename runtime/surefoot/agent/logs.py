"""Trainers write their own log files; here they are read: rank 0's lines, and a failed rank's last ones, go to stdout.

A thread of its own does it, so that a reader of stdout that stands still holds up nothing else. Files stay complete
whatever happens to the agent.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_LOOK_SECONDS = 0.2
_TAIL_BYTES = 16 << 10
_TAIL_LINES = 40


@dataclass(slots=True)
class _Followed:
    path: Path
    prefix: str
    offset: int = 0
    rest: bytes = b""
    ending: bool = False


@dataclass(frozen=True, slots=True)
class _Tail:
    path: Path
    prefix: str


@dataclass(frozen=True, slots=True)
class _Unfollow:
    path: Path


@dataclass(frozen=True, slots=True)
class _End:
    """No more orders."""


@dataclass(slots=True)
class LogForwarder:
    """`follow`, `unfollow` and `tail` return at once; `close` waits for what was ordered, a moment."""

    out: IO[str] = field(default_factory=lambda: sys.stdout)
    _orders: queue.SimpleQueue[_Followed | _Unfollow | _Tail | _End] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="surefoot-logs", daemon=True)
        self._thread.start()

    def follow(self, path: Path, rank: int) -> None:
        """Forwards what is written to this file from now on."""
        self._orders.put(_Followed(path, f"[rank {rank}] "))

    def unfollow(self, path: Path) -> None:
        """Forwards what is there, then no more."""
        self._orders.put(_Unfollow(path))

    def tail(self, path: Path, rank: int) -> None:
        """Forwards the last lines of a file that is not followed."""
        self._orders.put(_Tail(path, f"[rank {rank}] "))

    def close(self, seconds: float = 1.0) -> None:
        self._orders.put(_End())
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        followed: dict[Path, _Followed] = {}
        while True:
            order = self._next(_LOOK_SECONDS if followed else None)
            match order:
                case _Followed(path=path):
                    followed[path] = order
                case _Unfollow(path):
                    ended = followed.pop(path, None)
                    if ended is not None:
                        self._forward(ended, whole=True)
                case _Tail(path, prefix):
                    if path not in followed:
                        self._write(_last_lines(path), prefix)
                case _End():
                    for entry in followed.values():
                        self._forward(entry, whole=True)
                    return
            for entry in followed.values():
                self._forward(entry)

    def _next(self, wait: float | None) -> _Followed | _Unfollow | _Tail | _End | None:
        try:
            return self._orders.get(timeout=wait)
        except queue.Empty:
            return None

    def _forward(self, entry: _Followed, whole: bool = False) -> None:
        with contextlib.suppress(OSError), entry.path.open("rb") as file:  # not there yet, or cleaned away
            file.seek(entry.offset)
            data = file.read()
            entry.offset += len(data)
            *lines, entry.rest = (entry.rest + data).split(b"\n")
            if whole and entry.rest:
                lines.append(entry.rest)
            self._write([line.decode(errors="replace") for line in lines], entry.prefix)

    def _write(self, lines: list[str], prefix: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever read us has gone; the files are complete
            for text in lines:
                self.out.write(f"{prefix}{text}\n")
            self.out.flush()


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
