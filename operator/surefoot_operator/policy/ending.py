"""How a job ends: when it is complete, when its time is up, and what is left to tidy after it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.completeness import TierReading, complete
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.lineage import newest
from surefoot_operator.api.status import JobStatus
from surefoot_operator.names import JOB_COMPLETE, JOB_FAILED
from surefoot_operator.policy.actions import Action, CleanMemory, DeleteWorker, Event, RetireWorkers
from surefoot_operator.policy.facts import (
    Facts,
    audible,
    bad_of,
    final_step,
    member_sessions,
    node_lost,
    reading_at,
    soonest,
    worker_id,
)

LAST_PROMOTION_SECONDS = 600.0
"""How long a finished job waits for its last checkpoint to be complete in the persistent tier."""

LAST_SAVE_SECONDS = 30.0
"""How long after its last step a finished job waits to read on the holders what its agents say they saved there."""

LEAVING_SECONDS = 60.0
"""How long agents of an ended job have to flush and leave before they are deleted."""

KEPT_AFTER_FAILURE_SECONDS = 600.0
"""How long the memory of a failed job is kept, so that somebody can still look, or take it up."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job is over, and why."""

    phase: Literal["Complete", "Failed"]
    reason: str


@dataclass(frozen=True, slots=True)
class Tidying:
    actions: tuple[Action, ...]
    reason: str
    until_seconds: float | None = None


def verdict(facts: Facts) -> Verdict | None:
    """Whether the committed world has finished: every member said so, or its worker ended well."""
    world = facts.world
    steps: list[int] = []
    for member, session in member_sessions(facts):
        if session is not None and session.epoch == world.epoch and session.finished == 0:
            steps.append(session.finished_steps)
            continue
        worker = facts.workers.get(worker_id(member))
        if worker is None or worker.phase != "Succeeded" or worker.exit_code:
            return None
    if not world.members:
        return None
    if steps and not any(steps) and world.parent is None:
        reason = "the program ended with exit code 0 but never called step: call checkpointer.step() once a step"
        return Verdict("Failed", reason)
    done = f" after step {max(steps)}" if steps else ""
    return Verdict("Complete", f"every trainer finished{done}")


def last_promotion(facts: Facts) -> float | None:
    """Until when a finished world waits for its last checkpoint to reach the persistent tier; None: not at all.

    What a training ends with is what people want of it, and the memory tier goes with the job. Only a checkpoint that
    really was saved is waited for, and only while somebody is there to upload it.
    """
    final = final_step(facts)
    floor = facts.status.floor
    if facts.spec.checkpoint.persistent is None or final is None or (floor is not None and floor.step >= final):
        return None
    saved = [s for _, s in member_sessions(facts) if s is not None and s.saved is not None and s.saved.step == final]
    if len(saved) < len(facts.world.members) or not any(audible(facts, s) for s in saved):
        return None
    until = max(s.step_at_seconds or s.since_seconds for s in saved) + LAST_PROMOTION_SECONDS
    return until if facts.now < until else None


def last_saved(facts: Facts) -> tuple[Checkpoint | None, float | None]:
    """(newest complete checkpoint as the holders were read, until when to read them again; None: that is the last).

    The job's last saves end after its last step, and holders are read only now and then: what status names as the last
    complete checkpoint should be the one that people find. Nothing depends on it, so the wait is short.
    """
    epoch = facts.world.epoch
    reading = TierReading(reading_at(facts, epoch).holders, None)
    found = complete(reading, facts.status.lineage, epoch, bad_of(facts), facts.seen.covers)
    known = newest(c for c in (*found, facts.status.last_complete) if c is not None)
    sessions = [s for _, s in member_sessions(facts) if s is not None and audible(facts, s)]
    if not sessions or len(sessions) < len(facts.world.members):
        return known, None
    saves = [newest(c for c in (*s.pending, s.saved) if c is not None) for s in sessions]
    goal = min((c for c in saves if c is not None), default=None)
    if goal is None or None in saves or (known is not None and known >= goal):
        return known, None
    until = max(s.step_at_seconds or s.since_seconds for s in sessions) + LAST_SAVE_SECONDS
    return known, until if facts.now < until else None


def deadline(facts: Facts) -> float | None:
    """When activeDeadlineSeconds ends the job."""
    limit, start = facts.spec.run_policy.active_deadline_seconds, facts.status.start_seconds
    return None if limit is None or start is None else start + limit


def ended(status: JobStatus, phase: Literal["Complete", "Failed"], reason: str, now: float) -> JobStatus:
    return replace(status, phase=phase, message=reason, completion_seconds=now)


def ended_event(phase: str, reason: str) -> Event:
    return Event(JOB_COMPLETE if phase == "Complete" else JOB_FAILED, reason, warning=phase == "Failed")


def tidy(facts: Facts) -> Tidying:
    """After the end: agents leave, then their memory goes. A job that was deleted keeps nothing."""
    phase = facts.status.phase
    if facts.seen.job.deleted:
        deletes = tuple(
            DeleteWorker(w.name, w.uid, node_lost(facts, w.node), "the job was deleted")
            for w in facts.seen.workers
            if not w.deleting or node_lost(facts, w.node)
        )
        return Tidying((*deletes, *_clean(facts, "the job was deleted")), "the job was deleted")
    since = facts.status.completion_seconds if facts.status.completion_seconds is not None else facts.now
    alive = [w for w in facts.seen.workers if w.phase not in ("Succeeded", "Failed") and not w.deleting]
    hearing = [w for w in alive if (s := facts.sessions.get(worker_id(w))) is not None and audible(facts, s)]
    late = facts.now >= since + LEAVING_SECONDS
    actions: list[Action] = []
    if hearing and not late:
        indexes = tuple(sorted({w.index for w in hearing}))
        actions.append(RetireWorkers(indexes, 0 if phase == "Complete" else 1, facts.status.message))
    for worker in alive:
        if late or worker not in hearing:
            actions.append(DeleteWorker(worker.name, worker.uid, node_lost(facts, worker.node), f"the job is {phase}"))
    # a pod whose sidecars never end holds its node for ever; one that has ended keeps its logs for people
    lingering = [w for w in facts.seen.workers if w.lingering and not w.deleting]
    if late:
        actions += [DeleteWorker(w.name, w.uid, node_lost(facts, w.node), f"the job is {phase}") for w in lingering]
    due = since + _kept_seconds(facts)
    if not alive and facts.now >= due:
        actions += _clean(facts, f"the job is {phase}")
    moments = (
        since + LEAVING_SECONDS if (hearing or lingering) and not late else None,
        due if facts.now < due else None,
    )
    return Tidying(tuple(actions), facts.status.message, soonest(moments))


def _kept_seconds(facts: Facts) -> float:
    if facts.status.phase == "Complete":
        return 0.0
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return KEPT_AFTER_FAILURE_SECONDS if ttl is None else min(ttl, KEPT_AFTER_FAILURE_SECONDS)


def _clean(facts: Facts, reason: str) -> tuple[Action, ...]:
    """While any holder still knows this job: a cleaned one has no fence of it any more."""
    known = any(h.state == "Ready" and h.fence is not None for h in facts.seen.holders)
    return (CleanMemory(reason),) if known else ()
