"""Defines what the doctor finds, and renders it.

Pure. A check that could not be made is `unknown` and says why: "ok" would be a guess, and a fault would send people to mend what works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "fault", "unknown"]
STATES: tuple[State, ...] = ("ok", "warning", "fault", "unknown")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it."""

    check: str
    state: State
    said: str
    remedy: str = ""


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """Renders findings with their remedies, and counts them."""
    width = max((len(one.check) for one in found), default=0)
    lines = []
    for one in found:
        lines.append(f"{one.state:<8} {one.check:<{width}}   {one.said}")
        if one.remedy:
            lines.append(f"{'':<8} {'':<{width}}   -> {one.remedy}")
    counts = {state: sum(one.state == state for one in found) for state in STATES}
    return [*lines, "", ", ".join(f"{count} {state}" for state, count in counts.items() if count)]


def has_fault(found: Sequence[Finding]) -> bool:
    return any(one.state == "fault" for one in found)
