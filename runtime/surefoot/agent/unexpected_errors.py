"""Counts and logs unforeseen errors in work beside the training.

They cost that work, never the agent. An agent that ends takes its trainers along, and so a bug in a listing would end
a training that makes progress. Used where chores are carried out; each kind is counted each time and logged once, with
its traceback.
"""

from __future__ import annotations

import logging

from surefoot import metrics

_log = logging.getLogger(__name__)


class UnexpectedErrors:
    """Remembers which errors were logged, by the work that failed."""

    def __init__(self) -> None:
        self._told: set[tuple[str, type[Exception]]] = set()

    def record(self, work: str, error: Exception) -> str:
        """Counts a caught error, logs the first of its kind, describes it."""
        metrics.fallbacks.labels(what="chore_failed").inc()
        if (work, type(error)) not in self._told:
            self._told.add((work, type(error)))
            _log.error("%s failed in a way that was not foreseen; the agent goes on", work, exc_info=error)
        return f"{work} failed in an unexpected way: {type(error).__name__}: {error}"[:500]
