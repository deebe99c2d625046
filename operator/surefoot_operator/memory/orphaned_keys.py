"""Selects unindexed keys on a holder that can be removed.

Pure; called by `memory`. A save under way has data and no index entry yet: only keys found twice, some time apart, are
removed, and only where nobody could still commit them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from surefoot.protocol.checkpoints.settled import Settled
from surefoot.protocol.identities import Checkpoint, RankSave


def orphaned_keys(
    now: Mapping[RankSave, tuple[str, ...]],
    before: Mapping[RankSave, tuple[str, ...]],
    epoch: int,
    watermark: Checkpoint | None,
    busy: frozenset[RankSave],
    settled: Collection[Settled] = (),
) -> dict[RankSave, tuple[str, ...]]:
    """Selects keys to remove from a holder sealed at committed `epoch`.

    Saves of older epochs can be committed by nobody but a repair (`busy`); saves of this epoch below the watermark were
    given up by their agents, and their steps come no more; steps that some worker of the epoch misses (`settled`) never
    become a checkpoint.
    """
    gone: dict[RankSave, tuple[str, ...]] = {}
    for save, names in now.items():
        passed = save.epoch == epoch and watermark is not None and save.step < watermark.step
        missed = save.epoch == epoch and any(said.misses(save.step) for said in settled)
        if save in before and save not in busy and (save.epoch < epoch or passed or missed):
            both = tuple(name for name in names if name in before[save])
            if both:
                gone[save] = both
    return gone
