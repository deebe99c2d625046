"""Follows the chain of epochs that led to the present one.

Pure. A checkpoint counts only if it is on it. Used to choose the restore point, to retain and drop, and to count
samples along the history that was kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """An epoch's parent checkpoint (None: step 0) and its ranks.

    A parent may be an older job's (`Checkpoint.imported`): it is a plain parent whose epoch has no entry here.
    """

    epoch: int
    parent: Checkpoint | None
    size: int


Lineage = tuple[LineageEntry, ...]
"""Entries in the order of their epochs; not every number need be there, a claim may be overtaken by another."""


def entry_of(lineage: Lineage, epoch: int) -> LineageEntry | None:
    """The entry of `epoch`, or None where that epoch was never committed."""
    return next((entry for entry in reversed(lineage) if entry.epoch == epoch), None)


def on_lineage(lineage: Lineage, checkpoint: Checkpoint, epoch: int) -> bool:
    """Whether `checkpoint` is part of the history that `epoch` stands on.

    It is if that epoch saved it, or branched from it, or if it lies on the parent's lineage no later than the
    branching point. Saves of an overtaken world after the branching point are not: the world went another way.
    """
    entry = entry_of(lineage, epoch)
    bound: int | None = None  # steps above this were cut off by a later branch
    while entry is not None:
        begin = entry.parent.step if entry.parent else 0
        if checkpoint.epoch == entry.epoch:
            return checkpoint.step > begin and (bound is None or checkpoint.step <= bound)
        if entry.parent is None:
            return False
        bound = entry.parent.step if bound is None else min(bound, entry.parent.step)
        if checkpoint == entry.parent:
            return checkpoint.step <= bound  # also where its own epoch's entry was pruned
        entry = _before(lineage, entry)
    return False


def _before(lineage: Lineage, entry: LineageEntry) -> LineageEntry | None:
    """The entry that `entry` branched from. Epochs only grow, so a damaged record cannot lead round in a circle."""
    if entry.parent is None or entry.parent.epoch >= entry.epoch:
        return None
    return entry_of(lineage, entry.parent.epoch)


def newest(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The checkpoint of one lineage with the highest step; steps are unique."""
    return max(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.epoch), default=None)


def epoch_at(lineage: Lineage, epoch: int, step: int) -> int | None:
    """The epoch whose execution of `step` counts in `epoch`'s history.

    The first step is 1. None if no epoch has executed it.
    """
    entry = entry_of(lineage, epoch)
    while entry is not None:
        if entry.parent is None or step > entry.parent.step:
            return entry.epoch
        entry = _before(lineage, entry)
    return None


def ancestry(lineage: Lineage, epoch: int) -> tuple[int, ...]:
    """The epochs whose steps count in the history of `epoch`, itself first."""
    found, entry = list[int](), entry_of(lineage, epoch)
    while entry is not None:
        found.append(entry.epoch)
        entry = _before(lineage, entry)
    return tuple(found)


def first_step(lineage: Lineage) -> int:
    """The first step that this job ran itself in its present history.

    1, or the one after the older job's checkpoint that it began from.
    """
    entry = lineage[-1] if lineage else None
    while entry is not None:
        if entry.parent is not None and entry.parent.imported:
            return entry.parent.step + 1
        entry = _before(lineage, entry)
    return 1


def pruned(lineage: Lineage, oldest_needed: Checkpoint | None, epoch: int) -> Lineage:
    """Removes entries that no retained checkpoint needs: status stays bounded.

    Keeps every entry from `oldest_needed`'s epoch on that `epoch` descends from; with None keeps all.
    """
    if oldest_needed is None:
        return lineage
    chain: set[int] = set()
    entry = entry_of(lineage, epoch)
    while entry is not None:
        chain.add(entry.epoch)
        if entry.epoch <= oldest_needed.epoch:
            break
        entry = _before(lineage, entry)
    return tuple(entry for entry in lineage if entry.epoch in chain)


def describe(lineage: Sequence[LineageEntry]) -> str:
    """`1@0x3 > 2@40x2`: epoch, the step it branched from, its world."""
    return " > ".join(f"{e.epoch}@{e.parent.step if e.parent else 0}x{e.size}" for e in lineage)
