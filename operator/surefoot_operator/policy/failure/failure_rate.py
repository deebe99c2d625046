"""Estimates a job's failure rate and its odds of memory loss.

Pure; called by `save_intervals`. A young job has no record, so the estimate starts from a prior, and the job's own incidents soon
outweigh it. Rates differ by orders of magnitude (a spot fleet loses a worker each minute), so the two are averaged as logarithms: in
a sum a prior of once in a hundred days would hide ten incidents of one hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot_operator.api.status import Incident, JobStatus
from surefoot_operator.policy.failure.incidents import MAX_KEPT

WORKER_INCIDENT_SECONDS = 100 * 86400.0
"""Prior: a worker fails once in a hundred days. Reported of large trainings: once in 50 to 300 days a node."""

PRIOR_INCIDENTS = 0.1
"""Weight of the prior for the failure rate, in pseudo-observations (incidents), while a job has none of its own."""

PRIOR_WEIGHT = 0.5
"""The same beside a job's own incidents: the first counts twice as much."""

MIN_RECORD_SECONDS = 60.0
"""A job that fails as it begins has not shown yet how often it does."""

NODE_SHARE = 0.5
"""Prior: the share of incidents that lose a node with its copies; the others lose processes alone."""

TOGETHER_SHARE = 0.1
"""Prior: the probability of each further node lost in the same incident (a rack, a switch, a reclaimed group)."""

PRIOR_LOSSES = 4.0
"""Weight of the prior for the odds of memory loss, in pseudo-observations (incidents)."""


@dataclass(frozen=True, slots=True)
class Risk:
    """The estimate for one job now."""

    incidents_per_second: float
    memory_loss_probability: float
    """That an incident takes every copy in memory: then only the persistent tier helps."""

    @property
    def from_memory_seconds(self) -> float:
        """Mean time between incidents that memory recovers from."""
        return 1.0 / (self.incidents_per_second * (1.0 - self.memory_loss_probability))

    @property
    def from_persistent_seconds(self) -> float:
        """Mean time between incidents that only the persistent tier recovers from."""
        return 1.0 / (self.incidents_per_second * self.memory_loss_probability)


def risk_of(status: JobStatus, workers: int, replicas: int, now: float) -> Risk:
    """Estimates from incidents in status and a prior.

    `replicas`: copies that a save has in memory now. Planned changes are no incidents: they lose nothing.
    """
    known = status.incidents
    since = status.start_seconds if status.start_seconds is not None else now
    if len(known) >= MAX_KEPT:
        since = known[0].detected_seconds  # older ones are not known any more
    unplanned = [i for i in known if i.kind != "planned"]
    rate = _rate(len(unplanned), max(0.0, now - since), workers)
    expected = NODE_SHARE * TOGETHER_SHARE ** (max(1, replicas) - 1)
    lost = sum(map(_lost_memory, unplanned))
    odds = (PRIOR_LOSSES * expected + lost) / (PRIOR_LOSSES + len(unplanned))
    return Risk(rate, odds)


def _rate(incidents: int, observed_seconds: float, workers: int) -> float:
    """Incidents a second: the prior where there were none, else its weighted geometric mean with the job's own rate."""
    prior_seconds = PRIOR_INCIDENTS * WORKER_INCIDENT_SECONDS / max(1, workers)
    prior = PRIOR_INCIDENTS / (prior_seconds + observed_seconds)
    own = incidents / max(MIN_RECORD_SECONDS, observed_seconds)
    if not incidents:
        return prior
    return math.exp((PRIOR_WEIGHT * math.log(prior) + incidents * math.log(own)) / (PRIOR_WEIGHT + incidents))


def _lost_memory(incident: Incident) -> bool:
    """Something had to be read from the persistent tier; or there was nothing, and steps were lost all the same."""
    if incident.restored_from in ("persistent", "mixed"):
        return True
    return incident.restored_step == 0 and incident.last_step > 0 and incident.first_step_seconds is not None
