"""Chooses each tier's save interval and records it in status.

Pure; called by `maintenance_plan`. Trainers get the memory tier's level from `coordinator.desired_messages`; `upload_plan`
follows the persistent tier's steps. While something is not measured the choice stays as it is: at first the base, so
that there is soon something to measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from surefoot_operator.api.spec import MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import JobStatus, SaveInterval
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    WorldTierFacts,
    member_sessions,
    step_of,
)
from surefoot_operator.policy.failure.failure_rate import Risk, risk_of
from surefoot_operator.reasons import SAVE_INTERVAL_CHANGED

# ---- intervals as powers of two --------------------------------------------------------------------------------------
# Computes the save interval of one tier as a power of two. Powers of two, because ranks that follow a level at
# different moments must still save common steps: the sets of saved steps nest. The cost is flat around its minimum, so
# rounding is cheap (docs/adr/0006).

MAX_EXPONENT = 20
"""A million steps; what trainers know as the highest, too."""

FLUSH_ROOM = 1.25
"""A save may take a quarter longer than the last ones before the next is due."""

HYSTERESIS = 0.2
"""Hysteresis in log2 units: the level changes only when the wanted interval is more than 2**0.2 (15 %) outside its range."""


@dataclass(frozen=True, slots=True)
class IntervalRequest:
    """The interval that the job asks for; `seconds` None: `auto`."""

    base_steps: int
    seconds: float | None = None
    min_exponent: int = 0
    """Of the tier below: only what was saved there can go on to this one."""


@dataclass(frozen=True, slots=True)
class IntervalInputs:
    """Measurements and estimates for one tier, in seconds; None: unknown yet."""

    step_seconds: float | None
    cost_seconds: float | None
    """Training time that one save costs."""
    flush_seconds: float | None
    """Until a save is where it belongs: the next must not be due before."""
    incident_seconds: float
    """Mean time between incidents that this tier recovers from."""


@dataclass(frozen=True, slots=True)
class IntervalDecision:
    exponent: int
    target_seconds: float
    reason: str


def best_seconds(cost_seconds: float, incident_seconds: float) -> float:
    """The interval of least cost by Young (1974) and Daly (2006).

    As much time goes to saves as, on average, to steps that an incident makes run again.
    """
    return math.sqrt(2.0 * cost_seconds * incident_seconds)


def target_seconds(wish: IntervalRequest, inputs: IntervalInputs) -> float | None:
    """Seconds between two saves; None while unknown."""
    if wish.seconds is not None:
        return wish.seconds
    return None if inputs.cost_seconds is None else best_seconds(inputs.cost_seconds, inputs.incident_seconds)


def choose_exponent(wish: IntervalRequest, inputs: IntervalInputs, present: int | None) -> IntervalDecision | None:
    """Chooses the level; None while step time or cost is unknown."""
    wanted, step = target_seconds(wish, inputs), inputs.step_seconds
    if wanted is None or step is None or step <= 0:
        return None
    base = wish.base_steps * step
    # seconds are a promise, rounded down and never held above; the best interval is as flat above as it is below
    bias = -HYSTERESIS if wish.seconds is not None else 0.5
    level = exponent_with_hysteresis(_exponent_for(wanted / base) + bias, present)
    drain = inputs.flush_seconds or 0.0
    least = -exponent_with_hysteresis(-_exponent_for(drain * FLUSH_ROOM / base), None if present is None else -present)
    chosen = min(MAX_EXPONENT, max(level, least, wish.min_exponent, 0))
    return IntervalDecision(chosen, wanted, _reason(wish, inputs, wanted, (level, least, chosen)))


def exponent_with_hysteresis(wanted: float, present: int | None) -> int:
    """Rounds the wanted level down, unless the present one is near enough.

    Near enough: within `HYSTERESIS` of the present level's range.
    """
    if present is not None and present - HYSTERESIS <= wanted < present + 1 + HYSTERESIS:
        return present
    return math.floor(wanted)


def _exponent_for(ratio: float) -> float:
    """Far below one is as good as never: a drain of no time asks for no level."""
    return math.log2(max(ratio, 2.0**-MAX_EXPONENT))


def _reason(wish: IntervalRequest, inputs: IntervalInputs, wanted: float, levels: tuple[int, int, int]) -> str:
    level, least, chosen = levels
    if wish.seconds is not None:
        why = f"at most every {readable_seconds(wish.seconds)} was requested"
    else:
        why = (
            f"every {readable_seconds(wanted)} costs least, where a save costs {readable_seconds(inputs.cost_seconds or 0.0)}"
            f" and an incident comes every {readable_seconds(inputs.incident_seconds)}"
        )
    if chosen <= max(level, 0):
        return why
    if chosen == wish.min_exponent and chosen > least:
        return f"{why}, but the memory tier is not saved to more often"
    return f"{why}, but a save takes {readable_seconds(inputs.flush_seconds or 0.0)} to arrive, and the next waits for that"


def readable_seconds(seconds: float) -> str:
    """Formats seconds with two digits in a suitable unit."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or unit == "s":
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    raise AssertionError("every time has a unit")


# ---- save intervals --------------------------------------------------------------------------------------------------

BACKGROUND_COST_RATIO = 0.05
"""What goes on beside the training (a save that drains, an upload) is taken to cost it a twentieth of its time."""

