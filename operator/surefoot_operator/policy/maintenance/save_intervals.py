"""Chooses each tier's save interval and records it in the status.

Pure; called by `maintenance_plan`. Trainers get the memory tier's interval exponent from `coordinator.desired_messages`;
`upload_plan` follows the persistent tier's interval. Until everything is measured the interval stays as it is: at first the
base interval, so that there is soon something to measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from surefoot_operator.api.spec import MemoryTierSpec, PersistentTierSpec
from surefoot_operator.api.status import JobStatus, SaveInterval
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    MembershipTierFacts,
    member_sessions,
    step_of,
)
from surefoot_operator.policy.failure.failure_rate import Risk, estimate_risk

# ---- intervals as powers of two --------------------------------------------------------------------------------------
# Computes the save interval of one tier as base * 2**exponent. With powers of two, ranks that follow a change at different
# moments still save common steps, because the sets of saved steps nest. The cost is flat around its minimum, so the rounding
# is cheap (docs/adr/0006).

MAX_EXPONENT = 20
"""Highest exponent, about a million times the base; trainers use the same limit."""

FLUSH_TIME_FACTOR = 1.25
"""Factor on the flush time of the last saves: the next save is due no sooner."""

EXPONENT_HYSTERESIS = 0.2
"""In log2 units: the exponent changes only if the target interval is more than 2**0.2 (15 %) outside its range."""


@dataclass(frozen=True, slots=True)
class IntervalRequest:
    """The save interval that the job requests for one tier."""

    base_steps: int
    """Steps between saves at exponent 0."""
    seconds: float | None = None
    """Requested longest time between saves; None: `auto`."""
    min_exponent: int = 0
    """Exponent of the memory tier: only steps saved there can be uploaded."""


@dataclass(frozen=True, slots=True)
class IntervalInputs:
    """Measurements and estimates for one tier; None: unknown yet."""

    step_seconds: float | None
    """Duration of one step."""
    cost_seconds: float | None
    """Training time that one save costs."""
    flush_seconds: float | None
    """Time until a save is in its tier; the next must not be due before."""
    incident_seconds: float
    """Mean time between incidents that this tier recovers from."""


@dataclass(frozen=True, slots=True)
class IntervalDecision:
    """The chosen exponent, the target interval it follows, and the reason."""

    exponent: int
    target_seconds: float
    reason: str


def cheapest_interval_seconds(cost_seconds: float, incident_seconds: float) -> float:
    """Returns the interval of least cost by Young (1974) and Daly (2006), in seconds.

    At this interval, saves take on average as much time as the steps that an incident makes the job repeat.
    """
    return math.sqrt(2.0 * cost_seconds * incident_seconds)


def target_interval_seconds(request: IntervalRequest, inputs: IntervalInputs) -> float | None:
    """Returns the desired time between two saves; None while unknown."""
    if request.seconds is not None:
        return request.seconds
    return (
        None if inputs.cost_seconds is None else cheapest_interval_seconds(inputs.cost_seconds, inputs.incident_seconds)
    )


def choose_exponent(request: IntervalRequest, inputs: IntervalInputs, present: int | None) -> IntervalDecision | None:
    """Chooses the interval exponent; None while step time or cost is unknown. `present`: the exponent until now."""
    target, step_seconds = target_interval_seconds(request, inputs), inputs.step_seconds
    if target is None or step_seconds is None or step_seconds <= 0:
        return None
    base_seconds = request.base_steps * step_seconds
    # requested seconds are an upper limit, so they are rounded down; the cheapest interval is rounded to the nearest
    bias = -EXPONENT_HYSTERESIS if request.seconds is not None else 0.5
    target_exponent = exponent_with_hysteresis(_exponent_for(target / base_seconds) + bias, present)
    flush_seconds = inputs.flush_seconds or 0.0
    min_exponent = -exponent_with_hysteresis(
        -_exponent_for(flush_seconds * FLUSH_TIME_FACTOR / base_seconds), None if present is None else -present
    )
    exponent = min(MAX_EXPONENT, max(target_exponent, min_exponent, request.min_exponent, 0))
    return IntervalDecision(
        exponent, target, _describe_choice(request, inputs, target, (target_exponent, min_exponent, exponent))
    )


def exponent_with_hysteresis(target: float, present: int | None) -> int:
    """Rounds the target exponent down, or returns the present one if the target is within `HYSTERESIS` of its range."""
    if present is not None and present - EXPONENT_HYSTERESIS <= target < present + 1 + EXPONENT_HYSTERESIS:
        return present
    return math.floor(target)


def _exponent_for(ratio: float) -> float:
    """Returns log2 of a ratio of intervals, limited from below: a flush time of 0 requires no interval at all."""
    return math.log2(max(ratio, 2.0**-MAX_EXPONENT))


def _describe_choice(
    request: IntervalRequest, inputs: IntervalInputs, target: float, exponents: tuple[int, int, int]
) -> str:
    """Describes why the exponent was chosen; `exponents`: the target, the minimum and the choice."""
    target_exponent, min_exponent, exponent = exponents
    if request.seconds is not None:
        cause = f"at most every {format_seconds(request.seconds)} was requested"
    else:
        cause = (
            f"every {format_seconds(target)} costs least, if a save costs {format_seconds(inputs.cost_seconds or 0.0)}"
            f" and an incident happens every {format_seconds(inputs.incident_seconds)}"
        )
    if exponent <= max(target_exponent, 0):
        return cause
    if exponent == request.min_exponent and exponent > min_exponent:
        return f"{cause}, but saves to the memory tier are not made more often"
    return f"{cause}, but a save takes {format_seconds(inputs.flush_seconds or 0.0)} to be flushed, and the next must wait for it"


def format_seconds(seconds: float) -> str:
    """Formats seconds with two digits in a suitable unit."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or unit == "s":
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    raise AssertionError("every time has a unit")


