"""What a status write means in numbers: world size, restarts, lost steps, how long a recovery took. Called by `reconcile.loop`."""

from __future__ import annotations

from surefoot_operator import metrics
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Incident, JobStatus


def measure(old: JobStatus, new: JobStatus, job: TrainingJob) -> None:
    """Counts what is new in a status that was just written."""
    where = (job.namespace, job.name)
    world = new.world
    metrics.world_size.labels(*where).set(world.size if world is not None and world.state == "Committed" else 0)
    if new.restarts > old.restarts and new.incidents:
        metrics.restarts.labels(*where, new.incidents[-1].kind).inc(new.restarts - old.restarts)
    over = {_name(i) for i in old.incidents if i.first_step_seconds is not None}
    for incident in new.incidents:
        if incident.first_step_seconds is not None and _name(incident) not in over:
            _recovered(incident)
            metrics.lost_steps.labels(*where).inc(incident.steps_lost or 0)


def _name(incident: Incident) -> tuple[int, float]:
    return incident.epoch, incident.detected_seconds


def _recovered(incident: Incident) -> None:
    phases = {
        "claimed": incident.claimed_seconds,
        "stopped": incident.stopped_seconds,
        "sealed": incident.sealed_seconds,
        "assigned": incident.assigned_seconds,
        "first-step": incident.first_step_seconds,
    }
    for phase, at_seconds in phases.items():
        if at_seconds is not None:
            metrics.recovery_seconds.labels(phase).observe(max(0.0, at_seconds - incident.detected_seconds))
