"""Computes waits between retries: doubled up to a limit, with jitter.

Pure: what is drawn is an argument. Without a limit what failed for an hour is asked for once a day; without jitter all
who lost the same server come back to it in the same moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_DOUBLINGS = 30
"""Beyond it no wait here differs: a count of failures that grows for ever must not make a number that overflows."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """First and longest wait; unlimited only where the retries are few."""

    first_seconds: float
    longest_seconds: float = math.inf

    def seconds(self, failures: int, drawn: float = 0.0) -> float:
        """Returns the wait after so many failures in a row.

        Args:
            failures: Counted from 1; 0 waits as 1 does.
            drawn: The jitter, from 0 (the whole wait) to 1 (half of it).
        """
        doublings = min(max(0, failures - 1), _MAX_DOUBLINGS)
        return min(self.longest_seconds, self.first_seconds * 2.0**doublings) * (1.0 - drawn / 2)


# ---- latency buckets -------------------------------------------------------------------------------------------------
# Defines the latency buckets of agents and operator; both `metrics` import it.

BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The same for every latency, so that panels can be laid over each other."""
