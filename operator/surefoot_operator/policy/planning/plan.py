"""Plans a job's next status and actions from one snapshot.

Pure and level-triggered: `reconcile` calls it with every new snapshot. An operator that is killed after any of the plan's
actions and plans again arrives at the same membership. Three rules make this so:

* A decision is stored before it is acted upon: the plan only changes the status, and the next plan, from a snapshot with
  that status, acts.
* One plan claims or commits a generation at most once.
* Whatever waits has a reason, which users read as the job's message, and a time at which it is planned again.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.status import Ending, JobStatus
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Event, Plan
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    MembershipTierFacts,
    TierFacts,
    build_facts,
    earliest,
    has_stepped,
    is_responsive,
    last_step,
)
from surefoot_operator.policy.failure import incidents, stragglers, unhealthy_nodes
from surefoot_operator.policy.failure.failure_detection import Failure, detect_failures, find_dead_member
from surefoot_operator.policy.failure.restart_budget import decide_restart, record_restart, restart_delay_end
from surefoot_operator.policy.failure.spare_workers import required_indexes
from surefoot_operator.policy.failure.unhealthy_nodes import describe_shared_findings
from surefoot_operator.policy.membership import final_checkpoint, lifecycle, planned_change
from surefoot_operator.policy.membership.claim import (
    claim_generation,
    commit_generation,
    is_generation_taken,
    newest_known_generation,
    release_deadline,
    select_members,
    size_constraint_of,
    update_scheduling,
)
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS, upload_before_failing, uploading_agents
from surefoot_operator.policy.membership.lifecycle import (
    NO_WORKERS,
    PhaseDecision,
    active_deadline_reason,
    cleanup_after_end,
    end_job,
    fail_job,
    finalizer_actions,
    with_workers,
)
from surefoot_operator.policy.membership.node_exclusion import decide_straggler_actions, exclude_nodes
from surefoot_operator.policy.membership.restore_decisions import (
    LastUploadedLost,
    RestoreChosen,
    RestorePending,
    RollbackTargetLost,
    SourceCheckpointMissing,
    TotalLoss,
    add_unreadable,
    unreadable_by_upload,
)
from surefoot_operator.policy.membership.restore_point import choose_restore_point, describe_restore, has_nothing_newer
from surefoot_operator.policy.membership.rollback import decide_rollback
from surefoot_operator.policy.membership.workers import describe_start_failure, plan_pod_group
from surefoot_operator.policy.report.blockers import (
    describe_unconnected,
    find_blocker,
    unconnected_deadline,
    unconnected_members,
)
from surefoot_operator.policy.report.status_conditions import (
    reported_loss_message,
    status_change_events,
    summarize_status,
)

# ---- plan of a claimed generation ------------------------------------------------------------------------------------
# Chooses the restore point and the members of a claimed generation and commits it. Called below while the membership is
# Claimed.

UPLOAD_AFTER_SECONDS = 30.0
"""Time that a claim waits for workers before its newest checkpoint is uploaded. The wait may last hours, in which nodes of
the memory tier can fail."""


def plan_claimed(facts: Facts) -> PhaseDecision:
    """Plans for a claimed generation: reads the tiers, waits for workers, commits, or ends the job."""
    choice = choose_restore_point(facts)

    # no checkpoint to restore: the job fails, or an older checkpoint is recorded as the target first
    if isinstance(choice, TotalLoss):
        failing = fail_job(facts, choice.reason)
        return replace(failing, events=(Event(reasons.CHECKPOINT_LOST, choice.reason, True), *failing.events))
    if isinstance(choice, SourceCheckpointMissing):
        return fail_job(facts, choice.reason)
    if isinstance(choice, RollbackTargetLost):
        return _advance_rollback(facts, choice)
    if isinstance(choice, LastUploadedLost):
        return _without_last_uploaded(facts, choice)

    # record the phases of the incident that are over
    trainers_stopped = not isinstance(choice, RestorePending) or choice.are_trainers_stopped
    status = _with_explained_incident(facts)
    recorded = incidents.record_phases(facts, status.incidents, trainers_stopped, isinstance(choice, RestoreChosen))
    status = replace(status, incidents=recorded)

    # a deadline or a worker that cannot start ends the job, but its newest checkpoint is uploaded first
    cause = active_deadline_reason(facts) or (
        describe_start_failure(facts) if isinstance(choice, RestorePending) else None
    )
    if status.ending is None and cause:
        status = replace(status, ending=Ending(cause, facts.now))
    updated_facts = facts.with_status(status)
    if status.ending is not None:
        return _end_claimed(updated_facts, status.ending, choice)
    if isinstance(choice, RestoreChosen):
        return _commit_or_wait(updated_facts, choice)

    # wait until the tiers are read; a suspended job keeps its workers only as long as their agents must answer
    reason = choice.reason if facts.spec.suspend else _with_blocker(facts, choice.reason)
    lost = choice.loss_message or reported_loss_message(facts)
    base = PhaseDecision(reason, status, choice.actions, wake_times=(choice.until_seconds,), loss_message=lost)
    if facts.spec.suspend:
        has_responsive_agent = any(is_responsive(facts, s) for s in facts.sessions.values())
        return base if has_responsive_agent and not lost else with_workers(facts, base, NO_WORKERS)
    return _wait_for_workers(facts, base, None)


def _end_claimed(facts: MembershipTierFacts, ending: Ending, choice: RestoreChosen | RestorePending) -> PhaseDecision:
    """Ends the job after its tiers are read and its newest checkpoint is uploaded, within a time limit."""
    deadline = ending.since_seconds + RESCUE_SECONDS
    if isinstance(choice, RestorePending) and uploading_agents(facts) and facts.now < deadline:
        wakes = (deadline, choice.until_seconds)
        return PhaseDecision(f"{ending.reason}; {choice.reason}", facts.status, choice.actions, wake_times=wakes)
    return fail_job(facts, ending.reason, ending.since_seconds)


def _advance_rollback(facts: JobFacts, choice: RollbackTargetLost) -> PhaseDecision:
    """Stores an older target of the rollback, as the present one is lost; the next plan restores it."""
    rollback = facts.status.rollback
    assert rollback is not None
    status = replace(facts.status, rollback=replace(rollback, to_step=choice.to_step, target_known_good=False))
    event = Event(reasons.ROLLED_BACK, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wake_times=(facts.now,))


def _without_last_uploaded(facts: JobFacts, choice: LastUploadedLost) -> PhaseDecision:
    """Stores that the last uploaded checkpoint is unreadable; the next plan restores an older one."""
    status = replace(facts.status, unreadable_checkpoints=add_unreadable(facts.status, choice.last_uploaded))
    event = Event(reasons.CHECKPOINT_UNREADABLE, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wake_times=(facts.now,))


def _with_explained_incident(facts: MembershipNodeFacts) -> JobStatus:
    """Attributes the open incident to a node, worker or agent that was found dead after it was recorded.

    A node that lost power is only silent at first; its peers report broken connections. Once its death is known, that is
    the cause, and the restart no longer counts against the program.
    """
    incident = incidents.open_incident(facts.status.incidents)
    death = find_dead_member(facts) if incident is not None and incident.unexplained else None
    if incident is None or death is None:
        return facts.status
    reason = f"{death.reason}: {incident.reason}"
    explained = replace(
        incident, kind=death.kind, reason=reason, worker=death.worker, node=death.node, unexplained=False
    )
    no_progress_restarts = max(0, facts.status.no_progress_restarts - 1)
    return replace(
        facts.status,
        incidents=(*facts.status.incidents[:-1], explained),
        no_progress_restarts=no_progress_restarts,
    )


def _commit_or_wait(facts: Facts, choice: RestoreChosen) -> PhaseDecision:
    """Commits the generation once its members are selected, or waits for workers."""
    # a suspended job commits a generation without members, after its checkpoint is uploaded
    if facts.spec.suspend:
        pending_upload = upload_before_failing(facts, facts.membership.changed_seconds)
        if pending_upload is not None:
            reason = f"the job is suspended; {pending_upload.reason}"
            return PhaseDecision(reason, facts.status, wake_times=(pending_upload.until_seconds,), uploads=True)
        status = commit_generation(facts, choice, ())
        reason = lifecycle.suspended_message(facts, choice.parent)
        return PhaseDecision(
            reason, status, events=(Event(reasons.GENERATION_COMMITTED, reason), *_loss_events(facts, choice))
        )

    # restarts without progress are spaced further and further apart
    pause_end_seconds = restart_delay_end(facts)
    if pause_end_seconds is not None:
        restarts = facts.status.no_progress_restarts
        reason = f"{facts.membership.reason}; restart {restarts} in a row without a new step: pausing before the next"
        base = PhaseDecision(reason, facts.status, wake_times=(pause_end_seconds,))
        return with_workers(facts, base, required_indexes(facts))

    # too few workers: wait, and upload the checkpoint if that takes long
    constraint = size_constraint_of(facts, choice.parent)
    selection = select_members(facts, constraint)
    start_problem = describe_start_failure(facts) if not selection.members else None
    if start_problem is not None:
        return fail_job(facts, start_problem)
    if not selection.members:
        reason = _with_blocker(facts, selection.waiting_reason or "waiting for workers")
        incident = incidents.open_incident(facts.status.incidents)
        if incident is not None and incident.kind == "planned" and choice.parent is not None:
            step = choice.parent.step
            reason = f"{facts.membership.reason}; training continues from step {step} once enough workers run: {reason}"
        upload_seconds = facts.membership.changed_seconds + UPLOAD_AFTER_SECONDS
        wakes = (selection.until_seconds, upload_seconds if facts.now < upload_seconds else None)
        base = PhaseDecision(reason, facts.status, wake_times=wakes, uploads=facts.now >= upload_seconds)
        return _wait_for_workers(facts, base, None if constraint is None else constraint.workers(facts.spec))

    status = commit_generation(facts, choice, selection.members)
    membership = status.membership or facts.membership
    reason = f"{describe_restore(membership, choice.parent)} with {membership.world_size} ranks on {len(membership.members)} workers"
    reason = f"{reason}; {selection.cost_estimate}" if selection.cost_estimate else reason
    common_fault = describe_shared_findings(facts)
    fault_events = (Event("CommonNodeFault", common_fault, True),) if common_fault else ()
    events = (Event(reasons.GENERATION_COMMITTED, reason), *_loss_events(facts, choice), *fault_events)
    return PhaseDecision(reason, status, events=events)


def _wait_for_workers(facts: MembershipNodeFacts, base: PhaseDecision, fixed_count: int | None) -> PhaseDecision:
    """Asks for workers, unless too few of them occupied nodes for too long: then all give their nodes back.

    Args:
        fixed_count: the only number of workers that can restore the checkpoint; None: any size that the spec allows.
    """
    scheduling = update_scheduling(facts, fixed_count)
    base = replace(
        base,
        reason=scheduling.reason or base.reason,
        status=replace(base.status, scheduling=scheduling.scheduling),
        events=(*base.events, *scheduling.events),
        wake_times=(*base.wake_times, release_deadline(facts, scheduling.scheduling)),
    )
    return with_workers(facts, base, NO_WORKERS if scheduling.reason else required_indexes(facts))


def _with_blocker(facts: MembershipNodeFacts, reason: str) -> str:
    """Appends what keeps workers from running to the reason of a wait."""
    blocker = find_blocker(facts)
    return reason if blocker is None else f"{reason}; {blocker.text}"


def _loss_events(facts: TierFacts, choice: RestoreChosen) -> tuple[Event, ...]:
    """Returns warnings about steps that may be lost, because the operator stopped waiting for a copy."""
    restart_point = _restart_point(choice.parent)
    parent = None if choice.parent is None or choice.parent.is_imported else choice.parent
    events = [
        Event(
            reasons.MEMORY_SERVER_LOST,
            f"memory server {lost.instance} did not answer; steps after {restart_point} that were only there are lost",
            True,
        )
        for lost in choice.lost_servers
        if not has_nothing_newer(facts, facts.servers.get(lost.instance), parent)
    ]
    if choice.is_unlisted:
        text = f"the persistent tier did not answer; steps after {restart_point} that were only there are lost"
        events.append(Event(reasons.MEMORY_SERVER_LOST, text, True))
    if (choice.parent is None or choice.parent.is_imported) and facts.status.had_checkpoint:
        text = f"every checkpoint of this job is lost; training begins again at {choice.parent or 'step 0'}"
        events.append(Event(reasons.CHECKPOINT_LOST, text, True))
    return tuple(events)


def _restart_point(parent: Checkpoint | None) -> str:
    return f"step {parent.step}" if parent else "the beginning"


# ---- plan ------------------------------------------------------------------------------------------------------------

MIN_WAKE_SECONDS = 0.01
"""Shortest time until the next plan: a wake in the past must not become a busy loop."""

_TRAINER_FAILURE_KINDS = ("trainer-failed", "hang", "startup")


def plan(snapshot: JobSnapshot) -> Plan:
    """Decides what to do now and why.

    Every plan runs the same stages: it records new findings (unreadable checkpoints, unhealthy nodes, stragglers),
    decides on the membership, and derives the conditions and events of the new status.
    """
    facts, unreadable_events = _add_unreadable(build_facts(snapshot))
    facts, unhealthy_events, unhealthy_wake = _add_unhealthy(facts)
    facts = _with_stragglers(facts)
    decision = _decide_on_membership(facts)

    status = replace(decision.status, incidents=incidents.record_replacement(facts, decision.status.incidents))
    status = summarize_status(facts, status, decision.reason, decision.loss_message)
    events = (
        *unreadable_events,
        *unhealthy_events,
        *decision.events,
        *status_change_events(snapshot.status, status),
    )

    # plan again at the earliest time at which anything may change by itself; at once after a claim or commit
    group = plan_pod_group(facts)
    wakes = (
        unhealthy_wake,
        group.until_seconds,
        _remaining_deadline(facts, status),
        _unconnected_wake(facts),
    )
    wake = earliest((*decision.wake_times, *wakes))
    if status.membership != snapshot.status.membership:
        wake_after_seconds: float | None = 0.0
    else:
        wake_after_seconds = None if wake is None else max(MIN_WAKE_SECONDS, wake - snapshot.now_seconds)

    # the finalizer comes last: a failed call for it must not keep back anything that training waits for
    actions = (*group.actions, *decision.actions, *finalizer_actions(facts))
    return Plan(actions, status, decision.reason, events, wake_after_seconds, decision.uploads)


def _add_unreadable(facts: Facts) -> tuple[Facts, tuple[Event, ...]]:
    """Adds checkpoints that uploads found unreadable, so that this plan already avoids them."""
    status, events = facts.status, []
    for checkpoint in unreadable_by_upload(facts) if status.phase not in ("Complete", "Failed") else ():
        status = replace(status, unreadable_checkpoints=add_unreadable(status, checkpoint))
        text = f"every copy of some part of {checkpoint} is damaged, as its upload found; an older or newer one is used"
        events.append(Event(reasons.CHECKPOINT_UNREADABLE, text, True))
    return (build_facts(replace(facts.snapshot, status=status)), tuple(events)) if events else (facts, ())


def _add_unhealthy(facts: Facts) -> tuple[Facts, tuple[Event, ...], float | None]:
    """Adds nodes that agents found unhealthy; also returns events and the time to plan again."""
    status = facts.status
    if status.phase in ("Complete", "Failed"):
        return facts, (), None
    unhealthy, events, wake = unhealthy_nodes.update_unhealthy_nodes(facts)
    if unhealthy == status.unhealthy_nodes:
        return facts, events, wake
    return build_facts(replace(facts.snapshot, status=replace(status, unhealthy_nodes=unhealthy))), events, wake


def _with_stragglers(facts: Facts) -> Facts:
    """Adds the ranks that are slow now, so that this plan already acts on them."""
    if facts.status.phase in ("Complete", "Failed"):
        return facts
    status = decide_straggler_actions(facts, replace(facts.status, stragglers=stragglers.update_stragglers(facts)))
    return facts if status == facts.status else build_facts(replace(facts.snapshot, status=status))


def _decide_on_membership(facts: Facts) -> PhaseDecision:
    """Decides by the job's phase of life: ended, failing, not yet started, claimed or committed."""
    status = facts.status
    if facts.job.deleted or status.phase in ("Complete", "Failed"):
        cleanup = cleanup_after_end(facts)
        status = replace(status, memory_cleared=status.memory_cleared or cleanup.is_done)
        return PhaseDecision(cleanup.reason, status, cleanup.actions, cleanup.events, (cleanup.until_seconds,))
    failure_reason = status.ending.reason if status.ending is not None else lifecycle.active_deadline_reason(facts)
    if failure_reason and (status.membership is None or status.membership.state == "Committed"):
        return fail_job(facts, failure_reason)
    if status.membership is None:
        if facts.spec.suspend:
            return with_workers(facts, PhaseDecision("the job is suspended and has not started", status), NO_WORKERS)
        return PhaseDecision("the job starts", claim_generation(facts, "the job starts"))
    # stores are fenced by the newest generation that any of them knows: an older one could not write to them
    newest = newest_known_generation(facts)
    if newest > status.membership.generation or is_generation_taken(facts):
        reason = (
            f"generation {newest} is known to memory servers, agents or the persistent tier, but not to the status:"
            " claiming a newer one"
        )
        return PhaseDecision(reason, claim_generation(facts, reason))
    return plan_claimed(facts) if status.membership.state == "Claimed" else _plan_committed(facts)


