"""What every fault needs: whom it hits, what the oracle is told of it, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.engine import machine
from simulator.fabric import Node
from simulator.tiers import Holder

if TYPE_CHECKING:
    from simulator.world import Simulation

INFINITE = float("inf")

LASTING = 10.0
"""What others use up or refuse lasts so many times as long as a node's restart."""


def later(simulation: Simulation, seconds: float, action: Callable[..., None], *arguments: object) -> None:
    """A fault's next turn, or its end."""
    simulation.oracle.lossless.struck(seconds)
    simulation.engine.after(seconds, simulation.engine.environment, action, *arguments)


def some_node(simulation: Simulation) -> Node | None:
    well = [n for n in simulation.fabric.nodes.values() if n.alive and not n.frozen]
    return simulation.engine.rng.choice(well) if well else None


def some_holder(simulation: Simulation) -> Holder | None:
    """One server of a node; where nodes have one each, no more is drawn than the node."""
    node = some_node(simulation)
    if node is None:
        return None
    return node.holders[0] if len(node.holders) == 1 else simulation.engine.rng.choice(node.holders)


def disturb(simulation: Simulation, *nodes: str) -> None:
    for node in nodes:
        simulation.troubles[node] += 1
        simulation.oracle.disturbed[node] = INFINITE


def calm(simulation: Simulation, *nodes: str) -> None:
    """One thing that was wrong is over; of several the last counts. What was sent meanwhile may still need its time limit."""
    for node in nodes:
        simulation.troubles[node] = max(0, simulation.troubles[node] - 1)
        if not simulation.troubles[node]:
            simulation.oracle.disturbed[node] = simulation.engine.now + 3.0


def part(simulation: Simulation, pairs: list[tuple[str, str]], duration: float, both: bool = True) -> None:
    for one, other in pairs:
        simulation.network.cut(one, other, both)
        disturb(simulation, machine(one), machine(other))
        later(simulation, duration, simulation.network.heal, one, other, both)
        later(simulation, duration, calm, simulation, machine(one), machine(other))
