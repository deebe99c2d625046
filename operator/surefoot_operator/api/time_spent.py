"""Reads the account of a job's seconds that its status has. Pure; `policy.report.time_spent` keeps that account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from surefoot_operator.api.status import TimeSpent

CATEGORIES = tuple(
    f.name.removesuffix("_seconds") for f in fields(TimeSpent) if f.name not in ("category", "since_seconds")
)

DIGITS = 6
"""Digits to which seconds are rounded, so that a status read back from JSON equals the one that was written."""


def seconds_spent(spent: TimeSpent, now: float) -> dict[str, float]:
    """Returns the seconds of each category as of now, the open category included."""
    if spent.category:
        spent = add_seconds(spent, None, spent.category, now - spent.since_seconds)
    return {name: getattr(spent, f"{name}_seconds") for name in CATEGORIES}


def goodput(seconds: Mapping[str, float]) -> float | None:
    """Returns the ratio of training that counts to all time except suspension; None at the start.

    Suspension does not count, because a user asked for it.
    """
    counted_seconds = sum(seconds.values()) - seconds["suspended"]
    return seconds["training"] / counted_seconds if counted_seconds > 0 else None


def add_seconds(spent: TimeSpent, source: str | None, target: str, seconds: float) -> TimeSpent:
    """Adds `seconds` to the category `target` and takes them from the category `source`, unless that is None."""
    amount = round(max(0.0, seconds), DIGITS)
    changes = {f"{target}_seconds": round(getattr(spent, f"{target}_seconds") + amount, DIGITS)}
    if source is not None:
        changes[f"{source}_seconds"] = round(getattr(spent, f"{source}_seconds") - amount, DIGITS)
    return replace(spent, **changes)
