"""Holds a job's finalizer until its persistent data is deleted.

Pure. Attempts are limited: what cannot be deleted is reported and left, so that no deletion hangs for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.names import PERSISTENT_DELETED, PERSISTENT_LEFT
from surefoot_operator.observed import PurgeSeen
from surefoot_operator.policy.actions import Action, Event, PurgePersistent, SetFinalizer
from surefoot_operator.policy.facts import Facts

PURGE_SECONDS = 600.0
"""After this an attempt counts as failed, whatever it still does: also one that no node was found for."""

PURGE_ATTEMPTS = 3
AGAIN_SECONDS = 10.0
"""Between the beginnings of two attempts, at least."""


@dataclass(frozen=True, slots=True)
class PurgeStep:
    reason: str
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    until_seconds: float | None = None


def finalizer_actions(facts: Facts) -> tuple[Action, ...]:
    """Sets the finalizer as the spec asks, until the job is deleted."""
    job = facts.seen.job
    if job.deleted or job.held == _wanted(facts):
        return ()
    return (SetFinalizer(not job.held),)


def next_purge_step(facts: Facts) -> PurgeStep | None:
    """Plans the next purge step of a deleted job; None: done."""
    if not facts.seen.job.held:
        return None
    if not _wanted(facts):
        return PurgeStep("the job was deleted; its persistent data is kept", (SetFinalizer(False),))
    if facts.seen.workers:
        return PurgeStep("the job was deleted; its workers may still write, so its persistent data waits for their end")
    place = f"{_uri(facts)}/{facts.seen.job.uid}"
    last = max(facts.seen.purges, key=lambda p: p.attempt, default=None)
    if last is None:
        return PurgeStep(f"the job was deleted, and {place} with it", (PurgePersistent(1),))
    if last.phase == "Succeeded":
        reason = f"{place} was deleted"
        return PurgeStep(reason, (SetFinalizer(False),), (Event(PERSISTENT_DELETED, reason),))
    due = last.created_seconds + PURGE_SECONDS
    if last.phase != "Failed" and facts.now < due:
        return PurgeStep(f"waiting until {place} is deleted (attempt {last.attempt})", until_seconds=due)
    if last.attempt < PURGE_ATTEMPTS:
        again = last.created_seconds + AGAIN_SECONDS
        if facts.now < again:
            return PurgeStep(f"{place} could not be deleted; trying again", until_seconds=again)
        return PurgeStep(f"{place} could not be deleted; trying again", (PurgePersistent(last.attempt + 1),))
    reason = f"{place} was not deleted in {last.attempt} attempts ({_why(last)}); delete it by hand"
    return PurgeStep(reason, (SetFinalizer(False),), (Event(PERSISTENT_LEFT, reason, warning=True),))


def _wanted(facts: Facts) -> bool:
    persistent = facts.spec.checkpoint.persistent
    return persistent is not None and persistent.on_job_deletion == "Delete"


def _uri(facts: Facts) -> str:
    persistent = facts.spec.checkpoint.persistent
    return persistent.uri.rstrip("/") if persistent is not None else ""


def _why(last: PurgeSeen) -> str:
    return last.message or ("it ended with an error" if last.phase == "Failed" else f"it is {last.phase}")
