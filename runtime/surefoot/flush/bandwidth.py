"""Holds the limits of one worker's copies beside its training.

A save on its way to other nodes and an upload share the network with the training's collectives; a training that waits
for its own checkpoints has lost what they were to save.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from surefoot.settings import JobSettings

# ---- token bucket ----------------------------------------------------------------------------------------------------
# Limits the rate of background copies by a token bucket. They would take the network from the training.

BURST_SECONDS = 0.25
"""As much may go at once; a whole second's worth would be felt by a training whose step is shorter."""


class TokenBucket:
    """Limits bytes a second on average.

    At most `bytes_per_second`, in bursts of `BURST_SECONDS`; 0 means as fast as it goes. `take` waits its turn and
    returns False once `stop` was called, so that whoever paces can be ended at once.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._tokens = bytes_per_second * BURST_SECONDS
        self._at = time.monotonic()
        self._lifted = bytes_per_second <= 0
        self._stopped = False
        self._changed = threading.Condition()

    def take(self, amount: int) -> bool:
        """Spends bytes, and waits until their debt is paid."""
        with self._changed:
            if not self._lifted:
                now = time.monotonic()
                full = self._rate * BURST_SECONDS
                self._tokens = min(full, self._tokens + (now - self._at) * self._rate) - amount
                self._at = now
                self._changed.wait_for(lambda: self._lifted or self._stopped, max(0.0, -self._tokens / self._rate))
            return not self._stopped

    def limit(self, limited: bool) -> None:
        """Limits, or lifts the limit: whoever waits goes on."""
        with self._changed:
            lifted = not limited or self._rate <= 0
            if lifted and not self._lifted:
                self._tokens = 0.0  # what went out unlimited is no debt of what follows
                self._changed.notify_all()
            self._at = time.monotonic() if self._lifted and not lifted else self._at
            self._lifted = lifted

    def stop(self) -> None:
        """Ends all waits, for good."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


# ---- bandwidth -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Limits a worker's copies to other nodes, and its uploads."""

    memory: TokenBucket = field(default_factory=TokenBucket)
    persistent: TokenBucket = field(default_factory=TokenBucket)

    def limit(self, limited: bool) -> None:
        """Limits both, or neither.

        Where nothing trains there is nothing to spare.
        """
        self.memory.limit(limited)
        self.persistent.limit(limited)


def bandwidth_of(job: JobSettings) -> Bandwidth:
    """Makes the limits that a job asks for."""
    uploads = job.persistent.bytes_per_second if job.persistent is not None else 0.0
    return Bandwidth(TokenBucket(job.memory_bytes_per_second), TokenBucket(uploads))
