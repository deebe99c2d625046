"""Decides how a job ends, is suspended and is cleaned up, and when its finalizer is released.

Pure. Also: the status of a job whose spec cannot be read, and whether a job is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.protocol.checkpoints.completeness import newest_checkpoint
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import join_names
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import Condition, Ending, JobStatus, condition_of
from surefoot_operator.job_snapshot import ObservedBarrier, ObservedPurge, ObservedWorker
from surefoot_operator.policy.core.actions import (
    Action,
    ClearJobMemory,
    DeleteJob,
    DeleteWorker,
    Event,
    PurgePersistent,
    SetFinalizer,
    ShutDownWorkers,
)
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldNodeFacts,
    WorldTierFacts,
    barrier_checkpoint,
    earliest,
    fenced_servers,
    is_responsive,
    member_sessions,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.membership import final_checkpoint
from surefoot_operator.policy.membership.claim import claim_generation
from surefoot_operator.policy.membership.final_checkpoint import in_memory
from surefoot_operator.policy.membership.workers import WorkerChanges, reconcile_workers
from surefoot_operator.reasons import (
    JOB_COMPLETE,
    JOB_FAILED,
    PERSISTENT_DATA_DELETED,
    PERSISTENT_DATA_NOT_DELETED,
    PERSISTENT_DELETION_REJECTED,
)

LAST_SAVE_SECONDS = 30.0
"""How long after its last step a finished job waits to read on the holders what its agents say they saved there."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a job: its phase and reason."""

    phase: Literal["Complete", "Failed"]
    reason: str


def completion_of(facts: WorldFacts) -> Completion | None:
    """Decides whether every member of the committed world has finished."""
    membership = facts.membership
    steps: list[int] = []
    for member, session in member_sessions(facts):
        if session is not None and session.generation == membership.generation and session.finished == 0:
            steps.append(session.finished_steps)
            continue
        worker = facts.workers.get(worker_id(member))
        if worker is None or worker.phase != "Succeeded" or worker.exit_code:
            return None
    if not membership.members:
        return None
    if steps and not any(steps) and membership.parent is None:
        reason = "the program ended with exit code 0 but never called step: call checkpointer.step() once a step"
        return Completion("Failed", reason)
    done = f" after step {max(*steps, membership.start_step)}" if steps else ""
    return Completion("Complete", f"every trainer finished{done}")


def last_saved_checkpoint(facts: WorldTierFacts) -> tuple[Checkpoint | None, float | None]:
    """Finds a finished job's newest complete checkpoint.

    Returns it, and until when to read the holders again; None: it is final. The last saves end after the last step, and
    status should name the checkpoint that people will find. Nothing depends on it, so the wait is short.
    """
    known = newest_checkpoint(c for c in (*in_memory(facts), facts.status.last_complete) if c is not None)
    sessions = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    if not sessions or len(sessions) < len(facts.membership.members):
        return known, None
    saves = [newest_checkpoint(c for c in (*s.pending, s.saved) if c is not None) for s in sessions]
    goal = min((c for c in saves if c is not None), default=None)
    told = all(
        s.final_saves_reported for s in sessions
    )  # by a heartbeat, half a second or so behind the word that it finished
    if told and (goal is None or None in saves or (known is not None and known >= goal)):
        return known, None
    until = max(s.step_at_seconds or s.since_seconds for s in sessions) + LAST_SAVE_SECONDS
    return known, until if facts.now < until else None


def job_deadline(facts: JobFacts) -> float | None:
    """When activeDeadlineSeconds ends the job; None: never."""
    limit, start = facts.spec.run_policy.active_deadline_seconds, facts.status.start_seconds
    return None if limit is None or start is None else start + limit


def overdue_reason(facts: JobFacts) -> str:
    """Why the job ends for its age; empty: it does not."""
    due, limit = job_deadline(facts), facts.spec.run_policy.active_deadline_seconds
    if due is None or limit is None or facts.now < due:
        return ""
    return f"the job ran for activeDeadlineSeconds ({limit:g} s) without finishing"


def with_completion(status: JobStatus, phase: Literal["Complete", "Failed"], reason: str, now: float) -> JobStatus:
    return replace(status, phase=phase, message=reason, completion_seconds=now)


