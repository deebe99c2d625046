"""Limits the bytes of trainer logs that reach stdout.

Pure. What it leaves out is counted and said. A trainer that prints in a loop must not fill a node's disk with
container logs, nor hide the other ranks' words. Used by `log_forwarder`; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_SECOND = 256 << 10
BURST_BYTES = 4 << 20


@dataclass(slots=True)
class LogRateLimit:
    """Limits all local ranks' output together by a token bucket."""

    rate: float = BYTES_PER_SECOND
    burst: float = BURST_BYTES
    say_seconds: float = 5.0
    _level: float | None = None
    _at: float = 0.0
    _lines: int = 0
    _bytes: int = 0
    _said_at: float = float("-inf")

    def admit(self, size: int, now: float) -> bool:
        """Whether a line of `size` bytes is shown; others are counted."""
        level = self.burst if self._level is None else min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        if size > level:
            self._level = level
            self.skip(1, size)
            return False
        self._level = level - size
        return True

    def skip(self, lines: int, size: int) -> None:
        """Counts what is left out unread."""
        self._lines += lines
        self._bytes += size

    def overflow(self, now: float, last: bool = False) -> str | None:
        """Reports lines left out since the last report; None: nothing to report.

        At most every `say_seconds`, unless it is the `last`.
        """
        if not self._bytes or (now - self._said_at < self.say_seconds and not last):
            return None
        text = (
            f"{self._lines} lines ({self._bytes} bytes) are not shown here: the trainers of this worker print more than "
            f"{self.rate / 1024:.0f} KiB a second; their log files have all of it"
        )
        self._lines = self._bytes = 0
        self._said_at = now
        return text
