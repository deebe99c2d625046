"""Decides how a job ends, is suspended and is cleaned up, and when its finalizer is removed.

Pure. It also reports a spec that cannot be parsed in the job's status, and decides whether a job is idle.
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
from surefoot_operator.policy.core.availability import is_node_lost
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    MembershipTierFacts,
    TierFacts,
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
from surefoot_operator.policy.membership.final_checkpoint import complete_in_memory
from surefoot_operator.policy.membership.workers import WorkerChanges, reconcile_workers
from surefoot_operator.reasons import (
    JOB_COMPLETE,
    JOB_FAILED,
)

LAST_SAVE_SECONDS = 30.0
"""How long after its last step a finished job waits for the saves that its agents reported to appear on memory servers."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a job: its phase and reason."""

    phase: Literal["Complete", "Failed"]
    reason: str


def completion_of(facts: MembershipFacts) -> Completion | None:
    """Returns how the job ends if every member of the committed generation has finished; None: not yet."""
    membership = facts.membership
    steps: list[int] = []
    # A member counts as finished by its agent's report, or by its pod's exit if the agent is gone.
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
        reason = "the program ended with exit code 0 but never called checkpointer.step(): call it once per step"
        return Completion("Failed", reason)
    step_clause = f" after step {max(*steps, membership.start_step)}" if steps else ""
    return Completion("Complete", f"every trainer finished{step_clause}")


def last_saved_checkpoint(facts: MembershipTierFacts) -> tuple[Checkpoint | None, float | None]:
    """Returns a finished job's newest complete checkpoint, and until when to read the servers again for a newer one.

    The time is None if the checkpoint is final. The last saves end after the last step, and the status should name the
    checkpoint that users will find. Nothing else depends on it, so the wait is short.
    """
    newest = newest_checkpoint(c for c in (*complete_in_memory(facts), facts.status.last_complete) if c is not None)
    sessions = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    if not sessions or len(sessions) < len(facts.membership.members):
        return newest, None
    saves = [newest_checkpoint(c for c in (*s.pending, s.saved) if c is not None) for s in sessions]
    expected = min((c for c in saves if c is not None), default=None)
    all_reported = all(
        s.final_saves_reported for s in sessions
    )  # by a heartbeat, up to about half a second after the report that the trainer finished
    if all_reported and (expected is None or None in saves or (newest is not None and newest >= expected)):
        return newest, None
    deadline = max(s.step_at_seconds or s.since_seconds for s in sessions) + LAST_SAVE_SECONDS
    return newest, deadline if facts.now < deadline else None


def job_deadline(facts: JobFacts) -> float | None:
    """Returns when `activeDeadlineSeconds` ends the job (Unix time); None: never."""
    limit_seconds, start_seconds = facts.spec.run_policy.active_deadline_seconds, facts.status.start_seconds
    return None if limit_seconds is None or start_seconds is None else start_seconds + limit_seconds


def active_deadline_reason(facts: JobFacts) -> str:
    """Returns why the job ends for its age; empty: it does not."""
    deadline, limit_seconds = job_deadline(facts), facts.spec.run_policy.active_deadline_seconds
    if deadline is None or limit_seconds is None or facts.now < deadline:
        return ""
    return f"the job ran for activeDeadlineSeconds ({limit_seconds:g} s) without finishing"


def with_completion(
    status: JobStatus, phase: Literal["Complete", "Failed"], reason: str, now_seconds: float
) -> JobStatus:
    """Returns the status of the ended job."""
    return replace(status, phase=phase, message=reason, completion_seconds=now_seconds)


def build_end_event(phase: str, reason: str) -> Event:
    """Builds the event about the end of the job."""
    return Event(JOB_COMPLETE if phase == "Complete" else JOB_FAILED, reason, warning=phase == "Failed")


# ---- finalizer -------------------------------------------------------------------------------------------------------
# Keeps a job's finalizer until its data in the persistent tier is deleted. The number of attempts is limited, and an attempt
# whose pod the API server rejects counts. Data that cannot be deleted is reported and kept, so that deleting the job never
# hangs.

PURGE_SECONDS = 600.0
"""Longest duration of one attempt; then it counts as failed, even if its pod still runs or was never scheduled."""

