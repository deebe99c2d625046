"""`python -m kind verdict`: whether build/kind.json has every row of a whole run, each as it must be; what lacks is named.

A run that ended early, a test that was skipped and a row of last week once read the same as a run that was whole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images import build

TOLERANCE = 1e-9
SCENARIOS = (
    "installed, applied, complete",
    "node crashed, no spare",
    "node partitioned, its trainers run on",
    "node frozen and thawed",
    "kubelet stopped",
    "node drained, fixed size, no place",
    "node drained, elastic, at its minimum",
    "leading operator killed while all is well",
    "node to be left",
    "chart upgraded, memory tier included",
    "pod deleted, local socket switched on",
    "chart upgraded and rolled back, memory tier included",
)
Json = Mapping[str, Any]


def tests() -> list[str]:
    """Every test of this folder, as its row is named."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(f"{path.stem}.{node.name}")
    return found


def lacking(told: Json, owed_tests: list[str]) -> list[str]:
    """A sentence for each row that is not there or not as it must be. Pure."""
    walk = told.get("first_hour", {}).get("commands", {})
    found = [] if walk.get("to_its_end") else ["the first hour did not run to its end"]
    scenarios = told.get("scenarios", {})
    for name in SCENARIOS:
        found += [f"scenario {name!r}: {why}" for why in _scenario(scenarios.get(name))]
    rows = told.get("tests", {})
    for name in owed_tests:
        outcome = rows.get(name, {}).get("outcome", "not run")
        found += [] if outcome == "passed" else [f"test {name}: {outcome}"]
    return found


def _scenario(row: Json | None) -> list[str]:
    if row is None:
        return ["not run"]
    result = row.get("result")
    if result is None:
        return ["not compared with the undisturbed job"]
    found = []
    if (result["samples_lost"], result["samples_repeated"]) != (0, 0):
        found.append(f"{result['samples_lost']} samples lost, {result['samples_repeated']} repeated")
    for what in ("loss", "parameter"):
        difference = result[f"max_{what}_difference"]
        if difference is None:
            found.append(f"no {what} was compared")
        elif difference > TOLERANCE:
            found.append(f"a {what} differs by {difference:g}")
    return found


def table(told: Json) -> list[str]:
    """What a reader wants of the run: a line each. Pure."""
    lines = []
    for name, seconds in told.get("first_hour", {}).get("commands", {}).get("reached_seconds", {}).items():
        lines.append(f"{seconds:8.1f} s  first hour: {name}")
    for name, row in told.get("scenarios", {}).items():
        seconds = {key: row[f"{key}_seconds"] for key in ("detected", "first_step", "whole_again")}
        said = ", ".join(
            f"{key.replace('_', ' ')} {value:.1f} s" for key, value in seconds.items() if value is not None
        )
        worlds = " → ".join(map(str, row["worlds"]))
        lines.append(f"{worlds:>10}  {name}: {said or 'nothing felt'}, {row['steps_lost'] or 0} steps lost")
    for name, row in told.get("tests", {}).items():
        lines.append(f"{row['seconds']:8.1f} s  {row['outcome']}: {re.sub('_', ' ', name.partition('.test_')[2])}")
    return lines


def report() -> Path:
    """Where kind's figures are."""
    return build.PROJECT / "build" / "kind.json"