# ---- plan of a committed generation ----------------------------------------------------------------------------------


def _plan_committed(facts: Facts) -> PhaseDecision:
    """Plans for a committed generation: a rollback, the end, a failure, a planned change, or workers."""
    rollback = decide_rollback(facts)
    if rollback is not None:
        return rollback
    completion = lifecycle.completion_of(facts)
    if completion is not None:
        return _complete_job(facts, completion)
    detection = detect_failures(facts)
    if detection.failures:
        return _handle_failure(facts, detection.failures[0])
    if detection.partition_reason is not None:
        return PhaseDecision(detection.partition_reason, facts.status, wake_times=detection.recheck_seconds)
    change = planned_change.next_change_step(facts)
    if change is not None and change.must_claim:
        return _claim_for_change(facts, change.reason)
    base = PhaseDecision(
        change.reason if change is not None else _describe_training(facts),
        replace(facts.status, incidents=incidents.close_incident(facts)),
        change.actions if change is not None else (),
        _restored_events(facts),
        (*detection.recheck_seconds, change.until_seconds if change is not None else None),
    )
    return with_workers(facts, base, NO_WORKERS if facts.spec.suspend else required_indexes(facts))


def _complete_job(facts: Facts, completion: lifecycle.Completion) -> PhaseDecision:
    """Ends a job whose trainers have all finished, once its last checkpoint is in its tiers."""
    missing = final_checkpoint.check_final_checkpoint(facts) if completion.phase == "Complete" else None
    if isinstance(missing, final_checkpoint.FinalCheckpointPending):
        return PhaseDecision(missing.reason, facts.status, missing.actions, wake_times=(missing.until_seconds,))
    if isinstance(missing, Failure):
        return _handle_failure(facts, missing)
    last_saved, read_again_seconds = lifecycle.last_saved_checkpoint(facts)
    if read_again_seconds is not None:
        reason = "every trainer finished; reading the memory servers again for the last checkpoint"
        return PhaseDecision(reason, facts.status, wake_times=(read_again_seconds,))
    if missing is not None:
        completion = lifecycle.Completion("Failed" if missing.fails_job else "Complete", missing.reason)
    ending = end_job(facts, completion, final_checkpoint.last_step_time(facts))
    if ending.status.completion_seconds is None:
        return ending
    unsaved_events = (Event("FinalStepNotSaved", missing.reason, warning=True),) if missing is not None else ()
    status = replace(ending.status, last_complete=last_saved)
    return replace(ending, status=status, events=(*unsaved_events, *ending.events))


