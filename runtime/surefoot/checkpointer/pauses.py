"""Announces that a script makes no step for a while.

Used by `checkpointer`. An evaluation of minutes looks like a hang to whoever counts steps alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from surefoot.checkpointer.refusals import refuse_odd_pause
from surefoot.ipc.save_backend import SaveBackend
from surefoot.ipc.trainer_messages import Pausing

LONGEST_WORD = 64


@dataclass(slots=True)
class Spent:
    """How long the pause took, known at its end."""

    seconds: float = 0.0


@contextmanager
def announced(link: SaveBackend, what: str, at_most_seconds: float | None) -> Iterator[Spent]:
    """Tells the begin and the end of a pause, however it ends.

    Raises:
        ConfigurationError: `what` is empty, or the time not above zero.
    """
    refuse_odd_pause(what, at_most_seconds)
    began, spent = time.perf_counter(), Spent()
    link.pausing(Pausing(what.strip()[:LONGEST_WORD], at_most_seconds))
    try:
        yield spent
    finally:
        link.pausing(Pausing("", None))
        spent.seconds = time.perf_counter() - began
