"""Estimates what waiting, shrinking and growing cost this job, and chooses the cheapest.

Pure; called by `claim` and `planned_change`. No fixed limit suits all jobs: where replacements take ten minutes, each second
of waiting is lost, and where they take two seconds, a job that shrinks and grows again stops twice. Costs come from the job's
own incidents, in seconds of training of the whole job. Where a replacement may never come, the rule is that of ski rental
(Karlin et al., Competitive snoopy caching, 1988): never wait longer than not waiting would have cost.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from surefoot_operator.api.status import Incident
from surefoot_operator.job_snapshot import ObservedWorker
from surefoot_operator.policy.core.availability import costly_nodes
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    NodeFacts,
    cached_per_snapshot,
    worker_id,
)
from surefoot_operator.policy.failure.incidents import WORKER_LOSS_KINDS
from surefoot_operator.policy.failure.spare_workers import largest_size, newest_workers, required_indexes

MAX_WAIT_SECONDS = 600.0
"""Longest wait for replacements, whatever the estimate."""
_MIN_INCIDENTS = 3
"""Incidents from which on their rate is estimated."""
_LATE_FACTOR = 2.0
"""A replacement that takes this many times as long as usual is no longer expected."""


@dataclass(frozen=True, slots=True)
class IncidentHistory:
    """Figures from this job's own incidents; None: not measured yet."""

    change_seconds: float | None
    """Median time without training that a change of size takes, without waiting for workers."""
    arrival_seconds: float | None
    """Median time from a loss until as many workers as before were warm."""
    replaced_losses: int
    """Number of losses whose replacement came."""
    decided_losses: int
    """Number of losses that are over, replaced or not."""

    @property
    def replacement_probability(self) -> float:
        """The estimated probability (0 to 1) that a replacement comes; half an observation each way is the prior."""
        return (self.replaced_losses + 0.5) / (self.decided_losses + 1.0)


@dataclass(frozen=True, slots=True)
class CostDecision:
    """How long to wait, and the estimate that decided it. `until_seconds` None: do not wait."""

    until_seconds: float | None
    reason: str = ""


NOT_MEASURED = CostDecision(None)


@cached_per_snapshot
def incident_history_of(facts: JobFacts) -> IncidentHistory:
    """Computes the job's own figures from its incidents."""
    incidents = facts.status.incidents
    planned_seconds = [
        seconds for i in incidents if i.kind == "planned" and (seconds := startup_seconds(i)) is not None
    ]
    unplanned_seconds = [
        seconds for i in incidents if i.kind != "planned" and (seconds := startup_seconds(i)) is not None
    ]
    failures = [i for i in incidents if i.kind in WORKER_LOSS_KINDS and i.claimed_seconds is not None]
    arrivals = [i.replaced_seconds - (i.claimed_seconds or 0.0) for i in failures if i.replaced_seconds is not None]
    decided_count = sum(i.replaced_seconds is not None or i.first_step_seconds is not None for i in failures)
    return IncidentHistory(
        statistics.median(planned_seconds or unplanned_seconds) if planned_seconds or unplanned_seconds else None,
        statistics.median(arrivals) if arrivals else None,
        len(arrivals),
        decided_count,
    )


@dataclass(frozen=True, slots=True)
class WaitCosts:
    """Estimated cost of both reactions to a loss, in seconds of training of the whole job."""

    limit_seconds: float
    """Longest wait for a replacement; after it the job would shrink."""
    waiting_seconds: float
    shrinking_seconds: float


def estimate_wait_costs(record: IncidentHistory, small_size: int, full_size: int) -> WaitCosts | None:
    """Compares waiting for `full_size` workers with training on `small_size`; None: nothing was measured yet.

    Waiting loses all training until the replacement comes; shrinking loses the missing share until then, and the change of
    size when it comes. If it never comes, all waiting was in vain.
    """
    change_seconds, arrival_seconds = record.change_seconds, record.arrival_seconds
    # Without both figures, or without a choice, there is nothing to compare.
    if not small_size or full_size <= small_size or change_seconds is None or arrival_seconds is None:
        return None
    limit_seconds = min(change_seconds * full_size / small_size, _LATE_FACTOR * arrival_seconds, MAX_WAIT_SECONDS)
    probability, missing_share = record.replacement_probability, 1.0 - small_size / full_size
    shrinking_seconds = probability * (arrival_seconds * missing_share + change_seconds)
    if arrival_seconds <= limit_seconds:
        waiting_seconds = probability * arrival_seconds + (1.0 - probability) * limit_seconds
    else:
        waiting_seconds = limit_seconds + probability * (
            (arrival_seconds - limit_seconds) * missing_share + change_seconds
        )
    return WaitCosts(limit_seconds, waiting_seconds, shrinking_seconds)


def wait_or_shrink(facts: MembershipNodeFacts, ready: int, required_size: int | None = None) -> CostDecision:
    """Decides how long to wait for replacements before training continues with fewer workers.

    Args:
        facts: Facts of a job whose next generation is claimed.
        ready: Number of workers that could start now.
        required_size: The only number of workers at which the checkpoint can be restored; None: any.
    """
    record = incident_history_of(facts)
    small_size, full_size = (
        largest_size(facts.spec, ready, required_size),
        largest_size(facts.spec, ready + _count_expected_workers(facts, ready), required_size),
    )
    costs = estimate_wait_costs(record, small_size, full_size)
    if costs is None:
        return NOT_MEASURED
    estimate = (
        f"replacements took {record.arrival_seconds:.1f} s ({record.replaced_losses} of {record.decided_losses} came) and a change of size"
        f" {record.change_seconds:.1f} s, so waiting costs {costs.waiting_seconds:.1f} s of training, and continuing with"
        f" {small_size} of {full_size} workers {costs.shrinking_seconds:.1f} s"
    )
    if costs.waiting_seconds >= costs.shrinking_seconds:
        return CostDecision(None, estimate)
    return CostDecision(facts.membership.changed_seconds + costs.limit_seconds, estimate)