MAX_PURGE_ATTEMPTS = 3
"""Attempts, rejected pods included, before the data is left in place."""
PURGE_RETRY_SECONDS = 10.0
"""Shortest time between the starts of two attempts."""
REJECTED_RETRY_FACTOR = 3
"""Factor on that time after the second rejection: a quota may have room again, or a webhook may be back."""


@dataclass(frozen=True, slots=True)
class PurgeDecision:
    """The next step of deleting a job's persistent data."""

    reason: str
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    until_seconds: float | None = None


def finalizer_actions(facts: JobFacts) -> tuple[Action, ...]:
    """Sets or removes the finalizer as the spec requires, until the job is deleted."""
    job = facts.job
    if job.deleted or job.has_finalizer == _needs_purge(facts):
        return ()
    return (SetFinalizer(not job.has_finalizer),)


def next_purge_step(facts: MembershipTierFacts) -> PurgeDecision | None:
    """Plans the next step of deleting the data of a deleted job; None: done."""
    # Nothing is deleted before all workers have ended, because they could write to the folder again.
    if not facts.job.has_finalizer:
        return None
    if not _needs_purge(facts):
        return PurgeDecision("the job was deleted; its persistent data is kept", (SetFinalizer(False),))
    if facts.worker_list:
        return PurgeDecision(
            "the job was deleted; its persistent data is deleted once its workers, which may still write, have ended"
        )
    folder = f"{_persistent_uri(facts)}/{facts.job.uid}"
    last_attempt, call = _newest_attempt(facts), facts.purge_call
    # An attempt that succeeded, is being created or still runs leaves nothing to do now.
    if last_attempt is not None and last_attempt.phase == "Succeeded":
        reason = f"{folder} was deleted"
        return PurgeDecision(reason, (SetFinalizer(False),), (Event("PersistentDataDeleted", reason),))
    if call.in_progress:
        return PurgeDecision(f"the job was deleted; creating the pod that deletes {folder}")
    attempt_deadline = last_attempt.created_seconds + PURGE_SECONDS if last_attempt is not None else facts.now
    if last_attempt is not None and last_attempt.phase != "Failed" and facts.now < attempt_deadline:
        return PurgeDecision(
            f"waiting until {folder} is deleted (attempt {last_attempt.attempt})", until_seconds=attempt_deadline
        )
    if call.rejection and call.rejected_attempt > (last_attempt.attempt if last_attempt is not None else 0):
        return _handle_rejected_pod(facts, folder, last_attempt)
    if last_attempt is None:
        return PurgeDecision(f"the job was deleted; creating a pod that deletes {folder}", (PurgePersistent(1),))
    # The last attempt failed: retry, until the attempts are used up.
    if last_attempt.attempt + call.rejections >= MAX_PURGE_ATTEMPTS:
        return _abandon_purge(
            f"{folder} was not deleted in {last_attempt.attempt + call.rejections} attempts ({_describe_attempt(last_attempt)})"
        )
    retry_seconds = last_attempt.created_seconds + PURGE_RETRY_SECONDS
    if facts.now < retry_seconds:
        return PurgeDecision(f"{folder} could not be deleted; retrying", until_seconds=retry_seconds)
    return PurgeDecision(f"{folder} could not be deleted; retrying", (PurgePersistent(last_attempt.attempt + 1),))


def _newest_attempt(facts: TierFacts) -> ObservedPurge | None:
    """Returns the newest attempt: that of the newest pod, or one whose pod was removed since this leader created it."""
    call = facts.purge_call
    shown_attempt = max(facts.purges, key=lambda p: p.attempt, default=None)
    if call.attempt and (shown_attempt is None or shown_attempt.attempt < call.attempt):
        return ObservedPurge(call.attempt, "Failed", "its pod was removed", call.accepted_seconds)
    return shown_attempt


