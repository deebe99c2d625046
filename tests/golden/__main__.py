"""`python -m golden record|check` (PYTHONPATH=tests): compares outputs with recorded copies."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from golden import command_line, records, rendered
from golden.schemas import text
from golden.traces import SEEDS, trace_lines

RECORDED = Path(__file__).with_name("recorded")
HINT = (
    "If the change is on purpose, record anew and list it in the commit's message:"
    " PYTHONPATH=tests python -m golden record [--traces] [--chart]"
)
APART = {"traces.txt", "chart.txt"}
"""Copies that are made only where an option asks for them."""
_ENVIRONMENT = {"COLUMNS": "120", "LINES": "50", "TZ": "UTC", "NO_COLOR": "1", "TERM": "dumb", "LC_ALL": "C.UTF-8"}
"""Fixed, because outputs depend on them."""


def make_copies(traces: bool, chart: bool) -> dict[str, str]:
    """Returns the name and the text of each copy as the project is now."""
    copies = {**records.copies(), **command_line.copies(), **rendered.copies()}
    if traces:
        copies["traces.txt"] = text(trace_lines(range(SEEDS)))
    if chart:
        copies["chart.txt"] = rendered.chart()
    return copies


def differences(folder: Path, copies: Mapping[str, str]) -> list[str]:
    """Returns a unified diff for each copy that differs from its record, or that only one side has."""
    names = {path.name for path in folder.iterdir()} - APART | set(copies)
    diffs = []
    for name in sorted(names):
        path = folder / name
        old, new = path.read_text(encoding="utf-8") if path.exists() else "", copies.get(name, "")
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"recorded/{name}", f"now/{name}", lineterm="", n=1
            )
            diffs.append("\n".join(lines))
    return diffs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="golden", description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("--traces", action="store_true", help="the simulator's first 60 seeds too: minutes")
    parser.add_argument("--chart", action="store_true", help="the rendered chart too: needs helm, or builds it")
    args = parser.parse_args(arguments)
    os.environ.update(_ENVIRONMENT)
    time.tzset()
    copies = make_copies(args.traces, args.chart)
    if args.action == "record":
        for name, text in copies.items():
            (RECORDED / name).write_text(text, encoding="utf-8")
        for path in RECORDED.iterdir():
            if path.name not in APART | set(copies):
                path.unlink()
        print(f"{len(copies)} copies recorded in {RECORDED}")
        return 0
    diffs = differences(RECORDED, copies)
    if diffs:
        print("\n\n".join(diffs))
        print(f"\n{len(diffs)} of {len(copies)} copies differ from what was recorded. {HINT}")
        return 1
    print(f"{len(copies)} copies are as they were recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
