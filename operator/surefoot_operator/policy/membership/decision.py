"""Holds what one phase of a job decides.

Pure; called by `plan` and `claimed_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot_operator.api.status import Ending, JobStatus
from surefoot_operator.policy.core.actions import Action, Event
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.membership import final_checkpoint, lifecycle
from surefoot_operator.policy.membership.claim import claimed
from surefoot_operator.policy.membership.lifecycle import Completion
from surefoot_operator.policy.membership.workers import WorkerChanges, reconcile_workers

NO_WORKERS = frozenset[int]()


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """One phase's reason, next status, actions, events and wakes."""

    reason: str
    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wakes: tuple[float | None, ...] = ()
    lost: str = ""
    """What people are told where every checkpoint is lost."""
    uploads: bool = False
    """As `Plan.uploads`."""


def with_workers(facts: Facts, base: PhaseDecision, wanted: frozenset[int]) -> PhaseDecision:
    """Adds what workers of these indexes need; others are deleted."""
    tending: WorkerChanges = reconcile_workers(facts, wanted)
    return replace(
        base,
        status=replace(
            base.status,
            next_attempt=tending.next_attempt,
            failed_starts=tending.failed_starts,
            failed_starts_counted=tending.failed_starts_counted,
        ),
        actions=(*tending.actions, *base.actions),
        events=(*base.events, *tending.events),
        wakes=(*base.wakes, tending.until_seconds),
    )


def end_job(
    facts: Facts, end: Completion, since_seconds: float | None = None, up_to_step: int | None = None
) -> PhaseDecision:
    """Ends the job, once its newest complete checkpoint is in the persistent tier.

    Every ending comes this way: the memory tier is deleted with the job. The upload is waited for as long as somebody is
    there to make it, for `RESCUE_SECONDS` at most. `since_seconds`: when a world that trains no more broke; None: the
    next epoch is claimed, which stops the trainers, and the ending is durable. `up_to_step`: as `rescue` has it.
    """
    since = facts.now if since_seconds is None else since_seconds
    first = final_checkpoint.rescue(facts, since, up_to_step)
    if first is None:
        status = replace(lifecycle.ended(facts.status, end.phase, end.reason, facts.now), ending=None)
        return PhaseDecision(end.reason, status, events=(lifecycle.ended_event(end.phase, end.reason),))
    reason = f"{end.reason}; {first.reason}"
    if since_seconds is not None:
        return PhaseDecision(reason, facts.status, wakes=(first.until_seconds,), uploads=True)
    status = facts.status if facts.world.state == "Claimed" else claimed(facts, end.reason)
    return PhaseDecision(reason, replace(status, ending=Ending(end.reason, facts.now)), wakes=(facts.now,))


def fail_job(facts: Facts, reason: str, since_seconds: float | None = None) -> PhaseDecision:
    """Ends the job as Failed, as `end_job` does."""
    return end_job(facts, Completion("Failed", reason), since_seconds)
