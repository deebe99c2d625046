"""Models numbers that go wrong, and judges what becomes of it.

A step of the data may be poisoned: whoever trains on it has a model that is no number from then on, and so has all that is
saved of it. A rank may spoil the model by itself, which shows some steps later. Some steps' losses are far out, and harm nothing. What a checkpoint is
worth, and which data a step had, this keeps by itself: nothing here asks what trainers told, or what status says of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.progress import AnomalyKind
from surefoot_operator.api.status import JobStatus

if TYPE_CHECKING:
    from simulator.oracle import Oracle
    from simulator.trainers import Trainer


HIDDEN_STEPS = 2
"""Steps for which a spoiled model's loss still looks well: checkpoints of these are no better than later ones."""


class NumericsWatch:
    """Of one simulated job; `oracle` is told what it finds."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.poison: set[int] = set()
        """Places in the order of the data that are no numbers."""
        self.spikes: set[int] = set()
        """Places where the loss is far out."""
        self.spoiled: dict[int, int] = {}
        """Epoch -> the step from which its model is spoiled, whatever it reads. `HIDDEN_STEPS` later its loss shows it."""
        self._place: dict[tuple[int, int], int] = {}
        """(epoch, step) -> which step's data it trained on."""
        self._odd: dict[tuple[int, int], AnomalyKind] = {}
        self._sick: set[tuple[int, int]] = set()
        """Steps behind which the model is no number."""
        self._suspect: set[Checkpoint] = set()
        self._proven: set[Checkpoint] = set()
        """What later steps have shown to be good, be they taken back since."""
        self.rolled_back = 0

    # ---- what trainers ask ------------------------------------------------------------------------------------------

    def place_behind(self, parent: Checkpoint | None) -> int:
        """Which step's data a checkpoint stands at."""
        return 0 if parent is None else self._place[parent.generation, parent.step]

    def is_sick(self, checkpoint: Checkpoint | None) -> bool:
        return checkpoint is not None and (checkpoint.generation, checkpoint.step) in self._sick

    def stepped(self, trainer: Trainer, place: int, sick: bool) -> AnomalyKind:
        """What one rank sees of its step; `sick`: its model was no number before."""
        epoch, step = trainer.assign.generation, trainer.step
        known = self._place.setdefault((epoch, step), place)
        if known != place:
            self._oracle.fail(f"ranks of epoch {epoch} train on the data of steps {known} and {place} in step {step}")
        spoiled = self.spoiled.get(epoch, step + 1)
        shown = sick or place in self.poison or step >= spoiled + HIDDEN_STEPS
        kind: AnomalyKind = "not-finite" if shown else "spike" if place in self.spikes else ""
        if shown or step >= spoiled:
            self._sick.add((epoch, step))
        if kind:
            self._odd[epoch, step] = kind
        later = self._oracle.simulation.settings.good_after
        if later and epoch == self._oracle.base:
            self._proven |= {c for c in self._oracle.states if c.step == step - later and self._is_good(c)}
        return kind

    def saved(self, save: RankSave, kind: AnomalyKind) -> None:
        if kind:
            self._suspect.add(save.checkpoint)

    def is_suspect(self, save: RankSave) -> bool:
        """Whether what is saved of that step says so."""
        return save.checkpoint in self._suspect

    # ---- what is judged ---------------------------------------------------------------------------------------------

    def claimed(self, old: JobStatus, new: JobStatus) -> None:
        """Nobody goes back for nothing."""
        back = new.rollback
        if (
            back is None
            or back == old.rollback
            or back.generation != self._oracle.base
            or new.rollback_count > old.rollback_count
        ):
            return
        parent = self._oracle.parents[back.generation]
        restored = parent is not None and (parent.generation, parent.step) in self._odd
        if not restored and not any(epoch == back.generation for epoch, _ in self._odd):
            self._oracle.fail(f"epoch {back.generation} is rolled back ({back.reason}), and no step of it was odd")

    def is_left_behind(self, checkpoint: Checkpoint) -> bool:
        """Whether nobody is to restore it: a spoiled model, or what the rollback that is under way leaves for good."""
        return self.is_sick(checkpoint) or (self.is_beyond(checkpoint) and checkpoint in self._suspect)

    def is_beyond(self, checkpoint: Checkpoint) -> bool:
        """Whether the rollback that is under way takes it only where nothing before it is left in either tier."""
        back = self._oracle.simulation.store.status.rollback
        return back is not None and back.generation == self._oracle.base and checkpoint.step > back.to_step

    def goes_back(self, new: JobStatus) -> int | None:
        """Up to which step the epoch that is being committed may restore; None: any."""
        back = new.rollback
        return back.to_step if back is not None and back.generation == self._oracle.base else None

    def committed(self, new: JobStatus, parent: Checkpoint | None) -> None:
        """What a rollback restores is good."""
        if self.goes_back(new) is None:
            return
        self.rolled_back += 1
        if new.rollback is not None and not new.rollback.target_known_good:
            return  # nothing was known to be good
        if self.is_sick(parent):
            self._oracle.fail(f"a rollback restores {parent}, whose model is no number")
        if parent is not None and parent in self._suspect:
            self._oracle.fail(f"a rollback restores {parent}, whose own loss was far out")

    def may_go(self, checkpoint: Checkpoint, what: str, elsewhere: bool) -> None:
        """Once one is known to be good some good one stays, whatever is newer.

        Which of several, a leader that hears late, or does not see a holder, may see otherwise.
        """
        known = self._oracle.simulation.store.status.last_good
        if known is None or elsewhere or not self._is_good(checkpoint):
            return
        oracle = self._oracle
        for other in oracle.states:
            good = other != checkpoint and oracle.on_path(other, oracle.base) and self._is_good(other)
            if good and all(oracle.exists(save) for save in oracle.saves_of(other)):
                return
        oracle.fail(f"{what}, and no other good one is there")

    def finished(self) -> None:
        """The history that counts has no step that was no number, and no data twice; what lacks was skipped by a rollback."""
        if not self._oracle.simulation.settings.good_after:
            return
        before = 0
        for epoch, step in self._history():
            if self._odd.get((epoch, step)) == "not-finite":  # one that the last steps hide nobody can know of
                self._oracle.fail(f"step {step} of epoch {epoch} counts, and its loss is no number")
            place = self._place[epoch, step]
            parent = self._oracle.parents[epoch]
            begins = step == (parent.step if parent else 0) + 1
            if place <= before or (place != before + 1 and not (begins and self.rolled_back)):
                self._oracle.fail(f"step {step} of epoch {epoch} had the data of step {place} behind that of {before}")
            before = place

    def _is_good(self, checkpoint: Checkpoint) -> bool:
        """So many later steps of its history were well, on every rank."""
        if checkpoint in self._proven:
            return True
        if checkpoint in self._suspect or not self._oracle.on_path(checkpoint, self._oracle.base):
            return False
        oracle, later = self._oracle, self._oracle.simulation.settings.good_after
        epoch, last = oracle.base, checkpoint.step + later
        for step in range(last, checkpoint.step, -1):
            while (parent := oracle.parents[epoch]) is not None and step <= parent.step:
                epoch = parent.generation
            ranks = oracle.training.ledger.get((epoch, step), set())
            if len(ranks) < oracle.sizes[epoch] or (epoch, step) in self._odd:
                return False
        return True

    def _history(self) -> Iterator[tuple[int, int]]:
        oracle, found = self._oracle, list[tuple[int, int]]()
        epoch, step = oracle.base, oracle.simulation.settings.steps
        while step:
            parent = oracle.parents[epoch]
            if parent is not None and step <= parent.step:
                epoch = parent.generation
                continue
            found.append((epoch, step))
            step -= 1
        return reversed(found)
