"""Measures worker ages by this operator's own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot_operator.observed import WorkerSeen


class WorkerAges:
    """Of one job's workers, since this operator first saw each."""

    def __init__(self) -> None:
        self._first: dict[str, float] | None = None

    def told(self, workers: Sequence[WorkerSeen], now: float) -> tuple[WorkerSeen, ...]:
        """Returns the workers with creation times by this operator's clock.

        The workers, made no later than they were seen. Those that came while we looked were made when they came.
        """
        known, self._first = self._first, {}
        aged = []
        for worker in workers:
            created = min(worker.created_seconds, now) if known is None else known.get(worker.uid, now)
            self._first[worker.uid] = created
            aged.append(worker if worker.created_seconds == created else replace(worker, created_seconds=created))
        return tuple(aged)
