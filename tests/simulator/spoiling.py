"""Numbers that go wrong: data that is none, a model that a rank spoils, losses that leap for a while."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.world import Simulation


def _ahead(simulation: Simulation, most: int) -> list[int]:
    """Some steps' data that nobody has trained on yet, or that the next may."""
    rng, oracle = simulation.engine.rng, simulation.oracle
    reached = max((step for _, step in oracle.training.ledger), default=0)
    first = reached + rng.randint(1, 6)
    return list(range(first, first + rng.randint(1, most)))


def _poison(simulation: Simulation, duration: float) -> None:
    """Batches that make the model no number; not where nothing would be done about it."""
    if not simulation.settings.good_after:
        return
    places = _ahead(simulation, 2)
    simulation.engine.say("FAULT the data of steps {} is no number", places)
    simulation.oracle.numerics.poison.update(places)


def _spoil(simulation: Simulation, duration: float) -> None:
    """A rank's model becomes no number by itself, once."""
    oracle = simulation.oracle
    if not simulation.settings.good_after or not oracle.base:
        return
    reached = max((step for epoch, step in oracle.training.ledger if epoch == oracle.base), default=0)
    simulation.engine.say("FAULT the model of epoch {} is no number from step {} on", oracle.base, reached + 2)
    oracle.numerics.spoiled.setdefault(oracle.base, reached + 2)


def _leap(simulation: Simulation, duration: float) -> None:
    if not simulation.settings.good_after:
        return
    places = _ahead(simulation, 4)
    simulation.engine.say("FAULT the losses of steps {} are far out", places)
    simulation.oracle.numerics.spikes.update(places)


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {
    "data is no number": (0, _poison),
    "model becomes no number": (0, _spoil),
    "losses leap": (0, _leap),
}
"""Drawn apart, of jobs that do something about it."""


def drawn(simulation: Simulation) -> list[tuple[str, float]]:
    """Kinds and moments of one seed."""
    settings = simulation.settings
    if not settings.good_after or not settings.faults:
        return []
    rng = random.Random(f"spoiling {simulation.engine.rng.random()}")
    return [
        (rng.choice(sorted(KINDS)), 1.0 + rng.random() * settings.fault_span_seconds) for _ in range(rng.randint(0, 3))
    ]