def ended_event(phase: str, reason: str) -> Event:
    return Event(JOB_COMPLETE if phase == "Complete" else JOB_FAILED, reason, warning=phase == "Failed")


# ---- finalizer -------------------------------------------------------------------------------------------------------
# Keeps a job's finalizer until its data in the persistent tier is deleted. The number of attempts is limited, and an
# attempt whose pod the API server refuses counts. Data that cannot be deleted is reported and left, so that deleting
# the job never hangs.

PURGE_SECONDS = 600.0
"""An attempt that takes longer counts as failed, even if its pod still runs or was never scheduled."""

PURGE_ATTEMPTS = 3
RETRY_SECONDS = 10.0
"""Between the beginnings of two attempts, at least."""
REFUSED_TIMES = 3
"""Of these, how many pass after the second refusal: a quota may have room again, a webhook may be back."""


@dataclass(frozen=True, slots=True)
class PurgeDecision:
    reason: str
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    until_seconds: float | None = None


def finalizer_actions(facts: JobFacts) -> tuple[Action, ...]:
    """Sets the finalizer as the spec asks, until the job is deleted."""
    job = facts.job
    if job.deleted or job.has_finalizer == _needs_purge(facts):
        return ()
    return (SetFinalizer(not job.has_finalizer),)


def next_purge_step(facts: WorldTierFacts) -> PurgeDecision | None:
    """Plans the next purge step of a deleted job; None: done."""
    if not facts.job.has_finalizer:
        return None
    if not _needs_purge(facts):
        return PurgeDecision("the job was deleted; its persistent data is kept", (SetFinalizer(False),))
    if facts.worker_list:
        return PurgeDecision(
            "the job was deleted; its workers may still write, so its persistent data waits for their end"
        )
    place = f"{_uri(facts)}/{facts.job.uid}"
    last, call = _last(facts), facts.purge_call
    if last is not None and last.phase == "Succeeded":
        reason = f"{place} was deleted"
        return PurgeDecision(reason, (SetFinalizer(False),), (Event(PERSISTENT_DATA_DELETED, reason),))
    if call.under_way:
        return PurgeDecision(f"the job was deleted; the pod that deletes {place} is being created")
    due = last.created_seconds + PURGE_SECONDS if last is not None else facts.now
    if last is not None and last.phase != "Failed" and facts.now < due:
        return PurgeDecision(f"waiting until {place} is deleted (attempt {last.attempt})", until_seconds=due)
    if call.refusal and call.refused_attempt > (last.attempt if last is not None else 0):
        return _refused(facts, place, last)
    if last is None:
        return PurgeDecision(f"the job was deleted; a pod is created that deletes {place}", (PurgePersistent(1),))
    if last.attempt + call.refusals >= PURGE_ATTEMPTS:
        return _given_up(f"{place} was not deleted in {last.attempt + call.refusals} attempts ({_why(last)})")
    again = last.created_seconds + RETRY_SECONDS
    if facts.now < again:
        return PurgeDecision(f"{place} could not be deleted; trying again", until_seconds=again)
    return PurgeDecision(f"{place} could not be deleted; trying again", (PurgePersistent(last.attempt + 1),))


def _last(facts: TierFacts) -> ObservedPurge | None:
    """The newest attempt: the one whose pod is shown, or one whose pod somebody removed since this leader made it."""
    call = facts.purge_call
    shown = max(facts.purges, key=lambda p: p.attempt, default=None)
    if call.attempt and (shown is None or shown.attempt < call.attempt):
        return ObservedPurge(call.attempt, "Failed", "its pod was removed", call.made_seconds)
    return shown


def _refused(facts: TierFacts, place: str, last: ObservedPurge | None) -> PurgeDecision:
    """The fabric refused the pod of the next attempt: asked again, within the same bound."""
    call, begun = facts.purge_call, last.attempt if last is not None else 0
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
    again = call.last_seconds + RETRY_SECONDS * (REFUSED_TIMES if call.refusals > 1 else 1)
    if facts.now < again:
        return PurgeDecision(reason, until_seconds=min(again, end))
    return PurgeDecision(
        reason, (PurgePersistent(begun + 1),), (Event(PERSISTENT_DELETION_REJECTED, reason, warning=True),)
    )


