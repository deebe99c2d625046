"""Computes the places of the report's charts and bars.

Pure: values to pixels, which the template draws. A chart has one drawing for wide and one for narrow screens, as text keeps its
size on a phone. Marks differ in shape and number, lines in width and dashes, since colour alone tells some readers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# ---- curves ----------------------------------------------------------------------------------------------------------
# Thins curves and chooses the ticks of their axes. A run of 100,000 steps has more points than a screen has columns: of
# each column the lowest and the highest are kept, so that a spike of one step is still there.

Point = tuple[float, float]

_LARGEST = 1e300
"""The distance of two larger values may overflow."""
_LOGARITHMIC_RATIO = 50.0
"""The ratio of the largest value to the smallest at which a linear axis shows the largest alone."""


def thin_curve(points: Sequence[Point], columns: int) -> list[Point]:
    """Keeps each column's lowest and highest point, and both ends."""
    if len(points) <= 2 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    extremes: dict[int, tuple[Point, Point]] = {}
    for point in points:
        column = min(columns - 1, int((point[0] - first) / width))
        low, high = extremes.get(column, (point, point))
        extremes[column] = (min(low, point, key=lambda p: p[1]), max(high, point, key=lambda p: p[1]))
    return sorted({points[0], points[-1], *(point for pair in extremes.values() for point in pair)})


def select_finite(points: Iterable[tuple[int, float]]) -> list[Point]:
    """Leaves out values that no axis can have."""
    return [(float(step), value) for step, value in points if math.isfinite(value) and abs(value) < _LARGEST]


def needs_logarithm(values: Sequence[float]) -> bool:
    """Whether only a logarithmic axis would show the small values."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_RATIO


def ticks(low: float, high: float, max_count: int) -> list[float]:
    """Chooses at most `max_count` round values from `low` to `high`."""
    if not high > low:
        return [low]
    step = _round_up((high - low) / max_count)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def logarithmic_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Chooses powers of ten; linear ticks where the range has fewer than two of them."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((end - begin) / max_count))
    powers = [10.0**power for power in range(begin, end + 1, stride) if low <= 10.0**power <= high]
    return powers if len(powers) > 1 else ticks(low, high, max_count)


def _round_up(step: float) -> float:
    """The next of 1, 2, 5, 10, …; never 0."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step * 0.999), 10 * power)


# ---- charts ----------------------------------------------------------------------------------------------------------

TOP, RIGHT, BOTTOM, LEFT = 44.0, 12.0, 36.0, 52.0
"""Margins of a drawing in pixels."""
_FLOOR = 24.0
_BAND_LABEL_PIXELS = 58.0
"""A narrower band has no room for its name."""
_MARK_GAP_PIXELS = 4.0
_MAX_TITLES = 5
"""Of the incidents that share one mark."""


class Curve(NamedTuple):
    """One line of a chart; `kind` is its class: kept, discarded, undisturbed, stall."""

    kind: str
    points: Sequence[Point]


class XBand(NamedTuple):
    """A part of the x axis with a name, as a generation."""

    begin: float
    end: float
    label: str


