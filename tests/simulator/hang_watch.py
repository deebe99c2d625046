"""Models where ranks stand that hang or wait, and judges who is named for it.

A rank hangs in one of four ways: where it waits for nobody, in a collective that no other is in, in a loop, or while it
reads for ever. All others wait for it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Literal, get_args

from surefoot.agent.looks import Activity, Look
from surefoot.protocol.rank_places import RankPlace
from surefoot_operator.api.status import Incident, JobStatus

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.trainers import Trainer
    from simulator.world import Simulation

Way = Literal["stands", "waits elsewhere", "loops", "reads"]
FOUND_SECONDS = 60.0
"""By then a hang has been found, also one before the first step, which a start's deadline alone finds."""
_CORE = 0.9
_READ_BYTES = 50 << 20


class HangWatch:
    """Of one simulated job: which ranks hang, and which are named."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._hung: dict[int, tuple[Trainer, Way, float]] = {}
        self.found: Counter[str] = Counter()

    def hang(self, victim: Trainer) -> None:
        """Makes this rank stop for good without dying."""
        way = random.Random(f"{self._simulation.settings} {victim.process.name}").choice(get_args(Way))
        self._hung.setdefault(id(victim), (victim, way, self._simulation.engine.now))

    def is_hung(self, trainer: Trainer) -> bool:
        return id(trainer) in self._hung

    def stand(self) -> bool:
        """Whether some living rank hangs that a time limit may not have found yet."""
        now, epoch = self._simulation.engine.now, self._simulation.oracle.base
        return any(
            t.process.alive and t.assign.epoch == epoch and now - since < FOUND_SECONDS
            for t, _, since in self._hung.values()
        )

    def look(self, agent: Agent, epoch: int) -> Look | None:
        """What an agent sees of its ranks; None where one is too young to be asked, or gone."""
        ranks = [t for t in agent.trainers if t.assign.epoch == epoch]
        if not ranks or not all(t.process.running and t.restored for t in ranks):
            return None
        now = self._simulation.engine.now
        ways = [self._hung.get(id(t), (t, "", now)) for t in ranks]
        places = tuple(self._place(trainer, way) for trainer, way, _ in ways)
        read = sum(int(_READ_BYTES * (now - since)) for _, way, since in ways if way == "reads")
        computed = sum(_CORE * (now - since) for _, way, since in ways if way == "loops")
        return Look(now, places, Activity(read, computed))

    def _place(self, trainer: Trainer, way: str) -> RankPlace:
        rank = (trainer.rank,)
        if way == "waits elsewhere":
            return RankPlace(rank, "broadcast", "in broadcast", waiting=True)
        if way:
            return RankPlace(rank, way, f"where it {way}", waiting=False)
        if trainer.arrived > trainer.step:
            return RankPlace(rank, "all_reduce", "in all_reduce", waiting=True)
        moment = f"forward {self._simulation.engine.now:.3f}"  # it computes: no two looks at it are alike
        return RankPlace(rank, moment, "in forward", waiting=False)

    def written(self, old: JobStatus, new: JobStatus) -> None:
        """A status is stored: is somebody named who does not hang?"""
        before, after = old.incidents[-1:], new.incidents[-1:]
        if not after or after[0].kind != "hang" or (before and before[0].epoch == after[0].epoch):
            return
        self._judge(after[0])

    def _judge(self, incident: Incident) -> None:
        hung = {
            t.rank: way for t, way, _ in self._hung.values() if t.assign.epoch == incident.epoch and t.process.alive
        }
        named = incident.rank
        if len(hung) != 1:
            # of three ranks two may hang alike at once: then it is the third one that stands apart
            right = named is None or not hung or named in hung
            self.found[f"{'several' if hung else 'none'} hung, {'right' if right else 'wrong'}"] += 1
            return
        ((rank, way),) = hung.items()
        self.found[f"{way}, {'nobody' if named is None else 'named'}"] += 1
        if named is not None and named != rank:
            self._simulation.oracle.fail(f"rank {named} is named for a hang of rank {rank}: {incident.reason}")
