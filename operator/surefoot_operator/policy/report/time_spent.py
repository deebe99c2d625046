"""Accounts for every second of a job since it started.

Pure; called by `status_conditions`. Without it people see that a job recovers, not what failures, waiting and resizing cost it in
all. The categories follow the badput taxonomy of Google's ml-goodput library; they add up to the job's age by construction,
for a second leaves one only for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from surefoot_operator.api.status import Incident, JobStatus, TimeSpent
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    has_stepped,
    last_step_seconds,
    seconds_per_step,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.membership.lifecycle import completion_of

CATEGORIES = tuple(
    f.name.removesuffix("_seconds") for f in fields(TimeSpent) if f.name not in ("category", "since_seconds")
)

DIGITS = 6


def update_time_spent(facts: WorldFacts, status: JobStatus) -> TimeSpent:
    """Closes the category that this status ends, and opens the next."""
    old, before = _opened_account(facts, status), facts.status.incidents
    if not old.category:
        return old
    category, lost = _category(facts, status, old.category), _newly_assigned(before, status.incidents)
    if category == old.category and lost is None:
        return old
    spent = _moved(old, None, old.category, facts.now - old.since_seconds)
    if old.category == "training" and _newly_opened(before, status.incidents):
        spent = _moved(spent, "training", "detecting", min(facts.now - old.since_seconds, _idle_seconds(facts)))
    if lost is not None:
        steps = max(1, lost.last_step)
        spent = _moved(
            spent, "training", "recomputed", spent.training_seconds * min(lost.steps_lost or 0, steps) / steps
        )
    return replace(spent, category=category, since_seconds=facts.now)


def seconds_spent(spent: TimeSpent, now: float) -> dict[str, float]:
    """Returns seconds by category as of now, the open one included."""
    if spent.category:
        spent = _moved(spent, None, spent.category, now - spent.since_seconds)
    return {name: getattr(spent, f"{name}_seconds") for name in CATEGORIES}


def goodput(seconds: Mapping[str, float]) -> float | None:
    """The share of training that was not run again; None before any.

    Of all time but suspension, which somebody wished.
    """
    wished = sum(seconds.values()) - seconds["suspended"]
    return seconds["training"] / wished if wished > 0 else None


def _opened_account(facts: WorldFacts, status: JobStatus) -> TimeSpent:
    """The account as it was, opened where a job starts or an operator first counts."""
    known, start = facts.status.time_spent, status.start_seconds
    if known != TimeSpent() or start is None or facts.status.phase in ("Complete", "Failed"):
        return known
    if facts.status.start_seconds is None:
        return TimeSpent("waiting", start)
    # it started under an operator that did not count
    return TimeSpent(
        _category(facts, status, ""), facts.now, unknown_seconds=round(max(0.0, facts.now - start), DIGITS)
    )


def _category(facts: WorldFacts, status: JobStatus, now: str) -> str:
    """What the seconds from now on are spent on; empty: the job is over."""
    world, incident = status.membership, open_incident(status.incidents)
    if world is None or status.phase in ("Complete", "Failed"):
        return ""
    if status.phase == "Suspended":
        return "suspended"
    if incident is not None:
        if incident.fenced_seconds is not None and incident.committed_seconds is None:
            return "waiting"
        return "resizing" if incident.kind == "planned" else "recovering"
    if world.state == "Claimed":
        return "resizing" if facts.spec.suspend else "waiting"
    if world != facts.status.membership:
        return "starting"
    if completion_of(facts) is not None:
        return "finishing"
    # a new operator has heard of no step yet: what trained goes on training until something is known to have ended it
    return "training" if now == "training" or has_stepped(facts, world.generation) else "starting"


def _idle_seconds(facts: WorldFacts) -> float:
    """How long nothing was trained before the loss was known, beside the step that was under way."""
    last = last_step_seconds(facts, facts.membership.generation)
    return 0.0 if last is None else max(0.0, facts.now - last - (seconds_per_step(facts) or 0.0))


def _newly_opened(before: tuple[Incident, ...], after: tuple[Incident, ...]) -> bool:
    incident = open_incident(after)
    return incident is not None and incident.kind != "planned" and open_incident(before) is None


def _newly_assigned(before: tuple[Incident, ...], after: tuple[Incident, ...]) -> Incident | None:
    """The incident of which this status tells first how many steps it cost."""
    new, old = open_incident(after), open_incident(before)
    if new is None or new.committed_seconds is None or not new.steps_lost:
        return None
    return new if old is None or old.committed_seconds is None else None


def _moved(spent: TimeSpent, source: str | None, target: str, seconds: float) -> TimeSpent:
    """`seconds` in `target`, taken from `source` or new."""
    amount = round(max(0.0, seconds), DIGITS)
    changes = {f"{target}_seconds": round(getattr(spent, f"{target}_seconds") + amount, DIGITS)}
    if source is not None:
        changes[f"{source}_seconds"] = round(getattr(spent, f"{source}_seconds") - amount, DIGITS)
    return replace(spent, **changes)
