"""Agents that try their node before they join: nodes that fail, once or always, and trials that hang, crash or take long.

`JoinWatch` holds both promises: who fails gets no rank while others could train, and no job stands for it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from simulator.readiness import fails, ready_at
from surefoot.protocol.messages import NodeFinding
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Plan

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.fabric import Node
    from simulator.world import Simulation

JOINS_SECONDS = 1.0
"""So long a worker that is warm waits for the trial."""

LIMIT_SECONDS = 9.0
"""A trial that hangs is ended then, and proves nothing."""

PATIENCE_SECONDS = 60.0
"""A world that is possible only with a node that failed waits no longer than that for another one."""

FLAWS = ("CpuComputeError", "MemoryTestFailed", "DiskTestFailed")
OUTCOMES = ("well", "well", "fails", "fails once", "hangs", "crashes", "is slow")


class JoinTrial:
    """What one agent's start makes of its node."""

    def __init__(self, agent: Agent) -> None:
        simulation, self._agent = agent.simulation, agent
        self._policy = simulation.settings.pre_join_check
        self._node = simulation.fabric.nodes[agent.node]
        self.findings: tuple[NodeFinding, ...] = ()
        self._takes: float | None = None
        if self._policy != "Disabled":
            self._takes = simulation.join_watch.duration(self._node)
            agent.engine.after(self._takes, agent.process, self._over)

    def joins_after(self, warm_seconds: float) -> float:
        """When a worker that is warm after `warm_seconds` says so: it is told behind what was found."""
        if self._takes is None or self._policy != "Enforce":
            return warm_seconds
        return max(warm_seconds, min(self._takes, warm_seconds + JOINS_SECONDS) + 0.001)

    def _over(self) -> None:
        if self._node.trial in ("fails", "fails once"):
            text = f"{self._node.name} calculates wrong"
            self.findings = (NodeFinding(self._node.flaw, text, "node" if self._policy == "Enforce" else "unknown"),)
            self._agent.engine.say("{} fails its trial: {}", self._node.name, self._node.flaw)
        self._agent.say_findings()
        if self._node.trial == "fails once":
            self._node.trial = "well"


class JoinWatch:
    """Of one simulated job: what each node does where it is tried, and what follows."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._simulation = simulation
        self._rng = random.Random(f"trials {seed}")
        self.shared = False
        """Whether the trial is at fault, and no node."""
        self.kept_out = 0
        """Commits beside which a worker on a node that failed was ready."""

    def draw(self) -> None:
        """What each node does from the beginning on."""
        if self._simulation.settings.pre_join_check == "Disabled":
            return
        many = self._rng.random()
        self.shared = many < 0.2
        for place, node in enumerate(self._simulation.fabric.nodes.values()):
            # all fail for one cause, each for its own, or some do
            node.trial = "fails" if many < 0.4 else self._rng.choice(OUTCOMES)
            node.flaw = "LoopbackTestFailed" if self.shared else FLAWS[place % len(FLAWS)]
            if node.trial in ("fails", "fails once") and not self.shared:
                self._simulation.sick_watch.sick.add(node.name)

    def duration(self, node: Node) -> float:
        """How long a trial takes there, from an agent's start on."""
        if node.trial == "hangs":
            return LIMIT_SECONDS
        return self._rng.uniform(1.5, 8.0) if node.trial == "is slow" else self._rng.uniform(0.2, 0.8)

    def patience(self) -> float:
        """How much longer than others this job may stand."""
        enforced = self._simulation.settings.pre_join_check == "Enforce"
        failing = any(node.trial in ("fails", "fails once") for node in self._simulation.fabric.nodes.values())
        return PATIENCE_SECONDS if enforced and (failing or self._simulation.sick_watch.sick) else 0.0

    def left(self, status: JobStatus) -> None:
        """A status is stored: where the trial is at fault most nodes stay."""
        healthy = {one.name for one in status.unhealthy_nodes} - self._simulation.sick_watch.sick
        if 2 * len(healthy) > len(self._simulation.fabric.nodes) and len(healthy) > 1:
            self._simulation.oracle.fail(f"{sorted(healthy)} are left for a trial that fails everywhere")

    def deciding(self, seen: JobSnapshot, made: Plan) -> None:
        """A leader plans: does it commit a world with somebody on a node that failed?"""
        old, new = seen.status.membership, made.status.membership
        if old is None or new is None or new == old or new.state != "Committed" or not new.members:
            return
        before = {(m.index, m.attempt) for m in old.members}
        failed = {s.incarnation: s for s in seen.sessions if fails(seen, s) and (s.index, s.attempt) not in before}
        left = {one.name for one in (*made.status.unhealthy_nodes, *made.status.excluded_nodes)}
        ready = [s for s in seen.sessions if ready_at(seen, s, new.generation)]
        well = [s for s in ready if s.incarnation not in failed and s.node not in left]
        taken = [m for m in new.members if m.incarnation in failed]
        self.kept_out += any(s.incarnation in failed for s in ready) and not taken
        settings = self._simulation.settings
        least = settings.workers if settings.tied else settings.least_workers
        if not taken:
            return
        if len(well) >= least:
            names = [m.node for m in taken]
            self._simulation.oracle.fail(
                f"workers on {names} failed and get ranks, though {len(well)} others are ready"
            )
        if seen.free_nodes != 0 and seen.now_seconds < old.changed_seconds + PATIENCE_SECONDS:
            self._simulation.oracle.fail(f"no other worker is waited for than that on {taken[0].node}, which failed")
        self._judge_replaced(taken[0].node)

    def _judge_replaced(self, name: str) -> None:
        """Where nothing else happened a node that is well and free was to be tried before."""
        simulation, sick = self._simulation, self._simulation.sick_watch.sick
        used = {pod.node for pod in simulation.fabric.pods.values() if not pod.over}
        free = [n.name for n in simulation.fabric.nodes.values() if n.name not in used and n.name not in sick]
        if free and not simulation.struck:
            simulation.oracle.fail(f"{name} failed and its worker gets a rank, though {free} were never tried")
