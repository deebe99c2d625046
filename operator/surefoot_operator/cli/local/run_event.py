"""Defines an event of a job, as `surefoot local` prints it and the commands for one job show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event that the operator recorded."""

    at_seconds: float
    reason: str
    message: str
    warning: bool
