"""Detects which workers of the committed world are lost.

Pure; called by `plan`. Pod and node status is authoritative. A lost connection or a missed heartbeat counts only if no
rank has reported a step since. If most workers look lost by that alone, the operator is assumed to be partitioned and
nothing is decided: it would restart a healthy job otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.protocol.plain import listed
from surefoot_operator.api.status import Member
from surefoot_operator.job_snapshot import SessionSeen, WorkerSeen
from surefoot_operator.policy.core.availability import UNHEARD_SECONDS, announced_departure, node_lost
from surefoot_operator.policy.core.facts import (
    RECONNECT_GRACE_SECONDS,
    Facts,
    in_epoch,
    is_responsive,
    last_step_seconds,
    member_sessions,
    moving_until,
    seconds_per_step,
)
from surefoot_operator.policy.core.indexes import worker_id
from surefoot_operator.policy.failure.losses import Loss, Recheck
from surefoot_operator.policy.failure.node_faults import container_killed, weighed
from surefoot_operator.policy.failure.standstill import reported_hang, standstill
from surefoot_operator.policy.failure.testimony import unheard_until

RECONNECT_SECONDS = 1.0
"""A living agent is back on a line that broke by then: it tries at once, and TLS and the token's review take their time."""
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Detection:
    """The losses found, likeliest cause first."""

    losses: tuple[Loss, ...] = ()
    frozen: str | None = None
    recheck_seconds: tuple[float, ...] = ()


def detect_losses(facts: Facts) -> Detection:
    """Finds everything that ended the committed epoch, as known now."""
    epoch = facts.world.epoch
    exits = [s for s in in_epoch(facts, epoch) if s.exit is not None and s.exit.epoch == epoch]
    losses: list[Loss] = []
    recheck: list[float] = []
    heard: list[float] = []
    for identity, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        worker = facts.workers.get(identity)
        if session is not None and _is_well(facts, worker, session):
            heard.append(session.heard_seconds)
            continue
        found = _member(facts, member, (worker, session), epoch_dead=bool(exits))
        if isinstance(found, Loss):
            losses.append(replace(found, announced=not found.application and bool(announced_departure(facts, member))))
        elif found is not None:
            recheck.append(found.at_seconds)
    if heard:
        recheck.append(min(heard) + facts.spec.health_policy.heartbeat_timeout_seconds)
    unwitnessed = [loss for loss in losses if not loss.witnessed]
    if not exits and len(facts.world.members) > 1 and 2 * len(unwitnessed) > len(facts.world.members):
        names = listed([loss.worker for loss in unwitnessed])
        frozen = (
            f"no heartbeat from workers {names} (a majority), but nothing else reports them lost: "
            "waiting, the operator may have lost its network"
        )
        losses = [loss for loss in losses if loss.witnessed]
    else:
        frozen = None
    told = reported_hang(facts)
    losses += (told,) if told is not None else ()
    # a step that does not come is the effect of whatever else is known, and then says nothing of its own
    for found in (_echo(facts, exits, losses), None if losses or exits else standstill(facts)):
        if isinstance(found, Loss):
            losses.append(found)
        elif found is not None:
            recheck.append(found.at_seconds)
    losses.sort(key=lambda loss: loss.at_seconds)
    return Detection(tuple(losses), frozen, tuple(recheck))


def _is_well(facts: Facts, worker: WorkerSeen | None, session: SessionSeen) -> bool:
    """Whether nothing speaks against a member: of nearly all in every round, which are looked at once each."""
    quiet = session.exit is None and session.unreadable is None and session.finished is None
    runs = worker is not None and worker.phase not in ("Succeeded", "Failed")
    return quiet and runs and is_responsive(facts, session)


def _member(
    facts: Facts, member: Member, known: tuple[WorkerSeen | None, SessionSeen | None], epoch_dead: bool
) -> Loss | Recheck | None:
    """Judges one member: lost, to be looked at again, or well (None)."""
    epoch, (worker, session) = facts.world.epoch, known
    if session is not None and session.epoch == epoch and session.finished == 0:
        return None
    certain = _by_fabric(facts, member, worker, session)
    if certain is not None:
        return certain
    if session is None:
        other = facts.sessions.get(worker_id(member))
        if other is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Loss("agent-lost", reason, other.since_seconds, member.index, member.node)
        return _unheard(facts, member)
    if session.exit is not None and session.exit.epoch == epoch and not session.exit.secondary:
        return None if session.exit.kind == "hang" else _exited(facts, session, member)
    if session.unreadable is not None and session.epoch == epoch:
        return _unreadable(facts, session, member)
    if not session.connected:
        return _broken(facts, session, member, epoch_dead)
    return _silent(facts, session, member)


