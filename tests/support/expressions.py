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

QUIET = {
    "Saves that failed": "every save was taken",
    "Saves that were skipped": "every due save found a slot",
    "Saves under way": "a save of some kilobytes drains between two scrapes",
    "Restored bytes by source: read again: {{reason}}": "no copy was bad",
    "Steps lost and restarts: {{job}} steps": "the newest checkpoint may be that of the last step",
    "Evictions and failed calls: evicted keys": "a holder never evicts",
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

    def __str__(self) -> str:
        return f"{self.where}: {self.promql}"


def of_dashboards() -> list[Expression]:
    found = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        found += [Expression(a["name"], _filled(a["expr"])) for a in dashboard["annotations"]["list"] if "expr" in a]
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                where = f"{panel['title']}: {target['legendFormat']}"
                rests = where in QUIET or panel["title"] in QUIET
                found.append(Expression(where, _filled(target["expr"]), rests))
    return found


def of_alerts() -> list[Expression]:
    """What each alert compares with a bound: both sides of an `and`, for that must be there while all is well."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    parts = [(rule["alert"], part) for rule in rules for part in re.split(r" and on \([^)]*\) ", rule["expr"])]
    return [Expression(alert, _compared(part), may_rest=True) for alert, part in parts]


def lacking(prometheus: Prometheus) -> dict[str, str]:
    """Expressions that do not show what they should, and what they show instead."""
    found = {}
    for expression in (*of_dashboards(), *of_alerts()):
        numbers = _numbers(prometheus.series(expression.promql))
        if not numbers:
            found[str(expression)] = "no numbers"
        elif not expression.may_rest and not any(numbers):
            found[str(expression)] = "nothing but zeros"
    return found


def _filled(expression: str) -> str:
    for variable, value in {"$__rate_interval": "10s", "$__range": "1h", "$namespace": ".*", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def _compared(expression: str) -> str:
    left = re.fullmatch(r"(.+) (?:>|<|==) [0-9.]+", expression)
    assert left is not None, f"an alert compares something with a number: {expression}"
    return left.group(1)


def _numbers(series: list[dict[str, Any]]) -> list[float]:
    return [number for one in series for _, text in one["values"] if math.isfinite(number := float(text))]
