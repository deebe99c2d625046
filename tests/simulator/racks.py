"""Racks that die whole, all nodes of one at once, and the oracle that asks what that cost.

Nodes that follow each other in the order of their names stand in one rack, as they do in most machine rooms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import Node
from simulator.striking import calm, disturb, later
from surefoot.protocol.identities import Checkpoint

if TYPE_CHECKING:
    from simulator.world import Simulation


def _kill_rack(simulation: Simulation, duration: float) -> None:
    """What had all its copies, while every node was well, is still in memory: those of two racks are not lost with one."""
    nodes = list(simulation.fabric.nodes.values())
    if any(not node.alive or node.frozen for node in nodes):
        return
    rack = simulation.engine.rng.choice(sorted({node.rack for node in nodes}))
    dying = [node for node in nodes if node.rack == rack]
    gone = {node.name for node in dying}
    for checkpoint in _standing(simulation):
        if any(nodes_with <= gone for nodes_with in _copies(simulation, checkpoint)):
            simulation.oracle.fail(f"{rack} has every copy of some rank at {checkpoint}, which had them all")
    simulation.engine.say("FAULT {} dies with {} for {:.1f} s", rack, sorted(gone), duration)
    for node in dying:
        disturb(simulation, node.name)
        simulation.fabric.kill_node(node, silent=False)
        later(simulation, duration, _return_node, simulation, node)


def _standing(simulation: Simulation) -> list[Checkpoint]:
    """What the newest world saved with as many copies as the job asks for."""
    oracle, replicas = simulation.oracle, simulation.settings.replicas
    saved = [c for c in oracle.states if c.generation == oracle.base and oracle.on_path(c, oracle.base)]
    return [c for c in saved if min(map(len, _copies(simulation, c)), default=0) >= replicas]


def _copies(simulation: Simulation, checkpoint: Checkpoint) -> list[set[str]]:
    """Of each rank the nodes that have its save now."""
    ever, saves = simulation.oracle.ever, simulation.oracle.saves_of(checkpoint)
    return [{holder.id.node for holder in ever[save] if holder.process.alive} for save in saves]


def _return_node(simulation: Simulation, node: Node) -> None:
    simulation.engine.say("{} returns", node.name)
    simulation.fabric.return_node(node)
    calm(simulation, node.name)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {"rack dies": (0, _kill_rack)}