# ---- save intervals --------------------------------------------------------------------------------------------------

BACKGROUND_COST_RATIO = 0.05
"""Share of its own time that background work (a flush, an upload) is assumed to cost the training (0 to 1)."""

MIN_INTERVAL_LIFETIME_SECONDS = 30.0
"""Shortest time between two changes, unless saves cannot be flushed in time: a momentary measurement is no trend."""

REFRESH_SECONDS = 60.0
"""Shortest time between two updates of the recorded inputs while the interval is unchanged."""
REFRESH_FACTOR = 1.25
"""Change of an input from which on it is recorded again."""


def with_intervals(facts: MembershipTierFacts, status: JobStatus, replicas: int) -> JobStatus:
    """Returns the status with both tiers' save intervals; `replicas`: copies that a save has in memory now."""
    spec = facts.spec.checkpoint
    risk = estimate_risk(facts.status, len(facts.membership.members), replicas, facts.now)
    memory = _choose_memory_interval(facts, spec.memory, risk) if spec.memory.is_adaptive else None
    persistent = None
    if spec.persistent is not None and spec.persistent.is_adaptive:
        persistent = _choose_persistent_interval(facts, spec.persistent, memory, risk)
    return replace(status, memory_interval=memory, persistent_interval=persistent)


def interval_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Returns an event for each changed interval."""
    events = []
    for tier, previous, current in (
        ("memory", old.memory_interval, new.memory_interval),
        ("persistent", old.persistent_interval, new.persistent_interval),
    ):
        if current is None or (previous is not None and previous.steps == current.steps):
            continue
        interval = "step" if current.steps == 1 else f"{current.steps} steps"
        time_clause = f" ({format_seconds(current.steps * current.step_seconds)})" if current.step_seconds else ""
        previous_clause = f" instead of {previous.steps}" if previous is not None else ""
        text = f"the {tier} tier is saved to every {interval}{time_clause}{previous_clause}: {current.reason}"
        events.append(Event("SaveIntervalChanged", text))
    return tuple(events)


def _choose_memory_interval(facts: MembershipFacts, tier: MemoryTierSpec, risk: Risk) -> SaveInterval | None:
    """Chooses the memory tier's interval."""
    step_seconds, stall_seconds, flush_seconds = (
        _slowest_timing(facts, name) for name in ("step_seconds", "stall_seconds", "flush_seconds")
    )
    cost_seconds = None if stall_seconds is None else stall_seconds + BACKGROUND_COST_RATIO * (flush_seconds or 0.0)
    inputs = IntervalInputs(step_seconds, cost_seconds, flush_seconds, risk.memory_recovery_interval_seconds)
    return _choose_interval(
        facts, IntervalRequest(tier.base_steps, tier.interval_seconds), inputs, facts.status.memory_interval, risk
    )


