"""Replaces equal parts of a snapshot by those of the last.

Called by `reconcile.reconciler`. `core.indexes` keeps what it derived from a tuple for as long as it gets that tuple: fabrics
and monitors build a new one each time they are asked, of the same objects.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.job_snapshot import NodeSeen, Observed, WorkerSeen
from surefoot_operator.observed_tiers import HolderSeen


class SteadyParts:
    """Remembers nodes, workers and holders of one job's last snapshot."""

    def __init__(self) -> None:
        self._workers: tuple[WorkerSeen, ...] = ()
        self._nodes: tuple[NodeSeen, ...] = ()
        self._holders: tuple[HolderSeen, ...] = ()

    def of(self, seen: Observed) -> Observed:
        """Returns the snapshot with equal parts replaced by the last ones."""
        if seen.workers != self._workers:
            self._workers = seen.workers
        if seen.nodes != self._nodes:
            self._nodes = seen.nodes
        if seen.holders != self._holders:
            self._holders = seen.holders
        return replace(seen, workers=self._workers, nodes=self._nodes, holders=self._holders)