def grow_or_stay(facts: MembershipFacts, members: int, possible: int) -> CostDecision:
    """Decides until when a job that could grow keeps its size.

    It does while growing would not pay off before the next incident (after which every available worker joins anyway) or the
    job's deadline; and while more workers are about to come, so that it grows only once.
    """
    record = incident_history_of(facts)
    change_seconds = record.change_seconds
    if change_seconds is None or possible <= members:
        return NOT_MEASURED
    gain = 1.0 - members / possible
    pays_at_seconds = _growth_payoff_time(facts, change_seconds / gain)
    if pays_at_seconds is not None and facts.now < pays_at_seconds:
        return CostDecision(
            pays_at_seconds,
            f"a change of size takes {change_seconds:.1f} s, and would gain less than that before the next incident is likely",
        )
    return _wait_to_grow_once(facts, record, possible, gain)


def costs_more_than_staying(facts: NodeFacts, fewer: int, all_workers: int) -> bool:
    """Whether training without the costly nodes would lose more than these nodes cost.

    A worker on a slow or sometimes failing node still trains: `fewer` workers pay off only if the node costs all others a
    larger share of their time than the missing workers contribute.
    """
    highest_cost_share = max(costly_nodes(facts).values(), default=0.0)
    return fewer < all_workers * (1.0 - highest_cost_share)


def _wait_to_grow_once(facts: MembershipFacts, record: IncidentHistory, possible: int, gain: float) -> CostDecision:
    """Waits for workers that are starting, if two changes of size would cost more."""
    arrival_seconds, change_seconds = record.arrival_seconds, record.change_seconds or 0.0
    starting = _starting_workers(facts)
    if arrival_seconds is None or not starting or largest_size(facts.spec, possible + len(starting)) <= possible:
        return NOT_MEASURED
    newest_created_seconds = max(worker.created_seconds for worker in starting)
    late_seconds = newest_created_seconds + _LATE_FACTOR * arrival_seconds
    remaining_seconds = (
        newest_created_seconds + arrival_seconds - facts.now
        if facts.now < newest_created_seconds + arrival_seconds
        else late_seconds - facts.now
    )
    if remaining_seconds <= 0 or remaining_seconds * gain >= record.replacement_probability * change_seconds:
        return NOT_MEASURED
    text = f"{len(starting)} more on their way, which takes {arrival_seconds:.1f} s, and a second change of size {change_seconds:.1f} s"
    return CostDecision(late_seconds, text)


def startup_seconds(incident: Incident) -> float | None:
    """Returns the time from a claim to the first step, without waiting for workers; None: no step was made yet."""
    if incident.claimed_seconds is None or incident.first_step_seconds is None or incident.committed_seconds is None:
        return None
    fenced_seconds = incident.fenced_seconds if incident.fenced_seconds is not None else incident.committed_seconds
    return max(
        0.0, incident.first_step_seconds - incident.claimed_seconds - (incident.committed_seconds - fenced_seconds)
    )


def _growth_payoff_time(facts: JobFacts, needed_seconds: float) -> float | None:
    """Returns from when on growing gains more than it costs (Unix time); None: it does now.

    Growing gains until the next incident, after which every available worker joins anyway.
    """
    deadline = facts.spec.run_policy.active_deadline_seconds
    if deadline is not None and facts.status.start_seconds is not None:
        end_seconds = facts.status.start_seconds + deadline
        if end_seconds - facts.now < needed_seconds:
            return end_seconds
    failure_times = [i.detected_seconds for i in facts.status.incidents if i.kind != "planned"]
    if len(failure_times) < _MIN_INCIDENTS:
        return None
    # assumes that the next incident is as far away as the mean distance between incidents until now
    pays_at_seconds = failure_times[0] + len(failure_times) * needed_seconds
    return pays_at_seconds if facts.now < pays_at_seconds else None


def _count_expected_workers(facts: MembershipNodeFacts, ready: int) -> int:
    """Returns how many more workers may come: requested, and with no known blocker."""
    required_count = len(required_indexes(facts))
    # Without a free node, only workers that already have a node can come.
    if facts.free_nodes == 0:
        return min(required_count - ready, len(_starting_workers(facts)))
    blocked = {create.index for create in facts.pending_creates if create.rejection}
    blocked |= {
        w.index
        for w in newest_workers(facts).values()
        if w.phase == "Pending" and (w.start_blocker or (w.node is None and w.message))
    }
    return max(0, required_count - ready - len(blocked & required_indexes(facts)))


def _starting_workers(facts: MembershipFacts) -> list[ObservedWorker]:
    """Returns workers that have a node, no warm agent yet, and no known blocker."""
    warm = {worker for worker, session in facts.sessions.items() if session.warm}
    required = required_indexes(facts)
    return [
        w
        for w in newest_workers(facts).values()
        if w.index in required and w.node is not None and worker_id(w) not in warm
        if w.phase in ("Pending", "Running") and not w.deleting and not w.start_blocker
    ]