def _handle_rejected_pod(facts: TierFacts, folder: str, last_attempt: ObservedPurge | None) -> PurgeDecision:
    """Handles a rejected pod of the next attempt: it is retried within the same limit of attempts."""
    call, started_attempts = facts.purge_call, last_attempt.attempt if last_attempt is not None else 0
    attempts = started_attempts + call.rejections
    if call.closing:
        return _abandon_purge(f"{call.rejection}; {folder} was not deleted")
    deadline = call.since_seconds + PURGE_SECONDS
    if attempts >= MAX_PURGE_ATTEMPTS or facts.now >= deadline:
        return _abandon_purge(f"{call.rejection}; {folder} was not deleted in {max(1, attempts)} attempts")
    reason = (
        f"{call.rejection}; so {folder} is not deleted yet (attempt {max(1, attempts)} of {MAX_PURGE_ATTEMPTS}). After the last"
        " attempt the job is removed and the folder is kept; to do that now, remove the job's finalizer"
    )
    retry_seconds = call.last_seconds + PURGE_RETRY_SECONDS * (REJECTED_RETRY_FACTOR if call.rejections > 1 else 1)
    if facts.now < retry_seconds:
        return PurgeDecision(reason, until_seconds=min(retry_seconds, deadline))
    return PurgeDecision(
        reason,
        (PurgePersistent(started_attempts + 1),),
        (Event("PersistentDataDeletionRejected", reason, warning=True),),
    )


def _abandon_purge(cause: str) -> PurgeDecision:
    """Ends the attempts: the finalizer is removed, and the data is left to the user."""
    reason = f"{cause}; delete that folder by hand"
    return PurgeDecision(reason, (SetFinalizer(False),), (Event("PersistentDataNotDeleted", reason, warning=True),))


def _needs_purge(facts: JobFacts) -> bool:
    """Whether the job's persistent data is deleted with the job."""
    persistent = facts.spec.checkpoint.persistent
    return persistent is not None and persistent.on_job_deletion == "Delete"


def _persistent_uri(facts: JobFacts) -> str:
    """Returns the URI of the persistent tier, without a trailing slash; empty: there is none."""
    persistent = facts.spec.checkpoint.persistent
    return persistent.uri.rstrip("/") if persistent is not None else ""


def _describe_attempt(attempt: ObservedPurge) -> str:
    """Describes how an attempt ended."""
    return attempt.message or ("it ended with an error" if attempt.phase == "Failed" else f"it is {attempt.phase}")


# ---- cleanup ---------------------------------------------------------------------------------------------------------
# Cleans up workers and memory of an ended or deleted job.

SHUTDOWN_SECONDS = 60.0
"""How long agents of an ended job may flush and exit before their pods are deleted."""

NO_READY_SERVER_SECONDS = 60.0
"""Time without a ready memory server after which cleanup does not wait for the memory tier."""

