"""Tracks which of this worker's saves are pending, committed or lost.

Pure. The heartbeat reports it. A worker's save of a step is pending from the first rank's staging until every local
rank's copy is on all its holders or was given up; it is `saved` once every local rank has committed it somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.identities import Checkpoint, RankSave

_REMEMBERED = 8
"""Checkpoints that stay in the book behind the newest: later ones overtake them anyway."""

_HANDED_STEPS = 32
"""Steps of which it is remembered that they were handed over; whoever asks knows of no older ones."""


@dataclass(frozen=True, slots=True)
class SaveTracker:
    """Records which staged saves are pending, committed, or handed over."""

    staged: tuple[RankSave, ...] = ()
    """Staged, not yet done."""
    committed: dict[RankSave, int] = field(default_factory=dict)
    """On how many holders each of the newest rank saves is."""
    handed: tuple[RankSave, ...] = ()
    """Of the newest epoch and its newest steps: staged, and not known to have been lost on the way."""
    forgotten: Checkpoint | None = None
    """Newest one that `handed` is too short for."""

    def pending(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that still drain here, oldest first."""
        return tuple(sorted({save.checkpoint for save in self.staged}))

    def saved(self, epoch: int, local_ranks: int) -> tuple[Checkpoint | None, int]:
        """The newest checkpoint of `epoch` that all local ranks committed.

        With its fewest copies of a rank save; (None, 0) without one.
        """
        copies: dict[int, list[int]] = {}
        for save, count in self.committed.items():
            if save.epoch == epoch and count > 0:
                copies.setdefault(save.step, []).append(count)
        whole = [step for step, counts in copies.items() if len(counts) >= local_ranks]
        if not whole:
            return None, 0
        return Checkpoint(epoch, max(whole)), min(copies[max(whole)])

    def settled(self, epoch: int, local_ranks: int, upto: int) -> Settled:
        """This worker's closed steps of `epoch`, up to step `upto`."""
        ranks: dict[int, int] = {}
        for save in self.handed:
            if save.epoch == epoch:
                ranks[save.step] = ranks.get(save.step, 0) + 1
        whole = tuple(sorted(step for step, count in ranks.items() if count >= local_ranks))
        forgotten = self.forgotten.step if self.forgotten is not None and self.forgotten.epoch == epoch else 0
        return Settled(upto, whole, forgotten)


def staged(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """A trainer sealed a slot."""
    handed = (*(s for s in tracker.handed if s.epoch == save.epoch and s != save), save)
    steps = sorted({s.step for s in handed})
    forgotten = tracker.forgotten
    if len(steps) > _HANDED_STEPS:
        forgotten = Checkpoint(save.epoch, steps[-_HANDED_STEPS - 1])
        handed = tuple(s for s in handed if s.step > forgotten.step)
    waiting = (*(s for s in tracker.staged if s != save), save)
    return replace(tracker, staged=waiting, handed=handed, forgotten=forgotten)


def written(tracker: SaveTracker, save: RankSave, copies: int) -> SaveTracker:
    """Counts one more holder with the complete rank save."""
    committed = {**tracker.committed, save: copies}
    newest = sorted({s.checkpoint for s in committed})[-_REMEMBERED:]
    return replace(tracker, committed={s: n for s, n in committed.items() if s.checkpoint in newest})


def freed(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Ends the tracking of a drained save: its copies are final."""
    return replace(tracker, staged=tuple(s for s in tracker.staged if s != save))


def lost(tracker: SaveTracker, save: RankSave) -> SaveTracker:
    """Forgets a save that no holder was asked to commit."""
    return replace(tracker, handed=tuple(s for s in tracker.handed if s != save))
