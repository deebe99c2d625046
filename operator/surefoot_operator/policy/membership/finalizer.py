"""Holds a job's finalizer until its persistent data is deleted.

Pure. Attempts are limited, those whose pod the API server refuses included: what cannot be deleted is reported and
left, so that no deletion hangs for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot_operator.job_snapshot import PurgeSeen
from surefoot_operator.policy.core.actions import Action, Event, PurgePersistent, SetFinalizer
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.reasons import PERSISTENT_DELETED, PERSISTENT_LEFT, PERSISTENT_REFUSED

PURGE_SECONDS = 600.0
"""After this an attempt counts as failed, whatever it still does: also one that no node was found for."""

PURGE_ATTEMPTS = 3
AGAIN_SECONDS = 10.0
"""Between the beginnings of two attempts, at least."""
REFUSED_TIMES = 3
"""Of these, how many pass after the second refusal: a quota may have room again, a webhook may be back."""


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
    last, call = _last(facts), facts.seen.purge_call
    if last is not None and last.phase == "Succeeded":
        reason = f"{place} was deleted"
        return PurgeStep(reason, (SetFinalizer(False),), (Event(PERSISTENT_DELETED, reason),))
    if call.under_way:
        return PurgeStep(f"the job was deleted; the pod that deletes {place} is being created")
    due = last.created_seconds + PURGE_SECONDS if last is not None else facts.now
    if last is not None and last.phase != "Failed" and facts.now < due:
        return PurgeStep(f"waiting until {place} is deleted (attempt {last.attempt})", until_seconds=due)
    if call.refusal and call.refused_attempt > (last.attempt if last is not None else 0):
        return _refused(facts, place, last)
    if last is None:
        return PurgeStep(f"the job was deleted; a pod is created that deletes {place}", (PurgePersistent(1),))
    if last.attempt + call.refusals >= PURGE_ATTEMPTS:
        return _given_up(f"{place} was not deleted in {last.attempt + call.refusals} attempts ({_why(last)})")
    again = last.created_seconds + AGAIN_SECONDS
    if facts.now < again:
        return PurgeStep(f"{place} could not be deleted; trying again", until_seconds=again)
    return PurgeStep(f"{place} could not be deleted; trying again", (PurgePersistent(last.attempt + 1),))


def _last(facts: Facts) -> PurgeSeen | None:
    """The newest attempt: the one whose pod is shown, or one whose pod somebody removed since this leader made it."""
    call = facts.seen.purge_call
    shown = max(facts.seen.purges, key=lambda p: p.attempt, default=None)
    if call.attempt and (shown is None or shown.attempt < call.attempt):
        return PurgeSeen(call.attempt, "Failed", "its pod was removed", call.made_seconds)
    return shown


def _refused(facts: Facts, place: str, last: PurgeSeen | None) -> PurgeStep:
    """The fabric refused the pod of the next attempt: asked again, within the same bound."""
    call, begun = facts.seen.purge_call, last.attempt if last is not None else 0
    attempts = begun + call.refusals
    if call.closing:
        return _given_up(f"{call.refusal}; {place} was not deleted")
    end = call.since_seconds + PURGE_SECONDS
    if attempts >= PURGE_ATTEMPTS or facts.now >= end:
        return _given_up(f"{call.refusal}; {place} was not deleted in {max(1, attempts)} attempts")
    reason = (
        f"{call.refusal}; so {place} is not deleted yet (attempt {max(1, attempts)} of {PURGE_ATTEMPTS}). After the last"
        " attempt the job is removed and the folder stays; remove the job's finalizer to have that at once"
    )
    again = call.last_seconds + AGAIN_SECONDS * (REFUSED_TIMES if call.refusals > 1 else 1)
    if facts.now < again:
        return PurgeStep(reason, until_seconds=min(again, end))
    return PurgeStep(reason, (PurgePersistent(begun + 1),), (Event(PERSISTENT_REFUSED, reason, warning=True),))


def _given_up(why: str) -> PurgeStep:
    reason = f"{why}; delete that folder by hand"
    return PurgeStep(reason, (SetFinalizer(False),), (Event(PERSISTENT_LEFT, reason, warning=True),))


def _wanted(facts: Facts) -> bool:
    persistent = facts.spec.checkpoint.persistent
    return persistent is not None and persistent.on_job_deletion == "Delete"


def _uri(facts: Facts) -> str:
    persistent = facts.spec.checkpoint.persistent
    return persistent.uri.rstrip("/") if persistent is not None else ""


def _why(last: PurgeSeen) -> str:
    return last.message or ("it ended with an error" if last.phase == "Failed" else f"it is {last.phase}")
