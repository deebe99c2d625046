"""Judges members that a new leader never heard.

Pure; called by `failure_detection` and `membership.claim`. Whoever was heard in this term is missed after the heartbeat timeout; whoever
was not may be on the way here. The others tell: they came, nobody comes after them any more, and none of them makes a
step, which takes every rank. That is no more and no less than what a leader knows of a member that fell silent.
"""

from __future__ import annotations

import math

from surefoot_operator.job_snapshot import SessionSeen
from surefoot_operator.policy.core.facts import (
    Facts,
    derived_once,
    in_epoch,
    is_responsive,
    last_step_seconds,
    member_sessions,
    seconds_per_step,
)

QUIET_SECONDS = 1.0
"""A try that is not answered and the pause behind it: who lives has tried once more since the others came."""

_LOOK_SECONDS = 0.25


@derived_once
def arrivals_over(facts: Facts) -> float:
    """When nobody is on the way here any more.

    As far as those tell who came.
    """
    came = max((s.since_seconds for s in facts.sessions.values() if s.connected), default=-math.inf)
    return max(facts.seen.term_seconds, facts.seen.turned_away_seconds, came) + QUIET_SECONDS


@derived_once
def most_have_come(facts: Facts) -> bool:
    """Whether this leader hears at least half of the world's members."""
    heard = sum(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts))
    return heard > 0 and 2 * heard >= len(facts.members)


@derived_once
def unheard_until(facts: Facts) -> float | None:
    """Until when members never heard are waited for.

    None: the others do not tell.
    """
    if not most_have_come(facts):
        return None
    epoch = facts.world.epoch
    if any(s.exit is not None and s.exit.epoch == epoch for s in in_epoch(facts, epoch)):
        return arrivals_over(facts)
    last, usual = last_step_seconds(facts, epoch), seconds_per_step(facts)
    if last is None or usual is None:
        return None
    overdue = last + 2 * usual + facts.spec.health_policy.heartbeat_seconds
    told = any(_trains(facts, s) and s.heard_seconds >= overdue for s in in_epoch(facts, epoch))
    # what was said before the step was overdue says nothing about it
    return max(arrivals_over(facts), overdue if told else max(overdue, facts.now + _LOOK_SECONDS))


def _trains(facts: Facts, session: SessionSeen) -> bool:
    return session.finished is None and is_responsive(facts, session)
