"""Limits the rate of background copies by a token bucket.

They would take the network from the training.
"""

from __future__ import annotations

import threading
import time


class TokenBucket:
    """Limits bytes a second on average.

    At most `bytes_per_second`, in bursts of one second's worth; 0 means as fast as it goes.

    `take` waits its turn and returns False once `stop` was called, so that whoever paces can be ended at once.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._tokens = bytes_per_second
        self._at = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def take(self, amount: int) -> bool:
        """Spends bytes, and waits until their debt is paid."""
        if self._rate <= 0:
            return not self._stopped.is_set()
        with self._lock:
            now = time.monotonic()
            self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate) - amount
            self._at = now
            debt = max(0.0, -self._tokens / self._rate)
        return not self._stopped.wait(debt)

    def stop(self) -> None:
        self._stopped.set()
