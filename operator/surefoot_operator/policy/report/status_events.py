"""Derives events from the difference between two statuses.

Pure; called by `plan`.
"""

from __future__ import annotations

from surefoot_operator import reasons
from surefoot_operator.api.status import Condition, JobStatus
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.failure.stragglers import sentence
from surefoot_operator.policy.membership.scheduling_deadline import RELEASED
from surefoot_operator.policy.report.blockers import ENDED, NO_GROUP, OUT_OF_MEMORY, REFUSED, event_of

_NO_HINDRANCE = ("Scheduled", "Waiting", "NotWanted", ENDED, OUT_OF_MEMORY, RELEASED)
"""Reasons of PodsScheduled that are told by other events, or by none: a worker that ended is told as lost."""

_LONGEST_STACKS = 800
"""Characters of an event; the incident has more of them."""


def status_change_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Derives the events that a changed status calls for."""
    parts = (
        _claimed,
        _protected,
        _tied,
        _refused,
        _records_refused,
        _kept_forward,
        _straggled,
        _hindered,
        _stood,
        _lost,
        _unheard,
    )
    return tuple(event for part in parts for event in part(old, new))


def _claimed(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    world = new.world
    if world is None or world.state != "Claimed" or (old.world is not None and old.world.epoch >= world.epoch):
        return ()
    return (Event(reasons.WORLD_CLAIMED, f"epoch {world.epoch} is claimed: {world.reason}"),)


def _protected(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.CHECKPOINT_PROTECTED), _condition(new, reasons.CHECKPOINT_PROTECTED)
    if now is None:
        return ()
    if now.reason == reasons.HOLDERS_UNSEEN:
        known = was is not None and was.reason == now.reason
        return () if known else (Event(reasons.HOLDERS_UNSEEN, now.message, True),)
    stalled = now.reason == "Stalled"
    if stalled and (was is None or was.reason != "Stalled"):
        return (Event(reasons.CHECKPOINT_STALLED, now.message, True),)
    if was is not None and was.status != "True" and now.status == "True":
        newest = f": step {new.last_complete.step}" if new.last_complete is not None else ""
        return (Event(reasons.PROTECTED, f"{now.message}{newest}"),)
    if was is not None and was.status == "True" and now.status == "False":
        return (
            Event(
                reasons.UNPROTECTED,
                f"{now.message}; a failure now would lose every step since the last complete checkpoint",
                True,
            ),
        )
    return ()


def _stood(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Where ranks stood, once an incident: when every worker had its time to say so."""
    incident = new.incidents[-1] if new.incidents else None
    if incident is None or not incident.detail or new.world is None:
        return ()
    answered = new.world.state == "Committed" and new.world.epoch == incident.epoch + 1 and new.world != old.world
    over = new.phase == "Failed" and old.phase != "Failed"
    if not over and not (answered and old.world is not None and old.world.state == "Claimed"):
        return ()
    where = incident.detail[:_LONGEST_STACKS]
    return (Event(reasons.RANKS_STOOD, f"where the ranks of epoch {incident.epoch} stood:\n{where}"),)


def _refused(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.SPEC_REFUSED), _condition(new, reasons.SPEC_REFUSED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.JOB_REFUSED, f"{now.message}; the job continues with its former spec", True),)


def _records_refused(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.RECORDS_REFUSED), _condition(new, reasons.RECORDS_REFUSED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.RECORDS_REFUSED, f"ignored a record of this job: {now.message}", True),)


def _kept_forward(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.ROLLBACK_REFUSED), _condition(new, reasons.ROLLBACK_REFUSED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.ROLLBACK_REFUSED, now.message, True),)


def _straggled(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Who is slow, once a rank and node; and once that none is any more."""
    before = {(one.rank, one.node) for one in old.stragglers}
    told = [
        Event(reasons.STRAGGLER, sentence(one), True) for one in new.stragglers if (one.rank, one.node) not in before
    ]
    gone = [one for one in old.stragglers if not new.stragglers]
    over = [
        Event(reasons.STRAGGLER_GONE, f"rank {one.rank} is no straggler on node {one.node} any more") for one in gone
    ]
    return (*told, *over)


def _hindered(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """What keeps workers from running, once a cause: its words come again with other numbers, and in other rounds."""
    was, now = _condition(old, reasons.PODS_SCHEDULED), _condition(new, reasons.PODS_SCHEDULED)
    if now is None or now.reason in _NO_HINDRANCE:
        return ()
    asked = now.reason in (REFUSED, NO_GROUP)
    if was is not None and was.reason == now.reason and (not asked or _words(was) == _words(now)):
        return ()
    again = "; the operator tries again" if asked else ""
    return (Event(event_of(now.reason), f"{now.message}{again}", True),)


def _words(told: Condition) -> str:
    """Without numbers: of attempts, of what a quota has left."""
    return "".join(letter for letter in told.message if not letter.isdigit())


def _lost(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.CHECKPOINT_LOST), _condition(new, reasons.CHECKPOINT_LOST)
    return (Event(reasons.CHECKPOINT_LOST, now.message, True),) if now is not None and was is None else ()


def _unheard(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.AGENTS_HEARD), _condition(new, reasons.AGENTS_HEARD)
    if now is None or now.status != "False" or (was is not None and was.status == "False"):
        return ()
    return (Event(reasons.AGENTS_UNHEARD, now.message, True),)


def _tied(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition(old, reasons.WORLD_SIZE_TIED), _condition(new, reasons.WORLD_SIZE_TIED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.WORLD_SIZE_TIED, now.message, True),)


def _condition(status: JobStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)
