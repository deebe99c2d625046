"""Chooses each tier's save interval and records it in status.

Pure; called by `maintenance_plan`. Trainers get the memory tier's level from `coordinator.desired_messages`; `upload_plan`
follows the persistent tier's steps. While something is not measured the choice stays as it is: at first the base, so
that there is soon something to measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from surefoot_operator.api.spec import MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import Interval, JobStatus
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import Facts, member_sessions, step_of
from surefoot_operator.policy.failure.failure_rate import Risk, risk_of
from surefoot_operator.policy.maintenance.cadence import Cadence, Inputs, IntervalRequest, cadence, readable_seconds
from surefoot_operator.reasons import INTERVAL_CHOSEN

BESIDE_SHARE = 0.05
"""What goes on beside the training (a save that drains, an upload) is taken to cost it a twentieth of its time."""

DWELL_SECONDS = 30.0
"""No sooner is a choice changed, unless saves cannot arrive in time: measurements of a moment are no trend."""

REFRESH_SECONDS = 60.0
REFRESH_FACTOR = 1.25
"""Inputs that moved by so much are written down anew, no oftener than that; the choice they stand beside is the same."""


def with_intervals(facts: Facts, status: JobStatus, replicas: int) -> JobStatus:
    """Sets both tiers' choices in a status; `replicas`: effective copies."""
    spec = facts.spec.checkpoint
    risk = risk_of(facts.status, len(facts.world.members), replicas, facts.now)
    memory = _memory(facts, spec.memory, risk) if spec.memory.adaptive else None
    persistent = None
    if spec.persistent is not None and spec.persistent.adaptive:
        persistent = _persistent(facts, spec.persistent, memory, risk)
    return replace(status, memory_interval=memory, persistent_interval=persistent)


def changes(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports each changed choice as an event."""
    told = []
    for tier, before, after in (
        ("memory", old.memory_interval, new.memory_interval),
        ("persistent", old.persistent_interval, new.persistent_interval),
    ):
        if after is None or (before is not None and before.steps == after.steps):
            continue
        every = "step" if after.steps == 1 else f"{after.steps} steps"
        took = f" ({readable_seconds(after.steps * after.step_seconds)})" if after.step_seconds else ""
        was = f" instead of {before.steps}" if before is not None else ""
        text = f"the {tier} tier is saved to every {every}{took}{was}: {after.reason}"
        told.append(Event(INTERVAL_CHOSEN, text))
    return tuple(told)


def _memory(facts: Facts, tier: MemoryTierSpec, risk: Risk) -> Interval | None:
    step, stall, drain = (_slowest(facts, name) for name in ("step_seconds", "stall_seconds", "drain_seconds"))
    cost = None if stall is None else stall + BESIDE_SHARE * (drain or 0.0)
    inputs = Inputs(step, cost, drain, risk.from_memory_seconds)
    return _chosen(
        facts, IntervalRequest(tier.base_steps, tier.interval_seconds), inputs, facts.status.memory_interval, risk
    )


def _persistent(facts: Facts, tier: PersistentTierSpec, memory: Interval | None, risk: Risk) -> Interval | None:
    upload = facts.seen.promotion_seconds
    cost = None if upload is None else BESIDE_SHARE * upload
    inputs = Inputs(_slowest(facts, "step_seconds"), cost, upload, risk.from_persistent_seconds)
    wish = IntervalRequest(
        facts.spec.checkpoint.memory.base_steps, tier.interval_seconds, memory.level if memory else 0
    )
    return _chosen(facts, wish, inputs, facts.status.persistent_interval, risk)


def _slowest(facts: Facts, field: str) -> float | None:
    """The highest of the members' own figures; None while none has said it."""
    found: Iterable[float | None] = (getattr(s.timings, field) for _, s in member_sessions(facts) if s is not None)
    return max((value for value in found if value is not None), default=None)


def _chosen(
    facts: Facts, wish: IntervalRequest, inputs: Inputs, present: Interval | None, risk: Risk
) -> Interval | None:
    if present is not None and present.steps != wish.base_steps << present.level:
        present = None  # of a spec that is not asked for any more
    found = cadence(wish, inputs, present.level if present is not None else None)
    if found is None:
        if present is None or present.level >= wish.least_level:
            return present
        reason = "the memory tier is not saved to more often"
        return replace(present, steps=wish.base_steps << wish.least_level, level=wish.least_level, reason=reason)
    fresh = _written(facts, wish, inputs, found, risk)
    if present is None:
        return fresh
    if found.level != present.level:
        early = facts.now < present.since_seconds + DWELL_SECONDS
        return present if early and not _pressing(wish, inputs, present) else fresh
    if facts.now < present.measured_seconds + REFRESH_SECONDS or not _moved(present, fresh):
        return present
    return replace(fresh, since_seconds=present.since_seconds, since_step=present.since_step)


def _written(facts: Facts, wish: IntervalRequest, inputs: Inputs, found: Cadence, risk: Risk) -> Interval:
    return Interval(
        steps=wish.base_steps << found.level,
        level=found.level,
        reason=found.reason,
        since_seconds=facts.now,
        since_step=step_of(facts, facts.world.epoch),
        measured_seconds=facts.now,
        wanted_seconds=found.wanted_seconds,
        step_seconds=inputs.step_seconds,
        cost_seconds=inputs.cost_seconds,
        drain_seconds=inputs.drain_seconds,
        incident_seconds=inputs.incident_seconds,
        memory_loss_odds=risk.memory_loss_odds,
    )


def _pressing(wish: IntervalRequest, inputs: Inputs, present: Interval) -> bool:
    """Saves come faster than they arrive, or oftener than the tier below is saved to."""
    length = present.steps * (inputs.step_seconds or 0.0)
    return present.level < wish.least_level or length < (inputs.drain_seconds or 0.0)


def _moved(old: Interval, new: Interval) -> bool:
    pairs = (
        (old.wanted_seconds, new.wanted_seconds),
        (old.step_seconds, new.step_seconds),
        (old.cost_seconds, new.cost_seconds),
        (old.drain_seconds, new.drain_seconds),
        (old.incident_seconds, new.incident_seconds),
    )
    return any(_apart(was, now) for was, now in pairs)


def _apart(was: float | None, now: float | None) -> bool:
    if was is None or now is None:
        return was is not now
    low, high = sorted((was, now))
    return high > REFRESH_FACTOR * low
