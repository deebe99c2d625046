"""Plans a job's next status and actions from one snapshot.

Pure and level-triggered; called by `reconcile` with every new snapshot. Killed after any prefix of its actions and
asked again, it reaches the same world. One plan claims or commits at most once; the rest follows with the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.identities import Checkpoint
from surefoot_operator import names
from surefoot_operator.api.status import JobStatus
from surefoot_operator.observed import Observed
from surefoot_operator.policy.actions import Action, Event, Plan
from surefoot_operator.policy.facts import Facts, gather, has_stepped, is_responsive, soonest, step_of
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.detect import detect_losses, observed_death
from surefoot_operator.policy.failure.losses import Loss
from surefoot_operator.policy.failure.node_exclusion import excluded
from surefoot_operator.policy.failure.restart_budget import allowance, pause_until, recorded
from surefoot_operator.policy.lifecycle import completion, last_checkpoint, suspension
from surefoot_operator.policy.lifecycle.cleanup import cleanup_after_end
from surefoot_operator.policy.lifecycle.finalizer import finalizer_actions
from surefoot_operator.policy.reporting.conditions import known_loss, summarised
from surefoot_operator.policy.reporting.hindrances import hindrance
from surefoot_operator.policy.reporting.status_events import status_change_events
from surefoot_operator.policy.spares import wanted_indexes
from surefoot_operator.policy.workers import WorkerChanges, reconcile_workers, start_failure
from surefoot_operator.policy.world import planned_change
from surefoot_operator.policy.world.bad_checkpoints import with_bad
from surefoot_operator.policy.world.claim import claimed, committed, newest_epoch_seen, select_members
from surefoot_operator.policy.world.restore_choices import Chosen, NothingToTakeUp, TotalLoss, Waiting
from surefoot_operator.policy.world.restore_point import choose, describe
from surefoot_operator.policy.world.scheduling_deadline import due_seconds, held
from surefoot_operator.policy.world.size_tie import tie_of

SHORTEST_WAKE_SECONDS = 0.01

_OF_TRAINERS = ("trainer-failed", "hang", "startup")
_NONE = frozenset[int]()


@dataclass(frozen=True, slots=True)
class _Decision:
    reason: str
    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wakes: tuple[float | None, ...] = ()
    lost: str = ""
    """What people are told where every checkpoint is lost."""


def plan(seen: Observed) -> Plan:
    """Decides what to do now, with the reason as a sentence."""
    facts = gather(seen)
    decision = _decide(facts)
    status = summarised(facts, decision.status, decision.reason, decision.lost)
    events = (*decision.events, *status_change_events(seen.status, status))
    wake = soonest((*decision.wakes, _deadline_left(facts, status)))
    if status.world != seen.status.world:
        after: float | None = 0.0
    else:
        after = None if wake is None else max(SHORTEST_WAKE_SECONDS, wake - seen.now)
    # last: nothing that training waits for may fail for it
    return Plan((*decision.actions, *finalizer_actions(facts)), status, decision.reason, events, after)


def _decide(facts: Facts) -> _Decision:
    status = facts.status
    if facts.seen.job.deleted or status.phase in ("Complete", "Failed"):
        left = cleanup_after_end(facts)
        status = replace(status, tidied=status.tidied or left.done)
        return _Decision(left.reason, status, left.actions, left.events, (left.until_seconds,))
    due = completion.deadline(facts)
    if due is not None and facts.now >= due:
        limit = facts.spec.run_policy.active_deadline_seconds
        return _fail(facts, f"the job ran for activeDeadlineSeconds ({limit:g} s) without finishing")
    if status.world is None:
        if facts.spec.suspend:
            return _with_workers(facts, _Decision("the job is suspended and has not begun", status), _NONE)
        return _Decision("the job starts", claimed(facts, "the job starts"))
    newest = newest_epoch_seen(facts)
    if newest > status.world.epoch:
        reason = f"epoch {newest} is known to holders or agents but not to status: claiming a newer one"
        return _Decision(reason, claimed(facts, reason))
    return _claimed(facts) if status.world.state == "Claimed" else _committed(facts)


# ---- committed -----------------------------------------------------------------------------------------------------


def _committed(facts: Facts) -> _Decision:
    end = completion.completion_of(facts)
    if end is not None:
        return _end(facts, end)
    found = detect_losses(facts)
    if found.losses:
        return _lose(facts, found.losses[0])
    if found.frozen is not None:
        return _Decision(found.frozen, facts.status, wakes=found.recheck_seconds)
    halt = planned_change.advance(facts)
    if halt is not None and halt.claim:
        return _change(facts, halt.reason)
    base = _Decision(
        halt.reason if halt is not None else _steady(facts),
        replace(facts.status, incidents=incidents.closed(facts)),
        halt.actions if halt is not None else (),
        _restored(facts),
        (*found.recheck_seconds, halt.until_seconds if halt is not None else None),
    )
    return _with_workers(facts, base, _NONE if facts.spec.suspend else wanted_indexes(facts))


def _end(facts: Facts, end: completion.Completion) -> _Decision:
    """Every trainer has finished: the job is over, once what it ended with lies where people look for it."""
    left = last_checkpoint.outstanding(facts) if end.phase == "Complete" else None
    if isinstance(left, last_checkpoint.Pending):
        return _Decision(left.reason, facts.status, wakes=(left.until_seconds,))
    if isinstance(left, Loss):
        return _lose(facts, left)
    saved, patience = completion.last_saved(facts)
    if patience is not None:
        reason = "every trainer finished; reading the holders again for the last checkpoint"
        return _Decision(reason, facts.status, wakes=(patience,))
    told: tuple[Event, ...] = ()
    if left is not None:
        end = completion.Completion("Failed" if left.fails else "Complete", left.reason)
        told = (Event(names.LAST_STEP_UNSAVED, left.reason, warning=True),)
    status = completion.ended(replace(facts.status, last_complete=saved), end.phase, end.reason, facts.now)
    return _Decision(end.reason, status, events=(*told, completion.ended_event(end.phase, end.reason)))


def _lose(facts: Facts, loss: Loss) -> _Decision:
    """The epoch cannot go on: the next one is claimed, unless a budget says that enough is enough."""
    status = facts.status
    last_step = _last_step(facts)
    allowed = allowance(facts, loss, last_step)
    bad = with_bad(status, loss.bad)
    lost = Event(names.TRAINER_FAILED if loss.kind in _OF_TRAINERS else names.WORKER_LOST, loss.reason, True)
    events = (lost, *((Event(names.CHECKPOINT_BAD, loss.reason, True),) if loss.bad is not None else ()))
    if allowed.refusal is not None and allowed.witness_seconds is not None and facts.now < allowed.witness_seconds:
        reason = f"{loss.reason}; waiting for a lost node or worker that explains it"
        return _Decision(reason, status, wakes=(allowed.witness_seconds,))
    if allowed.refusal is not None:
        first = last_checkpoint.rescue(facts, loss.at_seconds)
        if first is not None:
            return _Decision(f"{allowed.refusal}; {first.reason}", status, wakes=(first.until_seconds,))
        failed = _fail(facts, allowed.refusal)
        limit = Event(names.RESTART_LIMIT, allowed.refusal, True)
        # people look for who ended the job where they look for all others
        known = replace(failed.status, incidents=incidents.ending(facts, loss, last_step))
        return replace(failed, status=known, events=(*events, limit, *failed.events))
    status = replace(
        recorded(claimed(facts, loss.reason), allowed, last_step),
        bad=bad,
        excluded_nodes=excluded(facts, loss),
        incidents=incidents.opened(facts, loss, last_step),
    )
    return _Decision(loss.reason, status, events=events)


def _change(facts: Facts, reason: str) -> _Decision:
    """A planned change: everybody holds and is saved, or nobody runs."""
    status = claimed(facts, reason)
    if facts.world.members and not facts.spec.suspend:
        loss = Loss("planned", reason, facts.now)
        status = replace(status, incidents=incidents.opened(facts, loss, _last_step(facts)))
    return _Decision(reason, status)


def _last_step(facts: Facts) -> int:
    parent = facts.world.parent.step if facts.world.parent else 0
    return max(step_of(facts, facts.world.epoch), parent)


def _steady(facts: Facts) -> str:
    world = facts.world
    if not world.members:
        return suspension.suspended_message(facts, world.parent) if facts.spec.suspend else "the world is empty"
    if not has_stepped(facts, world.epoch):
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
    return (Event(names.RESTORED, text),)


# ---- claimed -------------------------------------------------------------------------------------------------------


def _claimed(facts: Facts) -> _Decision:
    choice = choose(facts)
    if isinstance(choice, TotalLoss):
        over = _fail(facts, choice.reason)
        return replace(over, events=(Event(names.CHECKPOINT_LOST, choice.reason, True), *over.events))
    if isinstance(choice, NothingToTakeUp):
        return _fail(facts, choice.reason)
    stopped = not isinstance(choice, Waiting) or choice.stopped
    status = _explained(facts)
    phased = incidents.phased(facts, status.incidents, stopped, isinstance(choice, Chosen))
    status = replace(status, incidents=phased)
    if isinstance(choice, Chosen):
        return _commit(replace(facts, seen=replace(facts.seen, status=status)), choice)
    worn = start_failure(facts)
    if worn is not None:
        return _fail(facts, worn)
    reason = choice.reason if facts.spec.suspend else _hindered(facts, choice.reason)
    lost = choice.lost or known_loss(facts)
    base = _Decision(reason, status, choice.actions, wakes=(choice.until_seconds,), lost=lost)
    if facts.spec.suspend:
        heard = any(is_responsive(facts, s) for s in facts.sessions.values())
        return base if heard and not lost else _with_workers(facts, base, _NONE)
    return _waiting(facts, base, None)


def _explained(facts: Facts) -> JobStatus:
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


def _commit(facts: Facts, choice: Chosen) -> _Decision:
    if facts.spec.suspend:
        status = committed(facts, choice, ())
        reason = suspension.suspended_message(facts, choice.parent)
        return _Decision(reason, status, events=(Event(names.WORLD_COMMITTED, reason), *_unknown(facts, choice)))
    pause = pause_until(facts)
    if pause is not None:
        row = facts.status.no_progress_restarts
        reason = f"{facts.world.reason}; restart {row} in a row without a new step: pausing before the next"
        base = _Decision(reason, facts.status, wakes=(pause,))
        return _with_workers(facts, base, wanted_indexes(facts))
    tie = tie_of(facts, choice.parent)
    found = select_members(facts, tie)
    worn = start_failure(facts) if not found.members else None
    if worn is not None:
        return _fail(facts, worn)
    if not found.members:
        reason = _hindered(facts, found.waiting or "waiting for workers")
        incident = incidents.open_incident(facts.status.incidents)
        if incident is not None and incident.kind == "planned" and choice.parent is not None:
            step = choice.parent.step
            reason = f"{facts.world.reason}; training continues from step {step} once enough workers run: {reason}"
        base = _Decision(reason, facts.status, wakes=(found.until_seconds,))
        return _waiting(facts, base, None if tie is None else tie.workers(facts.spec))
    status = committed(facts, choice, found.members)
    world = status.world or facts.world
    reason = f"{describe(world, choice.parent)} with {world.size} ranks on {len(world.members)} workers"
    return _Decision(reason, status, events=(Event(names.WORLD_COMMITTED, reason), *_unknown(facts, choice)))


def _waiting(facts: Facts, base: _Decision, tied: int | None) -> _Decision:
    """Workers are asked for, unless too few of them have held nodes for too long."""
    kept = held(facts, tied)
    base = replace(
        base,
        reason=kept.reason or base.reason,
        status=replace(base.status, scheduling=kept.scheduling),
        events=(*base.events, *kept.events),
        wakes=(*base.wakes, due_seconds(facts, kept.scheduling)),
    )
    return _with_workers(facts, base, _NONE if kept.reason else wanted_indexes(facts))


def _hindered(facts: Facts, reason: str) -> str:
    """What is waited for, and what keeps workers from running meanwhile."""
    why = hindrance(facts)
    return reason if why is None else f"{reason}; {why.text}"


def _unknown(facts: Facts, choice: Chosen) -> tuple[Event, ...]:
    """What may have been lost by not waiting longer."""
    since = _or_begin(choice.parent)
    events = [
        Event(names.HOLDER_GIVEN_UP, f"{e.holder} did not answer; steps after {since} that only it held are lost", True)
        for e in choice.given_up
    ]
    if choice.unlisted:
        text = f"the persistent tier did not answer; steps after {since} that only it held are lost"
        events.append(Event(names.HOLDER_GIVEN_UP, text, True))
    if (choice.parent is None or choice.parent.imported) and facts.status.recorded:
        text = f"every checkpoint of this job is lost; training begins again at {choice.parent or 'step 0'}"
        events.append(Event(names.CHECKPOINT_LOST, text, True))
    return tuple(events)


def _or_begin(parent: Checkpoint | None) -> str:
    return f"step {parent.step}" if parent else "the beginning"


# ---- both ----------------------------------------------------------------------------------------------------------


def _with_workers(facts: Facts, base: _Decision, wanted: frozenset[int]) -> _Decision:
    """The same decision, and what the workers need beside it."""
    tending: WorkerChanges = reconcile_workers(facts, wanted)
    return replace(
        base,
        status=replace(base.status, next_attempt=tending.next_attempt, failed_starts=tending.failed_starts),
        actions=(*tending.actions, *base.actions),
        events=(*base.events, *tending.events),
        wakes=(*base.wakes, tending.until_seconds),
    )


def _fail(facts: Facts, reason: str) -> _Decision:
    status = completion.ended(facts.status, "Failed", reason, facts.now)
    return _Decision(reason, status, events=(completion.ended_event("Failed", reason),))


def _deadline_left(facts: Facts, status: JobStatus) -> float | None:
    return None if status.phase in ("Complete", "Failed") else completion.deadline(facts)
