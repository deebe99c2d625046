"""Copies trainers' log files to stdout, each line prefixed with its rank.

It runs in its own thread, so that a blocked reader of stdout delays nothing else. The rate is limited, and so is the size
of each file: a trainer that prints in a loop must not fill the disk.
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

# ---- rate limit ------------------------------------------------------------------------------------------------------
# Limits the bytes of trainer logs that reach stdout, and reports how much is left out: a trainer that prints in a
# loop must not fill a node's disk with container logs or bury the other ranks' output. Pure; time is an argument.

BYTES_PER_SECOND = 256 << 10
BURST_BYTES = 4 << 20


@dataclass(slots=True)
class LogRateLimit:
    """Limits all local ranks' output together by a token bucket."""

    rate: float = BYTES_PER_SECOND
    burst: float = BURST_BYTES
    report_seconds: float = 5.0
    _level: float | None = None
    _at: float = 0.0
    _lines: int = 0
    _bytes: int = 0
    _reported_seconds: float = float("-inf")

    def admit(self, size: int, now: float) -> bool:
        """Decides whether a line of `size` bytes is shown; counts it if not."""
        level = self.burst if self._level is None else min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if size > level:
            self._level = level
            self.count_skipped(1, size)
            return False
        self._level = level - size
        return True

    def count_skipped(self, lines: int, size: int) -> None:
        """Counts lines and bytes that are not shown."""
        self._lines += lines
        self._bytes += size

    def report_skipped(self, now: float, is_final: bool = False) -> str | None:
        """Describes the output left out since the last report; None: nothing, or the last report is too recent.

        A report comes at most every `report_seconds`, unless `is_final`.
        """
        if not self._bytes or (now - self._reported_seconds < self.report_seconds and not is_final):
            return None
        text = (
            f"{self._lines} lines ({self._bytes} bytes) are not shown here: the trainers of this worker print more than "
            f"{self.rate / 1024:.0f} KiB a second; their log files have more"
        )
        self._lines = self._bytes = 0
        self._reported_seconds = now
        return text


# ---- log forwarder ---------------------------------------------------------------------------------------------------

_POLL_SECONDS = 0.2
_TAIL_BYTES = 16 << 10
_TAIL_LINES = 40
_PIECE_BYTES = 1 << 20
"""Most bytes read from a file before the next one's turn, so that a fast-growing file does not delay the others."""
_LINE_BYTES = 16 << 10
"""Longest line that is shown whole; a longer one is split."""
_BEHIND_BYTES = 32 << 20
"""Unread bytes of a file above which the reader skips to the newest lines."""

MAX_FILE_BYTES = 64 << 20
"""Size of a log file above which its older part is deleted."""
KEPT_BYTES = 8 << 20
"""Bytes at the end of such a file that stay."""

_MAX_FINISHED = 64
"""Number of finished files that are remembered for their tails; no worker has more ranks."""


@dataclass(slots=True)
class _ForwardedLog:
    path: Path
    prefix: str
    offset: int = 0
    rest: bytes = b""
    cut: bool = False
    """Whether some of its lines were not shown."""


@dataclass(frozen=True, slots=True)
class _ShowTail:
    path: Path
    prefix: str


@dataclass(frozen=True, slots=True)
class _StopForwarding:
    path: Path


@dataclass(frozen=True, slots=True)
class _End:
    """Requests the end of the forwarding thread."""


