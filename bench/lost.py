"""Lost step time, from stretches of steps with saves and without, taken in turns by one process. Pure.

A machine's speed drifts by more than a save costs, so each stretch with saves is held against its neighbours, the plain
stretches before and after it; the median of these comparisons counts, and their spread says what is noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

PLAIN, DENSE, SPARSE = 0, 1, 10
"""Steps from one save to the next, as asked of a stretch; 0 is no save."""

Stretch = Mapping[str, Any]
"""`interval`, the `seconds` of its steps, and `left_seconds`: how long its last save still had to be waited for."""


def lost_fractions(stretches: Sequence[Stretch], interval: int) -> list[float]:
    """Of each stretch with saves at that interval, the share of step time that its saves took.

    The first stretch of all warms everything up and never counts; nor does one without a plain neighbour, nor one of a
    save each ten steps whose save outlasted it by more than a step, for its cost is not all in it.
    """
    found = []
    for number in range(1, len(stretches)):
        here = stretches[number]
        around = [s for s in stretches[max(1, number - 1) : number + 2] if s["interval"] == PLAIN]
        base = [seconds for stretch in around for seconds in stretch["seconds"]]
        whole = interval != SPARSE or (bool(base) and here["left_seconds"] <= fmean(base))
        if here["interval"] == interval and base and whole:
            found.append(_lost(here["seconds"], fmean(base), interval))
    return found


def lost_figures(turns: Sequence[Sequence[Stretch]], suffix: str = "") -> dict[str, float | None]:
    """Figures of one system from all its turns, in percent of the time of a plain step."""
    plain = [seconds for turn in turns for s in turn[1:] if s["interval"] == PLAIN for seconds in s["seconds"]]
    if not plain:
        return {}
    found: dict[str, float | None] = {"step_seconds" + suffix: fmean(plain)}
    for interval in (SPARSE, DENSE):
        fractions = [fraction for turn in turns for fraction in lost_fractions(turn, interval)]
        if fractions:
            name = f"percent_every_{interval}{suffix}"
            found[f"lost_step_{name}"] = 100 * median(fractions)
            # one comparison says nothing about noise
            spread = 100 * (max(fractions) - min(fractions)) if len(fractions) > 1 else None
            found[f"lost_step_spread_{name}"] = spread
        if fractions and interval == DENSE:
            found["relative_step_every_1" + suffix] = 1 + median(fractions)
    return found


def _lost(seconds: Sequence[float], base: float, interval: int) -> float:
    """A save each step: without the first step, whose save met none before it. A save each ten steps: the time of the
    steps that ran over that of ten, for with the save over, nothing is under way in the rest."""
    counted = seconds[1:] if interval == DENSE else seconds
    return (sum(counted) - len(counted) * base) / (max(len(counted), interval) * base)
