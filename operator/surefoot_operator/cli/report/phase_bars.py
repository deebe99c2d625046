"""Draws where each recovery's seconds went, as bars on one scale.

Pure. A bar alone shows shares; on one scale the slow recovery is seen among many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot_operator.cli.report.markup import Markup, element
from surefoot_operator.cli.report.report_facts import PhaseFacts
from surefoot_operator.policy.report.time_spent import CATEGORIES

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
