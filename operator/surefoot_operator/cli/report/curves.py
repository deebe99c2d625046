"""Thins curves and chooses the ticks of their axes.

Pure. A run of 100,000 steps has more points than a screen has columns: of each column the lowest and the highest are kept, so that a
spike of one step is still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, float]

_LARGEST = 1e300
"""The distance of two larger ones may be no number."""
_LOGARITHMIC_FROM = 50.0
"""The ratio of the largest value to the smallest at which a linear axis shows the largest alone."""


def thinned(points: Sequence[Point], columns: int) -> list[Point]:
    """Keeps each column's lowest and highest point; ends are kept too."""
    if len(points) <= 2 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    kept: dict[int, tuple[Point, Point]] = {}
    for point in points:
        column = min(columns - 1, int((point[0] - first) / width))
        low, high = kept.get(column, (point, point))
        kept[column] = (min(low, point, key=lambda p: p[1]), max(high, point, key=lambda p: p[1]))
    found = {points[0], points[-1], *(point for pair in kept.values() for point in pair)}
    return sorted(found)


def finite(points: Iterable[tuple[int, float]]) -> list[Point]:
    """Leaves out values that no axis can have."""
    return [(float(step), value) for step, value in points if math.isfinite(value) and abs(value) < _LARGEST]


def wants_logarithm(values: Sequence[float]) -> bool:
    """Whether only a logarithmic axis would show the small values."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_FROM


def ticks(low: float, high: float, most: int) -> list[float]:
    """Chooses at most `most` round values from `low` to `high`."""
    if not high > low:
        return [low]
    step = _round_up((high - low) / most)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    """Chooses powers of ten, or where they are few the halves between."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((end - begin) / most))
    found = [10.0**power for power in range(begin, end + 1, stride) if low <= 10.0**power <= high]
    return found if len(found) > 1 else ticks(low, high, most)


def _round_up(step: float) -> float:
    """The next of 1, 2, 5, 10, …; never 0."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step * 0.999), 10 * power)
