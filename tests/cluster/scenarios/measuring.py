"""From a fault to the first new step: which incident answers it, and how long each part took. Reads; touches nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.scenarios.job import Job
from cluster.scenarios.rows import Row
from support.machine_speed import scaled
from surefoot_operator.api.status import Incident

_SAME_CLOCK_SECONDS = 0.05
_LEFT = "being deleted"
SECONDS = scaled(90.0)


@dataclass(frozen=True)
class Struck:
    """A fault that was just made to happen to a job."""

    job: Job
    at: float
    epoch: int
    world: int

    @property
    def incident(self) -> Incident | None:
        """The first that the operator noted after it. A deleted worker may be left in order, as planned; growth is no answer."""
        after = (i for i in self.job.incidents() if i.detected_seconds >= self.at - _SAME_CLOCK_SECONDS)
        return next((i for i in after if i.kind != "planned" or _LEFT in i.reason), None)

    def recovered(self) -> bool:
        """Whether a world came after it and made a step."""
        found = self.incident
        return found is not None and found.first_step_seconds is not None and self.job.step > 0

    def wait(self, seconds: float = SECONDS) -> Struck:
        """Until it was answered and training goes on."""
        self.job.wait("the fault is answered by a new world that trains", self.recovered, seconds)
        return self

    def row(self, scenario: str) -> Row:
        """What it came to."""
        found = self.incident
        assert found is not None, f"no incident was noted\n{self.job.said()}"
        epoch = found.generation + 1
        worlds = {entry.generation: entry.world_size for entry in self.job.lineage()}
        while epoch not in worlds and epoch <= max(worlds):
            epoch += 1  # a claim that was given up for a later one
        self.job.ledger.look()
        first = self.job.ledger.first_step_at(epoch, worlds[epoch]) if epoch in worlds else None
        pods = self.job.pods_made(self.at)
        return Row(
            scenario=scenario,
            kind=found.kind,
            detected_seconds=self._since(found.detected_seconds),
            decided_seconds=self._since(found.claimed_seconds),
            pods_asked_seconds=self._since(pods[0].at) if pods else None,
            committed_seconds=self._since(found.committed_seconds),
            first_step_seconds=self._since(first),
            steps_lost=found.steps_lost,
            restored_from=found.restored_from,
            worlds=[self.world, *(size for e, size in sorted(worlds.items()) if e >= epoch)],
        )

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self.at


def strike(job: Job) -> Struck:
    """To be called in the moment before the fault."""
    return Struck(job, time.time(), job.epoch, job.world)