def _handle_failure(facts: Facts, failure: Failure) -> PhaseDecision:
    """Claims the next generation after a failure, or fails the job if a restart budget is used up."""
    status = facts.status
    reached_step = last_step(facts)
    restart = decide_restart(facts, failure, reached_step)
    unreadable = add_unreadable(status, failure.unreadable_checkpoint)
    reason = reasons.TRAINER_FAILED if failure.kind in _TRAINER_FAILURE_KINDS else reasons.WORKER_LOST
    unreadable_event = Event(reasons.CHECKPOINT_UNREADABLE, failure.reason, True)
    events = (
        Event(reason, failure.reason, True),
        *((unreadable_event,) if failure.unreadable_checkpoint is not None else ()),
    )

    # before a budget fails the job, a lost node that explains the failure may still be detected
    if (
        restart.rejection is not None
        and restart.corroboration_seconds is not None
        and facts.now < restart.corroboration_seconds
    ):
        reason = f"{failure.reason}; waiting for a lost node or worker that explains it"
        return PhaseDecision(reason, status, wake_times=(restart.corroboration_seconds,))
    if restart.rejection is not None:
        ending = fail_job(facts, restart.rejection, failure.first_sign_seconds)
        if ending.status.phase != "Failed":
            return ending
        limit_event = Event("RestartLimitReached", restart.rejection, True)
        # the last failure is an incident like all others, so that users find its rank and node in the same place
        status = replace(ending.status, incidents=incidents.end_with_incident(facts, failure, reached_step))
        return replace(ending, status=status, events=(*events, limit_event, *ending.events))
    status = replace(
        record_restart(claim_generation(facts, failure.reason), restart, reached_step),
        unreadable_checkpoints=unreadable,
        excluded_nodes=exclude_nodes(facts, failure),
        incidents=incidents.append_incident(facts, failure, reached_step),
    )
    return PhaseDecision(failure.reason, status, events=events)


