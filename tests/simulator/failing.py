"""Models nodes and ranks that fail one job again and again, with no word of why.

A node may be bad for this job alone: its trainers end there soon after they began, and no check finds anything. Or a rank ends wherever
it runs: then it is the program, and no node. `FailingWatch` holds the promise: such a node is left, and no other one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from math import comb
from typing import TYPE_CHECKING

from simulator.striking import later
from surefoot_operator.api.status import Incident, JobStatus

if TYPE_CHECKING:
    from simulator.trainers import Trainer
    from simulator.world import Simulation

PAUSE_SECONDS = (3.0, 7.0)
"""From one failure to the next, counted from when its world makes steps."""
LASTS_SECONDS = 90.0
NEW_STEPS = 3
"""What makes no new step between its failures fails the job, wherever it runs."""
PATIENCE = 3
"""Failures more than the sums ask for, by which a node must have been left."""


class FailingWatch:
    """Of one simulated job: what fails again and again, and which nodes are left for it."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._simulation, self.rng = simulation, random.Random(f"failing {seed}")
        self.node: str | None = None
        self.rank: int | None = None
        self.reached = 0
        """The step of the last failure."""
        self._left: list[str] = []
        self._ample: int | None = None
        """Failures on the node when they first were more than chance does."""
        self._times = 0

    @property
    def _watches(self) -> bool:
        return bool(set(self._simulation.settings.kinds) & KINDS.keys())

    def written(self, new: JobStatus) -> None:
        """A status is stored: is a node left that is well, or one kept that is not?"""
        if not self._watches:
            return
        fail = self._simulation.oracle.fail
        for one in new.excluded_nodes:
            if one.name in self._left:
                continue
            self._left.append(one.name)
            # who moves with its rank is known by that alone: the first place may be left for it, and no second
            first = self.rank is not None and len(self._left) == 1
            if one.name != self.node and not first:
                fail(f"healthy node {one.name} is left for failures: {one.reason}")
            elsewhere = self._places(new) - {one.name}
            if elsewhere:
                fail(f"node {one.name} is left for rank {self.rank}, which failed on {sorted(elsewhere)} too")
        if self.node is not None and self.node not in self._left:
            self._judge_kept(new)

    def _places(self, new: JobStatus) -> set[str]:
        """Where the rank that fails everywhere has failed in worlds of the present size, in which it is the same."""
        size = new.incidents[-1].world_size_before
        of_rank = (one for one in new.incidents if self.rank is not None and one.rank == self.rank)
        return {one.node for one in of_rank if one.node is not None and one.world_size_before == size}

    def _judge_kept(self, new: JobStatus) -> None:
        world = new.membership
        failed = [one for one in new.incidents if one.kind != "planned" and one.node is not None]
        times = sum(one.node == self.node for one in failed)
        if world is None or not world.members or times <= self._times:
            return
        self._times = times
        if self._ample is None and _is_no_chance(failed, times, len({m.node for m in world.members})):
            self._ample = times
        if self._ample is not None and times > self._ample + PATIENCE:
            self._simulation.oracle.fail(f"node {self.node} failed {times} times of {len(failed)} and is not left")

    def judged(self) -> dict[str, int]:
        """What was left of what failed for long enough, and what was not."""
        found = Counter[str]()
        if self.node is not None and (self._ample is not None or self.node in self._left):
            found[f"failing node, {'left' if self.node in self._left else 'kept'}"] += 1
        if self.rank is not None:
            found[f"failing rank, {len(self._left)} places given up"] += 1
        return dict(found)


def _is_no_chance(failed: list[Incident], times: int, nodes: int) -> bool:
    """Whether fewer than one job in a hundred would have so many on one node, if all were alike."""
    if times < 3 or nodes < 2:
        return False
    ways = sum(comb(len(failed), k) * int(nodes - 1) ** (len(failed) - k) for k in range(times, len(failed) + 1))
    return 100 * nodes * ways <= int(nodes) ** len(failed)


def _stepping(simulation: Simulation) -> Iterator[Trainer]:
    """Trainers of worlds that have made a few steps which none made before."""
    reached = simulation.failing_watch.reached
    for pod in (pod for node in simulation.fabric.nodes.values() for pod in node.pods):
        for trainer in pod.agent.trainers if pod.agent is not None else ():
            if trainer.process.running and trainer.restored and trainer.step >= reached + NEW_STEPS:
                yield trainer


def _repeat(simulation: Simulation, struck: Callable[[Trainer], bool]) -> None:
    """Ends one such trainer after the other, for as long as there are any and the fault lasts."""
    until = simulation.engine.now + LASTS_SECONDS
    simulation.faults_until = max(simulation.faults_until, until)
    rng = simulation.failing_watch.rng

    def turn() -> None:
        if simulation.engine.now > until:
            return
        victim = next((one for one in _stepping(simulation) if struck(one)), None)
        if victim is not None:
            simulation.engine.say("FAULT {} fails on {} once more", victim.process.name, victim.agent.node)
            simulation.failing_watch.reached = victim.step
            victim.kill()
        later(simulation, rng.uniform(*PAUSE_SECONDS), turn)

    turn()


def _failing_node(simulation: Simulation, duration: float) -> None:
    watch, world = simulation.failing_watch, simulation.store.status.membership
    if watch.node is None and watch.rank is None and world is not None and world.members:
        watch.node = watch.rng.choice([member.node for member in world.members])
        _repeat(simulation, lambda one: one.agent.node == watch.node)


def _failing_rank(simulation: Simulation, duration: float) -> None:
    watch, world = simulation.failing_watch, simulation.store.status.membership
    if watch.node is None and watch.rank is None and world is not None and world.world_size:
        watch.rank = watch.rng.randrange(world.world_size)
        _repeat(simulation, lambda one: one.rank == watch.rank)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "trainers of one node fail again and again": (0, _failing_node),
    "trainers of one rank fail wherever it runs": (0, _failing_rank),
}
"""Only where they are named: nothing of them was drawn before they were there."""
