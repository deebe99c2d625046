"""Clamps status times that a former leader's fast clock wrote.

Pure; called by `reconcile`. A wait that starts at a time in the future would last too long by the difference of the clocks,
so such a time is replaced by now. A time too far in the past cannot be recognised; so waits within a claim count from the
new leader's term at the earliest.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.api.status import Incident, JobStatus, SaveInterval
from surefoot_operator.policy.failure.unhealthy_nodes import UNHEALTHY_SECONDS


def clamp_future_times(status: JobStatus, now: float, max_exclusion_seconds: float) -> JobStatus:
    """Returns the status with times after `now` set to now, and exclusions of nodes limited."""
    membership = status.membership
    max_exclusion_end_seconds = now + max_exclusion_seconds
    return replace(
        status,
        membership=None
        if membership is None
        else replace(membership, changed_seconds=min(membership.changed_seconds, now)),
        incidents=tuple(_clamp_incident(incident, now) for incident in status.incidents),
        recent_restarts=tuple(
            replace(restart, time_seconds=min(restart.time_seconds, now)) for restart in status.recent_restarts
        ),
        conditions=tuple(
            replace(condition, last_transition_seconds=min(condition.last_transition_seconds, now))
            for condition in status.conditions
        ),
        excluded_nodes=tuple(
            replace(node, until_seconds=min(node.until_seconds, max_exclusion_end_seconds))
            for node in status.excluded_nodes
        ),
        unhealthy_nodes=tuple(
            replace(node, until_seconds=min(node.until_seconds, now + UNHEALTHY_SECONDS))
            for node in status.unhealthy_nodes
        ),
        stragglers=tuple(
            replace(straggler, since_seconds=min(straggler.since_seconds, now)) for straggler in status.stragglers
        ),
        replaced_stragglers=tuple(
            replace(
                replacement,
                time_seconds=min(replacement.time_seconds, now),
                until_seconds=min(replacement.until_seconds, max_exclusion_end_seconds),
            )
            for replacement in status.replaced_stragglers
        ),
        memory_interval=_clamp_interval(status.memory_interval, now),
        persistent_interval=_clamp_interval(status.persistent_interval, now),
        start_seconds=_clamp_time(status.start_seconds, now),
        completion_seconds=_clamp_time(status.completion_seconds, now),
        progress_seconds=_clamp_time(status.progress_seconds, now),
        time_spent=replace(status.time_spent, since_seconds=min(status.time_spent.since_seconds, now)),
    )


def _clamp_time(time_seconds: float | None, now: float) -> float | None:
    return None if time_seconds is None else min(time_seconds, now)


def _clamp_incident(incident: Incident, now: float) -> Incident:
    return replace(
        incident,
        detected_seconds=min(incident.detected_seconds, now),
        claimed_seconds=_clamp_time(incident.claimed_seconds, now),
        stopped_seconds=_clamp_time(incident.stopped_seconds, now),
        fenced_seconds=_clamp_time(incident.fenced_seconds, now),
        committed_seconds=_clamp_time(incident.committed_seconds, now),
        first_step_seconds=_clamp_time(incident.first_step_seconds, now),
    )


def _clamp_interval(interval: SaveInterval | None, now: float) -> SaveInterval | None:
    """Returns the save interval with its times set to `now` at the latest."""
    if interval is None:
        return None
    since_seconds, measured_seconds = min(interval.since_seconds, now), min(interval.measured_seconds, now)
    return replace(interval, since_seconds=since_seconds, measured_seconds=measured_seconds)
