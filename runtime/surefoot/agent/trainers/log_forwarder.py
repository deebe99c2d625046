"""Copies trainers' log files to stdout, each line prefixed with its rank.

A thread of its own does it, so that a reader of stdout that stands still holds up nothing else. What is shown is
limited (`rate_limit`); the files stay complete whatever happens to the agent.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from surefoot.agent.trainers.rate_limit import LogRateLimit

_LOOK_SECONDS = 0.2
_TAIL_BYTES = 16 << 10
_TAIL_LINES = 40
_PIECE_BYTES = 1 << 20
"""Read at a time, of each file in turn: one that grows faster than it can be shown keeps no other waiting."""
_LINE_BYTES = 16 << 10
"""A longer line is shown in pieces."""
_BEHIND_BYTES = 32 << 20
"""Further behind than this, the reader skips to the newest lines."""

_ENDED = 64
"""Files that ended lately: more ranks than that no worker has."""


@dataclass(slots=True)
class _Followed:
    path: Path
    prefix: str
    offset: int = 0
    rest: bytes = b""
    cut: bool = False
    """Something of it was not shown."""


@dataclass(frozen=True, slots=True)
class _ShowTail:
    path: Path
    prefix: str


@dataclass(frozen=True, slots=True)
class _Unfollow:
    path: Path


@dataclass(frozen=True, slots=True)
class _End:
    """Ends the forwarding."""


@dataclass(slots=True)
class LogForwarder:
    """Queues orders for its thread; `close` waits for them, but not long."""

    out: IO[str] = field(default_factory=lambda: sys.stdout)
    flow: LogRateLimit = field(default_factory=LogRateLimit)
    _orders: queue.SimpleQueue[_Followed | _Unfollow | _ShowTail | _End] = field(default_factory=queue.SimpleQueue)
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
        """Shows a file's last lines where some were left out before."""
        self._orders.put(_ShowTail(path, f"[rank {rank}] "))

    def close(self, seconds: float = 1.0) -> None:
        self._orders.put(_End())
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        followed: dict[Path, _Followed] = {}
        ended: collections.deque[_Followed] = collections.deque(maxlen=_ENDED)
        while True:
            order = self._next(_LOOK_SECONDS if followed else None)
            match order:
                case _Followed(path=path):
                    followed[path] = order
                case _Unfollow(path):
                    entry = followed.pop(path, None)
                    if entry is not None:
                        self._to_the_end(entry)
                        ended.append(entry)
                case _ShowTail(path, prefix):
                    if any(entry.cut and entry.path == path for entry in (*followed.values(), *ended)):
                        self._show(_last_lines(path), prefix)
                case _End():
                    for entry in followed.values():
                        self._to_the_end(entry)
                    self._say_overflow(last=True)
                    return
            for entry in followed.values():
                self._forward(entry)
            self._say_overflow()

    def _next(self, wait: float | None) -> _Followed | _Unfollow | _ShowTail | _End | None:
        try:
            return self._orders.get(timeout=wait)
        except queue.Empty:
            return None

    def _forward(self, entry: _Followed) -> int:
        """Forwards one piece of what is new; returns its bytes."""
        with contextlib.suppress(OSError), entry.path.open("rb") as file:  # not there yet, or cleaned away
            size = file.seek(0, 2)
            if size - entry.offset > _BEHIND_BYTES:
                skipped = size - entry.offset - _PIECE_BYTES
                self.flow.skip(0, skipped)
                entry.offset, entry.rest, entry.cut = entry.offset + skipped, b"", True
            file.seek(entry.offset)
            data = file.read(_PIECE_BYTES)
            entry.offset += len(data)
            *lines, entry.rest = (entry.rest + data).split(b"\n")
            while len(entry.rest) > _LINE_BYTES:
                lines.append(entry.rest[:_LINE_BYTES])
                entry.rest = entry.rest[_LINE_BYTES:]
            self._limited(entry, lines)
            return len(data)
        return 0

    def _to_the_end(self, entry: _Followed) -> None:
        while self._forward(entry):
            pass
        if entry.rest:
            self._limited(entry, [entry.rest])

    def _limited(self, entry: _Followed, lines: list[bytes]) -> None:
        now = time.monotonic()
        shown = [line for line in lines if self.flow.admit(len(entry.prefix) + len(line) + 1, now)]
        entry.cut = entry.cut or len(shown) < len(lines)
        self._show([line.decode(errors="replace") for line in shown], entry.prefix)

    def _say_overflow(self, last: bool = False) -> None:
        text = self.flow.overflow(time.monotonic(), last)
        if text is not None:
            self._show([text], "[surefoot] ")

    def _show(self, lines: list[str], prefix: str) -> None:
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
