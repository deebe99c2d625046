"""Plans a job's next status and actions from one snapshot.

Pure and level-triggered; called by `reconcile` with every new snapshot. Killed after any prefix of its actions and
asked again, it reaches the same world. One plan claims or commits at most once; the rest follows with the next.
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
    TierFacts,
    WorldFacts,
    WorldNodeFacts,
    WorldTierFacts,
    earliest,
    gather,
    has_stepped,
    is_responsive,
    last_step,
)
from surefoot_operator.policy.failure import incidents, stragglers, unhealthy_nodes
from surefoot_operator.policy.failure.failure_detection import Failure, detect_failures, observed_death
from surefoot_operator.policy.failure.restart_budget import decide_restart, pause_until, record_restart
from surefoot_operator.policy.failure.spare_workers import required_indices
from surefoot_operator.policy.failure.unhealthy_nodes import shared_findings
from surefoot_operator.policy.membership import final_checkpoint, lifecycle, planned_change
from surefoot_operator.policy.membership.claim import (
    claim_generation,
    commit_generation,
    due_seconds,
    is_taken,
    newest_known_generation,
    select_members,
    tie_of,
    update_scheduling,
)
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS, upload_before_failing, uploading_agents
from surefoot_operator.policy.membership.lifecycle import (
    NO_WORKERS,
    PhaseDecision,
    cleanup_after_end,
    end_job,
    fail_job,
    finalizer_actions,
    overdue_reason,
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
from surefoot_operator.policy.membership.restore_point import choose_restore_point, describe, has_nothing_newer
from surefoot_operator.policy.membership.rollback import heal
from surefoot_operator.policy.membership.workers import group_step, start_failure
from surefoot_operator.policy.report.blockers import find_blocker, unheard_due, unheard_members, unheard_message
from surefoot_operator.policy.report.status_conditions import reported_loss_message, status_change_events, summarize

# ---- plan of a claimed epoch -----------------------------------------------------------------------------------------
# Plans a claimed epoch: its restore point, its members, its commit. Pure; called below while a world is Claimed. A
# claim that waits keeps its reason and a time to look again, so that nothing waits without a word or for ever.

UPLOAD_AFTER_SECONDS = 30.0
"""A claim that waits so long for workers may wait for hours: its newest checkpoint goes to the persistent tier meanwhile."""


def plan_claimed(facts: Facts) -> PhaseDecision:
    choice = choose_restore_point(facts)
    if isinstance(choice, TotalLoss):
        over = fail_job(facts, choice.reason)
        return replace(over, events=(Event(reasons.CHECKPOINT_LOST, choice.reason, True), *over.events))
    if isinstance(choice, SourceCheckpointMissing):
        return fail_job(facts, choice.reason)
    if isinstance(choice, RollbackTargetLost):
        return _advance_rollback(facts, choice)
    if isinstance(choice, LastUploadedLost):
        return _without_last_uploaded(facts, choice)
    stopped = not isinstance(choice, RestorePending) or choice.stopped
    status = _explained(facts)
    phased = incidents.record_phases(facts, status.incidents, stopped, isinstance(choice, RestoreChosen))
    status = replace(status, incidents=phased)
    cause = overdue_reason(facts) or (start_failure(facts) if isinstance(choice, RestorePending) else None)
    if status.ending is None and cause:
        status = replace(status, ending=Ending(cause, facts.now))
    phased_facts = facts.with_status(status)
    if status.ending is not None:
        return _end_claimed(phased_facts, status.ending, choice)
    if isinstance(choice, RestoreChosen):
        return _commit(phased_facts, choice)
    reason = choice.reason if facts.spec.suspend else _waiting_with_blocker(facts, choice.reason)
    lost = choice.lost or reported_loss_message(facts)
    base = PhaseDecision(reason, status, choice.actions, wakes=(choice.until_seconds,), lost=lost)
    if facts.spec.suspend:
        heard = any(is_responsive(facts, s) for s in facts.sessions.values())
        return base if heard and not lost else with_workers(facts, base, NO_WORKERS)
    return _waiting(facts, base, None)


def _end_claimed(facts: WorldTierFacts, ending: Ending, choice: RestoreChosen | RestorePending) -> PhaseDecision:
    """The job ends with what it has: read first, as for a world that begins, then uploaded; each within the same time."""
    until = ending.since_seconds + RESCUE_SECONDS
    if isinstance(choice, RestorePending) and uploading_agents(facts) and facts.now < until:
        wakes = (until, choice.until_seconds)
        return PhaseDecision(f"{ending.reason}; {choice.reason}", facts.status, choice.actions, wakes=wakes)
    return fail_job(facts, ending.reason, ending.since_seconds)


def _advance_rollback(facts: JobFacts, choice: RollbackTargetLost) -> PhaseDecision:
    """Durable before it is acted upon, as the rollback itself was: the next plan commits it."""
    back = facts.status.rollback
    assert back is not None
    status = replace(facts.status, rollback=replace(back, to_step=choice.to_step, target_known_good=False))
    event = Event(reasons.ROLLED_BACK, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wakes=(facts.now,))


def _without_last_uploaded(facts: JobFacts, choice: LastUploadedLost) -> PhaseDecision:
    """Durable before it is acted upon: what is bad binds nobody, and the next plan restores an older one."""
    status = replace(facts.status, unreadable_checkpoints=add_unreadable(facts.status, choice.last_uploaded))
    event = Event(reasons.CHECKPOINT_UNREADABLE, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wakes=(facts.now,))


def _explained(facts: WorldNodeFacts) -> JobStatus:
    """A node that lost its power is silent at first, and all that is heard is how others lost their connections to it:
    once it is seen, that is the cause, and no restart that the program could be blamed for."""
    incident = incidents.open_incident(facts.status.incidents)
    death = observed_death(facts) if incident is not None and incident.unexplained else None
    if incident is None or death is None:
        return facts.status
    reason = f"{death.reason}: {incident.reason}"
    known = replace(incident, kind=death.kind, reason=reason, worker=death.worker, node=death.node, unexplained=False)
    row = max(0, facts.status.no_progress_restarts - 1)
    return replace(facts.status, incidents=(*facts.status.incidents[:-1], known), no_progress_restarts=row)


def _commit(facts: Facts, choice: RestoreChosen) -> PhaseDecision:
    if facts.spec.suspend:
        first = upload_before_failing(facts, facts.membership.changed_seconds)
        if first is not None:
            reason = f"the job is suspended; {first.reason}"
            return PhaseDecision(reason, facts.status, wakes=(first.until_seconds,), uploads=True)
        status = commit_generation(facts, choice, ())
        reason = lifecycle.suspended_message(facts, choice.parent)
        return PhaseDecision(
            reason, status, events=(Event(reasons.GENERATION_COMMITTED, reason), *_unknown(facts, choice))
        )
    pause = pause_until(facts)
    if pause is not None:
        row = facts.status.no_progress_restarts
        reason = f"{facts.membership.reason}; restart {row} in a row without a new step: pausing before the next"
        base = PhaseDecision(reason, facts.status, wakes=(pause,))
        return with_workers(facts, base, required_indices(facts))
    tie = tie_of(facts, choice.parent)
    found = select_members(facts, tie)
    worn = start_failure(facts) if not found.members else None
    if worn is not None:
        return fail_job(facts, worn)
    if not found.members:
        reason = _waiting_with_blocker(facts, found.waiting or "waiting for workers")
        incident = incidents.open_incident(facts.status.incidents)
        if incident is not None and incident.kind == "planned" and choice.parent is not None:
            step = choice.parent.step
            reason = f"{facts.membership.reason}; training continues from step {step} once enough workers run: {reason}"
        due = facts.membership.changed_seconds + UPLOAD_AFTER_SECONDS
        wakes = (found.until_seconds, due if facts.now < due else None)
        base = PhaseDecision(reason, facts.status, wakes=wakes, uploads=facts.now >= due)
        return _waiting(facts, base, None if tie is None else tie.workers(facts.spec))
    status = commit_generation(facts, choice, found.members)
    world = status.membership or facts.membership
    reason = f"{describe(world, choice.parent)} with {world.world_size} ranks on {len(world.members)} workers"
    reason = f"{reason}; {found.sums}" if found.sums else reason
    alike = shared_findings(facts)
    told = (Event(reasons.COMMON_NODE_FAULT, alike, True),) if alike else ()
    events = (Event(reasons.GENERATION_COMMITTED, reason), *_unknown(facts, choice), *told)
    return PhaseDecision(reason, status, events=events)


def _waiting(facts: WorldNodeFacts, base: PhaseDecision, tied: int | None) -> PhaseDecision:
    """Workers are asked for, unless too few of them have held nodes for too long."""
    kept = update_scheduling(facts, tied)
    base = replace(
        base,
        reason=kept.reason or base.reason,
        status=replace(base.status, scheduling=kept.scheduling),
        events=(*base.events, *kept.events),
        wakes=(*base.wakes, due_seconds(facts, kept.scheduling)),
    )
    return with_workers(facts, base, NO_WORKERS if kept.reason else required_indices(facts))


def _waiting_with_blocker(facts: WorldNodeFacts, reason: str) -> str:
    """What is waited for, and what keeps workers from running meanwhile."""
    why = find_blocker(facts)
    return reason if why is None else f"{reason}; {why.text}"


def _unknown(facts: TierFacts, choice: RestoreChosen) -> tuple[Event, ...]:
    """What may have been lost by not waiting longer."""
    since = _restart_if_allowed(choice.parent)
    own = None if choice.parent is None or choice.parent.imported else choice.parent
    events = [
        Event(
            reasons.MEMORY_SERVER_LOST,
            f"{e.instance} did not answer; steps after {since} that only it held are lost",
            True,
        )
        for e in choice.lost_servers
        if not has_nothing_newer(facts, facts.servers.get(e.instance), own)
    ]
    if choice.unlisted:
        text = f"the persistent tier did not answer; steps after {since} that only it held are lost"
        events.append(Event(reasons.MEMORY_SERVER_LOST, text, True))
    if (choice.parent is None or choice.parent.imported) and facts.status.had_checkpoint:
        text = f"every checkpoint of this job is lost; training begins again at {choice.parent or 'step 0'}"
        events.append(Event(reasons.CHECKPOINT_LOST, text, True))
    return tuple(events)


def _restart_if_allowed(parent: Checkpoint | None) -> str:
    return f"step {parent.step}" if parent else "the beginning"


# ---- plan ------------------------------------------------------------------------------------------------------------

MIN_WAKE_SECONDS = 0.01

_OF_TRAINERS = ("trainer-failed", "hang", "startup")


def plan(seen: JobSnapshot) -> Plan:
    """Decides what to do now, with the reason as a sentence."""
    facts, found = _add_unreadable(gather(seen))
    facts, sick, settled = _add_unhealthy(facts)
    facts = _with_stragglers(facts)
    decision = _decide(facts)
    known = replace(decision.status, incidents=incidents.record_replacement(facts, decision.status.incidents))
    status = summarize(facts, known, decision.reason, decision.lost)
    events = (*found, *sick, *decision.events, *status_change_events(seen.status, status))
    group = group_step(facts)
    wakes = (
        settled,
        group.until_seconds,
        _deadline_left(facts, status),
        _unheard_due(facts),
    )
    wake = earliest((*decision.wakes, *wakes))
    if status.membership != seen.status.membership:
        after: float | None = 0.0
    else:
        after = None if wake is None else max(MIN_WAKE_SECONDS, wake - seen.now_seconds)
    # last: nothing that training waits for may fail for it
    actions = (*group.actions, *decision.actions, *finalizer_actions(facts))
    return Plan(actions, status, decision.reason, events, after, decision.uploads)


def _add_unreadable(facts: Facts) -> tuple[Facts, tuple[Event, ...]]:
    """What uploads found to be bad counts from this very round."""
    status, events = facts.status, []
    for checkpoint in unreadable_by_upload(facts) if status.phase not in ("Complete", "Failed") else ():
        status = replace(status, unreadable_checkpoints=add_unreadable(status, checkpoint))
        text = f"every copy of some part of {checkpoint} is damaged, as its upload found; an older or newer one is used"
        events.append(Event(reasons.CHECKPOINT_UNREADABLE, text, True))
    return (gather(replace(facts.snapshot, status=status)), tuple(events)) if events else (facts, ())


def _add_unhealthy(facts: Facts) -> tuple[Facts, tuple[Event, ...], float | None]:
    """What agents found on their nodes counts from this very round."""
    status = facts.status
    if status.phase in ("Complete", "Failed"):
        return facts, (), None
    sick, events, due = unhealthy_nodes.update_unhealthy_nodes(facts)
    if sick == status.unhealthy_nodes:
        return facts, events, due
    return gather(replace(facts.snapshot, status=replace(status, unhealthy_nodes=sick))), events, due


def _with_stragglers(facts: Facts) -> Facts:
    """Who is slow counts from this very round."""
    if facts.status.phase in ("Complete", "Failed"):
        return facts
    status = decide_straggler_actions(facts, replace(facts.status, stragglers=stragglers.current_stragglers(facts)))
    return facts if status == facts.status else gather(replace(facts.snapshot, status=status))


def _decide(facts: Facts) -> PhaseDecision:
    status = facts.status
    if facts.job.deleted or status.phase in ("Complete", "Failed"):
        left = cleanup_after_end(facts)
        status = replace(status, memory_cleared=status.memory_cleared or left.done)
        return PhaseDecision(left.reason, status, left.actions, left.events, (left.until_seconds,))
    over = status.ending.reason if status.ending is not None else lifecycle.overdue_reason(facts)
    if over and (status.membership is None or status.membership.state == "Committed"):
        return fail_job(facts, over)
    if status.membership is None:
        if facts.spec.suspend:
            return with_workers(facts, PhaseDecision("the job is suspended and has not begun", status), NO_WORKERS)
        return PhaseDecision("the job starts", claim_generation(facts, "the job starts"))
    newest = newest_known_generation(facts)
    if newest > status.membership.generation or is_taken(facts):
        reason = (
            f"epoch {newest} is known to holders, agents or the persistent tier but not to status: claiming a newer one"
        )
        return PhaseDecision(reason, claim_generation(facts, reason))
    return plan_claimed(facts) if status.membership.state == "Claimed" else _committed(facts)


# ---- committed -----------------------------------------------------------------------------------------------------


def _committed(facts: Facts) -> PhaseDecision:
    healed = heal(facts)
    if healed is not None:
        return healed
    end = lifecycle.completion_of(facts)
    if end is not None:
        return _complete_job(facts, end)
    found = detect_failures(facts)
    if found.losses:
        return _handle_failure(facts, found.losses[0])
    if found.frozen is not None:
        return PhaseDecision(found.frozen, facts.status, wakes=found.recheck_seconds)
    halt = planned_change.next_change_step(facts)
    if halt is not None and halt.claim:
        return _plan_change(facts, halt.reason)
    base = PhaseDecision(
        halt.reason if halt is not None else _steady(facts),
        replace(facts.status, incidents=incidents.close_incident(facts)),
        halt.actions if halt is not None else (),
        _restored(facts),
        (*found.recheck_seconds, halt.until_seconds if halt is not None else None),
    )
    return with_workers(facts, base, NO_WORKERS if facts.spec.suspend else required_indices(facts))


def _complete_job(facts: Facts, end: lifecycle.Completion) -> PhaseDecision:
    """Every trainer has finished: the job is over, once what it ended with lies where people look for it."""
    left = final_checkpoint.missing_from_final(facts) if end.phase == "Complete" else None
    if isinstance(left, final_checkpoint.FinalCheckpointPending):
        return PhaseDecision(left.reason, facts.status, left.actions, wakes=(left.until_seconds,))
    if isinstance(left, Failure):
        return _handle_failure(facts, left)
    saved, patience = lifecycle.last_saved_checkpoint(facts)
    if patience is not None:
        reason = "every trainer finished; reading the holders again for the last checkpoint"
        return PhaseDecision(reason, facts.status, wakes=(patience,))
    if left is not None:
        end = lifecycle.Completion("Failed" if left.fails else "Complete", left.reason)
    over = end_job(facts, end, final_checkpoint.since(facts))
    if over.status.completion_seconds is None:
        return over
    told = (Event(reasons.FINAL_STEP_NOT_SAVED, left.reason, warning=True),) if left is not None else ()
    return replace(over, status=replace(over.status, last_complete=saved), events=(*told, *over.events))


def _handle_failure(facts: Facts, loss: Failure) -> PhaseDecision:
    """The epoch cannot go on: the next one is claimed, unless a budget says that enough is enough."""
    status = facts.status
    reached = last_step(facts)
    allowed = decide_restart(facts, loss, reached)
    bad = add_unreadable(status, loss.unreadable_checkpoint)
    lost = Event(reasons.TRAINER_FAILED if loss.kind in _OF_TRAINERS else reasons.WORKER_LOST, loss.reason, True)
    events = (
        lost,
        *((Event(reasons.CHECKPOINT_UNREADABLE, loss.reason, True),) if loss.unreadable_checkpoint is not None else ()),
    )
    if (
        allowed.rejection is not None
        and allowed.corroboration_seconds is not None
        and facts.now < allowed.corroboration_seconds
    ):
        reason = f"{loss.reason}; waiting for a lost node or worker that explains it"
        return PhaseDecision(reason, status, wakes=(allowed.corroboration_seconds,))
    if allowed.rejection is not None:
        over = fail_job(facts, allowed.rejection, loss.first_sign_seconds)
        if over.status.phase != "Failed":
            return over
        limit = Event(reasons.RESTART_LIMIT, allowed.rejection, True)
        # people look for who ended the job where they look for all others
        known = replace(over.status, incidents=incidents.end_with_incident(facts, loss, reached))
        return replace(over, status=known, events=(*events, limit, *over.events))
    status = replace(
        record_restart(claim_generation(facts, loss.reason), allowed, reached),
        unreadable_checkpoints=bad,
        excluded_nodes=exclude_nodes(facts, loss),
        incidents=incidents.append_incident(facts, loss, reached),
    )
    return PhaseDecision(loss.reason, status, events=events)


def _plan_change(facts: WorldTierFacts, reason: str) -> PhaseDecision:
    """A planned change: everybody holds and is saved, or nobody runs."""
    status = claim_generation(facts, reason)
    if facts.membership.members and not facts.spec.suspend:
        loss = Failure("planned", reason, facts.now)
        status = replace(status, incidents=incidents.append_incident(facts, loss, last_step(facts)))
    return PhaseDecision(reason, status)


def _steady(facts: WorldTierFacts) -> str:
    world = facts.membership
    if not world.members:
        return lifecycle.suspended_message(facts, world.parent) if facts.spec.suspend else "the world is empty"
    if not has_stepped(facts, world.generation):
        if unheard_members(facts):
            return unheard_message(facts)
        return f"{describe(world, world.parent)}, waiting for its first step"
    return f"epoch {world.generation} runs with {world.world_size} ranks on {len(world.members)} workers"


def _restored(facts: WorldFacts) -> tuple[Event, ...]:
    incident = incidents.close_incident(facts)[-1:] if facts.status.incidents else ()
    if not incident or incident[0] == facts.status.incidents[-1]:
        return ()
    done = incident[0]
    seconds = (done.first_step_seconds or facts.now) - done.detected_seconds
    source = f" from {done.restored_from}" if done.restored_from else ""
    ranks = f" with {done.world_size_after} ranks" if done.world_size_after is not None else ""
    text = f"training continues{ranks} {seconds:.1f} s after the first sign, {done.steps_lost} steps lost, restored{source}"
    return (Event(reasons.RESTORED, text),)


def _unheard_due(facts: WorldFacts) -> float | None:
    """Once: what was reported at its time stands until somebody is heard."""
    due = unheard_due(facts)
    return due if due is not None and facts.now < due else None


def _deadline_left(facts: JobFacts, status: JobStatus) -> float | None:
    ends = status.phase in ("Complete", "Failed") or status.ending is not None
    return None if ends else lifecycle.job_deadline(facts)