def _given_up(why: str) -> PurgeDecision:
    reason = f"{why}; delete that folder by hand"
    return PurgeDecision(reason, (SetFinalizer(False),), (Event(PERSISTENT_DATA_NOT_DELETED, reason, warning=True),))


def _needs_purge(facts: JobFacts) -> bool:
    persistent = facts.spec.checkpoint.persistent
    return persistent is not None and persistent.on_job_deletion == "Delete"


def _uri(facts: JobFacts) -> str:
    persistent = facts.spec.checkpoint.persistent
    return persistent.uri.rstrip("/") if persistent is not None else ""


def _why(last: ObservedPurge) -> str:
    return last.message or ("it ended with an error" if last.phase == "Failed" else f"it is {last.phase}")


# ---- cleanup ---------------------------------------------------------------------------------------------------------
# Cleans up workers and memory of an ended or deleted job.

SHUTDOWN_SECONDS = 60.0
"""How long agents of an ended job have to flush and leave before they are deleted."""

NO_READY_SERVER_SECONDS = 60.0
"""A memory tier that does not answer for so long is not waited for before the job counts as tidied."""

RETENTION_AFTER_FAILURE_SECONDS = 600.0
"""How long the memory of a failed job is kept, so that somebody can still look, or take it up."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    actions: tuple[Action, ...]
    reason: str
    until_seconds: float | None = None
    events: tuple[Event, ...] = ()
    done: bool = False
    """Nothing is left to tidy."""


def cleanup_after_end(facts: Facts) -> Cleanup:
    """Plans the cleanup of an ended or deleted job.

    After the end agents leave, then their memory is deleted. A deleted job keeps nothing.
    """
    return _deleted(facts) if facts.job.deleted else _over(facts)


def _deleted(facts: Facts) -> Cleanup:
    reason = "the job was deleted"
    # a worker whose deletion is all it hears of trains on for some seconds, so that its world could be left in order
    told = _retires([w for w in facts.worker_list if _is_agent_responsive(facts, w)], 0, reason)
    actions = (*told, *_deletes(facts, facts.worker_list, reason), *_clean(facts, reason))
    left = next_purge_step(facts)
    if left is None:
        return Cleanup(actions, reason)
    return Cleanup((*actions, *left.actions), left.reason, left.until_seconds, left.events)


def _over(facts: Facts) -> Cleanup:
    phase, now, since = facts.status.phase, facts.now, _ended_at(facts)
    late = now >= since + SHUTDOWN_SECONDS
    alive = [w for w in facts.worker_list if w.phase not in ("Succeeded", "Failed")]
    hearing = [w for w in alive if not w.deleting and _is_agent_responsive(facts, w)]
    rest = _rest(facts, late or not alive)
    actions: list[Action] = []
    if not late:
        actions += _retires(hearing, 0 if phase == "Complete" else 1, facts.status.message)
    going = [w for w in alive if late or not _ends(facts, w)]
    actions += _deletes(facts, [*going, *rest], f"the job is {phase}")
    kept_until = since + _retention_seconds(facts)
    if not any(not w.deleting for w in alive) and now >= kept_until:
        actions += _clean(facts, f"the job is {phase}")
    lingering = any(w.sidecar_running for w in facts.worker_list)
    done = not alive and not rest and not lingering and _is_clean(facts)
    expiry = _expiry(facts)
    if expiry is not None and now >= expiry and (done or facts.status.memory_cleared):
        actions.append(DeleteJob(f"it ended more than ttlSecondsAfterFinished ({expiry - since:g} s) ago"))
    moments = (since + SHUTDOWN_SECONDS if alive or lingering else None, kept_until, expiry)
    due = earliest(at for at in moments if at is not None and now < at)
    return Cleanup(tuple(actions), facts.status.message, due, done=done)


def _ended_at(facts: JobFacts) -> float:
    return facts.status.completion_seconds if facts.status.completion_seconds is not None else facts.now


def _is_agent_responsive(facts: WorldFacts, worker: ObservedWorker) -> bool:
    session = facts.sessions.get(worker_id(worker))
    return session is not None and is_responsive(facts, session)


def _ends(facts: WorldNodeFacts, worker: ObservedWorker) -> bool:
    """Whether its agent may still end by itself, so that its pod stays for its logs: it hears us, or has just left."""
    return _is_agent_responsive(facts, worker) or (worker.phase == "Running" and not node_lost(facts, worker.node))


def _retires(workers: Iterable[ObservedWorker], exit_code: int, reason: str) -> tuple[ShutDownWorkers, ...]:
    indexes = tuple(sorted({w.index for w in workers}))
    return (ShutDownWorkers(indexes, exit_code, reason),) if indexes else ()


def _rest(facts: WorldFacts, late: bool) -> list[ObservedWorker]:
    """Of the workers that have ended: those whose sidecars never do, which hold a node; or all, if that is asked for.

    Others stay: they hold nothing, and their logs are people's.
    """
    if not late:
        return []
    ended = [w for w in facts.worker_list if w.phase in ("Succeeded", "Failed")]
    if facts.spec.run_policy.clean_pod_policy == "All":
        return ended
    past = facts.now >= _ended_at(facts) + SHUTDOWN_SECONDS
    return [w for w in ended if w.sidecar_running and past]


def _deletes(facts: WorldNodeFacts, workers: Iterable[ObservedWorker], reason: str) -> tuple[DeleteWorker, ...]:
    """Once is enough, unless the node is gone since: then nobody else would ever say that the worker has ended."""
    return tuple(
        DeleteWorker(w.name, w.uid, node_lost(facts, w.node), reason)
        for w in workers
        if not w.deleting or node_lost(facts, w.node)
    )


def _expiry(facts: JobFacts) -> float | None:
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return None if ttl is None else _ended_at(facts) + ttl


def _retention_seconds(facts: JobFacts) -> float:
    if facts.status.phase == "Complete":
        return 0.0
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return RETENTION_AFTER_FAILURE_SECONDS if ttl is None else min(ttl, RETENTION_AFTER_FAILURE_SECONDS)


def _is_clean(facts: TierFacts) -> bool:
    """Cleaned by this operator; or no holder was heard of for so long that there is nobody to clean."""
    if facts.memory_cleaned:
        return True
    unheard = not any(h.state == "Ready" for h in facts.holder_list)
    return unheard and facts.now >= max(_ended_at(facts), facts.term_seconds) + NO_READY_SERVER_SECONDS


def _clean(facts: TierFacts, reason: str) -> tuple[Action, ...]:
    """While any holder still knows this job: a cleaned one has no fence of it any more."""
    if facts.status.memory_cleared or facts.memory_cleaned:
        return ()
    known = any(h.state == "Ready" and h.fence is not None for h in facts.holder_list)
    return (ClearJobMemory(reason),) if known else ()


# ---- suspension ------------------------------------------------------------------------------------------------------
# Uploads a suspended job's checkpoint before its workers are deleted: nodes are often rebooted during a suspension, and
# the memory tier is lost with them.

UPLOAD_SECONDS = 600.0
"""How long workers of a job that is suspended are kept for its upload."""


def suspension_needs_upload(facts: WorldFacts) -> bool:
    """Whether a suspending world waits at the barrier whose step is to be promoted."""
    return facts.spec.suspend and barrier_checkpoint(facts) is not None


def upload_due(facts: WorldFacts, barrier: ObservedBarrier) -> float | None:
    """Until when the promotion of the barrier's step is waited for; None: not."""
    floor = facts.status.last_uploaded
    if not facts.spec.suspend or facts.spec.checkpoint.persistent is None:
        return None
    if floor is not None and floor.step >= barrier.sent.step:
        return None
    if barrier_checkpoint(facts) in unreadable_checkpoints(facts):
        return None  # no copy can be read: its upload would fail until the time is over
    if not any(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts)):
        return None
    due = barrier.proposed_seconds + UPLOAD_SECONDS
    return due if facts.now < due else None


