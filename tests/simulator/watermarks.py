"""Judges what leaders, and agents without one, take for fully replicated, by the modelled holders alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.job_snapshot import JobSnapshot

if TYPE_CHECKING:
    from simulator.oracle import Oracle


class Watermarks:
    """Of one simulated job; `oracle` is told what it finds."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def certify(self, observed: JobSnapshot, water: Checkpoint | None) -> None:
        """A leader takes `water` for the newest Full checkpoint: of the holders it may count, are there enough copies?"""
        oracle = self._oracle
        world = observed.status.membership
        if water is None or world is None or world.generation < oracle.base:
            return  # what a leader that is past believes leads to nothing: its drops are refused
        if any(c.step >= water.step and oracle.on_path(c, oracle.base) for c in oracle.certified):
            return  # older news: copies of it may have gone rightly
        fit = [h for h in observed.servers if h.state == "Ready" and h.read_generation == world.generation]
        live = {h.endpoint.domain for h in fit if (h.fence or 0) >= world.generation}
        wanted = max(1, min(observed.job.spec.checkpoint.memory.replicas, len(live)))
        least = self._copies(water, world.generation)
        if least < wanted:
            oracle.fail(
                f"the watermark is {water}, of which there are {least} sealed copies, with {len(live)} live domains"
            )
        oracle.certified.add(water)
        # should the newest turn out to be damaged, what lies behind it has as many copies, and is what is gone back to
        for other in oracle.states:
            older = other.step < water.step and oracle.on_path(other, oracle.base)
            if older and self._copies(other, world.generation) >= wanted:
                oracle.certified.add(other)

    def vouched(self, water: Checkpoint, epoch: int, replicas: int) -> None:
        """An agent without a leader takes `water` for Full: are there as many copies as the job asks for?"""
        oracle = self._oracle
        if any(c.step >= water.step and oracle.on_path(c, oracle.base) for c in oracle.certified):
            return
        if self._copies(water, epoch) < replicas:
            oracle.fail(f"an agent's watermark is {water}, which has fewer than {replicas} sealed copies")
        oracle.certified.add(water)

    def stands(self, checkpoint: Checkpoint) -> bool:
        """Whether as many sealed copies as the job asks for are there, whoever knows it."""
        wanted = self._oracle.simulation.settings.replicas
        return self._copies(checkpoint, self._oracle.base) >= wanted

    def _copies(self, checkpoint: Checkpoint, epoch: int) -> int:
        """On how many nodes the rank save with the fewest copies lies, on holders sealed for this epoch."""
        oracle = self._oracle
        sealed = [{h.id.node for h in oracle.ever[s] if h.fence >= epoch} for s in oracle.saves_of(checkpoint)]
        return min(map(len, sealed), default=0)
