"""Defines the reason that an epoch cannot continue.

Pure; made by `failure_detection` and `standstill`, weighed by `restart_budget`.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint


@dataclass(frozen=True, slots=True)
class Loss:
    """The reason why an epoch cannot continue, and who caused it.

    `at_seconds`: the first sign. Worker, node and rank only where the cause is proved.
    """

    kind: str
    reason: str
    at_seconds: float
    worker: int | None = None
    node: str | None = None
    application: bool = False
    exit_code: int | None = None
    bad: Checkpoint | None = None
    witnessed: bool = True
    """False: only a broken line or silence says so."""
    unexplained: bool = False
    """Nothing proves that the program did it: its cause was not seen, or it may be its node's. Where it comes again and again
    without a new step, it counts."""
    announced: bool = False
    """Somebody wanted the worker to end and said so: nothing that a budget counts."""
    rank: int | None = None
    detail: str = ""
    """More lines for people."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """Nothing is lost yet; look again at this Unix time."""

    at_seconds: float
