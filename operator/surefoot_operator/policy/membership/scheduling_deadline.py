"""Releases nodes held too long without enough workers for a world.

Pure; called by `claimed_plan`. Two jobs that each got half of a small cluster would wait for each other for ever. So a job that
is short of workers for too long releases all of them, and asks again after a pause of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from surefoot.protocol.backoff import Backoff
from surefoot_operator import reasons
from surefoot_operator.api.status import JobStatus, Scheduling
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure.sizing import largest_size, target_size
from surefoot_operator.policy.failure.spare_workers import wanted_indexes

RELEASED = "Released"
"""Reason of PodsScheduled while no workers are asked for."""

_FIRST_PAUSE = 0.1
"""Of the deadline; doubled with each further release, up to the whole of it."""


@dataclass(frozen=True, slots=True)
class Released:
    """Scheduling state after a decision.

    `reason`: why no workers are asked for; empty: they are.
    """

    scheduling: Scheduling
    reason: str = ""
    events: tuple[Event, ...] = ()


def held(facts: Facts, tied: int | None = None) -> Released:
    """Decides whether workers keep their nodes while the world waits."""
    known, deadline = facts.status.scheduling, facts.spec.run_policy.scheduling_deadline_seconds
    if is_released(facts, facts.status):
        return Released(known, release_message(known))
    placed = _placed(facts)
    if not placed or largest_size(facts.spec, placed, tied):
        return Released(Scheduling(releases=known.releases))
    since = facts.now if known.since_seconds is None else min(known.since_seconds, facts.now)
    if facts.now < since + deadline:
        return Released(Scheduling(since, known.releases))
    releases = known.releases + 1
    pause = pause_seconds(facts.seen.job.uid, releases, deadline)
    new = Scheduling(None, releases, facts.now + pause)
    text = (
        f"{placed} of {target_size(facts.spec)} workers held nodes for schedulingDeadlineSeconds ({deadline:g} s), too few"
        f" for any world: they are released, and requested again after {pause:.0f} s"
    )
    return Released(new, release_message(new), (Event(reasons.WORKERS_RELEASED, text, warning=True),))


def due_seconds(facts: Facts, scheduling: Scheduling) -> float | None:
    """When nodes are released, or asked for again; None: neither."""
    if scheduling.since_seconds is None:
        return scheduling.until_seconds
    return scheduling.since_seconds + facts.spec.run_policy.scheduling_deadline_seconds


def is_released(facts: Facts, status: JobStatus) -> bool:
    """Whether the job asks for no workers now."""
    until = status.scheduling.until_seconds
    # a pause beyond the longest is none of ours: a clock went back
    return until is not None and facts.now < until <= facts.now + facts.spec.run_policy.scheduling_deadline_seconds


def release_message(known: Scheduling) -> str:
    """Describes a job whose workers were released."""
    at = datetime.fromtimestamp(known.until_seconds or 0.0, UTC).strftime("%H:%M:%S")
    times = f" ({known.releases} times now)" if known.releases > 1 else ""
    return f"too few workers got nodes, so theirs were released{times}; the job asks for them again at {at} UTC"


def pause_seconds(uid: str, releases: int, deadline: float) -> float:
    """The pause after a release, different for each job.

    Of two jobs that release together, one returns first and finds the nodes free.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{uid}:{releases}".encode()).digest()[:8], "big") / 2**64
    return Backoff(deadline * _FIRST_PAUSE, deadline).seconds(releases, drawn)


def _placed(facts: Facts) -> int:
    """Workers that keep a node from others."""
    over, wanted = ("Succeeded", "Failed"), wanted_indexes(facts)
    live = (w for w in facts.seen.workers if w.phase not in over and not w.deleting and not node_lost(facts, w.node))
    return len({w.index for w in live if w.node is not None and w.index in wanted})
