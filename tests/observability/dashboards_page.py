"""The dashboards' JSON with a run's data, drawn as one HTML page by a program that is not Grafana.

`drawn_boards` asks Prometheus; `boards_page` is pure. What a panel shows (kind, size, unit, thresholds, legend) is read from
the JSON that the chart ships; how it looks is this page's own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from observability.boards_style import STYLE, element
from observability.panel_drawing import Line, Panel, Span, drawn_panel
from support.expressions import FILES, filled
from support.servers.prometheus import Prometheus

COLUMNS = 24
"""Of Grafana's grid."""
MOST_POINTS = 240
BEFORE_SECONDS = 2.0
"""What is shown before the first step."""
NOT_GRAFANA = (
    "This page is not Grafana. It is drawn from the JSON of the dashboards that the chart ships and from what a Prometheus"
    " returned for each of their expressions, after one run of surefoot local in which a node was killed and came back. Lines break where a scrape took longer than 200 ms."
)


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: rows and panels in their order, each row a title alone."""

    title: str
    about: str
    parts: tuple[Panel | str, ...]
    """Rows and panels that are open, a row by its title."""
    marks: tuple[Span, ...]
    closed: tuple[tuple[str, tuple[Panel, ...]], ...] = ()
    """Closed rows with their panels."""


@dataclass(frozen=True, slots=True)
class Boards:
    begin: float
    end: float
    boards: tuple[Board, ...]


def drawn_boards(prometheus: Prometheus) -> Boards:
    """Asks every panel's expressions over the whole run."""
    begin, end = _first_step(prometheus) - BEFORE_SECONDS, prometheus.now()
    step = max(0.2, (end - begin) / MOST_POINTS)
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        body = json.loads(path.read_text(encoding="utf-8"))
        rows = [panel for panel in body["panels"] if panel.get("collapsed")]
        parts = tuple(
            str(panel["title"]) if panel["type"] == "row" else _panel(panel, prometheus, begin, step)
            for panel in body["panels"]
            if not panel.get("collapsed")
        )
        closed = tuple(
            (row["title"], tuple(_panel(panel, prometheus, begin, step) for panel in row["panels"])) for row in rows
        )
        marks = tuple(
            span for mark in body["annotations"].get("list", ()) for span in _spans(mark, prometheus, begin, step)
        )
        found.append(Board(body["title"], body.get("description", ""), parts, marks, closed))
    return Boards(begin, end, tuple(found))


def boards_page(boards: Boards) -> str:
    """The whole page: no script, nothing asked of a server."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", "Dashboards over a run with a failure"),
        element("style", STYLE),
    )
    sections = [part for board in boards.boards for part in _board(board, boards.begin, boards.end)]
    body = element("body", element("main", element("p", NOT_GRAFANA, class_="notice"), *sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _board(board: Board, begin: float, end: float) -> list[Markup]:
    marks = "; ".join(sorted({f"{mark.label} ({mark.kind})" for mark in board.marks}))
    about = f"{board.about} Marked: {marks}." if marks else board.about
    parts: list[Markup] = [element("h1", board.title), element("p", about)]
    grid: list[Markup] = []
    for part in board.parts:
        if isinstance(part, str):
            grid.append(element("h2", part))
        else:
            grid.append(drawn_panel(part, board.marks, begin, end))
    rows = [
        element(
            "details",
            element("summary", f"{title} ({len(panels)} panels)"),
            element("div", *(drawn_panel(panel, board.marks, begin, end) for panel in panels), class_="grid"),
        )
        for title, panels in board.closed
    ]
    return [*parts, element("div", *grid, class_="grid"), *rows]


def _panel(panel: dict[str, Any], prometheus: Prometheus, begin: float, step: float) -> Panel:
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    y_axis = panel.get("options", {}).get("yAxis", {})
    custom = defaults.get("custom", {})
    bounds = _bounds(defaults.get("thresholds", {}).get("steps", []))
    own = {
        override["matcher"]["options"]: override["properties"][0]["value"]["steps"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        if override["properties"][0]["id"] == "thresholds"
    }
    lines = tuple(
        Line(
            legend(target["legendFormat"], one["metric"]),
            _points(one, begin),
            one["metric"].get("le", ""),
            _bounds(own.get(target["refId"], [])) or bounds,
        )
        for target in panel["targets"]
        for one in _asked(target, prometheus, step)
    )
    return Panel(
        kind=panel["type"],
        title=panel["title"],
        about=panel.get("description", ""),
        unit=defaults.get("unit") or y_axis.get("unit") or "none",
        columns=panel["gridPos"]["w"],
        lines=lines,
        bounds=bounds,
        is_name=panel.get("options", {}).get("textMode") == "name",
        words={
            float(value): (result["text"], result["color"])
            for mapping in defaults.get("mappings", ())
            for value, result in mapping["options"].items()
        },
        logarithmic=custom.get("scaleDistribution", {}).get("type") == "log",
        stacking=custom.get("stacking", {}).get("mode", "none"),
        is_descending=next((sort["desc"] for sort in panel.get("options", {}).get("sortBy", ())), True),
    )


def _bounds(steps: list[dict[str, Any]]) -> tuple[tuple[float | None, str], ...]:
    return tuple((step["value"], step["color"]) for step in steps)


def _asked(target: dict[str, Any], prometheus: Prometheus, step: float) -> list[dict[str, Any]]:
    expression = str(filled(target["expr"]))
    found: list[dict[str, Any]] = (
        prometheus.latest(expression) if target.get("instant") else prometheus.series(expression, step)
    )
    return found


def _first_step(prometheus: Prometheus) -> float:
    return min(float(one["values"][0][0]) for one in prometheus.series("surefoot_step > 0"))


def _spans(mark: dict[str, Any], prometheus: Prometheus, begin: float, step: float) -> list[Span]:
    """Moments whose time is the value in milliseconds; else from the first sample to the last of each run of samples."""
    if "expr" not in mark:
        return []
    found: list[Span] = []
    for one in prometheus.series(filled(mark["expr"]), step):
        label = legend(mark["titleFormat"], one["metric"])
        points = _points(one, begin)
        if not points:
            continue
        if mark["useValueForTime"]:
            found += [Span(value / 1000, value / 1000, label, mark["name"]) for value in sorted({v for _, v in points})]
            continue
        first = last = points[0][0]
        for at, _ in points[1:]:
            if at - last > 1.5 * step:
                found.append(Span(first, last, label, mark["name"]))
                first = at
            last = at
        found.append(Span(first, last, label, mark["name"]))
    return found


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Grafana's own braces filled; a label that is not there becomes nothing, as there."""
    for name, value in labels.items():
        pattern = pattern.replace("{{" + name + "}}", value)
    return pattern


def _points(series: dict[str, Any], begin: float) -> tuple[tuple[float, float], ...]:
    found = ((float(at), float(text)) for at, text in series["values"])
    return tuple((at, value) for at, value in found if at >= begin and math.isfinite(value))