def _by_fabric(facts: Facts, member: Member, worker: WorkerSeen | None, session: SessionSeen | None) -> Loss | None:
    sign = session.since_seconds if session is not None and not session.connected else facts.now
    gone = node_lost(facts, member.node)
    if worker is not None and worker.phase == "Succeeded" and not worker.exit_code:
        return None
    over = worker is None or worker.phase in ("Succeeded", "Failed")
    if gone and (over or (session is not None and not is_responsive(facts, session))):
        node = facts.nodes.get(member.node)
        said = node.reason or node.doubt if node is not None else ""
        why = f": {said}" if said else ""
        return Loss("node-lost", f"node {member.node} of worker {member.index} is gone{why}", sign, *_at(member))
    if not over:
        return None
    if worker is None:
        return Loss("agent-lost", f"worker {member.index} was deleted", sign, *_at(member))
    detail = f" ({worker.message})" if worker.message else ""
    reason = f"worker {member.index} {worker.ended}{detail}"
    return container_killed(Loss("agent-lost", reason, sign, *_at(member)), worker)


def _unheard(facts: Facts, member: Member) -> Loss | Recheck | None:
    worker = facts.workers.get(worker_id(member))
    if worker is not None and worker.phase == "Succeeded":
        return None
    told, due = unheard_until(facts), facts.seen.term_seconds + UNHEARD_SECONDS
    if told is not None and facts.now >= told:
        reason = f"worker {member.index} has not come to this leader, and the others, which have, make no step"
        return Loss("worker-silent", reason, told, *_at(member), witnessed=False)
    if facts.now < due:
        return Recheck(due if told is None else min(due, told))
    if worker is not None and worker.phase == "Running" and not node_lost(facts, member.node):
        return None
    reason = f"worker {member.index} has not connected since this operator started, and nothing reports it running"
    return Loss("worker-silent", reason, due, *_at(member))


def _exited(facts: Facts, session: SessionSeen, member: Member) -> Loss | None:
    exit_seen = session.exit
    if exit_seen is None:
        return None
    how = f"signal {-exit_seen.code}" if exit_seen.code < 0 else f"exit code {exit_seen.code}"
    cause = f": {exit_seen.cause}" if exit_seen.cause else ""
    reason = f"rank {exit_seen.rank} on worker {member.index} ended with {how}{cause}"
    at = exit_seen.at_seconds
    loss = Loss("trainer-failed", reason, at, *_at(member), True, exit_seen.code, rank=exit_seen.rank)
    return weighed(facts, loss, exit_seen)


def _unreadable(facts: Facts, session: SessionSeen, member: Member) -> Loss | None:
    if session.unreadable is None:
        return None
    checkpoint, absent, detail = session.unreadable
    if absent:
        reason = f"no holder has all of {checkpoint} any more ({detail})"
        # only our own tiers are read anew before the next choice: an older job's, once gone, must not be chosen again
        return Loss("unreadable", reason, facts.now, *_at(member), bad=checkpoint if checkpoint.imported else None)
    reason = f"every copy of some block of {checkpoint} is damaged ({detail})"
    return Loss("unreadable", reason, facts.now, *_at(member), bad=checkpoint)


def _broken(facts: Facts, session: SessionSeen, member: Member, epoch_dead: bool) -> Loss | Recheck | None:
    """A line that broke is no witness: a reset link and a dead process look alike.

    A process that died is told by the fabric, or by peers whose collectives broke. Failing that, others say that a step
    is overdue; and an agent that does not come back within the heartbeat timeout is as silent as one without a word.
    """
    if not epoch_dead:
        moving = moving_until(facts, session.since_seconds)
        if moving is not None:
            return Recheck(moving)
        silent = session.since_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
        overdue = min(silent, _overdue_seconds(facts, session.since_seconds))
        if facts.now < overdue:
            return Recheck(overdue)
        if facts.now < silent and not _stands(facts, overdue):
            return Recheck(min(silent, facts.now + _LOOK_SECONDS))
    reason = f"the connection to worker {member.index} broke and was not re-established"
    return Loss("agent-lost", reason, session.since_seconds, *_at(member), witnessed=False)