@dataclass(slots=True)
class LogForwarder:
    """Forwards log files in a thread; `close` gives it a moment to finish queued requests."""

    out: IO[str] = field(default_factory=lambda: sys.stdout)
    flow: LogRateLimit = field(default_factory=LogRateLimit)
    _requests: queue.SimpleQueue[_ForwardedLog | _StopForwarding | _ShowTail | _End] = field(
        default_factory=queue.SimpleQueue
    )
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="surefoot-logs", daemon=True)
        self._thread.start()

    def start_forwarding(self, path: Path, rank: int) -> None:
        """Starts forwarding a trainer's log file."""
        self._requests.put(_ForwardedLog(path, f"[rank {rank}] "))

    def stop_forwarding(self, path: Path) -> None:
        """Forwards the rest of the file, then no more of it."""
        self._requests.put(_StopForwarding(path))

    def show_tail(self, path: Path, rank: int) -> None:
        """Shows the last lines of a file if some of its lines were left out."""
        self._requests.put(_ShowTail(path, f"[rank {rank}] "))

    def close(self, seconds: float = 1.0) -> None:
        self._requests.put(_End())
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        followed: dict[Path, _ForwardedLog] = {}
        finished: collections.deque[_ForwardedLog] = collections.deque(maxlen=_MAX_FINISHED)
        while True:
            request = self._next_request(_POLL_SECONDS if followed else None)
            match request:
                case _ForwardedLog(path=path):
                    followed[path] = request
                case _StopForwarding(path):
                    entry = followed.pop(path, None)
                    if entry is not None:
                        self._forward_rest(entry)
                        finished.append(entry)
                case _ShowTail(path, prefix):
                    if any(entry.cut and entry.path == path for entry in (*followed.values(), *finished)):
                        self._show(_last_lines(path), prefix)
                case _End():
                    for entry in followed.values():
                        self._forward_rest(entry)
                    self._show_overflow(last=True)
                    return
            for entry in followed.values():
                self._forward(entry)
            self._show_overflow()

    def _next_request(self, wait: float | None) -> _ForwardedLog | _StopForwarding | _ShowTail | _End | None:
        try:
            return self._requests.get(timeout=wait)
        except queue.Empty:
            return None

    def _forward(self, entry: _ForwardedLog) -> int:
        """Forwards up to _PIECE_BYTES of new output; returns the number of bytes."""
        with contextlib.suppress(OSError), entry.path.open("rb") as file:  # not created yet, or deleted
            size = file.seek(0, 2)
            if size - entry.offset > _BEHIND_BYTES:
                skipped = size - entry.offset - _PIECE_BYTES
                self.flow.count_skipped(0, skipped)
                entry.offset, entry.rest, entry.cut = entry.offset + skipped, b"", True
            file.seek(entry.offset)
            data = file.read(_PIECE_BYTES)
            entry.offset += len(data)
            *lines, entry.rest = (entry.rest + data).split(b"\n")
            while len(entry.rest) > _LINE_BYTES:
                lines.append(entry.rest[:_LINE_BYTES])
                entry.rest = entry.rest[_LINE_BYTES:]
            self._show_admitted(entry, lines)
            if size > MAX_FILE_BYTES:
                entry.offset, entry.rest = _delete_older_part(entry.path), b""
            return len(data)
        return 0

    def _forward_rest(self, entry: _ForwardedLog) -> None:
        while self._forward(entry):
            pass
        if entry.rest:
            self._show_admitted(entry, [entry.rest])

    def _show_admitted(self, entry: _ForwardedLog, lines: list[bytes]) -> None:
        now = time.monotonic()
        admitted = [line for line in lines if self.flow.admit(len(entry.prefix) + len(line) + 1, now)]
        entry.cut = entry.cut or len(admitted) < len(lines)
        self._show([line.decode(errors="replace") for line in admitted], entry.prefix)

    def _show_overflow(self, last: bool = False) -> None:
        text = self.flow.report_skipped(time.monotonic(), last)
        if text is not None:
            self._show([text], "[surefoot] ")

    def _show(self, lines: list[str], prefix: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader of stdout is gone; the files are complete
            for text in lines:
                self.out.write(f"{prefix}{text}\n")
            self.out.flush()


def _delete_older_part(path: Path) -> int:
    """Shortens a log file to its newest lines; returns its new size.

    The trainer appends (O_APPEND), so it continues at the new end. Lines that it writes in this moment may be lost.
    """
    with path.open("r+b") as file:
        old_bytes = file.seek(-KEPT_BYTES, 2) + KEPT_BYTES
        newest = file.read(KEPT_BYTES).partition(b"\n")[2]
        file.truncate(0)
        file.seek(0)
        notice = f"[surefoot] {old_bytes - len(newest)} older bytes were deleted: this log had more than {MAX_FILE_BYTES} bytes\n"
        file.write(notice.encode() + newest)
        return file.tell()


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
