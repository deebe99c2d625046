"""Models how long ranks work, what looks at them find, and judges who is named for a straggler.

All ranks of a step end it together; what each works of it is its own. Nodes are a little unlike for good, one may be much
slower, and a rank may be so wherever it runs, or do what no other one does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import Node
from simulator.striking import some_node
from surefoot.protocol.progress import RankActivity, add_activities
from surefoot_operator.api.status import JobStatus, Straggler

if TYPE_CHECKING:
    from simulator.trainers import Trainer
    from simulator.world import Simulation

LOOKS_A_SECOND = 5.0
UNLIKE = 0.03
"""Standard deviation of what equal nodes need for equal work."""
FACTORS = (1.6, 2.0, 3.0)
"""How many times as long who is slow takes."""
MOMENT_SECONDS = 12.0
"""So short a slowness is nobody's name."""
FOUND_SECONDS = 90.0
"""Who was slow for so long while its world ran must have been named."""
OWN_LINE = 99
"""Of a training loop, where one rank alone does something."""


class PaceWatch:
    """Of one simulated job: who is slow, and who is named for it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = random.Random(f"paces {simulation.engine.rng.random() if simulation.settings.paced else 0}")
        self._nature: dict[str, float] = {}
        self.slow_nodes: dict[str, tuple[float, float]] = {}
        """Node -> how many times as long it takes, since when."""
        self.slow_ranks: dict[int, tuple[float, float]] = {}
        self.busy_ranks: dict[int, tuple[float, float]] = {}
        """Ranks that do what no other one does."""
        self.found: Counter[str] = Counter()
        self.seconds: list[float] = []
        """From the begin of each slowness to its name."""
        self._named: set[str | int] = set()

    # ---- the model --------------------------------------------------------------------------------------------------

    def factor(self, trainer: Trainer) -> float:
        """How many times as long this rank works for a step."""
        if not self._simulation.settings.paced:
            return 1.0
        node = trainer.agent.node
        nature = self._nature.setdefault(node, 1.0 + self._rng.gauss(0.0, UNLIKE))
        ranks = max(self.slow_ranks.get(trainer.rank, (1.0, 0.0))[0], self.busy_ranks.get(trainer.rank, (1.0, 0.0))[0])
        return nature * max(self.slow_nodes.get(node, (1.0, 0.0))[0], ranks)

    def looked(self, before: RankActivity, worked: float, passed: float) -> RankActivity:
        """The totals of a rank that worked for so long in a step of so many seconds."""
        looks = int(passed * LOOKS_A_SECOND + self._rng.random())
        own = sum(self._rng.random() * passed < worked for _ in range(looks))
        alone = 1.0 - 1.0 / self.busy_ranks.get(before.rank, (1.0, 0.0))[0]
        lines = Counter(self._line(alone) for _ in range(own))
        window = RankActivity(
            before.rank, before.work, looks, own, 0, tuple((line, 0, count) for line, count in lines.items())
        )
        return add_activities(before, window)

    def _line(self, alone: float) -> int:
        """Where a look finds a rank at work: two lines that all have, and one of its own for such a part of the time."""
        if alone and self._rng.random() < alone:
            return OWN_LINE
        return self._rng.choice((10, 11))

    # ---- the judgement ----------------------------------------------------------------------------------------------

    def written(self, old: JobStatus, new: JobStatus) -> None:
        """A status is stored: is somebody named who is not slow, or a place moved twice?"""
        known = {(one.rank, one.node) for one in old.stragglers}
        for one in new.stragglers:
            if (one.rank, one.node) not in known:
                self._judge(one)
        world = new.membership
        if (
            world is not None and world == old.membership and world.state == "Committed"
        ):  # the first plan on it has been
            there = {(member.index, member.node) for member in world.members}
            for one in new.stragglers:
                if (one.worker, one.node) not in there:
                    self._simulation.oracle.fail(
                        f"worker {one.worker} is named for a straggler on node {one.node}, which it left"
                    )
        if new.replaced_stragglers != old.replaced_stragglers and new.replaced_stragglers:
            moved = new.replaced_stragglers[-1]
            if moved.rank in self.busy_ranks and moved.node not in self.slow_nodes:
                self._simulation.oracle.fail(
                    f"rank {moved.rank} is moved from node {moved.node} for what no other one does"
                )
            if sum(one.group_rank == moved.group_rank for one in new.replaced_stragglers) > 1:
                self._simulation.oracle.fail(
                    f"place {moved.group_rank} is moved from node {moved.node} for a second time"
                )

    def _judge(self, one: Straggler) -> None:
        now, rank, node = self._simulation.engine.now, one.rank, one.node
        known = ((node, self.slow_nodes), (rank, self.slow_ranks), (rank, self.busy_ranks))
        who = next((key for key, there in known if key in there), None)
        if who is None:
            self._simulation.oracle.fail(f"rank {rank} on node {node} is named for a straggler, and is none")
            return
        if (one.divergent_line is not None) != (rank in self.busy_ranks and node not in self.slow_nodes):
            self._simulation.oracle.fail(
                f"rank {rank} on node {node} is named for line {one.divergent_line} of its loop"
            )
        if who not in self._named:
            self._named.add(who)
            self.seconds.append(now - next(there for key, there in known if key in there)[who][1])  # type: ignore[index]

    def judged(self) -> dict[str, int]:
        """How many of those that were slow for long enough were named, and how many were not."""
        for what, slow in (
            ("slow node", self.slow_nodes),
            ("slow rank", self.slow_ranks),
            ("busy rank", self.busy_ranks),
        ):
            for who, (_, since) in slow.items():
                if who in self._named:
                    self.found[f"{what}, named"] += 1
                elif self._trained(who) and self._simulation.engine.now - since > FOUND_SECONDS:
                    self.found[f"{what}, nobody"] += 1
        return dict(self.found)

    def _trained(self, who: str | int) -> bool:
        """Whether that is in the world that was last."""
        world = self._simulation.store.status.membership
        if world is None or not isinstance(who, str):
            return world is not None
        return any(member.node == who for member in world.members)


def _member_node(simulation: Simulation) -> Node | None:
    node = some_node(simulation)
    return node if node is not None and simulation.trains and not _anybody_slow(simulation) else None


def _anybody_slow(simulation: Simulation) -> bool:
    watch = simulation.pace_watch
    return bool(watch.slow_nodes or watch.slow_ranks or watch.busy_ranks)


def _slow_node(simulation: Simulation, duration: float) -> None:
    """A node's clock is throttled, a neighbour takes its memory bandwidth: for good."""
    node, watch = _member_node(simulation), simulation.pace_watch
    if node is not None:
        watch.slow_nodes[node.name] = (simulation.engine.rng.choice(FACTORS), simulation.engine.now)
        simulation.engine.say("FAULT {} is slow", node.name)