def _overdue_seconds(facts: Facts, since_seconds: float) -> float:
    """From when on a step that has not come says something about a line that broke at `since_seconds`."""
    last, usual = last_step_seconds(facts, facts.world.epoch), seconds_per_step(facts)
    if last is None or usual is None:
        return float("inf")
    # others tell of a step with their next heartbeat
    told = last + 2 * usual + facts.spec.health_policy.heartbeat_seconds
    return max(since_seconds + RECONNECT_SECONDS, told)


def _stands(facts: Facts, overdue_seconds: float) -> bool:
    """Whether another rank said so late that it has no further step: nobody reports steps at the moment they are made."""
    return any(s.connected and s.heard_seconds >= overdue_seconds for s in in_epoch(facts, facts.world.epoch))


def _silent(facts: Facts, session: SessionSeen, member: Member) -> Loss | Recheck | None:
    due = session.heard_seconds + facts.spec.health_policy.heartbeat_timeout_seconds
    if facts.now <= due:
        return Recheck(due)
    # others tell of their steps with each heartbeat, however many they make in between
    moving = moving_until(facts, session.heard_seconds)
    if moving is not None:
        return Recheck(moving)
    silence = facts.spec.health_policy.heartbeat_timeout_seconds
    reason = f"worker {member.index} sent no heartbeat for more than {silence:g} seconds"
    return Loss("worker-silent", reason, due, *_at(member), witnessed=False)


def _echo(facts: Facts, exits: list[SessionSeen], losses: list[Loss]) -> Loss | Recheck | None:
    """Trainers that ended because a peer's connection broke, with no first cause in sight."""
    if losses or not exits:
        return None
    first = min((s.exit for s in exits if s.exit is not None), key=lambda e: e.at_seconds)
    due = first.at_seconds + RECONNECT_GRACE_SECONDS
    if facts.now < due:
        return Recheck(due)
    echo = f"rank {first.rank} lost its peers ({first.cause or 'connection broke'})"
    left = [
        (member, session, rank)
        for member, session in member_sessions(facts)
        if session is not None and session.epoch == facts.world.epoch
        for rank in session.progress.ended
    ]
    gone = next((m for m in facts.world.members if announced_departure(facts, m)), None)
    if not left and gone is not None:
        reason = (
            f"worker {gone.index} {announced_departure(facts, gone)}, and ended before its world could hold: {echo}"
        )
        return Loss("agent-lost", reason, first.at_seconds, *_at(gone), announced=True)
    if not left:
        loss = Loss("trainer-failed", f"{echo}, cause unknown", first.at_seconds, exit_code=first.code)
        return replace(loss, unexplained=True)
    member, session, rank = left[0]
    more = f", and {len(left) - 1} more," if len(left) > 1 else ""
    reason = f"rank {rank} on worker {member.index}{more} ended with code 0 after step {session.progress.step} while others train: {echo}"
    if len(left) > 1:
        return Loss("trainer-failed", reason, first.at_seconds, application=True, exit_code=0)
    return Loss("trainer-failed", reason, first.at_seconds, *_at(member), True, 0, rank=rank)


def observed_death(facts: Facts) -> Loss | None:
    """Finds the first member that ended or is no longer heard."""
    for identity, (member, session) in zip(facts.members, member_sessions(facts), strict=True):
        certain = _by_fabric(facts, member, facts.workers.get(identity), session)
        if certain is not None:
            return certain
        other = facts.sessions.get(identity)
        if session is None and other is not None:
            reason = f"the agent of worker {member.index} was restarted"
            return Loss("agent-lost", reason, other.since_seconds, *_at(member))
        if session is None:
            continue
        if facts.now > session.heard_seconds + facts.spec.health_policy.heartbeat_timeout_seconds:
            reason = f"worker {member.index} sends no heartbeats any more"
            return Loss("worker-silent", reason, session.heard_seconds, *_at(member))
    return None


def _at(member: Member) -> tuple[int, str]:
    return member.index, member.node
