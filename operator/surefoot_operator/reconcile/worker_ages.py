"""Measures worker ages by this operator's own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot_operator.job_snapshot import WorkerSeen


class WorkerAges:
    """Of one job's workers, since this operator first saw each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[WorkerSeen, WorkerSeen]] | None = None
        """By uid, a worker as it was shown last and with its age by this clock: the same again for the same."""

    def told(self, workers: Sequence[WorkerSeen], now: float) -> tuple[WorkerSeen, ...]:
        """Returns the workers with creation times by this operator's clock.

        The workers, made no later than they were seen. Those that came while we looked were made when they came.
        """
        known, self._known = self._known, {}
        found = []
        for worker in workers:
            shown, aged = (known or {}).get(worker.uid, (None, None))
            if aged is None:
                created = now if known is not None else min(worker.created_seconds, now)
                aged = replace(worker, created_seconds=created)
            elif shown is not worker:
                aged = replace(worker, created_seconds=aged.created_seconds)
            self._known[worker.uid] = worker, aged
            found.append(aged)
        return tuple(found)
