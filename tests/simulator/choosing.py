"""The project's choice of a restore point, as a function of what was read: for the exhaustive search."""

from __future__ import annotations

from surefoot.protocol.checkpoints.completeness import (
    Covers,
    Lineage,
    TierReading,
    complete_checkpoints,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint


def restore_point(
    reading: TierReading, lineage: Lineage, floor: Checkpoint | None, covers: Covers
) -> Checkpoint | None:
    """The newest complete checkpoint on the newest epoch's lineage."""
    return newest_checkpoint(complete_checkpoints(reading, lineage, lineage[-1].generation, frozenset(), covers))
