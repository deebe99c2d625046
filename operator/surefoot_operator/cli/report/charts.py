"""Computes the geometry of the report's charts and bars.

Pure: it maps values to pixels, and the template draws them. A chart has one drawing for wide and one for narrow
screens, because text keeps its size on a phone. Marks differ in shape and number, and lines in width and dashes, so that
readers who cannot distinguish the colours can still distinguish them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# ---- curves ----------------------------------------------------------------------------------------------------------
# Thins curves and chooses the ticks of their axes. A run of 100,000 steps has more points than a screen has columns.
# Thinning keeps the lowest and the highest point of each column, so that a spike of one step stays visible.

Point = tuple[float, float]

_MAX_VALUE = 1e300
"""Larger values are not drawn: the difference between two of them could overflow a float."""
_LOGARITHMIC_RATIO = 50.0
"""Ratio of the largest to the smallest value from which the axis is logarithmic, so that small values are visible."""


def thin_curve(points: Sequence[Point], columns: int) -> list[Point]:
    """Keeps each column's lowest and highest point, and both ends."""
    if len(points) <= 2 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    extremes: dict[int, tuple[Point, Point]] = {}
    # Keep the extremes of each column of pixels.
    for point in points:
        column = min(columns - 1, int((point[0] - first) / width))
        low, high = extremes.get(column, (point, point))
        extremes[column] = (
            min(low, point, key=lambda candidate: candidate[1]),
            max(high, point, key=lambda candidate: candidate[1]),
        )
    return sorted({points[0], points[-1], *(point for pair in extremes.values() for point in pair)})


def select_finite(points: Iterable[tuple[int, float]]) -> list[Point]:
    """Drops values that are NaN, infinite or too large for an axis."""
    return [(float(step), value) for step, value in points if math.isfinite(value) and abs(value) < _MAX_VALUE]


def needs_logarithm(values: Sequence[float]) -> bool:
    """Returns whether the small values are visible only on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_RATIO


def ticks(low: float, high: float, max_count: int) -> list[float]:
    """Chooses at most `max_count` round values from `low` to `high`."""
    if not high > low:
        return [low]
    step = _round_up((high - low) / max_count)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def logarithmic_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Chooses powers of ten, or linear ticks if the range contains fewer than two powers."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((end - begin) / max_count))
    powers = [10.0**power for power in range(begin, end + 1, stride) if low <= 10.0**power <= high]
    return powers if len(powers) > 1 else ticks(low, high, max_count)


def _round_up(step: float) -> float:
    """Rounds a positive step up to the next of 1, 2, 5, 10, …; the result is never 0."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step * 0.999), 10 * power)


# ---- charts ----------------------------------------------------------------------------------------------------------

TOP, RIGHT, BOTTOM, LEFT = 44.0, 12.0, 36.0, 52.0
"""Margins of a drawing in pixels."""
_BAND_HEIGHT_PIXELS = 24.0
_BAND_LABEL_PIXELS = 58.0
"""Width of a band's label; a narrower band is drawn without one."""
_MARK_GAP_PIXELS = 4.0
_MAX_TITLES = 5
"""Limit of the incident titles in the tooltip of one mark."""


class Curve(NamedTuple):
    """A line of a chart."""

    kind: str
    """CSS class of the line: kept, discarded, undisturbed or stall."""
    points: Sequence[Point]


class XBand(NamedTuple):
    """A labelled range of the x axis: the steps of one generation."""

    begin: float
    end: float
    label: str


