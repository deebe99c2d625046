"""Plans a job's next status and actions from one snapshot.

Pure and level-triggered; called by `reconcile` with every new snapshot. Killed after any prefix of its actions and
asked again, it reaches the same world. One plan claims or commits at most once; the rest follows with the next.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator import reasons
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.actions import Event, Plan
from surefoot_operator.policy.core.facts import Facts, gather, has_stepped, last_step, soonest
from surefoot_operator.policy.failure import incidents, pair_trials, stragglers, unhealthy_nodes
from surefoot_operator.policy.failure.failure_detection import detect_losses
from surefoot_operator.policy.failure.losses import Loss
from surefoot_operator.policy.failure.restart_budget import allowance, recorded
from surefoot_operator.policy.failure.spare_workers import wanted_indexes
from surefoot_operator.policy.membership import final_checkpoint, lifecycle, planned_change, suspension
from surefoot_operator.policy.membership.bad_checkpoints import found_by_uploads, with_bad
from surefoot_operator.policy.membership.claim import claimed, is_taken, newest_epoch_seen
from surefoot_operator.policy.membership.cleanup import cleanup_after_end
from surefoot_operator.policy.membership.decision import NO_WORKERS, PhaseDecision, end_job, fail_job, with_workers
from surefoot_operator.policy.membership.finalizer import finalizer_actions
from surefoot_operator.policy.membership.gang import group_step
from surefoot_operator.policy.membership.node_exclusion import excluded
from surefoot_operator.policy.membership.restore_point import describe
from surefoot_operator.policy.membership.rollback import heal
from surefoot_operator.policy.membership.straggler_replacement import answered
from surefoot_operator.policy.planning.claimed_plan import plan_claimed
from surefoot_operator.policy.report.status_conditions import summarised
from surefoot_operator.policy.report.status_events import status_change_events
from surefoot_operator.policy.report.unheard import unheard_due, unheard_members, unheard_message

SHORTEST_WAKE_SECONDS = 0.01

_OF_TRAINERS = ("trainer-failed", "hang", "startup")


def plan(seen: Observed) -> Plan:
    """Decides what to do now, with the reason as a sentence."""
    facts, found = _with_bad_found(gather(seen))
    facts, sick, settled = _with_sick_found(facts)
    facts = _with_stragglers(facts)
    decision = _decide(facts)
    known = replace(decision.status, incidents=incidents.replaced(facts, decision.status.incidents))
    status = summarised(facts, known, decision.reason, decision.lost)
    events = (*found, *sick, *decision.events, *status_change_events(seen.status, status))
    group = group_step(facts)
    wakes = (
        settled,
        group.until_seconds,
        pair_trials.next_look(facts),
        _deadline_left(facts, status),
        _unheard_due(facts),
    )
    wake = soonest((*decision.wakes, *wakes))
    if status.world != seen.status.world:
        after: float | None = 0.0
    else:
        after = None if wake is None else max(SHORTEST_WAKE_SECONDS, wake - seen.now)
    # last: nothing that training waits for may fail for it
    actions = (*group.actions, *decision.actions, *pair_trials.trials_due(facts), *finalizer_actions(facts))
    return Plan(actions, status, decision.reason, events, after, decision.uploads)


def _with_bad_found(facts: Facts) -> tuple[Facts, tuple[Event, ...]]:
    """What uploads found to be bad counts from this very round."""
    status, events = facts.status, []
    for checkpoint in found_by_uploads(facts) if status.phase not in ("Complete", "Failed") else ():
        status = replace(status, bad=with_bad(status, checkpoint))
        text = f"every copy of some part of {checkpoint} is damaged, as its upload found; an older or newer one is used"
        events.append(Event(reasons.CHECKPOINT_BAD, text, True))
    return (gather(replace(facts.seen, status=status)), tuple(events)) if events else (facts, ())


def _with_sick_found(facts: Facts) -> tuple[Facts, tuple[Event, ...], float | None]:
    """What agents found on their nodes counts from this very round."""
    status = facts.status
    if status.phase in ("Complete", "Failed"):
        return facts, (), None
    sick, events, due = unhealthy_nodes.with_sick_found(facts)
    if sick == status.sick_nodes:
        return facts, events, due
    return gather(replace(facts.seen, status=replace(status, sick_nodes=sick))), events, due


def _with_stragglers(facts: Facts) -> Facts:
    """Who is slow counts from this very round."""
    if facts.status.phase in ("Complete", "Failed"):
        return facts
    status = answered(facts, replace(facts.status, stragglers=stragglers.judged(facts)))
    return facts if status == facts.status else gather(replace(facts.seen, status=status))


def _decide(facts: Facts) -> PhaseDecision:
    status = facts.status
    if facts.seen.job.deleted or status.phase in ("Complete", "Failed"):
        left = cleanup_after_end(facts)
        status = replace(status, tidied=status.tidied or left.done)
        return PhaseDecision(left.reason, status, left.actions, left.events, (left.until_seconds,))
    over = status.ending.reason if status.ending is not None else lifecycle.overdue(facts)
    if over and (status.world is None or status.world.state == "Committed"):
        return fail_job(facts, over)
    if status.world is None:
        if facts.spec.suspend:
            return with_workers(facts, PhaseDecision("the job is suspended and has not begun", status), NO_WORKERS)
        return PhaseDecision("the job starts", claimed(facts, "the job starts"))
    newest = newest_epoch_seen(facts)
    if newest > status.world.epoch or is_taken(facts):
        reason = (
            f"epoch {newest} is known to holders, agents or the persistent tier but not to status: claiming a newer one"
        )
        return PhaseDecision(reason, claimed(facts, reason))
    return plan_claimed(facts) if status.world.state == "Claimed" else _committed(facts)


# ---- committed -----------------------------------------------------------------------------------------------------


def _committed(facts: Facts) -> PhaseDecision:
    healed = heal(facts)
    if healed is not None:
        return healed
    end = lifecycle.completion_of(facts)
    if end is not None:
        return _end(facts, end)
    found = detect_losses(facts)
    if found.losses:
        return _lose(facts, found.losses[0])
    if found.frozen is not None:
        return PhaseDecision(found.frozen, facts.status, wakes=found.recheck_seconds)
    halt = planned_change.advance(facts)
    if halt is not None and halt.claim:
        return _change(facts, halt.reason)
    base = PhaseDecision(
        halt.reason if halt is not None else _steady(facts),
        replace(facts.status, incidents=incidents.closed(facts)),
        halt.actions if halt is not None else (),
        _restored(facts),
        (*found.recheck_seconds, halt.until_seconds if halt is not None else None),
    )
    return with_workers(facts, base, NO_WORKERS if facts.spec.suspend else wanted_indexes(facts))


def _end(facts: Facts, end: lifecycle.Completion) -> PhaseDecision:
    """Every trainer has finished: the job is over, once what it ended with lies where people look for it."""
    left = final_checkpoint.outstanding(facts) if end.phase == "Complete" else None
    if isinstance(left, final_checkpoint.Pending):
        return PhaseDecision(left.reason, facts.status, left.actions, wakes=(left.until_seconds,))
    if isinstance(left, Loss):
        return _lose(facts, left)
    saved, patience = lifecycle.last_saved(facts)
    if patience is not None:
        reason = "every trainer finished; reading the holders again for the last checkpoint"
        return PhaseDecision(reason, facts.status, wakes=(patience,))
    if left is not None:
        end = lifecycle.Completion("Failed" if left.fails else "Complete", left.reason)
    over = end_job(facts, end, final_checkpoint.since(facts))
    if over.status.completion_seconds is None:
        return over
    told = (Event(reasons.LAST_STEP_UNSAVED, left.reason, warning=True),) if left is not None else ()
    return replace(over, status=replace(over.status, last_complete=saved), events=(*told, *over.events))


def _lose(facts: Facts, loss: Loss) -> PhaseDecision:
    """The epoch cannot go on: the next one is claimed, unless a budget says that enough is enough."""
    status = facts.status
    reached = last_step(facts)
    allowed = allowance(facts, loss, reached)
    bad = with_bad(status, loss.bad)
    lost = Event(reasons.TRAINER_FAILED if loss.kind in _OF_TRAINERS else reasons.WORKER_LOST, loss.reason, True)
    events = (lost, *((Event(reasons.CHECKPOINT_BAD, loss.reason, True),) if loss.bad is not None else ()))
    if allowed.refusal is not None and allowed.witness_seconds is not None and facts.now < allowed.witness_seconds:
        reason = f"{loss.reason}; waiting for a lost node or worker that explains it"
        return PhaseDecision(reason, status, wakes=(allowed.witness_seconds,))
    if allowed.refusal is not None:
        over = fail_job(facts, allowed.refusal, loss.at_seconds)
        if over.status.phase != "Failed":
            return over
        limit = Event(reasons.RESTART_LIMIT, allowed.refusal, True)
        # people look for who ended the job where they look for all others
        known = replace(over.status, incidents=incidents.ending(facts, loss, reached))
        return replace(over, status=known, events=(*events, limit, *over.events))
    status = replace(
        recorded(claimed(facts, loss.reason), allowed, reached),
        bad=bad,
        excluded_nodes=excluded(facts, loss),
        incidents=incidents.opened(facts, loss, reached),
    )
    return PhaseDecision(loss.reason, status, events=events)


def _change(facts: Facts, reason: str) -> PhaseDecision:
    """A planned change: everybody holds and is saved, or nobody runs."""
    status = claimed(facts, reason)
    if facts.world.members and not facts.spec.suspend:
        loss = Loss("planned", reason, facts.now)
        status = replace(status, incidents=incidents.opened(facts, loss, last_step(facts)))
    return PhaseDecision(reason, status)


def _steady(facts: Facts) -> str:
    world = facts.world
    if not world.members:
        return suspension.suspended_message(facts, world.parent) if facts.spec.suspend else "the world is empty"
    if not has_stepped(facts, world.epoch):
        if unheard_members(facts):
            return unheard_message(facts)
        return f"{describe(world, world.parent)}, waiting for its first step"
    return f"epoch {world.epoch} runs with {world.size} ranks on {len(world.members)} workers"


def _restored(facts: Facts) -> tuple[Event, ...]:
    incident = incidents.closed(facts)[-1:] if facts.status.incidents else ()
    if not incident or incident[0] == facts.status.incidents[-1]:
        return ()
    done = incident[0]
    seconds = (done.first_step_seconds or facts.now) - done.detected_seconds
    source = f" from {done.restored_from}" if done.restored_from else ""
    ranks = f" with {done.world_after} ranks" if done.world_after is not None else ""
    text = f"training continues{ranks} {seconds:.1f} s after the first sign, {done.steps_lost} steps lost, restored{source}"
    return (Event(reasons.RESTORED, text),)


def _unheard_due(facts: Facts) -> float | None:
    """Once: what was reported at its time stands until somebody is heard."""
    due = unheard_due(facts)
    return due if due is not None and facts.now < due else None


def _deadline_left(facts: Facts, status: JobStatus) -> float | None:
    ends = status.phase in ("Complete", "Failed") or status.ending is not None
    return None if ends else lifecycle.deadline(facts)
