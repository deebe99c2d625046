"""Weighs waiting, shrinking and growing by what each costs this job.

Pure; called by `claim` and `planned_change`. A limit that suits one job starves another: where replacements take ten minutes
every second of waiting is lost, and where they take two, a world that shrinks and grows again stands twice. Costs come from the
job's own incidents, in seconds of the whole world's training. Of what may never come the rule is ski rental's (Karlin et al.,
Competitive snoopy caching, 1988): nobody waits longer than not having waited would have cost.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from surefoot_operator.api.status import Incident
from surefoot_operator.job_snapshot import ObservedWorker
from surefoot_operator.policy.core.availability import costly_nodes
from surefoot_operator.policy.core.facts import (
    JobFacts,
    NodeFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    worker_id,
)
from surefoot_operator.policy.failure.incidents import WORKER_LOSS_KINDS
from surefoot_operator.policy.failure.spare_workers import largest_size, newest_workers, required_indices

MAX_WAIT_SECONDS = 600.0
_MIN_INCIDENTS = 3
"""Of fewer nobody could say how often they come."""
_LATE = 2.0
"""A replacement that takes so many times as long as usual is not counted on any more."""


@dataclass(frozen=True, slots=True)
class IncidentHistory:
    """What this job's incidents say; None: not measured yet."""

    change_seconds: float | None
    """How long the world stands while it changes its size, its waiting for workers left out."""
    arrival_seconds: float | None
    """From a loss until as many workers as before were warm."""
    replacements: int
    losses_without_replacement: int
    """Losses whose replacement came, of all that are over or replaced."""

    @property
    def replacement_probability(self) -> float:
        """The odds that a replacement comes.

        Half an observation each way stands for what was not seen yet.
        """
        return (self.replacements + 0.5) / (self.losses_without_replacement + 1.0)


@dataclass(frozen=True, slots=True)
class CostDecision:
    """A choice with its sums; without a time nobody waits."""

    until_seconds: float | None
    reason: str = ""


NOT_MEASURED = CostDecision(None)


@cached_per_snapshot
def record_of(facts: JobFacts) -> IncidentHistory:
    """Reads the job's own figures from its incidents."""
    known = facts.status.incidents
    planned = [seconds for i in known if i.kind == "planned" and (seconds := startup_seconds(i)) is not None]
    others = [seconds for i in known if i.kind != "planned" and (seconds := startup_seconds(i)) is not None]
    failures = [i for i in known if i.kind in WORKER_LOSS_KINDS and i.claimed_seconds is not None]
    arrivals = [i.replaced_seconds - (i.claimed_seconds or 0.0) for i in failures if i.replaced_seconds is not None]
    over = sum(i.replaced_seconds is not None or i.first_step_seconds is not None for i in failures)
    return IncidentHistory(
        statistics.median(planned or others) if planned or others else None,
        statistics.median(arrivals) if arrivals else None,
        len(arrivals),
        over,
    )


@dataclass(frozen=True, slots=True)
class WaitCosts:
    """What both answers to a loss cost, in seconds of training."""

    limit_seconds: float
    """How long would be waited at most."""
    waiting_seconds: float
    shrinking_seconds: float


def wait_costs(record: IncidentHistory, small: int, full: int) -> WaitCosts | None:
    """Weighs waiting for `full` workers against going on with `small`.

    Who waits loses everything until the replacement comes; who shrinks loses the missing part until then, and the change of
    size when it comes. If it never comes, all waiting was in vain. None: nothing was measured yet.
    """
    change, arrival = record.change_seconds, record.arrival_seconds
    if not small or full <= small or change is None or arrival is None:
        return None
    limit = min(change * full / small, _LATE * arrival, MAX_WAIT_SECONDS)
    odds, lacking = record.replacement_probability, 1.0 - small / full
    shrinking = odds * (arrival * lacking + change)
    if arrival <= limit:
        waiting = odds * arrival + (1.0 - odds) * limit
    else:
        waiting = limit + odds * ((arrival - limit) * lacking + change)
    return WaitCosts(limit, waiting, shrinking)


def wait_or_shrink(facts: WorldNodeFacts, ready: int, tied: int | None = None) -> CostDecision:
    """Decides how long replacements are waited for before fewer workers go on.

    Args:
        facts: A claimed world.
        ready: Workers that could begin now.
        tied: The only size that the checkpoint can be restored at; None: any.
    """
    record = record_of(facts)
    small, full = (
        largest_size(facts.spec, ready, tied),
        largest_size(facts.spec, ready + _expected_workers(facts, ready), tied),
    )
    costs = wait_costs(record, small, full)
    if costs is None:
        return NOT_MEASURED
    sums = (
        f"replacements took {record.arrival_seconds:.1f} s ({record.replacements} of {record.losses_without_replacement} came) and a change of size"
        f" {record.change_seconds:.1f} s, so waiting costs {costs.waiting_seconds:.1f} s of training, and going on with"
        f" {small} of {full} workers {costs.shrinking_seconds:.1f} s"
    )
    if costs.waiting_seconds >= costs.shrinking_seconds:
        return CostDecision(None, sums)
    return CostDecision(facts.membership.changed_seconds + costs.limit_seconds, sums)