RETENTION_AFTER_FAILURE_SECONDS = 600.0
"""How long a failed job's memory is kept, so that a user can inspect it or continue from it."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """The work that remains for an ended or deleted job."""

    actions: tuple[Action, ...]
    reason: str
    until_seconds: float | None = None
    events: tuple[Event, ...] = ()
    is_done: bool = False
    """Whether nothing is left to clean up."""


def cleanup_after_end(facts: Facts) -> Cleanup:
    """Plans the cleanup of an ended or deleted job: agents exit, then their memory is cleared."""
    return _clean_deleted_job(facts) if facts.job.deleted else _clean_ended_job(facts)


def _clean_deleted_job(facts: Facts) -> Cleanup:
    """Plans the cleanup of a deleted job: workers, memory, and persistent data if the spec requires that."""
    reason = "the job was deleted"
    # a worker that is only deleted would train on until its grace period ends, expecting a barrier: shut its agent down
    shutdowns = _build_shutdown([w for w in facts.worker_list if _is_agent_responsive(facts, w)], 0, reason)
    actions = (*shutdowns, *_delete_workers(facts, facts.worker_list, reason), *_clear_memory(facts, reason))
    purge = next_purge_step(facts)
    if purge is None:
        return Cleanup(actions, reason)
    return Cleanup((*actions, *purge.actions), purge.reason, purge.until_seconds, purge.events)


def _clean_ended_job(facts: Facts) -> Cleanup:
    """Plans the cleanup of an ended job: agents exit, then pods and memory are removed, then the job expires."""
    phase, now, ended_seconds = facts.status.phase, facts.now, _end_time(facts)
    is_overdue = now >= ended_seconds + SHUTDOWN_SECONDS
    alive = [w for w in facts.worker_list if w.phase not in ("Succeeded", "Failed")]
    reachable = [w for w in alive if not w.deleting and _is_agent_responsive(facts, w)]
    leftovers = _leftover_workers(facts, is_overdue or not alive)
    actions: list[Action] = []
    # First agents are asked to flush and exit, so that their pods end by themselves and keep their logs.
    if not is_overdue:
        actions += _build_shutdown(reachable, 0 if phase == "Complete" else 1, facts.status.message)
    to_delete = [w for w in alive if is_overdue or not _may_end_by_itself(facts, w)]
    actions += _delete_workers(facts, [*to_delete, *leftovers], f"the job is {phase}")
    # Memory is cleared once no worker writes to it, and after the time to inspect a failure.
    retention_end = ended_seconds + _retention_seconds(facts)
    if not any(not w.deleting for w in alive) and now >= retention_end:
        actions += _clear_memory(facts, f"the job is {phase}")
    has_running_sidecars = any(w.sidecar_running for w in facts.worker_list)
    is_done = not alive and not leftovers and not has_running_sidecars and _is_memory_clean(facts)
    expiry = _expiry_time(facts)
    if expiry is not None and now >= expiry and (is_done or facts.status.memory_cleared):
        actions.append(DeleteJob(f"it ended more than ttlSecondsAfterFinished ({expiry - ended_seconds:g} s) ago"))
    deadlines = (ended_seconds + SHUTDOWN_SECONDS if alive or has_running_sidecars else None, retention_end, expiry)
    next_deadline = earliest(deadline for deadline in deadlines if deadline is not None and now < deadline)
    return Cleanup(tuple(actions), facts.status.message, next_deadline, is_done=is_done)


def _end_time(facts: JobFacts) -> float:
    return facts.status.completion_seconds if facts.status.completion_seconds is not None else facts.now


def _is_agent_responsive(facts: MembershipFacts, worker: ObservedWorker) -> bool:
    """Whether the worker's agent is responsive."""
    session = facts.sessions.get(worker_id(worker))
    return session is not None and is_responsive(facts, session)


def _may_end_by_itself(facts: MembershipNodeFacts, worker: ObservedWorker) -> bool:
    """Whether the agent may still exit by itself, so that its pod keeps its logs."""
    return _is_agent_responsive(facts, worker) or (worker.phase == "Running" and not is_node_lost(facts, worker.node))


def _build_shutdown(workers: Iterable[ObservedWorker], exit_code: int, reason: str) -> tuple[ShutDownWorkers, ...]:
    """Builds one shutdown request for these workers."""
    indexes = tuple(sorted({w.index for w in workers}))
    return (ShutDownWorkers(indexes, exit_code, reason),) if indexes else ()


def _leftover_workers(facts: MembershipFacts, include: bool) -> list[ObservedWorker]:
    """Lists ended workers to delete: those with a running sidecar; all under cleanPodPolicy All.

    The others stay: they occupy nothing, and users need their logs.
    """
    if not include:
        return []
    ended_workers = [w for w in facts.worker_list if w.phase in ("Succeeded", "Failed")]
    if facts.spec.run_policy.clean_pod_policy == "All":
        return ended_workers
    is_past_shutdown = facts.now >= _end_time(facts) + SHUTDOWN_SECONDS
    return [w for w in ended_workers if w.sidecar_running and is_past_shutdown]


def _delete_workers(
    facts: MembershipNodeFacts, workers: Iterable[ObservedWorker], reason: str
) -> tuple[DeleteWorker, ...]:
    """Deletes each worker once, and again by force if its node is lost."""
    return tuple(
        DeleteWorker(w.name, w.uid, is_node_lost(facts, w.node), reason)
        for w in workers
        if not w.deleting or is_node_lost(facts, w.node)
    )


def _expiry_time(facts: JobFacts) -> float | None:
    """Returns when the ended job is deleted (Unix time); None: never."""
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return None if ttl is None else _end_time(facts) + ttl