class ChartMark(NamedTuple):
    """A vertical line with a number in a shape: a square for a planned change, a circle for a failure."""

    x: float
    label: str
    title: str
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of a chart; `title` and `description` are for readers who cannot see it."""

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    bands: tuple[XBand, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    from_zero: bool = False


FRAMES = {"wide": (960.0, 360.0), "narrow": (360.0, 280.0)}
"""Width and height of the drawings in pixels."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Maps the values of a chart to pixels of one frame."""

    chart: Chart
    frame: str
    x_from: float
    x_to: float
    y_from: float
    y_to: float
    logarithmic: bool

    @property
    def width(self) -> float:
        return FRAMES[self.frame][0]

    @property
    def height(self) -> float:
        return FRAMES[self.frame][1]

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * (value - self.x_from) / ((self.x_to - self.x_from) or 1.0)

    def y(self, value: float) -> float:
        floor = _FLOOR if self.chart.bands else 0.0
        low, high, at = (math.log10(v) if self.logarithmic else v for v in (self.y_from, self.y_to, value))
        return self.bottom - floor - (self.bottom - TOP - floor) * (at - low) / ((high - low) or 1.0)

    def rows(self) -> list[float]:
        return (logarithmic_ticks if self.logarithmic else ticks)(self.y_from, self.y_to, 6)

    def columns(self) -> list[float]:
        max_count = max(2, min(10, int((self.width - LEFT - RIGHT) / (8 * len(f"{self.x_to:.0f}") + 24))))
        return [value for value in ticks(self.x_from, self.x_to, max_count) if value == int(value)]

    def points(self, curve: Curve) -> list[Point]:
        """Places as many points of a curve as the frame has room for."""
        return [(self.x(x), self.y(y)) for x, y in thin_curve(curve.points, int(self.width))]

    def bands(self) -> Iterator[tuple[float, float, str, bool]]:
        """Yields each visible band's x, width, label (empty without room for it) and whether its place is odd."""
        for place, band in enumerate(self.chart.bands):
            begin, end = self.x(max(band.begin, self.x_from)), self.x(min(band.end, self.x_to))
            if end > begin:
                label = band.label if end - begin >= 2 * _BAND_LABEL_PIXELS else band.label.split(",")[0]
                yield begin, end - begin, label if end - begin >= _BAND_LABEL_PIXELS else "", bool(place % 2)

    def marks(self) -> Iterator[tuple[float, float, float, str, str, bool]]:
        """Yields marks: x of the line; left, width and label of the box; title; whether it is planned.

        Marks whose boxes would overlap are merged; the box of several names the first and the last.
        """
        groups: list[tuple[float, list[ChartMark]]] = []
        for mark in sorted(self.chart.marks, key=lambda mark: mark.x):
            x, group = self.x(min(max(mark.x, self.x_from), self.x_to)), [mark]
            # a label that grows may reach the box before it
            while groups and self._box_left(x, group) < (
                self._box_left(*groups[-1]) + _box_width(groups[-1][1]) + _MARK_GAP_PIXELS
            ):
                x, former = groups.pop()
                group = [*former, *group]
            groups.append((x, group))
        for x, group in groups:
            more = f"; and {len(group) - _MAX_TITLES} more" if len(group) > _MAX_TITLES else ""
            title = "; ".join(mark.title for mark in group[:_MAX_TITLES]) + more
            planned = all(mark.planned for mark in group)
            yield x, self._box_left(x, group), _box_width(group), _box_label(group), title, planned

    def _box_left(self, x: float, group: Sequence[ChartMark]) -> float:
        """Where a box begins; one at the edge is moved inwards."""
        width = _box_width(group)
        return min(max(x - width / 2, 0.0), self.width - width)


def _box_width(group: Sequence[ChartMark]) -> float:
    return max(19.0, 10.0 + 7.5 * len(_box_label(group)))


def _box_label(group: Sequence[ChartMark]) -> str:
    return group[0].label if len(group) == 1 else f"{group[0].label}–{group[-1].label}"


def draw_chart(chart: Chart) -> list[Drawing]:
    """Chooses both ranges by the data, for each frame; a flat curve gets some room."""
    xs = [point[0] for curve in chart.curves for point in curve.points]
    ys = [point[1] for curve in chart.curves for point in curve.points]
    x_from, x_to = min(xs, default=0.0), max(xs, default=1.0)
    logarithmic = not chart.from_zero and needs_logarithm(ys)
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if chart.from_zero:
        low = min(0.0, low)
    if high == low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low if chart.from_zero else low - spread), high + spread
    elif not logarithmic:
        high += (high - low) * 0.03
    x_to = x_to if x_to > x_from else x_from + 1
    return [Drawing(chart, frame, x_from, x_to, low, high, logarithmic) for frame in FRAMES]


# ---- bars ------------------------------------------------------------------------------------------------------------

_MIN_NUMBERED_PERCENT = 4.0


class BarPart(NamedTuple):
    """One part of a bar; its number is also its colour, the same in bar and table."""

    number: int
    seconds: float
    title: str


def draw_bar(parts: Iterable[BarPart], longest_seconds: float) -> Iterator[tuple[BarPart, float, float, bool]]:
    """Yields each part, its x and width in percent, and whether its number has room.

    `longest_seconds` has the whole width: bars of one scale show the slow recovery among many.
    """
    x = 0.0
    for part in parts:
        width = 100.0 * part.seconds / longest_seconds if longest_seconds > 0 else 0.0
        if width > 0:
            yield part, x, width, width >= _MIN_NUMBERED_PERCENT
        x += width
