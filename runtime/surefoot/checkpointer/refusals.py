"""Refuses calls that would lose or repeat steps.

Each says what to do instead.

Called by `checkpointer` before anything is done.
"""

from __future__ import annotations

import math

from surefoot.errors import ConfigurationError
from surefoot.protocol.identities import Checkpoint


def refuse_unrestored(parent: Checkpoint | None) -> None:
    """Refuses training from the beginning beside older steps.

    Retention would remove those, under their numbers.
    """
    if parent is not None:
        raise ConfigurationError(
            f"step() was called and restore() was not, and this job has {parent}: call restore() before training,"
            " or begin another job (folder=, or job=)"
        )


def refuse_odd_pause(what: str, at_most_seconds: float | None) -> None:
    """Refuses a pause without a word, or of no time."""
    if not what.strip() or (at_most_seconds is not None and not 0.0 < at_most_seconds < math.inf):
        raise ConfigurationError("pause() takes a word for what is done, and seconds above zero or none")
