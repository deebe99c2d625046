"""What people and schedulers do to a job on purpose, and say beforehand: none of it may cost a step.

Their ends go past `striking.later`, by which the oracle knows what nobody had announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.fabric import Node, Pod
from simulator.striking import calm, disturb, some_node

if TYPE_CHECKING:
    from simulator.world import Simulation

NOTICE_SECONDS = 12.0
"""How long before it ends a node that is reclaimed says so."""


def _then(simulation: Simulation, seconds: float, action: Callable[..., None], *arguments: object) -> None:
    simulation.engine.after(seconds, simulation.engine.environment, action, *arguments)
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + seconds)


def _some_pod(simulation: Simulation) -> Pod | None:
    pods = [p for n in simulation.fabric.nodes.values() if not n.frozen for p in n.pods if not p.over]
    there = [p for p in pods if not (p.deleting or p.disrupted)]
    return simulation.engine.rng.choice(there) if there else None


def _unwant_node(simulation: Simulation, duration: float) -> None:
    """Somebody wants the node left, which works on."""
    node = some_node(simulation)
    if node is not None:
        simulation.engine.say("{} is to be left for {:.1f} s", node.name, duration)
        node.signal = "it bears the label health=poor"
        _then(simulation, duration, setattr, node, "signal", "")


def _delete_pod(simulation: Simulation, duration: float) -> None:
    """Somebody deletes a pod, which is given time to leave."""
    victim = _some_pod(simulation)
    if victim is not None:
        simulation.engine.say("{} is deleted", victim.name)
        simulation.fabric.delete_gently(victim)


def _preempt_pod(simulation: Simulation, duration: float) -> None:
    """The scheduler names a pod that it will end, and deletes it a little later."""
    victim = _some_pod(simulation)
    if victim is not None:
        simulation.engine.say("{} is preempted", victim.name)
        victim.disrupted = True
        simulation.changed()
        _then(simulation, simulation.engine.rng.uniform(0.0, 2.0), _delete_if_there, simulation, victim)


def _delete_if_there(simulation: Simulation, pod: Pod) -> None:
    if simulation.fabric.pods.get((pod.index, pod.attempt)) is pod and not pod.deleting:
        simulation.fabric.delete_gently(pod)


def _drain_node(simulation: Simulation, duration: float) -> None:
    """As `kubectl drain` and, later, `kubectl uncordon`: whoever has no other place waits for this one."""
    node = some_node(simulation)
    if node is not None:
        simulation.engine.say("{} is drained for {:.1f} s", node.name, duration)
        node.cordoned = True
        for pod in list(node.pods):
            _delete_if_there(simulation, pod)
        simulation.changed()
        _then(simulation, duration, _uncordon, simulation, node)


def _uncordon(simulation: Simulation, node: Node) -> None:
    node.cordoned = False
    simulation.changed()


def _reclaim_node(simulation: Simulation, duration: float) -> None:
    """As clouds take their spot machines back: agents are told by the node alone, and then all that it has is gone."""
    node = some_node(simulation)
    if node is None or node.cordoned:
        return
    simulation.engine.say("{} is reclaimed in {:.1f} s, for {:.1f} s", node.name, NOTICE_SECONDS, duration)
    node.cordoned = True
    for pod in node.pods:
        simulation.fabric.ask_to_leave(pod)
    simulation.changed()
    _then(simulation, NOTICE_SECONDS, _end_node, simulation, node, duration, simulation.trains)


def _end_node(simulation: Simulation, node: Node, duration: float, trained: bool) -> None:
    """`trained`: there was a world when it was said."""
    if node.alive:
        simulation.engine.say("{} ends, as was said", node.name)
        untold = any(
            pod.agent is None or pod.agent.life.termination_exit_code is None for pod in node.pods if not pod.over
        )
        if not trained or untold:
            # nobody could bring away what only it had, or a pod that was on its way there when it was said never heard
            simulation.oracle.lossless.struck(0.0)
        disturb(simulation, node.name)
        simulation.fabric.kill_node(node, silent=False)
    _then(simulation, duration, _give_back, simulation, node)


def _give_back(simulation: Simulation, node: Node) -> None:
    node.cordoned = False
    simulation.fabric.return_node(node)
    calm(simulation, node.name)


def _suspend(simulation: Simulation, duration: float) -> None:
    if simulation.job.spec.suspend:
        return
    simulation.engine.say("the job is suspended for {:.1f} s", duration)
    simulation.suspended_until = simulation.engine.now + duration
    _edit(simulation, suspend=True)
    _then(simulation, duration, _edit, simulation, False)


def _edit(simulation: Simulation, suspend: bool) -> None:
    simulation.job = replace(simulation.job, spec=replace(simulation.job.spec, suspend=suspend))
    simulation.changed()


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "node is to be left": (1, _unwant_node),
    "pod is deleted": (1, _delete_pod),
    "pod is preempted": (1, _preempt_pod),
    "node is drained": (1, _drain_node),
    "node is reclaimed": (1, _reclaim_node),
    "job is suspended": (1, _suspend),
}
"""With how often each is drawn among all kinds."""
