"""Draws charts as SVG.

Pure: data to markup. Colours are classes, which the page's style defines for light and dark; lines differ in width and dashes, marks in
shape and number too, since colour alone tells some readers nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.protocol.text import plain, shorten
from surefoot_operator.cli.report.report_data import (
    PhaseFacts,
    Point,
    logarithmic_ticks,
    thinned,
    ticks,
    wants_logarithm,
)
from surefoot_operator.policy.report.time_spent import CATEGORIES

# ---- markup ----------------------------------------------------------------------------------------------------------
# Builds HTML and SVG elements whose text is always escaped. What a page shows was written by others, as names, messages
# and exceptions of programs: a string can only become text, never an element, so that none of them runs in the browser
# of whoever looks.

LONGEST_TEXT = 2000
"""Characters of one piece of foreign text: a hang's stacks would fill a page."""

_VOID = frozenset({"meta", "br"})


@dataclass(frozen=True, slots=True)
class Markup:
    """Finished markup; only `element` and constants of this package make it."""

    text: str


Child = str | Markup | None
Attribute = str | float | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Builds one element; strings are escaped, None is left out.

    Args:
        name: the element's name.
        children: text, or elements.
        attributes: `class_` is class, `stroke_width` is stroke-width; numbers have two decimals.
    """
    told = "".join(f' {_key(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(*children).text}</{name}>")


def joined(*children: Child) -> Markup:
    """Joins text and elements in order."""
    return Markup(
        "".join(one.text if isinstance(one, Markup) else _escaped(one) for one in children if one is not None)
    )


def decimal(value: float) -> str:
    """Writes at most two decimals, none that say nothing."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _escaped(text: str) -> str:
    return html.escape(plain(shorten(text, LONGEST_TEXT)), quote=True)


def _value(value: str | float) -> str:
    return html.escape(plain(value), quote=True) if isinstance(value, str) else decimal(value)


