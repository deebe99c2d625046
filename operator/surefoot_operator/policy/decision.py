"""Holds what one phase of a job decides.

Pure; called by `plan` and `claimed_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot_operator.api.status import JobStatus
from surefoot_operator.policy.actions import Action, Event
from surefoot_operator.policy.facts import Facts
from surefoot_operator.policy.lifecycle import completion
from surefoot_operator.policy.workers import WorkerChanges, reconcile_workers

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


def with_workers(facts: Facts, base: PhaseDecision, wanted: frozenset[int]) -> PhaseDecision:
    """Adds what workers of these indexes need; others are deleted."""
    tending: WorkerChanges = reconcile_workers(facts, wanted)
    return replace(
        base,
        status=replace(base.status, next_attempt=tending.next_attempt, failed_starts=tending.failed_starts),
        actions=(*tending.actions, *base.actions),
        events=(*base.events, *tending.events),
        wakes=(*base.wakes, tending.until_seconds),
    )


def job_failed(facts: Facts, reason: str) -> PhaseDecision:
    """Ends the job as Failed, with the reason for people."""
    status = completion.ended(facts.status, "Failed", reason, facts.now)
    return PhaseDecision(reason, status, events=(completion.ended_event("Failed", reason),))
