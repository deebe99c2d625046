"""Learns from a job's steps how long one may take.

Pure; agents look at their trainers by it, and the operator judges by it. A limit for every job would be hours for one
with steps of minutes, and an hour wasted for one with steps of a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

FEWEST_STEPS = 10
"""Of fewer nothing is learned: the first ones compile, allocate and warm caches."""
MOST_STEPS = 31
"""Newest steps that are learned from."""

_MEDIANS = 20.0
_LONGEST = 3.0
_LEAST_SHARE = 0.2


def learned_limit_seconds(steps: Sequence[float], ceiling_seconds: float) -> float:
    """Returns after how long without a step a world is suspect.

    Args:
        steps: Recent steps, in seconds.
        ceiling_seconds: healthPolicy.stepTimeoutSeconds, after which no evidence is asked for.

    Returns:
        20 medians and 3 of the longest step, at least a fifth of the ceiling; the ceiling while fewer than ten are known.
    """
    if len(steps) < FEWEST_STEPS:
        return ceiling_seconds
    usual = max(_MEDIANS * statistics.median(steps), _LONGEST * max(steps), _LEAST_SHARE * ceiling_seconds)
    return min(ceiling_seconds, usual)
