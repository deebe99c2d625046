"""Clamps status times that a former leader's fast clock wrote.

Pure; called by `reconcile`. Whoever waited from a time in the future would wait for as long as the clocks differ; it is
replaced by now. A time too far in the past cannot be told from an old one; so waits within a claim count from the new
leader's term at the earliest.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.api.status import Incident, JobStatus, SaveInterval
from surefoot_operator.policy.failure.unhealthy_nodes import UNHEALTHY_SECONDS


def clamp_future_times(status: JobStatus, now: float, longest_exclusion_seconds: float) -> JobStatus:
    """Moves times after `now` back to it, and limits exclusions."""
    world = status.membership
    exclusion = now + longest_exclusion_seconds
    return replace(
        status,
        membership=None if world is None else replace(world, changed_seconds=min(world.changed_seconds, now)),
        incidents=tuple(_incident(one, now) for one in status.incidents),
        recent_restarts=tuple(replace(one, time_seconds=min(one.time_seconds, now)) for one in status.recent_restarts),
        conditions=tuple(
            replace(one, last_transition_seconds=min(one.last_transition_seconds, now)) for one in status.conditions
        ),
        excluded_nodes=tuple(
            replace(one, until_seconds=min(one.until_seconds, exclusion)) for one in status.excluded_nodes
        ),
        unhealthy_nodes=tuple(
            replace(one, until_seconds=min(one.until_seconds, now + UNHEALTHY_SECONDS))
            for one in status.unhealthy_nodes
        ),
        stragglers=tuple(replace(one, since_seconds=min(one.since_seconds, now)) for one in status.stragglers),
        replaced_stragglers=tuple(
            replace(one, time_seconds=min(one.time_seconds, now), until_seconds=min(one.until_seconds, exclusion))
            for one in status.replaced_stragglers
        ),
        memory_interval=_interval(status.memory_interval, now),
        persistent_interval=_interval(status.persistent_interval, now),
        start_seconds=_past(status.start_seconds, now),
        completion_seconds=_past(status.completion_seconds, now),
        progress_seconds=_past(status.progress_seconds, now),
        time_spent=replace(status.time_spent, since_seconds=min(status.time_spent.since_seconds, now)),
    )


def _past(moment: float | None, now: float) -> float | None:
    return None if moment is None else min(moment, now)


def _incident(incident: Incident, now: float) -> Incident:
    return replace(
        incident,
        detected_seconds=min(incident.detected_seconds, now),
        claimed_seconds=_past(incident.claimed_seconds, now),
        stopped_seconds=_past(incident.stopped_seconds, now),
        fenced_seconds=_past(incident.fenced_seconds, now),
        committed_seconds=_past(incident.committed_seconds, now),
        first_step_seconds=_past(incident.first_step_seconds, now),
    )


def _interval(interval: SaveInterval | None, now: float) -> SaveInterval | None:
    if interval is None:
        return None
    since, measured = min(interval.since_seconds, now), min(interval.measured_seconds, now)
    return replace(interval, since_seconds=since, measured_seconds=measured)