def suspended_message(facts: TierFacts, parent: Checkpoint | None) -> str:
    """Says where a suspended job will resume, and what would lose that."""
    if parent is None:
        return "the job is suspended; it will begin at step 0"
    text = f"the job is suspended; it will resume from {parent}"
    floor = facts.status.last_uploaded
    if parent.imported or (floor is not None and floor.step >= parent.step):
        return text
    nodes = sorted(
        server.endpoint.instance.node
        for server in fenced_servers(facts, facts.membership.generation)
        if any(m.save.checkpoint == parent for m in server.entries)
    )
    if not nodes:
        return f"{text}, which is in memory only"
    return f"{text}, which is in memory only: restarting the memory tier on {join_names(nodes)} at the same time would lose it"


# ---- invalid spec ----------------------------------------------------------------------------------------------------
# Reports in the status that the spec is invalid. Pure; called by `reconcile`, which cannot plan such a job. The report
# is withdrawn as soon as the spec can be read.

INVALID = "Invalid"


def status_with_rejection(status: JobStatus, reason: str, generation: int, now: float) -> JobStatus:
    """The status of a job whose spec cannot be read.

    One that never began has failed; of any other only the refusal is reported.
    """
    if status.phase in ("Complete", "Failed") and not _is_rejected(status):
        return status
    kind = reasons.FAILED if status.membership is None else reasons.SPEC_REJECTED
    old = condition_of(status, kind)
    since = old.last_transition_seconds if old is not None and old.status == "True" else now
    others = tuple(c for c in status.conditions if c.type not in (reasons.FAILED, reasons.SPEC_REJECTED))
    return replace(
        status,
        phase="Failed" if status.membership is None else status.phase,
        observed_generation=generation,
        message=reason,
        conditions=(*others, Condition(kind, "True", INVALID, reason, since)),
    )


