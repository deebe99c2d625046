"""Computes the waits between retries: doubled up to a limit, with jitter.

Pure: the random number is an argument. Without a limit, a call that failed for an hour would be retried once a day;
without jitter, all clients that lost the same server would return to it at the same moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_DOUBLINGS = 30
"""More doublings make no difference here; without this limit a growing count of failures would overflow the result."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff from a first wait up to a longest one."""

    first_seconds: float
    """Wait after the first failure."""
    max_seconds: float = math.inf
    """Limit of the wait; infinite only where there are few retries."""

    def wait_seconds(self, failures: int, jitter: float = 0.0) -> float:
        """Returns the wait after this many failures in a row.

        Args:
            failures: At least 1; 0 counts as 1.
            drawn: Random number that shortens the wait: 0 leaves all of it, 1 half of it.
        """
        doublings = min(max(0, failures - 1), _MAX_DOUBLINGS)
        return min(self.max_seconds, self.first_seconds * 2.0**doublings) * (1.0 - jitter / 2)


# ---- latency buckets -------------------------------------------------------------------------------------------------
# Latency buckets of the metrics of agents and operator.

BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds; the same for every latency, so that panels can be compared."""
