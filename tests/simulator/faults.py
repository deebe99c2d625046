"""The faults that a seed brings, and their ends. All end before the run does: then everything must come right.

Between any two events anything may die, freeze or be cut off; what comes back comes back with what its kind keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from simulator import (
    announced,
    damage,
    failing,
    hindrances,
    lasting,
    pace_watch,
    racks,
    rollout,
    sickness,
    spoiling,
    starting,
)
from simulator.fabric import Node, Pod
from simulator.striking import LASTING, calm, disturb, later, part, some_holder, some_node
from simulator.trainers import Trainer

if TYPE_CHECKING:
    from simulator.world import Simulation


def schedule(simulation: Simulation) -> None:
    """Draws when and what; whom it hits is drawn when it happens."""
    rng, engine = simulation.engine.rng, simulation.engine
    kinds = simulation.settings.kinds or tuple(kind for kind, (weight, _) in KINDS.items() if weight)
    for _ in range(simulation.settings.faults):
        kind = rng.choices(kinds, [KINDS[kind][0] or 1 for kind in kinds])[0]
        at = 1.0 + rng.random() * simulation.settings.fault_span_seconds
        duration = rng.choice((0.3, 1.0, 3.0, 6.0, 12.0)) * rng.uniform(0.7, 1.3)
        simulation.faults_until = max(simulation.faults_until, at + duration)
        engine.after(at, engine.environment, _strike, simulation, kind, duration)
    for kind, at in () if simulation.settings.kinds else spoiling.drawn(simulation):
        engine.after(at, engine.environment, _strike, simulation, kind, 0.0)


def _strike(simulation: Simulation, kind: str, duration: float) -> None:
    simulation.struck[kind] += 1
    simulation.machines_struck |= not kind.startswith("trainer") or kind in spoiling.KINDS
    if kind in announced.KINDS or kind in rollout.KINDS or kind in {**sickness.KINDS, **pace_watch.KINDS}:
        simulation.oracle.lossless.announced(kind)
    else:
        simulation.oracle.lossless.struck(0.0, damage=kind in damage.KINDS)
    KINDS[kind][1](simulation, duration)


def _kill_node(simulation: Simulation, duration: float, silent: bool = False) -> None:
    node = some_node(simulation)
    if node is None:
        return
    simulation.engine.say("FAULT {} dies{} for {:.1f} s", node.name, " silently" if silent else "", duration)
    disturb(simulation, node.name)
    simulation.fabric.kill_node(node, silent)
    later(simulation, duration, _return_node, simulation, node)


def _return_node(simulation: Simulation, node: Node) -> None:
    simulation.engine.say("{} returns", node.name)
    simulation.fabric.return_node(node)
    calm(simulation, node.name)


def _power_loss(simulation: Simulation, duration: float) -> None:
    _kill_node(simulation, duration, silent=True)


def _freeze_node(simulation: Simulation, duration: float) -> None:
    node = some_node(simulation)
    if node is None:
        return
    simulation.engine.say("FAULT {} freezes for {:.1f} s", node.name, duration)
    disturb(simulation, node.name)
    simulation.fabric.freeze_node(node)
    later(simulation, duration, _thaw_node, simulation, node)


def _thaw_node(simulation: Simulation, node: Node) -> None:
    simulation.engine.say("{} thaws", node.name)
    simulation.fabric.thaw_node(node)
    calm(simulation, node.name)


def _restart_holder(simulation: Simulation, duration: float) -> None:
    holder = some_holder(simulation)
    if holder is None:
        return
    simulation.engine.say("FAULT {} restarts empty after {:.1f} s", holder.id, duration)
    disturb(simulation, holder.id.node)
    simulation.fabric.kill_holder(holder)
    later(simulation, duration, simulation.fabric.return_holder, holder)
    later(simulation, duration, calm, simulation, holder.id.node)


def _freeze_holder(simulation: Simulation, duration: float) -> None:
    holder = some_holder(simulation)
    if holder is None or not holder.process.alive:
        return
    process = holder.process
    simulation.engine.say("FAULT {} freezes for {:.1f} s", holder.id, duration)
    disturb(simulation, holder.id.node)
    simulation.engine.freeze(process)
    later(simulation, duration, simulation.engine.thaw, process)
    later(simulation, duration, calm, simulation, holder.id.node)


def _fill_holder(simulation: Simulation, duration: float) -> None:
    holder = some_holder(simulation)
    if holder is None:
        return
    simulation.engine.say("FAULT {} is full for {:.1f} s", holder.id, duration)
    holder.full = True

    def room() -> None:
        holder.full = False
        simulation.oracle.eyes.room_since = simulation.engine.now

    later(simulation, duration, room)


def _trainers(simulation: Simulation) -> list[Trainer]:
    pods = [p for n in simulation.fabric.nodes.values() if not n.frozen for p in n.pods]
    return [t for p in pods if p.agent is not None for t in p.agent.trainers if t.process.running]


def _kill_trainer(simulation: Simulation, duration: float) -> None:
    trainers = _trainers(simulation)
    if trainers:
        victim = simulation.engine.rng.choice(trainers)
        simulation.engine.say("FAULT {} is killed", victim.process.name)
        victim.kill()


def _hang_trainer(simulation: Simulation, duration: float) -> None:
    trainers = _trainers(simulation)
    if trainers:
        victim = simulation.engine.rng.choice(trainers)
        simulation.engine.say("FAULT {} hangs", victim.process.name)
        simulation.hang_watch.hang(victim)


def _freeze_trainer(simulation: Simulation, duration: float) -> None:
    """One rank alone is stopped and goes on: a debugger, a page fault, a throttled core."""
    trainers = _trainers(simulation)
    if trainers:
        victim = simulation.engine.rng.choice(trainers).process
        simulation.engine.say("FAULT {} freezes for {:.1f} s", victim.name, duration)
        simulation.engine.freeze(victim)
        later(simulation, duration, simulation.engine.thaw, victim)


def _pods(simulation: Simulation) -> list[Pod]:
    return [p for n in simulation.fabric.nodes.values() if not n.frozen for p in n.pods if not p.over]


def _kill_agent(simulation: Simulation, duration: float) -> None:
    pods = _pods(simulation)
    if pods:
        victim = simulation.engine.rng.choice(pods)
        simulation.engine.say("FAULT the agent of {} is killed", victim.name)
        simulation.fabric.kill_agent(victim)


def _isolate_node(simulation: Simulation, duration: float) -> None:
    node = some_node(simulation)
    if node is None:
        return
    others = [n for n in (*simulation.fabric.nodes, "operator", "persistent") if n != node.name]
    simulation.engine.say("FAULT {} is cut off from all for {:.1f} s", node.name, duration)
    part(simulation, [(node.name, other) for other in others], duration)


def _part_operator(simulation: Simulation, duration: float) -> None:
    """The operator loses some nodes, which go on among themselves: an old world that does not know."""
    rng = simulation.engine.rng
    names = sorted(simulation.fabric.nodes)
    lost = rng.sample(names, rng.randint(1, len(names)))
    simulation.engine.say("FAULT the operator loses {} for {:.1f} s", lost, duration)
    part(simulation, [("operator", name) for name in lost], duration)


def _part_pair(simulation: Simulation, duration: float) -> None:
    one, other = simulation.engine.rng.sample(sorted(simulation.fabric.nodes), 2)
    simulation.engine.say("FAULT {} and {} lose each other for {:.1f} s", one, other, duration)
    part(simulation, [(one, other)], duration)


def _part_persistent(simulation: Simulation, duration: float) -> None:
    if simulation.persistent is None:
        return
    simulation.engine.say("FAULT the persistent tier is away for {:.1f} s", duration)
    process = simulation.persistent.process
    disturb(simulation, "persistent")
    simulation.persistent_unkind = True
    simulation.engine.freeze(process)
    later(simulation, duration, simulation.engine.thaw, process)
    later(simulation, duration, calm, simulation, "persistent")


def _kill_operator(simulation: Simulation, duration: float) -> None:
    operator = simulation.operators[-1]
    if not operator.process.running:
        return
    simulation.engine.say("FAULT {} is killed for {:.1f} s", operator.process.name, duration)
    simulation.engine.kill(operator.process)
    later(simulation, duration, simulation.start_operator)


def _freeze_operator(simulation: Simulation, duration: float, tries: int = 300) -> None:
    """It stops; another one takes the lease; it thaws with what it believed, and finds out a little later.

    Where it can be had, it stops between having planned and having written: with the most to do late.
    """
    operator = simulation.operators[-1]
    if not operator.process.running:
        return
    if not operator.applying and tries:
        later(simulation, 0.003, _freeze_operator, simulation, duration, tries - 1)
        return
    simulation.engine.say("FAULT {} freezes for {:.1f} s", operator.process.name, duration)
    simulation.engine.freeze(operator.process)
    takeover = simulation.engine.rng.uniform(0.2, 1.0) * duration
    later(simulation, takeover, _take_over, simulation)
    later(simulation, duration, simulation.engine.thaw, operator.process)
    notice = simulation.engine.rng.choice((0.001, 0.05, 0.5))
    later(simulation, duration + notice, operator.hang_up)


def _take_over(simulation: Simulation) -> None:
    simulation.start_operator()
    for node in simulation.fabric.nodes.values():
        for pod in node.pods:
            if pod.agent is not None and pod.agent.process.alive:
                simulation.engine.after(simulation.engine.rng.uniform(0.0, 0.3), pod.agent.process, pod.agent.redial)


def _answer(simulation: Simulation, answers: Literal["no", "late", "never"], duration: float) -> None:
    fabric = simulation.fabric
    simulation.engine.say("FAULT the API answers {} about pods for {:.1f} s", answers, duration)
    fabric.answers, until = answers, simulation.engine.now + duration
    fabric.unkind_until = max(fabric.unkind_until, until)

    def kind() -> None:
        if fabric.unkind_until <= until:
            fabric.answers = "at once"
            simulation.changed()

    later(simulation, duration, kind)


def _refuse_pods(simulation: Simulation, duration: float) -> None:
    _answer(simulation, "no", LASTING * duration)


def _delay_pods(simulation: Simulation, duration: float) -> None:
    _answer(simulation, "late", LASTING * duration)


def _lose_answers(simulation: Simulation, duration: float) -> None:
    _answer(simulation, "never", LASTING * duration)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "node dies": (3, _kill_node),
    "node loses power": (2, _power_loss),
    "node freezes": (3, _freeze_node),
    "holder restarts": (2, _restart_holder),
    "holder freezes": (2, _freeze_holder),
    "holder is full": (1, _fill_holder),
    "trainer dies": (2, _kill_trainer),
    "trainer hangs": (0.5, _hang_trainer),
    "trainer freezes": (1, _freeze_trainer),
    "agent dies": (2, _kill_agent),
    "node is cut off": (2, _isolate_node),
    "operator loses nodes": (2, _part_operator),
    "two nodes lose each other": (1, _part_pair),
    "persistent tier is away": (1, _part_persistent),
    "operator dies": (2, _kill_operator),
    "operator freezes, another leads": (2, _freeze_operator),
    "chunk is damaged": damage.KINDS["chunk is damaged"],
    "pods are refused": (1, _refuse_pods),
    "pods are made late": (1, _delay_pods),
    "answers about pods are lost": (1, _lose_answers),
    **hindrances.KINDS,
    **lasting.KINDS,
    **damage.KINDS,
    **announced.KINDS,
    **rollout.KINDS,
    **sickness.KINDS,
    **pace_watch.KINDS,
    **spoiling.KINDS,
    **failing.KINDS,
    **starting.KINDS,
    **racks.KINDS,
}
"""With how often each is drawn; at 0 only where it is named."""
