"""Faults of what lies between: links that fail apart from each other, an API that lags or is away, a tier that fails for
some objects, clocks that differ, a core that is busy. Nothing dies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.striking import LASTING, calm, disturb, later, part, some_holder

if TYPE_CHECKING:
    from simulator.world import Simulation


def _some(simulation: Simulation) -> list[str]:
    rng, names = simulation.engine.rng, sorted(simulation.fabric.nodes)
    return rng.sample(names, rng.randint(1, len(names)))


def _blind_operator(simulation: Simulation, duration: float) -> None:
    """It hears its agents, and reaches no holder beside them."""
    lost = _some(simulation)
    simulation.engine.say("FAULT the operator loses the holders of {} for {:.1f} s", lost, duration)
    part(simulation, [("operator", f"{name}/holder") for name in lost], duration)


def _deaf_operator(simulation: Simulation, duration: float) -> None:
    """One way: what agents say does not arrive, what they are told does; or the other way round."""
    lost, inward = _some(simulation), simulation.engine.rng.random() < 0.5
    simulation.engine.say("FAULT {} and the operator hear one way alone for {:.1f} s", lost, duration)
    pairs = [(name, "operator") if inward else ("operator", name) for name in lost]
    part(simulation, pairs, duration, both=False)


def _part_holder(simulation: Simulation, duration: float) -> None:
    """One node's agents do not reach another node's holder; everybody else does."""
    one, other = simulation.engine.rng.sample(sorted(simulation.fabric.nodes), 2)
    simulation.engine.say("FAULT {} loses the holder of {} for {:.1f} s", one, other, duration)
    part(simulation, [(one, f"{other}/holder")], duration)


def _cut_lines(simulation: Simulation, duration: float) -> None:
    """Resets from between: lines break, and what was on its way is lost."""
    connections = [c for o in simulation.operators for c in o.connections]
    if connections:
        cut = simulation.engine.rng.sample(connections, simulation.engine.rng.randint(1, len(connections)))
        simulation.engine.say("FAULT {} lines are cut", len(cut))
        for connection in cut:
            connection.line.cut()


def _call_twice(simulation: Simulation, duration: float) -> None:
    """Calls to tiers are carried out again, later, by a library that tries again or a network that repeats."""
    simulation.engine.say("FAULT calls may be carried out twice for {:.1f} s", duration)
    simulation.network.twice_until = max(simulation.network.twice_until, simulation.engine.now + duration)


def _restart_in_a_call(simulation: Simulation, duration: float) -> None:
    """A Redis ends in the middle of the next call: done, and never answered."""
    holder = some_holder(simulation)
    if holder is None or not holder.process.alive:
        return
    victim = simulation.fabric.nodes[holder.id.node]
    simulation.engine.say("FAULT {} ends in its next call", holder.id)
    disturb(simulation, victim.name)

    def end() -> None:
        if holder in victim.holders:
            simulation.fabric.kill_holder(holder)
            later(simulation, simulation.engine.rng.uniform(0.05, 1.0), simulation.fabric.return_holder, holder)
            later(simulation, 1.0, calm, simulation, victim.name)

    simulation.network.last_calls[holder.process] = end
    later(simulation, duration, calm, simulation, victim.name)


# ---- the API server -------------------------------------------------------------------------------------------------


def _lag(simulation: Simulation, duration: float) -> None:
    """Leaders read what is past: their writes conflict."""
    seconds = simulation.engine.rng.uniform(0.2, 2.0)
    simulation.engine.say("FAULT the API is read {:.1f} s late for {:.1f} s", seconds, duration)
    simulation.store.lag_seconds = seconds
    later(simulation, duration, setattr, simulation.store, "lag_seconds", 0.0)
    later(simulation, duration, simulation.changed)


def _lose_writes(simulation: Simulation, duration: float) -> None:
    """Status is written, and nobody answers that it was."""
    simulation.engine.say("FAULT the API does not answer to writes for {:.1f} s", duration)
    simulation.store.losing = True
    later(simulation, duration, setattr, simulation.store, "losing", False)


def _go_away(simulation: Simulation, duration: float) -> None:
    """Nothing is read or written; when it is back every node counts as silent until kubelets are heard."""
    fabric, store, engine = simulation.fabric, simulation.store, simulation.engine
    seconds = LASTING / 2 * duration
    if store.away or fabric.answers != "at once":
        return
    engine.say("FAULT the API is away for {:.1f} s", seconds)
    store.away, fabric.answers = True, "away"
    fabric.stand_still(True)

    def back() -> None:
        store.away, fabric.answers = False, "at once"
        fabric.stand_still(False)
        for node in fabric.nodes.values():
            node.doubted_until = engine.now + engine.rng.uniform(2.0, 20.0)
            engine.say("the API is back, and calls {} silent until {:.1f}", node.name, node.doubted_until)
            simulation.faults_until = max(simulation.faults_until, node.doubted_until)
            later(simulation, node.doubted_until - engine.now, simulation.changed)
        simulation.changed()

    later(simulation, seconds, back)
    simulation.faults_until = max(simulation.faults_until, engine.now + seconds + 20.0)


# ---- the persistent tier --------------------------------------------------------------------------------------------


def _slow_listings(simulation: Simulation, duration: float) -> None:
    """Up to a minute each."""
    tier, rng = simulation.persistent, simulation.engine.rng
    if tier is None:
        return
    simulation.engine.say("FAULT listings take up to a minute for {:.1f} s", LASTING * duration)
    unkind(simulation, LASTING * duration + 60.0)
    tier.slow = lambda: rng.uniform(1.0, 60.0)
    until = simulation.engine.now + LASTING * duration + 62.0
    simulation.listings_slow_until = max(simulation.listings_slow_until, until)
    later(simulation, LASTING * duration, setattr, tier, "slow", lambda: 0.0)


def _fail_objects(simulation: Simulation, duration: float) -> None:
    """Single requests fail, each by itself."""
    tier, rng = simulation.persistent, simulation.engine.rng
    if tier is None:
        return
    share = rng.choice((0.1, 0.3, 0.6))
    simulation.engine.say("FAULT {:.0%} of the tier's requests fail for {:.1f} s", share, duration)
    unkind(simulation, duration)
    tier.failing = lambda: rng.random() < share
    later(simulation, duration, setattr, tier, "failing", lambda: False)


def unkind(simulation: Simulation, seconds: float) -> None:
    simulation.persistent_unkind = True
    disturb(simulation, "persistent")
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + seconds)
    later(simulation, seconds, calm, simulation, "persistent")


# ---- clocks and cores -----------------------------------------------------------------------------------------------


def _skew(simulation: Simulation, duration: float) -> None:
    """Whoever leads next has another clock."""
    simulation.skew_seconds = simulation.engine.rng.uniform(-5.0, 5.0)
    simulation.engine.say("FAULT the next operator's clock is {:.1f} s wrong", simulation.skew_seconds)


def _busy(simulation: Simulation, duration: float) -> None:
    """The operator's core is shared: each message and each plan takes it long, and meanwhile it hears nothing."""
    rng = simulation.engine.rng
    simulation.message_seconds, simulation.plan_seconds = rng.uniform(0.002, 0.03), rng.uniform(0.05, 1.0)
    simulation.engine.say("FAULT a plan takes the operator {:.2f} s for {:.1f} s", simulation.plan_seconds, duration)
    later(simulation, duration, setattr, simulation, "message_seconds", 0.0001)
    later(simulation, duration, setattr, simulation, "plan_seconds", 0.001)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "operator loses holders": (1.5, _blind_operator),
    "operator and nodes hear one way": (1, _deaf_operator),
    "node loses another's holder": (1, _part_holder),
    "lines are cut": (1.5, _cut_lines),
    "calls are carried out twice": (1, _call_twice),
    "holder ends in a call": (1.5, _restart_in_a_call),
    "API lags": (1, _lag),
    "answers to writes are lost": (1, _lose_writes),
    "API is away": (1, _go_away),
    "listings are slow": (1, _slow_listings),
    "objects fail": (1, _fail_objects),
    "clock differs": (1, _skew),
    "operator is busy": (1, _busy),
}
