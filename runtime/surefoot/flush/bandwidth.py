"""Limits the bandwidth that one worker's copies and uploads take from its training.

They share the network with the training's collectives. Training that waits for its own checkpoints loses the time
that they were meant to save.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from surefoot.settings import JobSettings

# ---- token bucket ----------------------------------------------------------------------------------------------------
# Limits the rate of background copies, which would otherwise take the network from the training.

BURST_SECONDS = 0.25
"""How many seconds' worth of bytes may be sent at once. A full second would delay training with shorter steps."""


class TokenBucket:
    """Limits the average rate to `bytes_per_second`, in bursts of `BURST_SECONDS`; 0 means no limit.

    `take` returns False once `stop` was called, so that a thread that waits in it can be ended at once.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._tokens = bytes_per_second * BURST_SECONDS
        self._at = time.monotonic()
        self._lifted = bytes_per_second <= 0
        self._stopped = False
        self._changed = threading.Condition()

    def wait_for(self, amount: int) -> bool:
        """Takes `amount` bytes from the bucket and waits until they are covered; False once stopped."""
        with self._changed:
            if not self._lifted:
                now = time.monotonic()
                capacity = self._rate * BURST_SECONDS
                self._tokens = min(capacity, self._tokens + (now - self._at) * self._rate) - amount
                self._at = now
                self._changed.wait_for(lambda: self._lifted or self._stopped, max(0.0, -self._tokens / self._rate))
            return not self._stopped

    def set_limited(self, limited: bool) -> None:
        """Enables or lifts the limit; lifting it releases every waiting `take`."""
        with self._changed:
            is_lifted = not limited or self._rate <= 0
            if is_lifted and not self._lifted:
                self._tokens = 0.0  # bytes sent without a limit must not delay later ones
                self._changed.notify_all()
            self._at = time.monotonic() if self._lifted and not is_lifted else self._at
            self._lifted = is_lifted

    def stop(self) -> None:
        """Ends all waits, now and later: every `take` returns False."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


# ---- bandwidth -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth limits of one worker."""

    memory: TokenBucket = field(default_factory=TokenBucket)
    """Limit of copies to memory servers on other nodes."""
    persistent: TokenBucket = field(default_factory=TokenBucket)
    """Limit of uploads to the persistent tier."""

    def set_limited(self, limited: bool) -> None:
        """Enables or lifts both limits; they are is_lifted while nothing trains, as there is nothing to protect."""
        self.memory.set_limited(limited)
        self.persistent.set_limited(limited)


def build_bandwidth(job: JobSettings) -> Bandwidth:
    """Builds the limits that the job's settings ask for."""
    uploads = job.persistent.bytes_per_second if job.persistent is not None else 0.0
    return Bandwidth(TokenBucket(job.memory_bytes_per_second), TokenBucket(uploads))
