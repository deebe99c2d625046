"""Estimates a job's rate and what a failure now would repeat.

Pure; called by `job_summary`. A rate that is not known is None: a job that has just begun has none, and 0 would be an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.jobs.stored_job import StoredJob

_FEWEST_STEPS = 3
"""Of fewer the first, slow one would be most."""
_STATUS_SECONDS = 8.0
"""So old may a status' step be while trainers go on: the operator writes it no oftener. An older one says that they do not."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Progress of one job and its rate; None: not known."""

    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    left_seconds: float | None = None
    checkpoint_step: int | None = None
    """Of the newest complete checkpoint."""
    checkpoint_age_seconds: float | None = None
    exposed_steps: int | None = None
    """Steps since then, up to now: what a failure would have to repeat."""
    exposed_seconds: float | None = None


def pace_of(stored: StoredJob, now: float) -> Pace:
    """Estimates a job's pace at Unix time `now`."""
    status = stored.status
    if status is None or not stored.phase:
        return Pace(step=stored.step, total_steps=stored.total_steps)
    rate, saved, total = _steps_per_second(status), status.last_complete, stored.total_steps
    over = status.phase in ("Complete", "Failed")
    step = finished_step(status)
    exposed = None if over or saved is None else max(0, step_at(status, rate, now) - saved.step)
    left = None if total is None or rate is None or over else max(0, total - step) / rate
    aged = stored.checkpoint_seconds
    return Pace(
        step=step,
        total_steps=total,
        steps_per_second=rate,
        left_seconds=left,
        checkpoint_step=None if saved is None else saved.step,
        checkpoint_age_seconds=None if aged is None else max(0.0, now - aged),
        exposed_steps=exposed,
        exposed_seconds=None if exposed is None or rate is None else exposed / rate,
    )


def finished_step(status: JobStatus) -> int:
    """Returns the newest step known to be finished.

    A status may have heard of its checkpoint first.
    """
    return max(status.step, 0 if status.last_complete is None else status.last_complete.step)


def step_at(status: JobStatus, steps_per_second: float | None, now: float) -> int:
    """Estimates the step that trainers have come to at Unix time `now`.

    A status is seconds old: of a job that saves often, all that a failure would repeat was made since.
    """
    known = finished_step(status)
    if steps_per_second is None or status.phase != "Running" or status.progress_seconds is None:
        return known
    since = min(max(0.0, now - status.progress_seconds), _STATUS_SECONDS)
    return max(known, int(status.step + steps_per_second * since))


def _steps_per_second(status: JobStatus) -> float | None:
    """Over the present world since it was committed, else as the operator measured it for its intervals."""
    world = status.world
    if world is None or world.state != "Committed" or not world.members:
        return None
    made = status.step - (world.parent.step if world.parent is not None else 0)
    seconds = (status.progress_seconds or 0.0) - world.changed_seconds
    measured = status.memory_interval.step_seconds if status.memory_interval is not None else None
    if measured:
        return 1 / measured
    return made / seconds if made >= _FEWEST_STEPS and seconds > 0 else None