def _claim_for_change(facts: MembershipTierFacts, reason: str) -> PhaseDecision:
    """Claims the next generation for a planned change, when every rank waits at the barrier."""
    status = claim_generation(facts, reason)
    if facts.membership.members and not facts.spec.suspend:
        change = Failure("planned", reason, facts.now)
        status = replace(status, incidents=incidents.append_incident(facts, change, last_step(facts)))
    return PhaseDecision(reason, status)


def _describe_training(facts: MembershipTierFacts) -> str:
    """Returns the message of a job that neither fails nor changes."""
    membership = facts.membership
    if not membership.members:
        if facts.spec.suspend:
            return lifecycle.suspended_message(facts, membership.parent)
        return f"generation {membership.generation} has no members"
    if not has_stepped(facts, membership.generation):
        if unconnected_members(facts):
            return describe_unconnected(facts)
        return f"{describe_restore(membership, membership.parent)}, waiting for its first step"
    return (
        f"generation {membership.generation} runs with {membership.world_size} ranks on"
        f" {len(membership.members)} workers"
    )


def _restored_events(facts: MembershipFacts) -> tuple[Event, ...]:
    """Reports the incident that the first step of this generation closes."""
    closed = incidents.close_incident(facts)[-1:] if facts.status.incidents else ()
    if not closed or closed[0] == facts.status.incidents[-1]:
        return ()
    incident = closed[0]
    seconds = (incident.first_step_seconds or facts.now) - incident.detected_seconds
    source = f" from {incident.restored_from}" if incident.restored_from else ""
    ranks = f" with {incident.world_size_after} ranks" if incident.world_size_after is not None else ""
    text = (
        f"training continues{ranks} {seconds:.1f} s after the first sign, {incident.steps_lost} steps lost,"
        f" restored{source}"
    )
    return (Event("Restored", text),)


def _unconnected_wake(facts: MembershipFacts) -> float | None:
    """Returns when unconnected members are to be reported; None if they already are."""
    deadline = unconnected_deadline(facts)
    return deadline if deadline is not None and facts.now < deadline else None


def _remaining_deadline(facts: JobFacts, status: JobStatus) -> float | None:
    """Returns when the job exceeds its deadline; None: it has none, or ends already."""
    is_ending = status.phase in ("Complete", "Failed") or status.ending is not None
    return None if is_ending else lifecycle.job_deadline(facts)