DWELL_SECONDS = 30.0
"""No sooner is a choice changed, unless saves cannot arrive in time: measurements of a moment are no trend."""

REFRESH_SECONDS = 60.0
REFRESH_FACTOR = 1.25
"""Inputs that moved by so much are written down anew, no oftener than that; the choice they stand beside is the same."""


def with_intervals(facts: WorldTierFacts, status: JobStatus, replicas: int) -> JobStatus:
    """Sets both tiers' choices in a status; `replicas`: effective copies."""
    spec = facts.spec.checkpoint
    risk = risk_of(facts.status, len(facts.membership.members), replicas, facts.now)
    memory = _memory(facts, spec.memory, risk) if spec.memory.is_adaptive else None
    persistent = None
    if spec.persistent is not None and spec.persistent.is_adaptive:
        persistent = _persistent(facts, spec.persistent, memory, risk)
    return replace(status, memory_interval=memory, persistent_interval=persistent)


def interval_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
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
        told.append(Event(SAVE_INTERVAL_CHANGED, text))
    return tuple(told)


def _memory(facts: WorldFacts, tier: MemoryTierSpec, risk: Risk) -> SaveInterval | None:
    step, stall, drain = (_slowest(facts, name) for name in ("step_seconds", "stall_seconds", "flush_seconds"))
    cost = None if stall is None else stall + BACKGROUND_COST_RATIO * (drain or 0.0)
    inputs = IntervalInputs(step, cost, drain, risk.from_memory_seconds)
    return _chosen(
        facts, IntervalRequest(tier.base_steps, tier.interval_seconds), inputs, facts.status.memory_interval, risk
    )


def _persistent(
    facts: WorldTierFacts, tier: PersistentTierSpec, memory: SaveInterval | None, risk: Risk
) -> SaveInterval | None:
    upload = facts.promotion_seconds
    cost = None if upload is None else BACKGROUND_COST_RATIO * upload
    inputs = IntervalInputs(_slowest(facts, "step_seconds"), cost, upload, risk.from_persistent_seconds)
    wish = IntervalRequest(
        facts.spec.checkpoint.memory.base_steps, tier.interval_seconds, memory.exponent if memory else 0
    )
    return _chosen(facts, wish, inputs, facts.status.persistent_interval, risk)


def _slowest(facts: WorldFacts, field: str) -> float | None:
    """The highest of the members' own figures; None while none has said it."""
    found: Iterable[float | None] = (getattr(s.timings, field) for _, s in member_sessions(facts) if s is not None)
    return max((value for value in found if value is not None), default=None)


def _chosen(
    facts: WorldFacts, wish: IntervalRequest, inputs: IntervalInputs, present: SaveInterval | None, risk: Risk
) -> SaveInterval | None:
    if present is not None and present.steps != wish.base_steps << present.exponent:
        present = None  # of a spec that is not asked for any more
    found = choose_exponent(wish, inputs, present.exponent if present is not None else None)
    if found is None:
        if present is None or present.exponent >= wish.min_exponent:
            return present
        reason = "the memory tier is not saved to more often"
        return replace(present, steps=wish.base_steps << wish.min_exponent, exponent=wish.min_exponent, reason=reason)
    fresh = _written(facts, wish, inputs, found, risk)
    if present is None:
        return fresh
    if found.exponent != present.exponent:
        early = facts.now < present.since_seconds + DWELL_SECONDS
        return present if early and not _is_too_frequent(wish, inputs, present) else fresh
    if facts.now < present.measured_seconds + REFRESH_SECONDS or not _moved(present, fresh):
        return present
    return replace(fresh, since_seconds=present.since_seconds, since_step=present.since_step)


def _written(
    facts: WorldFacts, wish: IntervalRequest, inputs: IntervalInputs, found: IntervalDecision, risk: Risk
) -> SaveInterval:
    return SaveInterval(
        steps=wish.base_steps << found.exponent,
        exponent=found.exponent,
        reason=found.reason,
        since_seconds=facts.now,
        since_step=step_of(facts, facts.membership.generation),
        measured_seconds=facts.now,
        target_seconds=found.target_seconds,
        step_seconds=inputs.step_seconds,
        cost_seconds=inputs.cost_seconds,
        flush_seconds=inputs.flush_seconds,
        mtbf_seconds=inputs.incident_seconds,
        memory_loss_probability=risk.memory_loss_probability,
    )


def _is_too_frequent(wish: IntervalRequest, inputs: IntervalInputs, present: SaveInterval) -> bool:
    """Saves come faster than they arrive, or oftener than the tier below is saved to."""
    length = present.steps * (inputs.step_seconds or 0.0)
    return present.exponent < wish.min_exponent or length < (inputs.flush_seconds or 0.0)


def _moved(old: SaveInterval, new: SaveInterval) -> bool:
    pairs = (
        (old.target_seconds, new.target_seconds),
        (old.step_seconds, new.step_seconds),
        (old.cost_seconds, new.cost_seconds),
        (old.flush_seconds, new.flush_seconds),
        (old.mtbf_seconds, new.mtbf_seconds),
    )
    return any(_apart(was, now) for was, now in pairs)


def _apart(was: float | None, now: float | None) -> bool:
    if was is None or now is None:
        return was is not now
    low, high = sorted((was, now))
    return high > REFRESH_FACTOR * low