class ChartMark(NamedTuple):
    """A vertical line with a numbered shape: a square for a planned change, a circle for a failure."""

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
    """Maps the values of a chart to the pixels of one frame, a key of FRAMES."""

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
        band_height = _BAND_HEIGHT_PIXELS if self.chart.bands else 0.0
        low, high, position = (
            math.log10(number) if self.logarithmic else number for number in (self.y_from, self.y_to, value)
        )
        return self.bottom - band_height - (self.bottom - TOP - band_height) * (position - low) / ((high - low) or 1.0)

    def rows(self) -> list[float]:
        return (logarithmic_ticks if self.logarithmic else ticks)(self.y_from, self.y_to, 6)

    def columns(self) -> list[float]:
        max_count = max(2, min(10, int((self.width - LEFT - RIGHT) / (8 * len(f"{self.x_to:.0f}") + 24))))
        return [value for value in ticks(self.x_from, self.x_to, max_count) if value == int(value)]

    def points(self, curve: Curve) -> list[Point]:
        """Maps a curve to pixels, with no more points than the frame can show."""
        return [(self.x(x), self.y(y)) for x, y in thin_curve(curve.points, int(self.width))]

    def bands(self) -> Iterator[tuple[float, float, str, bool]]:
        """Yields each visible band's x, width, label (empty if it does not fit) and whether to draw it shaded."""
        for index, band in enumerate(self.chart.bands):
            begin, end = self.x(max(band.begin, self.x_from)), self.x(min(band.end, self.x_to))
            if end > begin:
                label = band.label if end - begin >= 2 * _BAND_LABEL_PIXELS else band.label.split(",")[0]
                yield begin, end - begin, label if end - begin >= _BAND_LABEL_PIXELS else "", bool(index % 2)

    def marks(self) -> Iterator[tuple[float, float, float, str, str, bool]]:
        """Yields for each mark: x of the line; left, width and label of the box; title; whether it is planned.

        Marks whose boxes would overlap are merged; their box shows the first and the last number.
        """
        groups: list[tuple[float, list[ChartMark]]] = []
        for mark in sorted(self.chart.marks, key=lambda mark: mark.x):
            x, group = self.x(min(max(mark.x, self.x_from), self.x_to)), [mark]
            # Merging makes a label wider, so the merged box may overlap the box before it: merge until it does not.
            while groups and self._box_left(x, group) < (
                self._box_left(*groups[-1]) + _box_width(groups[-1][1]) + _MARK_GAP_PIXELS
            ):
                x, previous_group = groups.pop()
                group = [*previous_group, *group]
            groups.append((x, group))
        for x, group in groups:
            unlisted_text = f"; and {len(group) - _MAX_TITLES} more" if len(group) > _MAX_TITLES else ""
            title = "; ".join(mark.title for mark in group[:_MAX_TITLES]) + unlisted_text
            planned = all(mark.planned for mark in group)
            yield x, self._box_left(x, group), _box_width(group), _box_label(group), title, planned

    def _box_left(self, x: float, group: Sequence[ChartMark]) -> float:
        """Returns the left edge of a box, moved inwards at the edge of the drawing."""
        width = _box_width(group)
        return min(max(x - width / 2, 0.0), self.width - width)


def _box_width(group: Sequence[ChartMark]) -> float:
    return max(19.0, 10.0 + 7.5 * len(_box_label(group)))


def _box_label(group: Sequence[ChartMark]) -> str:
    return group[0].label if len(group) == 1 else f"{group[0].label}–{group[-1].label}"


def draw_chart(chart: Chart) -> list[Drawing]:
    """Returns one drawing per frame, with axis ranges chosen from the data and some padding for a flat curve."""
    xs = [point[0] for curve in chart.curves for point in curve.points]
    ys = [point[1] for curve in chart.curves for point in curve.points]
    x_from, x_to = min(xs, default=0.0), max(xs, default=1.0)
    logarithmic = not chart.from_zero and needs_logarithm(ys)
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if chart.from_zero:
        low = min(0.0, low)
    # Give a flat curve a range, and any other curve on a linear axis some space at the top.
    if high == low:
        padding = abs(high) * 0.1 or 1.0
        low, high = (low if chart.from_zero else low - padding), high + padding
    elif not logarithmic:
        high += (high - low) * 0.03
    x_to = x_to if x_to > x_from else x_from + 1
    return [Drawing(chart, frame, x_from, x_to, low, high, logarithmic) for frame in FRAMES]


# ---- bars ------------------------------------------------------------------------------------------------------------

_MIN_NUMBERED_PERCENT = 4.0


class BarPart(NamedTuple):
    """A part of a bar."""

    number: int
    """Number that the bar and the table show for this part; it also selects the colour."""
    seconds: float
    title: str


def draw_bar(parts: Iterable[BarPart], longest_seconds: float) -> Iterator[tuple[BarPart, float, float, bool]]:
    """Yields each part, its x and width in percent, and whether its number fits.

    `longest_seconds` is the length of a bar of full width. Recoveries share it, so that a slow one is noticed.
    """
    x = 0.0
    for part in parts:
        width = 100.0 * part.seconds / longest_seconds if longest_seconds > 0 else 0.0
        if width > 0:
            yield part, x, width, width >= _MIN_NUMBERED_PERCENT
        x += width
