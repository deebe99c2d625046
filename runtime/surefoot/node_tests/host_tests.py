"""Defines what one trial of a part of the node finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["well", "fails", "unknown"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One part of the node that was tried.

    `fails`: it did what no well part does, as a wrong result. unknown: it could not be tried, which proves nothing.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    """CamelCase and stable, where it fails."""
    text: str = ""
    """A sentence for people, where it is not well."""
    rate: float = 0.0
    """How fast it was, in units of `unit` a second."""
    unit: str = ""