def _retention_seconds(facts: JobFacts) -> float:
    """Returns how long an ended job's memory is kept."""
    if facts.status.phase == "Complete":
        return 0.0
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return RETENTION_AFTER_FAILURE_SECONDS if ttl is None else min(ttl, RETENTION_AFTER_FAILURE_SECONDS)


def _is_memory_clean(facts: TierFacts) -> bool:
    """Whether memory was cleared, or no memory server was ready for so long that none is left."""
    if facts.is_memory_cleared:
        return True
    has_no_ready_server = not any(h.state == "Ready" for h in facts.server_list)
    return has_no_ready_server and facts.now >= max(_end_time(facts), facts.term_seconds) + NO_READY_SERVER_SECONDS


def _clear_memory(facts: TierFacts, reason: str) -> tuple[Action, ...]:
    """Clears the job's memory while any memory server has a fence of this job; a cleared one has none."""
    if facts.status.memory_cleared or facts.is_memory_cleared:
        return ()
    has_fenced_server = any(h.state == "Ready" and h.fence is not None for h in facts.server_list)
    return (ClearJobMemory(reason),) if has_fenced_server else ()


# ---- suspension ------------------------------------------------------------------------------------------------------
# Uploads a suspended job's checkpoint before its workers are deleted: nodes are often rebooted during a suspension, and the
# memory tier is lost with them.

UPLOAD_SECONDS = 600.0
"""How long workers of a job that is being suspended are kept for its upload."""


def suspension_needs_upload(facts: MembershipFacts) -> bool:
    """Whether all ranks of a job that is being suspended wait at the barrier whose step is to be uploaded."""
    return facts.spec.suspend and barrier_checkpoint(facts) is not None


def barrier_upload_deadline(facts: MembershipFacts, barrier: ObservedBarrier) -> float | None:
    """Returns until when to wait for the upload of the barrier's step (Unix time); None: no wait."""
    last_uploaded = facts.status.last_uploaded
    if not facts.spec.suspend or facts.spec.checkpoint.persistent is None:
        return None
    if last_uploaded is not None and last_uploaded.step >= barrier.barrier.step:
        return None
    if barrier_checkpoint(facts) in unreadable_checkpoints(facts):
        return None  # no copy can be read: its upload would fail until the wait is over
    if not any(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts)):
        return None
    deadline = barrier.proposed_seconds + UPLOAD_SECONDS
    return deadline if facts.now < deadline else None


def suspended_message(facts: TierFacts, parent: Checkpoint | None) -> str:
    """Describes where a suspended job will resume, and which restarts would lose that checkpoint."""
    if parent is None:
        return "the job is suspended; it will start at step 0"
    text = f"the job is suspended; it will resume from {parent}"
    last_uploaded = facts.status.last_uploaded
    if parent.is_imported or (last_uploaded is not None and last_uploaded.step >= parent.step):
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
# Reports in the status that the spec is invalid. Pure; called by `reconcile`, which cannot plan such a job. The report is
# withdrawn as soon as the spec can be parsed.

INVALID_SPEC_REASON = "Invalid"
"""Reason of the condition about an invalid spec."""


def status_with_rejection(status: JobStatus, reason: str, generation: int, now: float) -> JobStatus:
    """Returns the status of a job with an invalid spec: Failed if it never started, else a condition."""
    if status.phase in ("Complete", "Failed") and not _is_rejected(status):
        return status
    # A job that trains is not failed by a faulty edit of its spec.
    condition_type = reasons.FAILED if status.membership is None else reasons.SPEC_REJECTED
    previous = condition_of(status, condition_type)
    since_seconds = previous.last_transition_seconds if previous is not None and previous.status == "True" else now
    others = tuple(c for c in status.conditions if c.type not in (reasons.FAILED, reasons.SPEC_REJECTED))
    return replace(
        status,
        phase="Failed" if status.membership is None else status.phase,
        observed_generation=generation,
        message=reason,
        conditions=(*others, Condition(condition_type, "True", INVALID_SPEC_REASON, reason, since_seconds)),
    )


