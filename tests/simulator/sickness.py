"""What agents find wrong with their nodes: hardware that is at fault, programs that are, and what all nodes see at once.

`SickWatch` holds the promise: no node is left that is healthy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import Node
from simulator.striking import some_node
from surefoot.protocol.messages import NodeFinding
from surefoot_operator.api.status import JobStatus

if TYPE_CHECKING:
    from simulator.world import Simulation

_LOST = NodeFinding("GpuLost", "GPU 0 is lost", "node")
_MISTAKE = NodeFinding("GpuXid31", "GPU 0 reported Xid 31", "application")
_SHARED = NodeFinding("LinkDown", "port 1 is down", "node")
SPREAD_SECONDS = 8.0
"""How far apart nodes find what all of them suffer from: checks have their periods."""


class SickWatch:
    """Of one simulated job: which nodes are sick, and which are taken for it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.sick: set[str] = set()
        self.left: set[str] = set()
        self.heard: set[str] = set()
        """Sick ones with an agent on them to say so, which did not end with them."""

    def judged(self) -> dict[str, int]:
        """How many sick nodes with an agent on them were left, and how many were not."""
        left = self.heard & self.left
        return {"sick node, left": len(left), "sick node, kept": len(self.heard - left)}

    def written(self, new: JobStatus) -> None:
        """A status is stored."""
        for one in new.unhealthy_nodes:
            self.left.add(one.name)
            if one.name not in self.sick and not self._simulation.join_watch.shared:
                self._simulation.oracle.fail(f"healthy node {one.name} is left: {one.reason}")
        self._simulation.join_watch.left(new)


def _find(simulation: Simulation, node: Node, finding: NodeFinding) -> None:
    node.findings = (*node.findings, finding)
    simulation.engine.say("{} is found to have {}", node.name, finding.reason)
    for pod in node.pods:
        if pod.agent is not None:
            pod.agent.say_findings()


def _sicken(simulation: Simulation, duration: float) -> None:
    """A node's own hardware fails, and goes on being so."""
    node = some_node(simulation)
    if node is not None and _LOST not in node.findings and not simulation.sick_watch.sick:
        simulation.sick_watch.sick.add(node.name)
        if any(pod.agent is not None and pod.agent.process.running for pod in node.pods):
            simulation.sick_watch.heard.add(node.name)
        _find(simulation, node, _LOST)


def _mistake(simulation: Simulation, duration: float) -> None:
    """A program does what its GPU refuses."""
    node = some_node(simulation)
    if node is not None and _MISTAKE not in node.findings:
        _find(simulation, node, _MISTAKE)


def _share(simulation: Simulation, duration: float) -> None:
    """A switch fails, and each node sees its own port go down."""
    for node in simulation.fabric.nodes.values():
        if _SHARED not in node.findings:
            after = simulation.engine.rng.uniform(0.0, SPREAD_SECONDS)
            simulation.engine.after(after, simulation.engine.environment, _find, simulation, node, _SHARED)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "node is sick": (0, _sicken),
    "a program errs on its GPU": (0, _mistake),
    "all nodes find the same": (0, _share),
}
"""Only where they are named: nothing of them was drawn before they were there."""
