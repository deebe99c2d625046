"""Models where ranks stand that hang or wait, and judges who is named for it.

A rank hangs where it waits for nobody, in a collective that no other is in, in a loop, or while it reads for ever; or it stands
in the same line as all others, in another group or with other tensors, which a flight recorder alone can tell. All others
wait for it. Recorders fail in ways of their own: one is not there, answers late, or has forgotten the group.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from surefoot.agent.agent_state import HangObservation, ProcessActivity
from surefoot.protocol.hangs import Collective, RankStack
from surefoot_operator.api.status import Incident, JobStatus

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.trainers import Trainer
    from simulator.world import Simulation

Way = Literal["stands", "waits elsewhere", "loops", "reads", "in another group", "gives other tensors"]
OF_THE_PROGRAM = ("in another group", "gives other tensors")
"""Where stacks are alike, and no node can be at fault."""
FOUND_SECONDS = 60.0
"""By then a hang has been found, also one before the first step, which a start's deadline alone finds."""
_CORE = 0.9
_READ_BYTES = 50 << 20
_NO_RECORDER = _LATE = _FORGOTTEN = 0.02
"""Shares of ranks, of answers, of ranks."""


class HangWatch:
    """Of one simulated job: which ranks hang, and which are named."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._simulation = simulation
        # By the seed: drawn from the settings' text, all seeds of one test had the same few ways to hang, and a field's new
        # name took one of them away.
        self._seed = seed
        self._chance = random.Random(f"recorders {seed}")
        self._hung: dict[int, tuple[Trainer, Way, float]] = {}
        self._unseen: set[tuple[int, int]] = set()
        """(epoch, rank) whose recorder's last answer was none, or not of the group."""
        self.found: Counter[str] = Counter()

    def hang(self, victim: Trainer) -> None:
        """Makes this rank stop for good without dying."""
        way = random.Random(f"hangs {self._seed} {victim.process.name}").choice(get_args(Way))
        self._hung.setdefault(id(victim), (victim, way, self._simulation.engine.now))

    def is_hung(self, trainer: Trainer) -> bool:
        return id(trainer) in self._hung

    def stand(self) -> bool:
        """Whether some living rank hangs that a time limit may not have found yet."""
        now, epoch = self._simulation.engine.now, self._simulation.oracle.base
        return any(
            t.process.alive and t.assign.generation == epoch and now - since < FOUND_SECONDS
            for t, _, since in self._hung.values()
        )

    def look(self, agent: Agent, epoch: int) -> HangObservation | None:
        """What an agent sees of its ranks; None where one is too young to be asked, or gone."""
        ranks = [t for t in agent.trainers if t.assign.generation == epoch]
        if not ranks or not all(t.process.running and t.restored for t in ranks):
            return None
        now = self._simulation.engine.now
        ways = [self._hung.get(id(t), (t, "", now)) for t in ranks]
        places = tuple(self._place(trainer, way) for trainer, way, _ in ways)
        read = sum(int(_READ_BYTES * (now - since)) for _, way, since in ways if way == "reads")
        computed = sum(_CORE * (now - since) for _, way, since in ways if way == "loops")
        return HangObservation(
            now, places, ProcessActivity(read, computed), self._recorded(ranks, [way for _, way, _ in ways])
        )

    def _recorded(self, ranks: list[Trainer], ways: list[str]) -> tuple[Collective, ...]:
        """What the ranks' flight recorders say, if all of them say something."""
        epoch, told = ranks[0].assign.generation, list[Collective]()
        for trainer, way in zip(ranks, ways, strict=True):
            kind = random.Random(f"recorder {self._seed} {trainer.process.name}").random()
            late = self._chance.random() < _LATE
            if kind >= _NO_RECORDER + _FORGOTTEN and not late:
                self._unseen.discard((epoch, trainer.rank))
                told += _collectives(trainer, way)
                continue
            self._unseen.add((epoch, trainer.rank))
            if kind < _NO_RECORDER or late:
                return ()
            told.append(Collective((trainer.rank,), "pair", 1, "all_reduce", "", "finished"))
        return tuple(told)

    def _place(self, trainer: Trainer, way: str) -> RankStack:
        rank = (trainer.rank,)
        if way == "waits elsewhere":
            return RankStack(rank, "broadcast", "in broadcast", is_waiting=True)
        if way in OF_THE_PROGRAM:
            return RankStack(rank, "all_reduce", "in all_reduce", is_waiting=True)
        if way:
            return RankStack(rank, way, f"where it {way}", is_waiting=False)
        if trainer.arrived > trainer.step:
            return RankStack(rank, "all_reduce", "in all_reduce", is_waiting=True)
        moment = f"forward {self._simulation.engine.now:.3f}"  # it computes: no two looks at it are alike
        return RankStack(rank, moment, "in forward", is_waiting=False)

    def written(self, old: JobStatus, new: JobStatus) -> None:
        """A status is stored: is somebody named who does not hang?"""
        before, after = old.incidents[-1:], new.incidents[-1:]
        if not after or after[0].kind != "hang" or (before and before[0].generation == after[0].generation):
            return
        self._judge(after[0])

    def _judge(self, incident: Incident) -> None:
        hung = {
            t.rank: way
            for t, way, _ in self._hung.values()
            if t.assign.generation == incident.generation and t.process.alive
        }
        named = incident.rank
        if len(hung) != 1:
            # of three ranks two may hang alike at once: then it is the third one that stands apart
            right = named is None or not hung or named in hung
            self.found[f"{'several' if hung else 'none'} hung, {'right' if right else 'wrong'}"] += 1
            return
        ((rank, way),) = hung.items()
        hidden = (
            named is None and way in OF_THE_PROGRAM and any(epoch == incident.generation for epoch, _ in self._unseen)
        )
        self.found[f"{way}, {'unseen' if hidden else 'nobody' if named is None else 'named'}"] += 1
        if way in OF_THE_PROGRAM and incident.node is not None:
            self._simulation.oracle.fail(f"node {incident.node} is blamed for what its program did: {incident.reason}")
        if named is not None and named != rank:
            self._simulation.oracle.fail(f"rank {named} is named for a hang of rank {rank}: {incident.reason}")


def _collectives(trainer: Trainer, way: str) -> tuple[Collective, ...]:
    """One at the program's start, then one in each step."""
    last, ours = trainer.step + 1, (trainer.rank,)
    before = Collective(ours, "default_pg", last, "all_reduce", "Float[8]", "finished")
    if way == "waits elsewhere":
        return (replace(before, number=last + 1, call="broadcast", state="scheduled"),)
    if way == "in another group":
        return before, Collective(ours, "pair", 2, "all_reduce", "Float[8]", "scheduled")
    if way == "gives other tensors":
        return (replace(before, number=last + 1, tensors="Float[4]", state="scheduled"),)
    if not way and trainer.arrived > trainer.step:
        return (replace(before, number=last + 1, state="scheduled"),)
    return (before,)
