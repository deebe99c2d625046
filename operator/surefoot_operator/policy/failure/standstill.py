"""Detects hangs and identifies the rank that is behind.

Pure; called by `failure_detection`. In synchronous training one rank that hangs stops all of them, mostly at the same step. A tie
proves nothing, nor does whose timer ran out first: then nobody is blamed, and no node is excluded for it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from surefoot.protocol.plain import listed
from surefoot.protocol.step_limit import learned_limit_seconds
from surefoot_operator.job_snapshot import SessionSeen, StandingSeen
from surefoot_operator.policy.core.facts import (
    Facts,
    has_stepped,
    is_responsive,
    last_step_seconds,
    member_sessions,
    step_of,
)
from surefoot_operator.policy.failure.losses import Loss, Recheck
from surefoot_operator.policy.failure.odd_one import OddOne, odd_one

_MOST_NAMED = 8


def standstill(facts: Facts) -> Loss | Recheck | None:
    """Reports a missing first or further step, or when to recheck."""
    epoch = facts.world.epoch
    if not _running(facts):
        return None
    if not has_stepped(facts, epoch):
        limit = facts.spec.run_policy.startup_deadline_seconds
        due = max(facts.world.changed_seconds, facts.seen.term_seconds) + limit
        reason = f"epoch {epoch} made no first step within startupDeadlineSeconds ({limit:g} s)"
        return Recheck(due) if facts.now < due else Loss("startup", reason, due, application=True)
    last = last_step_seconds(facts, epoch)
    if last is None:
        return None
    early = _proven(facts, last)
    if early is not None:
        return early
    due = last + _limit_seconds(facts)
    return Recheck(due) if facts.now < due else _hang(facts, due)


def _limit_seconds(facts: Facts) -> float:
    """After how long a world without a step hangs, whatever its ranks seem to do."""
    paused = [s.progress.pause_seconds or 0.0 for s in _running(facts) if s.progress.paused]
    return max(facts.spec.health_policy.step_timeout_seconds, *paused, 0.0)


def _proven(facts: Facts, last_seconds: float) -> Loss | Recheck | None:
    """A hang that every rank's stack shows, sooner than a time alone could tell.

    Not while any rank has announced a pause, nor at the step where the last hang was found: if a program really stands
    there for long, its limit decides the second time.
    """
    epoch, running = facts.world.epoch, _running(facts)
    incident = facts.status.incidents[-1] if facts.status.incidents else None
    again = incident is not None and incident.kind == "hang" and step_of(facts, epoch) <= incident.last_step + 1
    told = _without_step(facts)
    if again or told is None or any(one.moves for one in told) or any(s.progress.paused for s in running):
        return None
    ceiling = facts.spec.health_policy.step_timeout_seconds
    usual = [seconds for s in running for seconds in s.timings.steps]
    due = last_seconds + learned_limit_seconds(usual, ceiling)
    if facts.now < due:
        return Recheck(due)
    if due >= last_seconds + ceiling:
        return None
    evidence = (
        f"no step for {due - last_seconds:.0f} s, and steps take {median(usual):.2g} s: in no rank did stack or I/O"
        " move between two looks"
    )
    return _hang(facts, due, evidence)


def reported_hang(facts: Facts) -> Loss | None:
    """The hang that agents report whose own timers ran out first."""
    epoch = facts.world.epoch
    told = [
        s.exit
        for _, s in member_sessions(facts)
        if s is not None and s.exit is not None and s.exit.epoch == epoch and s.exit.kind == "hang"
    ]
    return _hang(facts, min(e.at_seconds for e in told)) if told else None


def _hang(facts: Facts, at_seconds: float, evidence: str | None = None) -> Loss:
    """Blames the one rank that stands elsewhere, or at an earlier step, than all others, if there is one."""
    members = [s for _, s in member_sessions(facts) if s is not None]
    if evidence is None:
        paused = next((s.progress.paused for s in members if s.progress.paused), "")
        doing = f", while it had announced {paused}" if paused else ""
        evidence = f"no step for stepTimeoutSeconds ({_limit_seconds(facts):g} s){doing}"
    odd = _odd(facts)
    if odd is not None and odd.rank is not None:
        worker = facts.world.members[odd.rank // facts.spec.nproc_per_node]
        where = f"rank {odd.rank} on worker {worker.index} {odd.text}"
        if odd.program:
            where += ": the program's ranks take unlike paths, no node is at fault"
        node = None if odd.program else worker.node
        return replace(Loss("hang", f"{evidence}; {where}", at_seconds, worker.index, node, True), rank=odd.rank)
    if odd is not None:
        return Loss("hang", f"{evidence}; {odd.text}", at_seconds, application=True)
    slow = _behind(facts)
    loss = Loss(
        "hang",
        f"{evidence}; {_where(facts, slow)}",
        at_seconds,
        application=all(is_responsive(facts, s) for s in members),
    )
    return loss if slow is None else replace(loss, worker=slow.index, node=slow.node, rank=_rank(facts, slow))


def _odd(facts: Facts) -> OddOne | None:
    told = _without_step(facts)
    return None if told is None else odd_one(told)


def _without_step(facts: Facts) -> tuple[StandingSeen, ...] | None:
    """Where all ranks are without a step since the present one; None while any agent has not said so, or is not heard."""
    told = tuple(
        s.standing
        for s in _running(facts)
        if s.standing is not None and s.standing.step == s.progress.step and is_responsive(facts, s)
    )
    return told if len(told) == len(facts.world.members) else None


def _running(facts: Facts) -> list[SessionSeen]:
    epoch = facts.world.epoch
    return [s for _, s in member_sessions(facts) if s is not None and (s.finished is None or s.epoch != epoch)]


def _behind(facts: Facts) -> SessionSeen | None:
    """The worker that proves to be behind; None if that is not one, or somebody's place is not known."""
    running = _running(facts)
    if len(running) < len(facts.world.members) or not all(is_responsive(facts, s) for s in running):
        return None
    if len(running) == 1:
        return running[0] if _named_rank(running[0]) is not None else None
    least = min(s.progress.step for s in running)
    slow = [s for s in running if s.progress.step == least]
    return slow[0] if len(slow) == 1 else None


def _where(facts: Facts, slow: SessionSeen | None) -> str:
    running = _running(facts)
    least = min((s.progress.step for s in running), default=0)
    late = [s for s in running if s.progress.step == least]
    over = [s.index for _, s in member_sessions(facts) if s is not None and (s.progress.ended or s.finished == 0)]
    ended = f"; of {_workers(over)} ranks have ended with code 0" if over else ""
    if slow is not None:
        rank = _rank(facts, slow)
        who = f"worker {slow.index}" if rank is None else f"rank {rank} on worker {slow.index}"
        return f"{who} is at step {slow.progress.step}, all others are further{ended}"
    if len(late) == len(running):
        return f"no rank is behind: all are at step {least}{ended}"
    return f"{_workers([s.index for s in late])} are at step {least}, others further{ended}"


def _workers(indexes: list[int]) -> str:
    return f"worker{'s' if len(indexes) > 1 else ''} {listed(indexes, _MOST_NAMED)}"


def _rank(facts: Facts, session: SessionSeen) -> int | None:
    """Which rank of this worker it is, as far as that is known."""
    if facts.spec.nproc_per_node > 1:
        return _named_rank(session)
    return next(place for place, member in enumerate(facts.world.members) if member.index == session.index)


def _named_rank(session: SessionSeen) -> int | None:
    told = session.exit
    return (
        told.rank
        if told is not None and told.epoch == session.epoch and told.kind == "hang" and told.rank >= 0
        else None
    )
