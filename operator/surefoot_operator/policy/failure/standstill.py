"""Detects hangs and identifies the rank that is behind.

Pure; called by `detect`. In synchronous training one rank that hangs stops all of them, mostly at the same step. A tie
proves nothing, nor does whose timer ran out first: then nobody is blamed, and no node is excluded for it.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.plain import listed
from surefoot_operator.observed import SessionSeen
from surefoot_operator.policy.facts import Facts, has_stepped, is_responsive, last_step_seconds, member_sessions
from surefoot_operator.policy.failure.losses import Loss, Recheck

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
    due = last + facts.spec.health_policy.step_timeout_seconds
    return Recheck(due) if facts.now < due else _hang(facts, due)


def reported_hang(facts: Facts) -> Loss | None:
    """The hang that agents report whose own timers ran out first."""
    epoch = facts.world.epoch
    told = [
        s.exit
        for _, s in member_sessions(facts)
        if s is not None and s.exit is not None and s.exit.epoch == epoch and s.exit.kind == "hang"
    ]
    return _hang(facts, min(e.at_seconds for e in told)) if told else None


def _hang(facts: Facts, at_seconds: float) -> Loss:
    """Blames the one worker that stands at an earlier step than all others, if everybody is heard and there is one."""
    members = [s for _, s in member_sessions(facts) if s is not None]
    limit = facts.spec.health_policy.step_timeout_seconds
    slow = _behind(facts)
    loss = Loss(
        "hang",
        f"no step for stepTimeoutSeconds ({limit:g} s); {_where(facts, slow)}",
        at_seconds,
        application=all(is_responsive(facts, s) for s in members),
    )
    return loss if slow is None else replace(loss, worker=slow.index, node=slow.node, rank=_rank(facts, slow))


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
