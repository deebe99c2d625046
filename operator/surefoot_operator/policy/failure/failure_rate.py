"""Estimates how often a job fails, and how probably a failure takes every copy in memory.

Pure; called by `save_intervals`. A young job has no record, so the estimate starts from a prior, and the job's own incidents
soon outweigh it. Rates differ by orders of magnitude (a spot fleet loses a worker each minute), so the two are averaged as
logarithms: in a sum, a prior of once in a hundred days would hide ten incidents in one hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.policy.failure.incidents import MAX_INCIDENTS

WORKER_INCIDENT_SECONDS = 100 * 86400.0
"""Prior: mean time between failures of one worker. Large trainings report 50 to 300 days per node."""

PRIOR_INCIDENTS = 0.1
"""Weight of the prior for the failure rate, in pseudo-observations (incidents), while a job has none of its own."""

PRIOR_WEIGHT = 0.5
"""Weight of the prior for the failure rate relative to a job's own incidents: the first incident counts twice as much."""

MIN_RECORD_SECONDS = 60.0
"""Shortest time over which a rate is computed: a failure seconds after the start does not mean one every few seconds."""

NODE_SHARE = 0.5
"""Prior: the share of incidents that lose a node with its copies; the others lose only processes."""

TOGETHER_SHARE = 0.1
"""Prior: the probability of each further node lost in the same incident (a rack, a switch, a reclaimed group)."""

PRIOR_LOSSES = 4.0
"""Weight of the prior for the odds of memory loss, in pseudo-observations (incidents)."""


@dataclass(frozen=True, slots=True)
class Risk:
    """The estimated failure rate of one job."""

    incidents_per_second: float
    """Unplanned incidents of the whole job."""
    memory_loss_probability: float
    """Probability that an incident takes every copy in memory, so that only the persistent tier helps."""

    @property
    def memory_recovery_interval_seconds(self) -> float:
        """Mean time between incidents that memory recovers from."""
        return 1.0 / (self.incidents_per_second * (1.0 - self.memory_loss_probability))

    @property
    def persistent_recovery_interval_seconds(self) -> float:
        """Mean time between incidents that only the persistent tier recovers from."""
        return 1.0 / (self.incidents_per_second * self.memory_loss_probability)


def estimate_risk(status: JobStatus, workers: int, replicas: int, now: float) -> Risk:
    """Estimates a job's failure rate from the incidents in its status and a prior.

    `replicas`: copies that a save has in memory now. Planned changes are not counted: they lose nothing.
    """
    incidents = status.incidents
    start_seconds = status.start_seconds if status.start_seconds is not None else now
    if len(incidents) >= MAX_INCIDENTS:
        start_seconds = incidents[0].detected_seconds  # the status keeps no older incidents
    unplanned = [incident for incident in incidents if incident.kind != "planned"]
    rate = _incident_rate(len(unplanned), max(0.0, now - start_seconds), workers)
    prior_probability = NODE_SHARE * TOGETHER_SHARE ** (max(1, replicas) - 1)
    memory_losses = sum(map(_lost_memory, unplanned))
    memory_loss_probability = (PRIOR_LOSSES * prior_probability + memory_losses) / (PRIOR_LOSSES + len(unplanned))
    return Risk(rate, memory_loss_probability)


def _incident_rate(incidents: int, observed_seconds: float, workers: int) -> float:
    """Incidents a second: the prior where there were none, else its weighted geometric mean with the job's own rate."""
    # The prior counts as a fraction of an incident over a correspondingly short time, so that it does not outweigh the record.
    prior_seconds = PRIOR_INCIDENTS * WORKER_INCIDENT_SECONDS / max(1, workers)
    prior_rate = PRIOR_INCIDENTS / (prior_seconds + observed_seconds)
    observed_rate = incidents / max(MIN_RECORD_SECONDS, observed_seconds)
    if not incidents:
        return prior_rate
    return math.exp(
        (PRIOR_WEIGHT * math.log(prior_rate) + incidents * math.log(observed_rate)) / (PRIOR_WEIGHT + incidents)
    )


def _lost_memory(incident: Incident) -> bool:
    """Whether the incident lost every copy in memory: it needed the persistent tier, or lost all steps."""
    if incident.restored_from in ("persistent", "mixed"):
        return True
    return incident.restored_step == 0 and incident.last_step > 0 and incident.first_step_seconds is not None
