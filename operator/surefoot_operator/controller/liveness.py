"""Decides from measurements whether the process should be restarted.

Pure; called by `cluster_operator`. A restart helps a process that is stuck. It does not help while the API server is away, so a
watch that is stale for that reason is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    watch_seconds: float = 120.0
    """A watch renews itself every half minute; one that has not for so long, while the server answers, is stuck."""
    round_seconds: float = 180.0
    """A reconcile is bounded by its calls' own limits; one that takes longer is stuck."""
    lag_seconds: float = 5.0
    """How late the event loop may be. Agents count as silent after three."""
    answered_seconds: float = 10.0
    """So lately must the API server have answered for a stale watch to be our own fault."""


@dataclass(frozen=True, slots=True)
class LivenessSigns:
    watches: Mapping[str, float]
    """Kind -> seconds since the API server last answered it, be it with a refusal: no restart would change that."""
    rounds: Mapping[str, float]
    """Job -> seconds that its reconcile under way has taken."""
    lag_seconds: float
    """The worst of the last half minute."""
    api_seconds: float
    """Since the API server last answered anything."""
    watchers_end: str = ""
    """Why the thread that wakes us is gone for good; empty: it is not."""


def liveness_failures(vitals: LivenessSigns, limits: LivenessLimits) -> tuple[str, ...]:
    """Lists what is stuck, a sentence each; empty: alive."""
    found = []
    if vitals.api_seconds <= limits.answered_seconds:
        found += [
            f"the watch of {kind} has received no answer for {age:.0f} s, although the API server answers"
            for kind, age in sorted(vitals.watches.items())
            if age > limits.watch_seconds
        ]
    found += [
        f"the reconcile of job {job} has taken {age:.0f} s"
        for job, age in sorted(vitals.rounds.items())
        if age > limits.round_seconds
    ]
    if vitals.lag_seconds > limits.lag_seconds:
        found.append(f"the event loop was {vitals.lag_seconds:.1f} s late")
    if vitals.watchers_end:
        found.append(vitals.watchers_end)
    return tuple(found)
