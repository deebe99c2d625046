"""What each expression returned of a run: how much, an example, or why nothing. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from support.expressions import QUIET, Expression, numbers, wrong

Reading = dict[str, Any]
Series = list[dict[str, Any]]

_METRIC = re.compile(r"surefoot_\w+")
_PARTS = ("_bucket", "_sum", "_count", "_created")


def of(expression: Expression, series: Series) -> Reading:
    """One expression; `lacks` says what it should have shown."""
    found = numbers(series)
    rests = not any(found)
    reading: Reading = {
        **({"dashboard": expression.board} if expression.board else {}),
        "where": expression.where,
        "expression": expression.written,
        "asked": expression.promql,
        "series": len(series),
        "samples": len(found),
        "example": _example(series),
    }
    if lacks := wrong(expression, series):
        return {**reading, "lacks": lacks}
    return {**reading, "why_zero": _resting(expression)} if rests else reading


def of_alert(rule: Mapping[str, Any], compared: Sequence[Reading]) -> Reading:
    """One alert as the server judges it, with what it compares."""
    state = str(rule["state"])
    why = (
        {}
        if state != "inactive"
        else {"why_empty": "its condition was never true in this run; what it compares was there"}
    )
    parts = [one for one in compared if one["where"] == rule["name"]]
    return {
        "alert": rule["name"],
        "expression": rule["query"],
        "for_seconds": rule["duration"],
        "state": state,
        "health": rule["health"],
        "compares": [{name: one[name] for name in one if name != "where"} for one in parts],
        **why,
    }


def counted(found: Sequence[Reading]) -> dict[str, int]:
    """How many there are of each kind."""
    return {
        "expressions": len(found),
        "with_numbers": sum(one["samples"] > 0 for one in found),
        "only_zeros": sum("why_zero" in one for one in found),
        "lacking": sum("lacks" in one for one in found),
    }


def defects(found: Sequence[Reading], alerts: Sequence[Reading]) -> list[str]:
    """What should not be, in sentences."""
    lacking = [f"{one['where']}: {one['asked']}: {one['lacks']}" for one in found if "lacks" in one]
    unwell = [f"alert {one['alert']} is judged {one['health']}" for one in alerts if one["health"] != "ok"]
    return lacking + unwell + [f"alert {one['alert']} is {one['state']}" for one in alerts if one["state"] == "firing"]


def unused(exported: Collection[str], found: Sequence[Reading]) -> list[str]:
    """Metrics that no panel and no alert names; a histogram is one metric."""
    named = {name for one in found for name in _METRIC.findall(one["asked"])}
    left = {_family(name) for name in exported} - {_family(name) for name in named}
    return sorted(name for name in left if not name.endswith("_created"))


def _family(name: str) -> str:
    return next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), name)


def _example(series: Series) -> Reading | None:
    """The last finite number of the series that says most."""
    best: Reading | None = None
    for one in series:
        for at, text in reversed(one["values"]):
            if math.isfinite(value := float(text)):
                if best is None or abs(value) > abs(best["value"]):
                    best = {"labels": one["metric"], "value": value, "at": at}
                break
    return best


def _resting(expression: Expression) -> str:
    title = expression.where.partition(": ")[0]
    return QUIET.get(expression.where) or QUIET.get(title) or "what it compares was zero in this run"