def status_without_rejection(status: JobStatus) -> JobStatus:
    """Returns the status without the rejection, once the spec can be parsed."""
    if not _is_rejected(status):
        return status
    conditions = tuple(c for c in status.conditions if c.type != reasons.FAILED)
    return replace(status, phase="Pending", message="", conditions=conditions)


def _is_rejected(status: JobStatus) -> bool:
    return any(
        c.type == reasons.FAILED and c.status == "True" and c.reason == INVALID_SPEC_REASON for c in status.conditions
    )


# ---- idle ------------------------------------------------------------------------------------------------------------
# Decides whether a job is idle and can be observed less often.


def is_idle(job: TrainingJob, status: JobStatus, workers: Sequence[ObservedWorker]) -> bool:
    """Whether a suspended or ended job needs no regular reconciles, because only an edit can change it."""
    membership = status.membership
    has_no_members = membership is None or (membership.state == "Committed" and not membership.members)
    has_ended = status.phase in ("Complete", "Failed")
    if job.deleted:
        return False
    # pods that have ended stay for their logs, so workers may remain after the end
    return status.memory_cleared if has_ended else job.spec.suspend and has_no_members and not workers


# ---- decision --------------------------------------------------------------------------------------------------------
# Defines the decision of one phase of a job: reason, next status, actions, events, wake-up times.

NO_WORKERS = frozenset[int]()
"""Indexes of a job that needs no worker."""


@dataclass(frozen=True, slots=True)
class PhaseDecision:
    """The decision of one phase of a job."""

    reason: str
    """Sentence for logs, events and the status."""
    status: JobStatus
    """The next status."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_times: tuple[float | None, ...] = ()
    """Unix times of the next decision; None entries do not count."""
    loss_message: str = ""
    """Message about the loss of every checkpoint; empty: not every checkpoint is lost."""
    uploads: bool = False
    """Same meaning as `Plan.uploads`."""


def with_workers(facts: MembershipNodeFacts, base: PhaseDecision, indexes: frozenset[int]) -> PhaseDecision:
    """Adds the actions that keep one worker for each of these indexes; other workers are deleted."""
    changes: WorkerChanges = reconcile_workers(facts, indexes)
    return replace(
        base,
        status=replace(
            base.status,
            next_attempt=changes.next_attempt,
            failed_starts=changes.failed_starts,
            failed_starts_counted=changes.failed_starts_counted,
        ),
        actions=(*changes.actions, *base.actions),
        events=(*base.events, *changes.events),
        wake_times=(*base.wake_times, changes.until_seconds),
    )


def end_job(
    facts: MembershipTierFacts, end: Completion, since_seconds: float | None = None, up_to_step: int | None = None
) -> PhaseDecision:
    """Ends the job, once its newest complete checkpoint is in the persistent tier.

    Every job ends here, because the memory tier is deleted with it. The upload is awaited while an agent can make it, for at
    most `RESCUE_SECONDS`.

    Args:
        facts: The job's facts.
        end: Phase and reason.
        since_seconds: When training broke, if it did; None: the next generation is claimed, which stops the trainers and
            makes the end durable.
        up_to_step: Last step whose checkpoint is uploaded; None: any.
    """
    failed_seconds = facts.now if since_seconds is None else since_seconds
    # Before the end, the newest checkpoint is uploaded, if that is possible.
    pending_upload = final_checkpoint.upload_before_failing(facts, failed_seconds, up_to_step)
    if pending_upload is None:
        status = replace(with_completion(facts.status, end.phase, end.reason, facts.now), ending=None)
        return PhaseDecision(end.reason, status, events=(build_end_event(end.phase, end.reason),))
    reason = f"{end.reason}; {pending_upload.reason}"
    if since_seconds is not None:
        return PhaseDecision(reason, facts.status, wake_times=(pending_upload.until_seconds,), uploads=True)
    status = facts.status if facts.membership.state == "Claimed" else claim_generation(facts, end.reason)
    return PhaseDecision(reason, replace(status, ending=Ending(end.reason, facts.now)), wake_times=(facts.now,))


def fail_job(facts: MembershipTierFacts, reason: str, since_seconds: float | None = None) -> PhaseDecision:
    """Ends the job as Failed; see `end_job`."""
    return end_job(facts, Completion("Failed", reason), since_seconds)