def _key(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


# ---- charts ----------------------------------------------------------------------------------------------------------

_TOP, _RIGHT, _BOTTOM, _LEFT = 44.0, 12.0, 36.0, 52.0
_FLOOR = 24.0
_BAND_LABEL_PIXELS = 58.0
"""A narrower band has no room for its name."""
_MARK_GAP_PIXELS = 4.0
_MOST_SAID = 5
"""Of marks that share one."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    `kind` is its class: kept, discarded, undisturbed, stall.
    """

    kind: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class XBand:
    """A part of the x axis with a name, as an epoch."""

    begin: float
    end: float
    label: str


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line with a number in a shape.

    A square is a planned change, a circle a failure.
    """

    x: float
    label: str
    said: str
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows.

    `title` and `description` are for who cannot see it.
    """

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    bands: tuple[XBand, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """A drawing's size in pixels.

    One for each width of screen: text keeps its size on a phone.
    """

    kind: str
    width: float
    height: float


FRAMES = (ChartFrame("wide", 960, 360), ChartFrame("narrow", 360, 280))


@dataclass(frozen=True, slots=True)
class Axes:
    """Maps values to pixels of one frame."""

    frame: ChartFrame
    x_from: float
    x_to: float
    y_from: float
    y_to: float
    logarithmic: bool
    floor: float = 0.0
    """Pixels beneath the lowest value, where bands have their names."""

    def x(self, value: float) -> float:
        room = self.frame.width - _LEFT - _RIGHT
        return _LEFT + room * (value - self.x_from) / ((self.x_to - self.x_from) or 1.0)

    def y(self, value: float) -> float:
        room = self.frame.height - _TOP - _BOTTOM - self.floor
        low, high, at = (math.log10(v) if self.logarithmic else v for v in (self.y_from, self.y_to, value))
        return self.frame.height - _BOTTOM - self.floor - room * (at - low) / ((high - low) or 1.0)


def drawn_chart(chart: Chart) -> Markup:
    """Draws a chart for wide and for narrow screens.

    The page's style shows one of them.
    """
    return joined(*(_drawn(chart, frame) for frame in FRAMES))


def axes_of(chart: Chart, frame: ChartFrame) -> Axes:
    """Chooses both ranges by the data; a flat curve gets some room."""
    xs = [point[0] for curve in chart.curves for point in curve.points]
    ys = [point[1] for curve in chart.curves for point in curve.points]
    x_from, x_to = min(xs, default=0.0), max(xs, default=1.0)
    logarithmic = not chart.from_zero and wants_logarithm(ys)
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if chart.from_zero:
        low = min(0.0, low)
    if high == low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low if chart.from_zero else low - spread), high + spread
    elif not logarithmic:
        high += (high - low) * 0.03
    return Axes(
        frame, x_from, x_to if x_to > x_from else x_from + 1, low, high, logarithmic, _FLOOR if chart.bands else 0.0
    )


def _drawn(chart: Chart, frame: ChartFrame) -> Markup:
    axes = axes_of(chart, frame)
    ids = f"{chart.name}-{frame.kind}"
    return element(
        "svg",
        element("title", chart.title, id=f"{ids}-title"),
        element("desc", chart.description, id=f"{ids}-desc"),
        _bands(chart, axes),
        _grid(chart, axes),
        *(_path(curve, axes) for curve in chart.curves),
        _marks(chart, axes),
        class_=f"chart {frame.kind}",
        viewBox=f"0 0 {frame.width:g} {frame.height:g}",
        role="img",
        aria_labelledby=f"{ids}-title {ids}-desc",
    )


def _bands(chart: Chart, axes: Axes) -> Markup:
    top, bottom = _TOP, axes.frame.height - _BOTTOM
    found: list[Markup] = []
    for place, band in enumerate(chart.bands):
        begin, end = axes.x(max(band.begin, axes.x_from)), axes.x(min(band.end, axes.x_to))
        if end <= begin:
            continue
        shade = "band odd" if place % 2 else "band"
        found.append(element("rect", class_=shade, x=begin, y=top, width=end - begin, height=bottom - top))
        if end - begin >= _BAND_LABEL_PIXELS:
            label = band.label if end - begin >= 2 * _BAND_LABEL_PIXELS else band.label.split(",")[0]
            found.append(element("text", label, class_="band-label", x=(begin + end) / 2, y=bottom - 8))
    return joined(*found)


def _grid(chart: Chart, axes: Axes) -> Markup:
    frame = axes.frame
    room = frame.width - _LEFT - _RIGHT
    most = max(2, min(10, int(room / (8 * len(f"{axes.x_to:.0f}") + 24))))
    pick = logarithmic_ticks if axes.logarithmic else ticks
    rows = [
        joined(
            element("line", class_="grid", x1=_LEFT, x2=frame.width - _RIGHT, y1=axes.y(value), y2=axes.y(value)),
            element("text", f"{value:.4g}", class_="tick end", x=_LEFT - 6, y=axes.y(value) + 4),
        )
        for value in pick(axes.y_from, axes.y_to, 6)
    ]
    columns = [
        element(
            "text",
            f"{value:.0f}",
            class_="tick end" if axes.x(value) > frame.width - 3 * _RIGHT else "tick middle",
            x=axes.x(value),
            y=frame.height - _BOTTOM + 16,
        )
        for value in ticks(axes.x_from, axes.x_to, most)
        if value == int(value)
    ]
    scale = f"{chart.y_label}, logarithmic" if axes.logarithmic else chart.y_label
    return joined(
        *rows,
        *columns,
        element("text", chart.x_label, class_="axis end", x=frame.width - _RIGHT, y=frame.height - 4),
        element("text", scale, class_="axis", x=4, y=14),
    )


def _path(curve: Curve, axes: Axes) -> Markup:
    shown = [(axes.x(x), axes.y(y)) for x, y in thinned(curve.points, int(axes.frame.width))]
    if len(shown) == 1:
        return element("circle", class_=f"dot {curve.kind}", cx=shown[0][0], cy=shown[0][1], r=3)
    line = "L".join(f"{decimal(round(x, 1))} {decimal(round(y, 1))}" for x, y in shown)
    return element("path", class_=f"curve {curve.kind}", d=f"M{line}") if shown else Markup("")


def _marks(chart: Chart, axes: Axes) -> Markup:
    """Marks that would lie on each other share one, which names the first and the last."""
    groups: list[tuple[float, list[ChartMark]]] = []
    for mark in sorted(chart.marks, key=lambda one: one.x):
        at, marks = axes.x(min(max(mark.x, axes.x_from), axes.x_to)), [mark]
        # a label that grows may reach the one before it
        while (
            groups and _left(at, marks, axes) < _left(*groups[-1], axes) + _mark_width(groups[-1][1]) + _MARK_GAP_PIXELS
        ):
            before = groups.pop()
            before[1].extend(marks)
            at, marks = before
        groups.append((at, marks))
    return joined(*(_mark(at, marks, axes) for at, marks in groups))


def _left(at: float, marks: Sequence[ChartMark], axes: Axes) -> float:
    """Where a label begins; one at the edge is moved inwards."""
    width = _mark_width(marks)
    return min(max(at - width / 2, 0.0), axes.frame.width - width)


def _mark_width(marks: Sequence[ChartMark]) -> float:
    return max(19.0, 10.0 + 7.5 * len(_mark_label(marks)))


def _mark_label(marks: Sequence[ChartMark]) -> str:
    return marks[0].label if len(marks) == 1 else f"{marks[0].label}–{marks[-1].label}"


def _mark(at: float, marks: Sequence[ChartMark], axes: Axes) -> Markup:
    planned = all(mark.planned for mark in marks)
    width = _mark_width(marks)
    left = _left(at, marks, axes)
    more = f"; and {len(marks) - _MOST_SAID} more" if len(marks) > _MOST_SAID else ""
    return element(
        "g",
        element("title", "; ".join(mark.said for mark in marks[:_MOST_SAID]) + more),
        element("line", x1=at, x2=at, y1=38, y2=axes.frame.height - _BOTTOM),
        element("rect", x=left, y=19, width=width, height=19, rx=2 if planned else 9.5),
        element("text", _mark_label(marks), x=left + width / 2, y=33),
        class_="mark planned" if planned else "mark",
    )


# ---- phase bars ------------------------------------------------------------------------------------------------------
# Draws where each recovery's seconds went, as bars on one scale. A bar alone shows shares; on one scale the slow
# recovery is seen among many.

_WIDTH, _HEIGHT = 1000.0, 26.0
_NUMBERED_FROM = 40.0

COLOURS = {"detected": 1, "claimed": 2, "stopped": 3, "sealed": 4, "assigned": 5, "first_step": 6}
"""Number and colour of each phase, the same in every bar and table."""


def durations(phases: Sequence[PhaseFacts]) -> list[tuple[PhaseFacts, float]]:
    """Pairs each phase with the seconds since the one before it."""
    found, before = [], 0.0
    for one in phases:
        found.append((one, max(0.0, one.at_seconds - before)))
        before = max(before, one.at_seconds)
    return found


def phase_bar(phases: Sequence[PhaseFacts], longest_seconds: float, title: str) -> Markup:
    """Draws one recovery; `longest_seconds` has the whole width."""
    told = [(COLOURS[one.name], seconds, one.said) for one, seconds in durations(phases)]
    return _bar(told, longest_seconds, title)


def seconds_bar(seconds: Mapping[str, float], title: str) -> Markup:
    """Draws a job's whole time, divided by category."""
    told = [(category_colour(name), spent, name) for name, spent in seconds.items()]
    return _bar(told, sum(seconds.values()), title)


def category_colour(category: str) -> int:
    """The number of a category's colour, in bar and table."""
    return CATEGORIES.index(category) + 1 if category in CATEGORIES else len(CATEGORIES)


def _bar(told: Sequence[tuple[int, float, str]], longest_seconds: float, title: str) -> Markup:
    parts, at = [], 0.0
    for number, seconds, said in told:
        width = _WIDTH * seconds / longest_seconds if longest_seconds > 0 else 0.0
        if width > 0:
            parts.append(
                element(
                    "g",
                    element("title", f"{number}: {said}, {seconds:.3f} s"),
                    element(
                        "rect",
                        class_=f"c{number}",
                        x=f"{at / 10:.2f}%",
                        y=1,
                        width=f"{width / 10:.2f}%",
                        height=_HEIGHT - 2,
                    ),
                    element("text", str(number), x=f"{(at + width / 2) / 10:.2f}%", y=18)
                    if width >= _NUMBERED_FROM
                    else None,
                )
            )
        at += width
    return element("svg", element("title", title), *parts, class_="bar", role="img", aria_label=title)
