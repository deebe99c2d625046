"""Every PromQL of the chart's dashboards and alerts, and what each must show of a run with a failure in it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.servers.prometheus import Prometheus

FILES = Path(__file__).parents[2] / "charts" / "surefoot" / "files"
ALERTS = FILES / "alerts.yaml"

VARIABLES = {"$__rate_interval": "10s", "$__range": "1h", "$namespace": ".*", "$job": ".*"}

QUIET = {
    "Saves that failed": "every save was taken",
    "Saves that were skipped": "every due save found a slot",
    "Recovery by phase: committed": "the membership is committed as soon as memory is fenced",
    "Saves under way": "a save of some kilobytes drains between two scrapes",
    "Restored bytes by source: read again: {{reason}}": "no copy was bad",
    "Steps lost and restarts: {{job}} steps": "the newest checkpoint may be that of the last step",
    "Jobs in danger": "the job that runs is protected from its first checkpoint on",
    "Loss: {{job}} not finite": "every loss was a number",
    "Loss: {{job}} spikes": "every loss was near those before",
    "Loss: {{job}} rollbacks": "nothing was to be gone back from",
    "Stragglers: {{job}}": "no rank was slower than its peers",
    "Evictions and failed calls: evicted keys": "a memory server never evicts",
    "Evictions and failed calls: {{call}}": "calls to the killed node fail only if one was under way",
    "What failed": "nothing of it did",
}
"""Expressions that may be zero all the time, and why: a panel's title, or title and legend."""


@dataclass(frozen=True)
class Expression:
    """`where` it stands, and what a run of seconds makes of Grafana's variables in it."""

    where: str
    promql: str
    may_rest: bool = False
    written: str = ""
    """As the file has it."""
    legend: str = ""
    board: str = ""
    """The dashboard's title; empty: it is an alert's."""

    def __str__(self) -> str:
        return f"{self.where}: {self.promql}"


def of_dashboards() -> list[Expression]:
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        title = dashboard["title"]
        marks = [mark for mark in dashboard["annotations"].get("list", ()) if "expr" in mark]
        found += [
            Expression(mark["name"], filled(mark["expr"]), False, mark["expr"], mark["titleFormat"], title)
            for mark in marks
        ]
        for panel in panels_of(dashboard):
            for target in panel.get("targets", ()):
                legend = target["legendFormat"]
                where = f"{panel['title']}: {legend}"
                rests = where in QUIET or panel["title"] in QUIET
                found.append(Expression(where, filled(target["expr"]), rests, target["expr"], legend, title))
    return found


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row and panel, also those of closed rows."""
    return [one for panel in dashboard["panels"] for one in (panel, *(panel.get("panels") or ()))]


def of_choices() -> list[Expression]:
    """What fills the lists of names above the panels: `label_values(selector, label)`, Grafana's own, as a query."""
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for choice in dashboard["templating"]["list"]:
            if choice["type"] == "query":
                parts = re.fullmatch(r"label_values\((.+), (\w+)\)", choice["query"])
                assert parts is not None, choice["query"]
                asked = f"group by ({parts[2]}) ({filled(parts[1])})"
                where = f"choice of {choice['name']}"
                found.append(Expression(where, asked, written=choice["query"], board=dashboard["title"]))
    return found


def of_alerts() -> list[Expression]:
    """What each alert compares with a bound: both sides of an `and`, for that must be there while all is well."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    parts = [(rule["alert"], part) for rule in rules for part in re.split(r" and on \([^)]*\) ", rule["expr"])]
    return [Expression(alert, _compared(part), True, part) for alert, part in parts]


def lacking(prometheus: Prometheus) -> dict[str, str]:
    """Expressions that do not show what they should, and what they show instead."""
    found = {}
    for expression in (*of_dashboards(), *of_choices(), *of_alerts()):
        if why := wrong(expression, prometheus.series(expression.promql)):
            found[str(expression)] = why
    return found


def wrong(expression: Expression, series: list[dict[str, Any]]) -> str:
    """What it does not show and should; empty: nothing."""
    found = numbers(series)
    if not found:
        return "no numbers"
    if not expression.may_rest and not any(found):
        return "nothing but zeros"
    labels = set(re.findall(r"\{\{(\w+)\}\}", expression.legend))
    lacking = sorted({label for one in series for label in labels - set(one["metric"])})
    return f"its legend names labels that it has not: {', '.join(lacking)}" if lacking else ""


def filled(expression: str) -> str:
    """As a run of a minute is asked."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def _compared(expression: str) -> str:
    left = re.fullmatch(r"(.+) (?:>|<|==) [0-9.]+", expression)
    assert left is not None, f"an alert compares something with a number: {expression}"
    return left.group(1)


def numbers(series: list[dict[str, Any]]) -> list[float]:
    return [number for one in series for _, text in one["values"] if math.isfinite(number := float(text))]