def _choose_persistent_interval(
    facts: MembershipTierFacts, tier: PersistentTierSpec, memory: SaveInterval | None, risk: Risk
) -> SaveInterval | None:
    """Chooses the persistent tier's interval, no shorter than the memory tier's."""
    upload_seconds = facts.upload_seconds
    cost_seconds = None if upload_seconds is None else BACKGROUND_COST_RATIO * upload_seconds
    inputs = IntervalInputs(
        _slowest_timing(facts, "step_seconds"), cost_seconds, upload_seconds, risk.persistent_recovery_interval_seconds
    )
    request = IntervalRequest(
        facts.spec.checkpoint.memory.base_steps, tier.interval_seconds, memory.exponent if memory else 0
    )
    return _choose_interval(facts, request, inputs, facts.status.persistent_interval, risk)


def _slowest_timing(facts: MembershipFacts, field: str) -> float | None:
    """Returns the highest of the members' medians of one timing; None while no member has reported it."""
    values: Iterable[float | None] = (getattr(s.timings, field) for _, s in member_sessions(facts) if s is not None)
    return max((value for value in values if value is not None), default=None)


def _choose_interval(
    facts: MembershipFacts, request: IntervalRequest, inputs: IntervalInputs, present: SaveInterval | None, risk: Risk
) -> SaveInterval | None:
    """Chooses an interval, or keeps the present one for `MIN_INTERVAL_LIFETIME_SECONDS` after its start."""
    if present is not None and present.steps != request.base_steps << present.exponent:
        present = None  # it was chosen for an earlier spec
    decision = choose_exponent(request, inputs, present.exponent if present is not None else None)
    # Not measured yet: keep the present interval, as far as the memory tier's allows it.
    if decision is None:
        if present is None or present.exponent >= request.min_exponent:
            return present
        reason = "saves to the memory tier are not made more often"
        return replace(
            present, steps=request.base_steps << request.min_exponent, exponent=request.min_exponent, reason=reason
        )
    new = _build_interval(facts, request, inputs, decision, risk)
    if present is None:
        return new
    # Keep a young choice, unless saves cannot keep up with it.
    if decision.exponent != present.exponent:
        is_early = facts.now < present.since_seconds + MIN_INTERVAL_LIFETIME_SECONDS
        return present if is_early and not _is_too_frequent(request, inputs, present) else new
    if facts.now < present.measured_seconds + REFRESH_SECONDS or not _have_inputs_changed(present, new):
        return present
    return replace(new, since_seconds=present.since_seconds, since_step=present.since_step)


def _build_interval(
    facts: MembershipFacts, request: IntervalRequest, inputs: IntervalInputs, decision: IntervalDecision, risk: Risk
) -> SaveInterval:
    """Builds the interval for the status."""
    return SaveInterval(
        steps=request.base_steps << decision.exponent,
        exponent=decision.exponent,
        reason=decision.reason,
        since_seconds=facts.now,
        since_step=step_of(facts, facts.membership.generation),
        measured_seconds=facts.now,
        target_seconds=decision.target_seconds,
        step_seconds=inputs.step_seconds,
        cost_seconds=inputs.cost_seconds,
        flush_seconds=inputs.flush_seconds,
        mtbf_seconds=inputs.incident_seconds,
        memory_loss_probability=risk.memory_loss_probability,
    )


def _is_too_frequent(request: IntervalRequest, inputs: IntervalInputs, present: SaveInterval) -> bool:
    """Whether saves are due faster than they are flushed, or more often than the tier below is saved to."""
    interval_seconds = present.steps * (inputs.step_seconds or 0.0)
    return present.exponent < request.min_exponent or interval_seconds < (inputs.flush_seconds or 0.0)


def _have_inputs_changed(old: SaveInterval, new: SaveInterval) -> bool:
    """Whether any recorded input changed by `REFRESH_FACTOR` or more."""
    pairs = (
        (old.target_seconds, new.target_seconds),
        (old.step_seconds, new.step_seconds),
        (old.cost_seconds, new.cost_seconds),
        (old.flush_seconds, new.flush_seconds),
        (old.mtbf_seconds, new.mtbf_seconds),
    )
    return any(_differ(old_value, new_value) for old_value, new_value in pairs)


def _differ(old: float | None, new: float | None) -> bool:
    """Whether two values differ by more than `REFRESH_FACTOR`."""
    if old is None or new is None:
        return old is not new
    lower, higher = sorted((old, new))
    return higher > REFRESH_FACTOR * lower
