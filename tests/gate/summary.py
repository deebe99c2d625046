"""Reads what the stages' JUnit files report, and measures how fast the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

_TURNS = 10_000_000
_REASON_CHARACTERS = 300


def counts(files: Iterable[Path]) -> tuple[int, int, int]:
    """Returns how many tests passed, failed and were skipped; a file that does not exist is skipped."""
    total = failed = skipped = 0
    for file in files:
        if not file.is_file():
            continue
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            total += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def failures(file: Path) -> list[str]:
    """Returns a line for each test that failed: its name, and the first line of what it failed with."""
    if not file.is_file():
        return []
    lines = []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        for outcome in (*case.iter("failure"), *case.iter("error")):
            reason = (outcome.get("message") or "").strip().splitlines() or ["no message"]
            lines.append(f"{case.get('classname')}::{case.get('name')}: {reason[0][:_REASON_CHARACTERS]}")
    return lines


def busy_seconds() -> float | None:
    """Returns the CPU seconds that all processes of this machine have used since it started; None where /proc lacks them.

    A stage's own figure lacks the CPU time of daemons that work for it (containers, API servers) and of detached processes.
    """
    try:
        user, nice, system, _idle, _wait, interrupts, soft_interrupts = map(
            int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def spin_seconds() -> float:
    """Returns the CPU time of a loop of ten million turns: the measure by which deadlines are scaled to this machine."""
    began = time.process_time()
    turns = 0
    while turns < _TURNS:
        turns += 1
    return time.process_time() - began
