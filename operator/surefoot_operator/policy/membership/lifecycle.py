"""Decides when a job is complete, and when its deadline passes.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.checkpoints.lineage import newest
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import Facts, is_responsive, member_sessions
from surefoot_operator.policy.core.indexes import worker_id
from surefoot_operator.policy.membership.final_checkpoint import in_memory
from surefoot_operator.reasons import JOB_COMPLETE, JOB_FAILED

LAST_SAVE_SECONDS = 30.0
"""How long after its last step a finished job waits to read on the holders what its agents say they saved there."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a job: its phase and reason."""

    phase: Literal["Complete", "Failed"]
    reason: str


def completion_of(facts: Facts) -> Completion | None:
    """Decides whether every member of the committed world has finished."""
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
        return Completion("Failed", reason)
    done = f" after step {max(*steps, world.begun_step)}" if steps and min(steps) >= 0 else ""
    return Completion("Complete", f"every trainer finished{done}")


def last_saved(facts: Facts) -> tuple[Checkpoint | None, float | None]:
    """Finds a finished job's newest complete checkpoint.

    Returns it, and until when to read the holders again; None: it is final. The last saves end after the last step, and
    status should name the checkpoint that people will find. Nothing depends on it, so the wait is short.
    """
    known = newest(c for c in (*in_memory(facts), facts.status.last_complete) if c is not None)
    sessions = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    if not sessions or len(sessions) < len(facts.world.members):
        return known, None
    saves = [newest(c for c in (*s.pending, s.saved) if c is not None) for s in sessions]
    goal = min((c for c in saves if c is not None), default=None)
    told = all(s.saves_told for s in sessions)  # by a heartbeat, half a second or so behind the word that it finished
    if told and (goal is None or None in saves or (known is not None and known >= goal)):
        return known, None
    until = max(s.step_at_seconds or s.since_seconds for s in sessions) + LAST_SAVE_SECONDS
    return known, until if facts.now < until else None


def deadline(facts: Facts) -> float | None:
    """When activeDeadlineSeconds ends the job; None: never."""
    limit, start = facts.spec.run_policy.active_deadline_seconds, facts.status.start_seconds
    return None if limit is None or start is None else start + limit


def overdue(facts: Facts) -> str:
    """Why the job ends for its age; empty: it does not."""
    due, limit = deadline(facts), facts.spec.run_policy.active_deadline_seconds
    if due is None or limit is None or facts.now < due:
        return ""
    return f"the job ran for activeDeadlineSeconds ({limit:g} s) without finishing"


def ended(status: JobStatus, phase: Literal["Complete", "Failed"], reason: str, now: float) -> JobStatus:
    return replace(status, phase=phase, message=reason, completion_seconds=now)


def ended_event(phase: str, reason: str) -> Event:
    return Event(JOB_COMPLETE if phase == "Complete" else JOB_FAILED, reason, warning=phase == "Failed")
