"""Logs what a job's rounds decide, each decision once.

Called by `reconcile.reconciler`. A round a second that decides the same would fill the log with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from surefoot_operator.api.status import JobStatus
from surefoot_operator.policy.core.actions import DropSaves, Plan
from surefoot_operator.policy.maintenance.maintenance_plan import Maintenance

log = logging.getLogger(__name__)

_MOST_TOLD = 32
"""Actions that a line of the log names."""


class RoundLog:
    """Remembers what was logged last, for one job."""

    def __init__(self) -> None:
        self._said = self._said_actions = ""
        self._without: tuple[int, int] | None = None

    def say(self, decided: Plan, kept: Maintenance | None, status: JobStatus) -> None:
        """Logs what differs from the last plan and maintenance."""
        what, world = _told(decided.actions), _world(status)
        line = f"{decided.reason}{': ' if what else ''}{what}"
        if line != self._said:
            self._said = line
            log.info("[%s] %s", world, line)
        actions = _told(kept.actions if kept is not None else ())
        if actions != self._said_actions:
            self._said_actions = actions
            # drops come with every few saves; who looks for one asks for them
            routine = kept is None or all(isinstance(e, DropSaves) for e in kept.actions)
            log.log(logging.DEBUG if routine else logging.INFO, "[%s] maintenance: %s", world, actions)

        for one in kept.unrecoverable if kept is not None else ():
            if (one.checkpoint.epoch, one.worker) != self._without:  # once, and not with each save that it misses
                self._without = (one.checkpoint.epoch, one.worker)
                log.info("[%s] %s: the other ranks' saves of such checkpoints are dropped", world, one.reason)


def _told(actions: Sequence[object]) -> str:
    """The first few: a line that names two thousand is read by nobody, and takes longer than what it is about."""
    more = len(actions) - _MOST_TOLD
    return "; ".join((*map(str, actions[:_MOST_TOLD]), *((f"and {more} more",) if more > 0 else ())))


def _world(status: JobStatus) -> str:
    world = status.world
    return "no world" if world is None else f"epoch {world.epoch} {world.state.lower()}"
