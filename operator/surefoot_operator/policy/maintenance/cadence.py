"""Computes the save interval of one tier as a power of two.

Pure; called by `save_intervals`. Powers of two, because ranks that follow a level at different moments must still save
common steps: the sets of saved steps nest. The cost is flat around its minimum, so rounding is cheap (docs/adr/0006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HIGHEST_LEVEL = 20
"""A million steps; what trainers know as the highest, too."""

DRAIN_ROOM = 1.25
"""A save may take a quarter longer than the last ones before the next is due."""

HYSTERESIS = 0.2
"""Hysteresis in log2 units: the level changes only when the wanted interval is more than 2**0.2 (15 %) outside its range."""


@dataclass(frozen=True, slots=True)
class IntervalRequest:
    """The interval that the job asks for; `seconds` None: `auto`."""

    base_steps: int
    seconds: float | None = None
    least_level: int = 0
    """Of the tier below: only what was saved there can go on to this one."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Measurements and estimates for one tier, in seconds; None: unknown yet."""

    step_seconds: float | None
    cost_seconds: float | None
    """Training time that one save costs."""
    drain_seconds: float | None
    """Until a save is where it belongs: the next must not be due before."""
    incident_seconds: float
    """Mean time between incidents that this tier recovers from."""


@dataclass(frozen=True, slots=True)
class Cadence:
    level: int
    wanted_seconds: float
    reason: str


def best_seconds(cost_seconds: float, incident_seconds: float) -> float:
    """The interval of least cost by Young (1974) and Daly (2006).

    As much time goes to saves as, on average, to steps that an incident makes run again.
    """
    return math.sqrt(2.0 * cost_seconds * incident_seconds)


def wanted_seconds(wish: IntervalRequest, inputs: Inputs) -> float | None:
    """Seconds between two saves; None while unknown."""
    if wish.seconds is not None:
        return wish.seconds
    return None if inputs.cost_seconds is None else best_seconds(inputs.cost_seconds, inputs.incident_seconds)


def cadence(wish: IntervalRequest, inputs: Inputs, present: int | None) -> Cadence | None:
    """Chooses the level; None while step time or cost is unknown."""
    wanted, step = wanted_seconds(wish, inputs), inputs.step_seconds
    if wanted is None or step is None or step <= 0:
        return None
    base = wish.base_steps * step
    # seconds are a promise, rounded down and never held above; the best interval is as flat above as it is below
    bias = -HYSTERESIS if wish.seconds is not None else 0.5
    level = level_with_hysteresis(_doublings(wanted / base) + bias, present)
    drain = inputs.drain_seconds or 0.0
    least = -level_with_hysteresis(-_doublings(drain * DRAIN_ROOM / base), None if present is None else -present)
    chosen = min(HIGHEST_LEVEL, max(level, least, wish.least_level, 0))
    return Cadence(chosen, wanted, _reason(wish, inputs, wanted, (level, least, chosen)))


def level_with_hysteresis(wanted: float, present: int | None) -> int:
    """Rounds the wanted level down, unless the present one is near enough.

    Near enough: within `HYSTERESIS` of the present level's range.
    """
    if present is not None and present - HYSTERESIS <= wanted < present + 1 + HYSTERESIS:
        return present
    return math.floor(wanted)


def _doublings(ratio: float) -> float:
    """Far below one is as good as never: a drain of no time asks for no level."""
    return math.log2(max(ratio, 2.0**-HIGHEST_LEVEL))


def _reason(wish: IntervalRequest, inputs: Inputs, wanted: float, levels: tuple[int, int, int]) -> str:
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
    if chosen == wish.least_level and chosen > least:
        return f"{why}, but the memory tier is not saved to more often"
    return f"{why}, but a save takes {readable_seconds(inputs.drain_seconds or 0.0)} to arrive, and the next waits for that"


def readable_seconds(seconds: float) -> str:
    """Formats seconds with two digits in a suitable unit."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or unit == "s":
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    raise AssertionError("every time has a unit")
