"""Judges trainers: what they start from and restore, and that each step counts once for every rank of its world."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from simulator.trainers import Trainer, content_of
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.protocol.messages import Assign
from surefoot_operator.policy.core.actions import CreateWorker

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.oracle import Oracle
    from simulator.tiers import Holder


class TrainingWatch:
    """Of one simulated job; `oracle` is told what it finds."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.ledger: dict[tuple[int, int], set[int]] = defaultdict(set)
        """Ranks that made a step, by epoch and step."""
        self.stepped_at = 0.0
        self._starts: dict[tuple[int, int], str] = {}

    def created(self, order: CreateWorker) -> None:
        oracle = self._oracle
        if order.attempt >= oracle.simulation.store.status.next_attempt:
            oracle.fail(f"{order} before status counted that attempt")

    def starting(self, agent: Agent, assign: Assign) -> None:
        oracle = self._oracle
        if assign.generation not in oracle.parents or oracle.parents[assign.generation] != assign.parent:
            oracle.fail(f"trainers start for epoch {assign.generation} from {assign.parent}, which was never committed")
        if assign.generation < agent.life.stopped_below:
            oracle.fail(
                f"epoch {assign.generation} starts on {agent.pod.name}, which told that it stopped for {agent.life.stopped_below}"
            )
        for local in range(assign.local_ranks):
            rank = (assign.generation, assign.first_rank + local)
            if rank in self._starts:
                oracle.fail(
                    f"rank {rank[1]} of epoch {rank[0]} starts twice: {self._starts[rank]}, {agent.incarnation}"
                )
            self._starts[rank] = agent.incarnation
        for other in oracle.simulation.trainers_of(agent):
            if other.process.alive:
                oracle.fail(
                    f"epoch {assign.generation} starts on {agent.pod.name} while epoch {other.assign.generation} lives"
                )

    def restoring(self, trainer: Trainer, parent: Checkpoint, found: dict[int, int]) -> None:
        oracle = self._oracle
        epoch = trainer.assign.generation
        if oracle.parents[epoch] != parent:
            oracle.fail(
                f"rank {trainer.rank} of epoch {epoch} restores {parent}, its parent is {oracle.parents[epoch]}"
            )
        size = oracle.sizes[parent.generation]
        wanted = {r: content_of(oracle.states[parent], size, r) for r in range(size)}
        if found != wanted:
            oracle.fail(f"rank {trainer.rank} of epoch {epoch} restored other content than was saved as {parent}")

    def unreadable(self, trainer: Trainer, save: RankSave, good: list[Holder]) -> None:
        """A rank says that every holder answered and none has a good copy; `good`: had one all the while."""
        if good:
            self._oracle.fail(
                f"rank {trainer.rank} of epoch {trainer.assign.generation} cannot read {save}, of which {good[0].id} has a good copy"
            )

    def stepped(self, trainer: Trainer) -> None:
        oracle = self._oracle
        key = (trainer.assign.generation, trainer.step)
        if trainer.rank in self.ledger[key]:
            oracle.fail(f"rank {trainer.rank} did step {trainer.step} of epoch {trainer.assign.generation} twice")
        self.ledger[key].add(trainer.rank)
        self.stepped_at = oracle.simulation.engine.now
        oracle.lossless.stepped(*key)
        parent = oracle.parents[trainer.assign.generation]
        if trainer.step <= (parent.step if parent else 0):
            oracle.fail(f"step {trainer.step} of epoch {trainer.assign.generation} lies before its parent")

    def finished(self) -> None:
        """Each step counts once along the final lineage, by every rank of its world."""
        oracle = self._oracle
        epoch, step = oracle.base, oracle.simulation.settings.steps
        while step:
            parent = oracle.parents[epoch]
            if parent is not None and step <= parent.step:
                epoch = parent.generation
                continue
            if self.ledger[epoch, step] != set(range(oracle.sizes[epoch])):
                oracle.fail(f"step {step} of epoch {epoch} was done by ranks {sorted(self.ledger[epoch, step])} alone")
            step -= 1