def status_without_rejection(status: JobStatus) -> JobStatus:
    """The status without the refusal, once the spec can be read.

    A job that was only refused has not failed.
    """
    if not _is_rejected(status):
        return status
    left = tuple(c for c in status.conditions if c.type != reasons.FAILED)
    return replace(status, phase="Pending", message="", conditions=left)


def _is_rejected(status: JobStatus) -> bool:
    return any(c.type == reasons.FAILED and c.status == "True" and c.reason == INVALID for c in status.conditions)


# ---- idle ------------------------------------------------------------------------------------------------------------
# Decides whether a job is idle and can be observed less often.


def is_idle(job: TrainingJob, status: JobStatus, workers: Sequence[ObservedWorker]) -> bool:
    """Decides whether a suspended or ended job needs no regular rounds.

    With no worker left, nothing changes until somebody edits the job.
    """
    membership = status.membership
    empty = membership is None or (membership.state == "Committed" and not membership.members)
    over = status.phase in ("Complete", "Failed")
    if job.deleted:
        return False
    # pods that have ended stay for their logs
    return status.memory_cleared if over else job.spec.suspend and empty and not workers


# ---- decision --------------------------------------------------------------------------------------------------------
# Holds what one phase of a job decides: reason, next status, actions, events, times to wake.

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


def with_workers(facts: WorldNodeFacts, base: PhaseDecision, wanted: frozenset[int]) -> PhaseDecision:
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
    facts: WorldTierFacts, end: Completion, since_seconds: float | None = None, up_to_step: int | None = None
) -> PhaseDecision:
    """Ends the job, once its newest complete checkpoint is in the persistent tier.

    Every ending comes this way: the memory tier is deleted with the job. The upload is waited for as long as somebody is
    there to make it, for `RESCUE_SECONDS` at most. `since_seconds`: when a world that trains no more broke; None: the
    next epoch is claimed, which stops the trainers, and the ending is durable. `up_to_step`: as `rescue` has it.
    """
    since = facts.now if since_seconds is None else since_seconds
    first = final_checkpoint.upload_before_failing(facts, since, up_to_step)
    if first is None:
        status = replace(with_completion(facts.status, end.phase, end.reason, facts.now), ending=None)
        return PhaseDecision(end.reason, status, events=(ended_event(end.phase, end.reason),))
    reason = f"{end.reason}; {first.reason}"
    if since_seconds is not None:
        return PhaseDecision(reason, facts.status, wakes=(first.until_seconds,), uploads=True)
    status = facts.status if facts.membership.state == "Claimed" else claim_generation(facts, end.reason)
    return PhaseDecision(reason, replace(status, ending=Ending(end.reason, facts.now)), wakes=(facts.now,))


def fail_job(facts: WorldTierFacts, reason: str, since_seconds: float | None = None) -> PhaseDecision:
    """Ends the job as Failed, as `end_job` does."""
    return end_job(facts, Completion("Failed", reason), since_seconds)
