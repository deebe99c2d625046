"""Ledger lines of runs that never were, and the facts of their reports."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident
from surefoot_operator.cli.local.progress import LedgerEntry
from surefoot_operator.cli.local.run_report import RunRecords

BEGAN = 1000.0
FAILED = Incident(
    "node-lost", "node node-1 is gone", 1, "node-1", 1, BEGAN + 13,
    claimed_seconds=BEGAN + 13.2, stopped_seconds=BEGAN + 13.5, fenced_seconds=BEGAN + 14, committed_seconds=BEGAN + 14,
    first_step_seconds=BEGAN + 16, last_step=12, restored_step=10, steps_lost=2, restored_from="memory", world_size_before=2, world_size_after=1,
)  # fmt: skip


def lines(
    worker: str,
    rank: int,
    epoch: int,
    steps: range,
    at: float,
    loss: Callable[[int], float | None] = lambda step: 1 / step,
) -> list[tuple[str, LedgerEntry]]:
    """One second a step; every fifth is followed by a save that stops 10 ms."""
    return [
        (
            worker,
            LedgerEntry(
                epoch, step, rank, loss(step), ((2 * step - 2 + rank, 2 * step - 1 + rank),), at + place,
                stall_seconds=0.01 if step % 5 == 1 else None, seconds=1.0,
            ),
        )
        for place, step in enumerate(steps, 1)
    ]  # fmt: skip


def broken_run() -> RunRecords:
    """Two ranks; one is lost after step 12, the other goes on alone from step 10 and reads for both."""
    alone = [
        (
            worker,
            LedgerEntry(2, line.step, 0, line.loss, ((2 * line.step - 2, 2 * line.step),), line.at_seconds, None, 1.0),
        )
        for worker, line in lines("0-1", 0, 2, range(11, 21), BEGAN + 15)
    ]
    both = [*lines("0-1", 0, 1, range(1, 13), BEGAN + 1), *lines("1-1", 1, 1, range(1, 13), BEGAN + 1)]
    lineage = (LineageEntry(1, None, 2), LineageEntry(2, Checkpoint(1, 10), 1))
    return RunRecords((*both, *alone), lineage, (FAILED,), reference={step: 1 / step for step in range(1, 21)})
