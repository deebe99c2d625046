"""Operator or workers are rolled out under a job that trains: the leader goes in order, pods one by one.

Agents of before go on beside the new leader. Nothing of it may cost a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import Pod

if TYPE_CHECKING:
    from simulator.world import Simulation

LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 20.0
"""After so long the next pod is replaced though the world is not whole again."""


def _then(simulation: Simulation, seconds: float, action: Callable[..., None], *arguments: object) -> None:
    simulation.engine.after(seconds, simulation.engine.environment, action, *arguments)
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + seconds)


def _roll_operator(simulation: Simulation, duration: float) -> None:
    """The leader's pod is replaced: it hands its lease over, and a new one leads."""
    leader = simulation.operators[-1]
    if not leader.process.running:
        return
    simulation.engine.say("{} goes; a new one comes", leader.process.name)
    leader.hang_up()
    _then(simulation, simulation.engine.rng.uniform(0.05, 1.0), simulation.start_operator)


def _roll_pods(simulation: Simulation, duration: float) -> None:
    """Workers get another image: each pod in turn, once the world is whole again."""
    former = [pod for _, pod in sorted(simulation.fabric.pods.items()) if not (pod.over or pod.deleting)]
    simulation.engine.say("{} pods are replaced one by one", len(former))
    _next_pod(simulation, former)


def _next_pod(simulation: Simulation, former: list[Pod]) -> None:
    there = [pod for pod in former if simulation.fabric.pods.get((pod.index, pod.attempt)) is pod and not pod.deleting]
    if not there or simulation.over:
        return
    simulation.oracle.lossless.announced("pods are replaced one by one")
    simulation.engine.say("{} is replaced", there[0].name)
    simulation.fabric.delete_gently(there[0])
    _await_whole(simulation, there[1:], there[0], simulation.engine.now + PATIENCE_SECONDS)


def _await_whole(simulation: Simulation, rest: list[Pod], gone: Pod, until: float) -> None:
    world = simulation.store.status.membership
    whole = simulation.trains and world is not None and len(world.members) == simulation.settings.workers
    left = simulation.fabric.pods.get((gone.index, gone.attempt)) is not gone
    if (whole and left) or simulation.engine.now >= until:
        _then(simulation, LOOK_SECONDS, _next_pod, simulation, rest)
    else:
        _then(simulation, LOOK_SECONDS, _await_whole, simulation, rest, gone, until)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "operator is rolled out": (1, _roll_operator),
    "pods are replaced one by one": (1, _roll_pods),
}