def grow_or_stay(facts: WorldFacts, members: int, possible: int) -> CostDecision:
    """Decides until when a world that could grow stays as it is.

    It stays while growing would not pay for itself before the next incident, which takes in whoever is there, or before the
    job's deadline; and while more workers are about to come, so that it grows once.
    """
    record = record_of(facts)
    change = record.change_seconds
    if change is None or possible <= members:
        return NOT_MEASURED
    gain = 1.0 - members / possible
    pays = _growth_pays_at(facts, change / gain)
    if pays is not None and facts.now < pays:
        return CostDecision(
            pays, f"a change of size takes {change:.1f} s, and would not win as much before the next incident is likely"
        )
    return _grow_once(facts, record, possible, gain)


def costs_more_than_staying(facts: NodeFacts, fewer: int, more: int) -> bool:
    """Whether a world without costly nodes would lose more than they cost.

    Who is slow there, or fails now and then, still works: going on with `fewer` workers pays only where the node costs all
    others a larger part of their time than the workers that would be missing do of it.
    """
    worst = max(costly_nodes(facts).values(), default=0.0)
    return fewer < more * (1.0 - worst)


def _grow_once(facts: WorldFacts, record: IncidentHistory, possible: int, gain: float) -> CostDecision:
    """Waits for workers that are on their way, where two changes cost more."""
    arrival, change = record.arrival_seconds, record.change_seconds or 0.0
    coming = _on_their_way(facts)
    if arrival is None or not coming or largest_size(facts.spec, possible + len(coming)) <= possible:
        return NOT_MEASURED
    made = max(worker.created_seconds for worker in coming)
    late = made + _LATE * arrival
    left = made + arrival - facts.now if facts.now < made + arrival else late - facts.now
    if left <= 0 or left * gain >= record.replacement_probability * change:
        return NOT_MEASURED
    text = f"{len(coming)} more on their way take {arrival:.1f} s, and a second change of size {change:.1f} s"
    return CostDecision(late, text)


def startup_seconds(incident: Incident) -> float | None:
    """Returns how long a world stood before its first step.

    From its claim, without its waiting for workers; None: it made none yet.
    """
    if incident.claimed_seconds is None or incident.first_step_seconds is None or incident.committed_seconds is None:
        return None
    sealed = incident.fenced_seconds if incident.fenced_seconds is not None else incident.committed_seconds
    return max(0.0, incident.first_step_seconds - incident.claimed_seconds - (incident.committed_seconds - sealed))


def _growth_pays_at(facts: JobFacts, needed_seconds: float) -> float | None:
    """From when growing wins more than it costs; None: it does now.

    Growing wins until the next incident, after which a world begins anyway, with whoever is there.
    """
    deadline = facts.spec.run_policy.active_deadline_seconds
    if deadline is not None and facts.status.start_seconds is not None:
        over = facts.status.start_seconds + deadline
        if over - facts.now < needed_seconds:
            return over
    found = [i.detected_seconds for i in facts.status.incidents if i.kind != "planned"]
    if len(found) < _MIN_INCIDENTS:
        return None
    # at this rate the next is as far away as they came one after the other until now
    pays = found[0] + len(found) * needed_seconds
    return pays if facts.now < pays else None


def _expected_workers(facts: WorldNodeFacts, ready: int) -> int:
    """How many more workers may come: asked for, and nothing known to be in their way."""
    wanted = len(required_indices(facts))
    if facts.free_nodes == 0:
        return min(wanted - ready, len(_on_their_way(facts)))
    hindered = {create.index for create in facts.creates if create.rejection}
    hindered |= {
        w.index
        for w in newest_workers(facts).values()
        if w.phase == "Pending" and (w.start_blocker or (w.node is None and w.message))
    }
    return max(0, wanted - ready - len(hindered & required_indices(facts)))


def _on_their_way(facts: WorldFacts) -> list[ObservedWorker]:
    """Workers that have a node and no warm agent yet, and that nothing is known to keep from it."""
    heard = {worker for worker, session in facts.sessions.items() if session.warm}
    wanted = required_indices(facts)
    return [
        w
        for w in newest_workers(facts).values()
        if w.index in wanted and w.node is not None and worker_id(w) not in heard
        if w.phase in ("Pending", "Running") and not w.deleting and not w.start_blocker
    ]