def _slow_for_a_moment(simulation: Simulation, duration: float) -> None:
    node, watch = _member_node(simulation), simulation.pace_watch
    if node is None or node.name in watch.slow_nodes:
        return
    watch.slow_nodes[node.name] = (FACTORS[-1], simulation.engine.now)
    simulation.engine.say("FAULT {} is slow for a moment", node.name)

    def quicken() -> None:
        del watch.slow_nodes[node.name]

    simulation.engine.after(MOMENT_SECONDS, simulation.engine.environment, quicken)


def _slow_rank(simulation: Simulation, duration: float) -> None:
    """A rank has more to do than the others, wherever it runs."""
    _burden(simulation, simulation.pace_watch.slow_ranks, "is slow")


def _busy_rank(simulation: Simulation, duration: float) -> None:
    """A rank evaluates or writes what no other one does, in a line of its own, wherever it runs."""
    _burden(simulation, simulation.pace_watch.busy_ranks, "does more than the others")


def _burden(simulation: Simulation, ranks: dict[int, tuple[float, float]], what: str) -> None:
    """One rank of the world is held up from now on, unless somebody is already."""
    world = simulation.store.status.membership
    if world is None or not world.world_size or _anybody_slow(simulation):
        return
    rank = simulation.engine.rng.randrange(world.world_size)
    ranks[rank] = (simulation.engine.rng.choice(FACTORS), simulation.engine.now)
    simulation.engine.say(f"FAULT rank {{}} {what}", rank)


def _all_slow(simulation: Simulation, duration: float) -> None:
    """A file server that all read from: nobody is slower than its peers."""
    watch = simulation.pace_watch
    for name in simulation.fabric.nodes:
        watch._nature[name] = 2.0 * watch._nature.get(name, 1.0)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "node is slow": (0, _slow_node),
    "node is slow for a moment": (0, _slow_for_a_moment),
    "a rank is slow wherever it runs": (0, _slow_rank),
    "a rank does more than the others": (0, _busy_rank),
    "all nodes are slow": (0, _all_slow),
}
"""Only where they are named: nothing of them was drawn before they were there."""
