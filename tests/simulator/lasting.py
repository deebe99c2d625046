"""Faults that outlast patience: links that stay broken, uploads of many seconds, leaders and clocks that are past.

Nothing dies of them but the warm process of a worker, which is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import Pod
from simulator.striking import LASTING, calm, disturb, later, part

if TYPE_CHECKING:
    from simulator.agents import Agent
    from simulator.operators import Operator
    from simulator.world import Simulation

REDIALS = 8
"""How often agents lose their line while a former leader still answers."""

DRIFT = 0.02
"""How much faster or slower a clock may go: a thousand times what real ones do."""


def _agents(simulation: Simulation) -> list[Pod]:
    nodes = simulation.fabric.nodes.values()
    return [p for n in nodes if not n.frozen for p in n.pods if p.agent is not None and p.agent.process.alive]


def _former_leader(simulation: Simulation, duration: float) -> None:
    """A leader stops; another one leads and the world changes; it goes on and answers those whose line breaks then."""
    former = simulation.operators[-1]
    if not former.process.running:
        return
    engine, rng = simulation.engine, simulation.engine.rng
    engine.say("FAULT {} stops, and answers again after {:.1f} s", former.process.name, duration)
    engine.freeze(former.process)
    former.outdated = True
    later(simulation, 0.05, simulation.start_operator)
    later(simulation, 0.06, _redial_all, simulation)
    trainers = [t for pod in _agents(simulation) if pod.agent for t in pod.agent.trainers if t.process.running]
    if trainers:
        later(simulation, 0.5, rng.choice(trainers).kill)
    later(simulation, duration, engine.thaw, former.process)
    lasts = rng.uniform(0.2, 2.0)
    for _ in range(REDIALS):
        later(simulation, duration + rng.uniform(0.0, lasts), _redial_one, simulation)
    later(simulation, duration + lasts, _hang_up, former)


def _redial_all(simulation: Simulation) -> None:
    for pod in _agents(simulation):
        if pod.agent is not None:
            simulation.engine.after(simulation.engine.rng.uniform(0.0, 0.3), pod.agent.process, pod.agent.redial)


def _redial_one(simulation: Simulation) -> None:
    pods = _agents(simulation)
    agent = simulation.engine.rng.choice(pods).agent if pods else None
    if agent is not None:
        simulation.engine.after(0.0, agent.process, agent.redial)


def _hang_up(former: Operator) -> None:
    if former.process.alive:
        former.hang_up()


def _end_warm_process(simulation: Simulation, duration: float) -> None:
    """What trainers are forked from ends (killed for memory), and another one takes a while to be warm."""
    pods = _agents(simulation)
    agent = simulation.engine.rng.choice(pods).agent if pods else None
    if agent is not None:
        simulation.engine.say("FAULT the warm process of {} ends; another in {:.1f} s", agent.process.name, duration)
        simulation.engine.after(0.0, agent.process, agent.warm, False)
        simulation.engine.after(duration, agent.process, agent.warm, True)


def _end_warm_process_at_commit(simulation: Simulation, duration: float, tries: int = 1000) -> None:
    """The same just when a world is committed: it cannot start there, another rank fails, and the world is claimed anew."""
    world = simulation.store.status.membership
    if world is None or world.state != "Claimed":
        if tries:
            later(simulation, 0.01, _end_warm_process_at_commit, simulation, duration, tries - 1)
        return
    _strike_at_commit(simulation, world.generation, 3000)


def _strike_at_commit(simulation: Simulation, epoch: int, tries: int) -> None:
    world, rng = simulation.store.status.membership, simulation.engine.rng
    if world is None or world.generation != epoch or not tries:
        return
    if world.state != "Committed":
        later(simulation, 0.001, _strike_at_commit, simulation, epoch, tries - 1)
        return
    agents = [pod.agent for pod in _agents(simulation) if pod.agent is not None]
    if len(agents) < 2:
        return
    cold, other = rng.sample(agents, 2)
    simulation.engine.say("FAULT the warm process of {} ends as epoch {} is committed", cold.process.name, epoch)
    simulation.engine.after(0.0, cold.process, cold.warm, False)
    simulation.engine.after(0.6, other.process, _kill_ranks, other)
    simulation.engine.after(0.6 + rng.uniform(0.05, 0.8), cold.process, cold.warm, True)


def _kill_ranks(agent: Agent) -> None:
    for trainer in agent.trainers:
        trainer.kill()


def _break_line_for_long(simulation: Simulation, duration: float) -> None:
    """One agent's line is reset, and no other one comes about for a while; training feels nothing."""
    rng = simulation.engine.rng
    connections = [c for c in simulation.operators[-1].connections if c.worker is not None]
    if connections:
        line = rng.choice(connections).line
        site = next(end.site for end in line.ends if end is not simulation.operators[-1].process)
        simulation.engine.say("FAULT the line of {} breaks for {:.1f} s", site, duration)
        line.cut()
        part(simulation, [("operator", site)], duration)


def _lose_holder_for_long(simulation: Simulation, duration: float) -> None:
    """The operator does not reach one holder for minutes; every agent does."""
    name = simulation.engine.rng.choice(sorted(simulation.fabric.nodes))
    seconds = 2 * LASTING * duration
    simulation.engine.say("FAULT the operator loses the holder of {} for {:.1f} s", name, seconds)
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + seconds)
    part(simulation, [("operator", f"{name}/holder")], seconds)


def _slow_uploads(simulation: Simulation, duration: float) -> None:
    """Each rank's upload takes seconds of its own: worlds end between the first and the last of a checkpoint."""
    tier, rng = simulation.persistent, simulation.engine.rng
    if tier is None:
        return
    simulation.engine.say("FAULT uploads take up to 8 s for {:.1f} s", duration)
    simulation.persistent_unkind = True
    disturb(simulation, "persistent")
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + duration + 10.0)
    tier.slow_put = lambda: rng.choice((0.05, rng.uniform(0.5, 8.0)))
    later(simulation, duration, setattr, tier, "slow_put", None)
    later(simulation, duration + 10.0, calm, simulation, "persistent")


def _drift(simulation: Simulation, duration: float) -> None:
    """The clock of whoever leads, and leads next, goes too fast or too slow."""
    simulation.drift = simulation.engine.rng.uniform(-DRIFT, DRIFT)
    simulation.engine.say("FAULT clocks of operators drift by {:+.1%}", simulation.drift)
    for operator in simulation.operators:
        operator.clock.drift(simulation.drift)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "former leader answers": (1, _former_leader),
    "warm process ends": (1, _end_warm_process),
    "warm process ends at a commit": (0, _end_warm_process_at_commit),
    "line breaks for long": (1, _break_line_for_long),
    "operator loses a holder for long": (0.5, _lose_holder_for_long),
    "uploads are slow": (1, _slow_uploads),
    "clock drifts": (1, _drift),
}
