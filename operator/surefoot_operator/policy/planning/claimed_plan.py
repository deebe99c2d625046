"""Plans a claimed epoch: its restore point, its members, its commit.

Pure; called by `plan` while a world is Claimed. A claim that waits keeps its reason and a time to look again, so that nothing
waits without a word or for ever.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.status import Ending, JobStatus
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import Facts, is_responsive
from surefoot_operator.policy.failure import incidents, pair_trials
from surefoot_operator.policy.failure.failure_detection import observed_death
from surefoot_operator.policy.failure.restart_budget import pause_until
from surefoot_operator.policy.failure.spare_workers import wanted_indexes
from surefoot_operator.policy.failure.unhealthy_nodes import shared_findings
from surefoot_operator.policy.membership import suspension
from surefoot_operator.policy.membership.bad_checkpoints import with_bad
from surefoot_operator.policy.membership.claim import committed, select_members
from surefoot_operator.policy.membership.decision import NO_WORKERS, PhaseDecision, fail_job, with_workers
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS, rescue, uploading_agents
from surefoot_operator.policy.membership.lifecycle import overdue
from surefoot_operator.policy.membership.restore_decisions import (
    Chosen,
    FloorGone,
    FurtherOn,
    NothingToTakeUp,
    TotalLoss,
    Waiting,
)
from surefoot_operator.policy.membership.restore_point import choose, describe, has_nothing_newer
from surefoot_operator.policy.membership.scheduling_deadline import due_seconds, held
from surefoot_operator.policy.membership.size_tie import tie_of
from surefoot_operator.policy.membership.workers import start_failure
from surefoot_operator.policy.report.blockers import hindrance
from surefoot_operator.policy.report.status_conditions import known_loss

UPLOAD_AFTER_SECONDS = 30.0
"""A claim that waits so long for workers may wait for hours: its newest checkpoint goes to the persistent tier meanwhile."""


def plan_claimed(facts: Facts) -> PhaseDecision:
    choice = choose(facts)
    if isinstance(choice, TotalLoss):
        over = fail_job(facts, choice.reason)
        return replace(over, events=(Event(reasons.CHECKPOINT_LOST, choice.reason, True), *over.events))
    if isinstance(choice, NothingToTakeUp):
        return fail_job(facts, choice.reason)
    if isinstance(choice, FurtherOn):
        return _further_on(facts, choice)
    if isinstance(choice, FloorGone):
        return _without_floor(facts, choice)
    stopped = not isinstance(choice, Waiting) or choice.stopped
    status = _explained(facts)
    phased = incidents.phased(facts, status.incidents, stopped, isinstance(choice, Chosen))
    status = replace(status, incidents=phased)
    cause = overdue(facts) or (start_failure(facts) if isinstance(choice, Waiting) else None)
    if status.ending is None and cause:
        status = replace(status, ending=Ending(cause, facts.now))
    phased_facts = replace(facts, seen=replace(facts.seen, status=status))
    if status.ending is not None:
        return _end(phased_facts, status.ending, choice)
    if isinstance(choice, Chosen):
        return _commit(phased_facts, choice)
    reason = choice.reason if facts.spec.suspend else _hindered(facts, choice.reason)
    lost = choice.lost or known_loss(facts)
    base = PhaseDecision(reason, status, choice.actions, wakes=(choice.until_seconds,), lost=lost)
    if facts.spec.suspend:
        heard = any(is_responsive(facts, s) for s in facts.sessions.values())
        return base if heard and not lost else with_workers(facts, base, NO_WORKERS)
    return _waiting(facts, base, None)


def _end(facts: Facts, ending: Ending, choice: Chosen | Waiting) -> PhaseDecision:
    """The job ends with what it has: read first, as for a world that begins, then uploaded; each within the same time."""
    until = ending.since_seconds + RESCUE_SECONDS
    if isinstance(choice, Waiting) and uploading_agents(facts) and facts.now < until:
        wakes = (until, choice.until_seconds)
        return PhaseDecision(f"{ending.reason}; {choice.reason}", facts.status, choice.actions, wakes=wakes)
    return fail_job(facts, ending.reason, ending.since_seconds)


def _further_on(facts: Facts, choice: FurtherOn) -> PhaseDecision:
    """Durable before it is acted upon, as the rollback itself was: the next plan commits it."""
    back = facts.status.rollback
    assert back is not None
    status = replace(facts.status, rollback=replace(back, to_step=choice.to_step, proven=False))
    event = Event(reasons.ROLLED_BACK, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wakes=(facts.now,))


def _without_floor(facts: Facts, choice: FloorGone) -> PhaseDecision:
    """Durable before it is acted upon: what is bad binds nobody, and the next plan restores an older one."""
    status = replace(facts.status, bad=with_bad(facts.status, choice.floor))
    event = Event(reasons.CHECKPOINT_BAD, choice.reason, True)
    return PhaseDecision(choice.reason, status, events=(event,), wakes=(facts.now,))


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


def _commit(facts: Facts, choice: Chosen) -> PhaseDecision:
    if facts.spec.suspend:
        first = rescue(facts, facts.world.changed_seconds)
        if first is not None:
            reason = f"the job is suspended; {first.reason}"
            return PhaseDecision(reason, facts.status, wakes=(first.until_seconds,), uploads=True)
        status = committed(facts, choice, ())
        reason = suspension.suspended_message(facts, choice.parent)
        return PhaseDecision(reason, status, events=(Event(reasons.WORLD_COMMITTED, reason), *_unknown(facts, choice)))
    pause = pause_until(facts)
    if pause is not None:
        row = facts.status.no_progress_restarts
        reason = f"{facts.world.reason}; restart {row} in a row without a new step: pausing before the next"
        base = PhaseDecision(reason, facts.status, wakes=(pause,))
        return with_workers(facts, base, wanted_indexes(facts))
    tie = tie_of(facts, choice.parent)
    found = select_members(facts, tie)
    worn = start_failure(facts) if not found.members else None
    if worn is not None:
        return fail_job(facts, worn)
    if not found.members:
        reason = _hindered(facts, found.waiting or "waiting for workers")
        incident = incidents.open_incident(facts.status.incidents)
        if incident is not None and incident.kind == "planned" and choice.parent is not None:
            step = choice.parent.step
            reason = f"{facts.world.reason}; training continues from step {step} once enough workers run: {reason}"
        due = facts.world.changed_seconds + UPLOAD_AFTER_SECONDS
        wakes = (found.until_seconds, due if facts.now < due else None)
        base = PhaseDecision(reason, facts.status, wakes=wakes, uploads=facts.now >= due)
        return _waiting(facts, base, None if tie is None else tie.workers(facts.spec))
    status = committed(facts, choice, found.members)
    world = status.world or facts.world
    reason = f"{describe(world, choice.parent)} with {world.size} ranks on {len(world.members)} workers"
    reason = f"{reason}; {found.sums}" if found.sums else reason
    doubt, alone = pair_trials.remarks(facts, found.members)
    reason = f"{reason}; {alone}" if alone else reason
    alike = shared_findings(facts)
    told = (
        *((Event(reasons.NODES_FAIL_ALIKE, alike, True),) if alike else ()),
        *((Event(reasons.PAIR_FAILS, doubt, True),) if doubt else ()),
    )
    events = (Event(reasons.WORLD_COMMITTED, reason), *_unknown(facts, choice), *told)
    return PhaseDecision(reason, status, events=events)


def _waiting(facts: Facts, base: PhaseDecision, tied: int | None) -> PhaseDecision:
    """Workers are asked for, unless too few of them have held nodes for too long."""
    kept = held(facts, tied)
    base = replace(
        base,
        reason=kept.reason or base.reason,
        status=replace(base.status, scheduling=kept.scheduling),
        events=(*base.events, *kept.events),
        wakes=(*base.wakes, due_seconds(facts, kept.scheduling)),
    )
    return with_workers(facts, base, NO_WORKERS if kept.reason else wanted_indexes(facts))


def _hindered(facts: Facts, reason: str) -> str:
    """What is waited for, and what keeps workers from running meanwhile."""
    why = hindrance(facts)
    return reason if why is None else f"{reason}; {why.text}"


def _unknown(facts: Facts, choice: Chosen) -> tuple[Event, ...]:
    """What may have been lost by not waiting longer."""
    since = _or_begin(choice.parent)
    own = None if choice.parent is None or choice.parent.imported else choice.parent
    events = [
        Event(
            reasons.HOLDER_GIVEN_UP, f"{e.holder} did not answer; steps after {since} that only it held are lost", True
        )
        for e in choice.given_up
        if not has_nothing_newer(facts, facts.holders.get(e.holder), own)
    ]
    if choice.unlisted:
        text = f"the persistent tier did not answer; steps after {since} that only it held are lost"
        events.append(Event(reasons.HOLDER_GIVEN_UP, text, True))
    if (choice.parent is None or choice.parent.imported) and facts.status.recorded:
        text = f"every checkpoint of this job is lost; training begins again at {choice.parent or 'step 0'}"
        events.append(Event(reasons.CHECKPOINT_LOST, text, True))
    return tuple(events)


def _or_begin(parent: Checkpoint | None) -> str:
    return f"step {parent.step}" if parent else "the beginning"
