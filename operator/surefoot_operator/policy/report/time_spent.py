"""Accounts for every second of a job since it started.

Pure; called by `status_conditions`. It shows users what failures, waiting and resizing cost the job in total. The categories
follow the badput taxonomy of Google's ml-goodput library. They always add up to the job's age: a second is only ever moved
from one category to another.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.api.status import Incident, JobStatus, TimeSpent
from surefoot_operator.api.time_spent import DIGITS, add_seconds
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    has_stepped,
    last_step_seconds,
    seconds_per_step,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.membership.lifecycle import completion_of


def update_time_spent(facts: MembershipFacts, status: JobStatus) -> TimeSpent:
    """Returns the account with the present category closed and another opened, if this status changes it."""
    account, old_incidents = _opened_account(facts, status), facts.status.incidents
    if not account.category:
        return account
    category = _categorize_time(facts, status, account.category)
    costed = _newly_costed(old_incidents, status.incidents)
    if category == account.category and costed is None:
        return account
    spent = add_seconds(account, None, account.category, facts.now - account.since_seconds)
    # the time between the last step and the detection of the failure was no training
    if account.category == "training" and _newly_opened(old_incidents, status.incidents):
        idle_seconds = min(facts.now - account.since_seconds, _idle_seconds(facts))
        spent = add_seconds(spent, "training", "detecting", idle_seconds)
    # steps that the failure took back will be computed again: their average duration leaves training
    if costed is not None:
        steps = max(1, costed.last_step)
        recomputed_seconds = spent.training_seconds * min(costed.steps_lost or 0, steps) / steps
        spent = add_seconds(spent, "training", "recomputed", recomputed_seconds)
    return replace(spent, category=category, since_seconds=facts.now)


def _opened_account(facts: MembershipFacts, status: JobStatus) -> TimeSpent:
    """Returns the stored account, or a new one if the job starts or no operator has counted yet."""
    account, start_seconds = facts.status.time_spent, status.start_seconds
    if account != TimeSpent() or start_seconds is None or facts.status.phase in ("Complete", "Failed"):
        return account
    if facts.status.start_seconds is None:
        return TimeSpent("waiting", start_seconds)
    # the job started under an operator that did not count: how it spent the time until now is unknown
    return TimeSpent(
        _categorize_time(facts, status, ""),
        facts.now,
        unknown_seconds=round(max(0.0, facts.now - start_seconds), DIGITS),
    )


def _categorize_time(facts: MembershipFacts, status: JobStatus, current: str) -> str:
    """Returns the category of the seconds from now on; empty: the job is over.

    Args:
        current: the category until now; empty: none.
    """
    membership, incident = status.membership, open_incident(status.incidents)
    if membership is None or status.phase in ("Complete", "Failed"):
        return ""
    if status.phase == "Suspended":
        return "suspended"
    if incident is not None:
        if incident.fenced_seconds is not None and incident.committed_seconds is None:
            return "waiting"
        return "resizing" if incident.kind == "planned" else "recovering"
    if membership.state == "Claimed":
        return "resizing" if facts.spec.suspend else "waiting"
    if membership != facts.status.membership:
        return "starting"
    if completion_of(facts) is not None:
        return "finishing"
    # a new operator has received no step yet: a job that trained counts as training until its end is known
    return "training" if current == "training" or has_stepped(facts, membership.generation) else "starting"


def _idle_seconds(facts: MembershipFacts) -> float:
    """Returns how long nothing was trained before the failure was detected, without the step that was under way."""
    last_step_at = last_step_seconds(facts, facts.membership.generation)
    return 0.0 if last_step_at is None else max(0.0, facts.now - last_step_at - (seconds_per_step(facts) or 0.0))


def _newly_opened(old_incidents: tuple[Incident, ...], new_incidents: tuple[Incident, ...]) -> bool:
    incident = open_incident(new_incidents)
    return incident is not None and incident.kind != "planned" and open_incident(old_incidents) is None


def _newly_costed(old_incidents: tuple[Incident, ...], new_incidents: tuple[Incident, ...]) -> Incident | None:
    """Returns the incident whose lost steps are known for the first time with this status, if there is one."""
    new, old = open_incident(new_incidents), open_incident(old_incidents)
    if new is None or new.committed_seconds is None or not new.steps_lost:
        return None
    return new if old is None or old.committed_seconds is None else None
