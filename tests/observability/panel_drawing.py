"""The panels of the dashboards as SVG: numbers, lines over time, histograms over time. Pure."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from markupsafe import Markup

from observability.boards_style import element
from surefoot_operator.cli.report.charts import logarithmic_ticks, ticks

Points = tuple[tuple[float, float], ...]

COLORS = 10
_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 52.0, 10.0, 8.0, 20.0, 180.0
_ASKED_APART_SECONDS = 1.0
"""Expressions of one panel are asked one after the other, while the run goes on."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")


@dataclass(frozen=True, slots=True)
class Line:
    legend: str
    points: Points
    bound: str = ""
    """Of a histogram's bucket: its upper one."""
    bounds: tuple[tuple[float | None, str], ...] = ()
    """Of its query, where they are not the panel's."""


@dataclass(frozen=True, slots=True)
class Span:
    """What stands over every panel: a moment, or a time."""

    begin: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    kind: str
    title: str
    about: str
    unit: str
    columns: int
    """Of 24."""
    lines: tuple[Line, ...]
    bounds: tuple[tuple[float | None, str], ...] = ()
    """From which value on which colour; the first has none."""
    is_name: bool = False
    """The legend alone is shown."""
    words: Mapping[float, tuple[str, str]] = field(default_factory=dict)
    """Value -> the word and the colour that stand for it."""
    logarithmic: bool = False
    stacking: str = "none"
    is_descending: bool = True
    """Of a table: the highest value is first."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Maps time and value to pixels of one drawing."""

    width: float
    begin: float
    end: float
    top: float
    bottom: float = 0.0
    """Above 0 on a logarithmic axis."""

    def x(self, at: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * (at - self.begin) / ((self.end - self.begin) or 1.0)

    def y(self, value: float) -> float:
        share = value / (self.top or 1.0)
        if self.bottom:
            share = math.log(max(value, self.bottom) / self.bottom) / (math.log(self.top / self.bottom) or 1.0)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def drawn_panel(panel: Panel, marks: Sequence[Span], begin: float, end: float) -> Markup:
    """One panel with its title and what it is about; drawn twice, for wide and for narrow screens."""
    drawn = _stacked(panel) if panel.kind == "timeseries" and panel.stacking != "none" else panel
    simple = {"stat": _numbers, "table": _table}
    inner = [simple[panel.kind](panel)] if panel.kind in simple else []
    if panel.kind not in simple:
        for kind, width in (("wide", panel.columns * 51.0 - 28.0), ("narrow", 340.0)):
            draw = _heat if panel.kind == "heatmap" else _lines
            inner.append(draw(drawn, marks, Plane(width, begin, end, _top(drawn), _lowest(drawn)), kind))
    return element(
        "section",
        element("h3", panel.title),
        element("p", panel.about, class_="about"),
        *inner,
        _key(panel) if panel.kind == "timeseries" else None,
        class_=f"panel {panel.kind}",
        style=f"grid-column:span {panel.columns}",
    )


def shown(value: float, unit: str) -> str:
    """A number in its panel's unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit in ("bytes", "Bps"):
        names, factor = (_BINARY, 1024.0) if unit == "bytes" else (_DECIMAL, 1000.0)
        place = min(len(names) - 1, int(math.log(abs(value), factor))) if abs(value) >= 1 else 0
        return f"{value / factor**place:.3g} {names[place]}"
    if unit == "s":
        if abs(value) < 1 and value:
            return f"{1000 * value:.3g} ms"
        return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"
    return f"{value:.0f}" if value == round(value) else f"{value:.3g}"


def color_of(value: float, bounds: Sequence[tuple[float | None, str]]) -> str:
    """The colour of the highest bound that the value reaches."""
    reached = [color for bound, color in bounds if bound is None or value >= bound]
    return reached[-1] if reached else "blue"


def buckets(lines: Sequence[Line]) -> list[tuple[str, Points]]:
    """A cumulative histogram's own counts: upper bound -> points, the lowest bucket first."""
    found: list[tuple[str, Points]] = []
    below: dict[float, float] = {}
    for line in sorted(lines, key=lambda one: float(one.bound)):
        found.append((line.bound, tuple((at, value - below.get(at, 0.0)) for at, value in line.points)))
        below = dict(line.points)
    return found


def _numbers(panel: Panel) -> Markup:
    """The last value of each series with its name, as Grafana reduces them."""
    found = []
    for line in panel.lines:
        if line.points:
            value = line.points[-1][1]
            color = color_of(value, line.bounds or panel.bounds)
            word, color = panel.words.get(value, (line.legend if panel.is_name else shown(value, panel.unit), color))
            name = None if panel.is_name else element("small", line.legend)
            found.append(element("div", word, name, class_="number", style=f"color:var(--{color})"))
    return element("div", *found, class_="numbers") if found else element("div", "none", class_="number")


def _table(panel: Panel) -> Markup:
    """A row for each job, the worst first."""
    rows = sorted(
        ((line.points[-1][1], line.legend) for line in panel.lines if line.points), reverse=panel.is_descending
    )
    cells = [
        element(
            "tr",
            element("td", job),
            element("td", shown(value, panel.unit), style=f"color:var(--{color_of(value, panel.bounds)})"),
        )
        for value, job in rows
    ]
    return element("table", *cells) if cells else element("div", "none", class_="number")


def _stacked(panel: Panel) -> Panel:
    """Each line on those before it; the highest is drawn first, so that the lower ones stay visible."""
    sums: dict[float, float] = defaultdict(float)
    totals: dict[float, float] = defaultdict(float)
    for line in panel.lines:
        for at, value in line.points:
            totals[round(at, 1)] += value
    lines = []
    for line in panel.lines:
        points = []
        for at, value in line.points:
            sums[round(at, 1)] += value
            share = (totals[round(at, 1)] or 1.0) if panel.stacking == "percent" else 1.0
            points.append((at, sums[round(at, 1)] / share))
        lines.append(replace(line, points=tuple(points)))
    return replace(panel, lines=tuple(lines), unit="percentunit" if panel.stacking == "percent" else panel.unit)


def _lines(panel: Panel, marks: Sequence[Span], plane: Plane, kind: str) -> Markup:
    is_stacked = panel.stacking != "none"
    paths = [
        element(
            "path",
            d=_path(line.points, plane, closed=is_stacked),
            class_="area" if is_stacked else "line",
            style=f"{'fill' if is_stacked else 'stroke'}:var(--s{place % COLORS})",
        )
        for place, line in enumerate(panel.lines)
    ]
    if is_stacked:
        paths.reverse()
    paths += [
        element("line", x1=_LEFT, x2=plane.width - _RIGHT, y1=y, y2=y, class_="bound", style=f"stroke:var(--{color})")
        for bound, color in panel.bounds
        if bound is not None and plane.bottom <= bound <= plane.top
        for y in (plane.y(bound),)
    ]
    rules = [_rule(value, plane, shown(value, panel.unit)) for value in _round_values(plane, panel.unit)]
    return _svg(panel, plane, kind, [*rules, *_over(marks, plane), *paths])


def _heat(panel: Panel, marks: Sequence[Span], plane: Plane, kind: str) -> Markup:
    rows = buckets(panel.lines)
    most = max((value for _, points in rows for _, value in points), default=0.0)
    height = (_HEIGHT - _TOP - _BOTTOM) / (len(rows) or 1)
    every = max(1, math.ceil(len(rows) / 6))
    parts: list[Markup] = []
    for place, (bound, points) in enumerate(rows):
        y = _HEIGHT - _BOTTOM - height * (place + 1)
        if place % every == 0 or bound == "+Inf":
            said = bound if bound == "+Inf" else shown(float(bound), panel.unit)
            parts.append(element("text", said, x=_LEFT - 6, y=y + 4, class_="end"))
        width = plane.x(points[1][0]) - plane.x(points[0][0]) if len(points) > 1 else 2.0
        parts += [
            element(
                "rect",
                x=plane.x(at),
                y=y,
                width=width,
                height=height - 0.5,
                fill_opacity=(value / most) ** 0.5,
                class_="cell",
            )
            for at, value in points
            if value > 1e-9
        ]
    return _svg(panel, plane, kind, [*_over(marks, plane), *parts], bool(most))


def _svg(panel: Panel, plane: Plane, kind: str, parts: Sequence[Markup], has_data: bool = True) -> Markup:
    middle = (_LEFT + plane.width - _RIGHT) / 2
    empty = element("text", "No data", x=middle, y=_HEIGHT / 2, class_="middle nothing")
    has = has_data and any(line.points for line in panel.lines)
    return element(
        "svg",
        *parts,
        None if has else empty,
        *_times(plane),
        viewBox=f"0 0 {plane.width:g} {_HEIGHT:g}",
        role="img",
        aria_label=f"{panel.title}: {panel.about}",
        class_=kind,
    )


def _times(plane: Plane) -> list[Markup]:
    def at(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")

    most = 3 if plane.width < 450 else 6
    moments = [plane.begin + after for after in ticks(0.0, plane.end - plane.begin, most)]
    return [
        element("text", at(moment), x=plane.x(moment), y=_HEIGHT - 5, class_="middle")
        for moment in moments
        if plane.x(moment) < plane.width - 24
    ]


def _over(marks: Sequence[Span], plane: Plane) -> list[Markup]:
    bottom = _HEIGHT - _BOTTOM
    found = []
    for mark in marks:
        x, width = plane.x(mark.begin), max(1.0, plane.x(mark.end) - plane.x(mark.begin))
        title = element("title", f"{mark.label} ({mark.kind})")
        if mark.begin == mark.end:
            found.append(element("g", title, element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="incident")))
        else:
            found.append(element("rect", title, x=x, y=_TOP, width=width, height=bottom - _TOP, class_="spell"))
    return found


def _rule(value: float, plane: Plane, said: str) -> Markup:
    y = plane.y(value)
    line = element("line", x1=_LEFT, x2=plane.width - _RIGHT, y1=y, y2=y, class_="rule")
    return element("g", line, element("text", said, x=_LEFT - 6, y=y + 4, class_="end"))


def _round_values(plane: Plane, unit: str) -> list[float]:
    """Where rules are drawn: bytes at round numbers of their binary unit."""
    top = plane.top
    if plane.bottom:
        return logarithmic_ticks(plane.bottom, top, 6)
    scale = 1024.0 ** int(math.log(top, 1024)) if unit == "bytes" and top > 1 else 1.0
    return [scale * value for value in ticks(0.0, top / scale, 4)]


def _path(points: Points, plane: Plane, closed: bool = False) -> str:
    """A line that breaks where samples are missing; `closed`: the area below it."""
    if closed and points:
        outline = [(points[0][0], plane.bottom), *points, (points[-1][0], plane.bottom)]
        return "M" + "L".join(f"{plane.x(at):.1f} {plane.y(value):.1f}" for at, value in outline) + "Z"
    gap = 1.5 * _least_step(points)
    words, last = [], -math.inf
    for at, value in points:
        words.append(f"{'M' if at - last > gap else 'L'}{plane.x(at):.1f} {plane.y(value):.1f}")
        last = at
    return " ".join(words)


def _least_step(points: Points) -> float:
    return min((later[0] - sooner[0] for sooner, later in itertools.pairwise(points)), default=0.0)


def _top(panel: Panel) -> float:
    most = max((value for line in panel.lines for _, value in line.points), default=0.0)
    return most * 1.05 if most > 0 else 1.0


def _lowest(panel: Panel) -> float:
    """Where a logarithmic axis begins; 0: the axis is linear."""
    positive = [value for line in panel.lines for _, value in line.points if value > 0]
    return min(positive, default=0.0) * 0.9 if panel.logarithmic else 0.0


def _key(panel: Panel) -> Markup:
    newest = max((line.points[-1][0] for line in panel.lines if line.points), default=0.0)

    def last(line: Line) -> str:
        if not line.points:
            return "no value"
        over = newest - line.points[-1][0] > _ASKED_APART_SECONDS
        return "ended" if over else shown(line.points[-1][1], panel.unit)

    return element(
        "ul",
        *(
            element(
                "li",
                element("i", style=f"background:var(--s{place % COLORS})"),
                f"{line.legend} ",
                element("b", last(line)),
            )
            for place, line in enumerate(panel.lines)
            if not line.points or any(value for _, value in line.points)
        ),
        class_="key",
    )
