"""Workers that their kubelet cannot start for minutes, and then can: a registry or a secret is away, an init container fails.

Nothing that runs feels it; whoever is lost meanwhile has no replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulator.fabric import INIT_FAILS
from simulator.striking import later

if TYPE_CHECKING:
    from simulator.world import Simulation

LASTS = 5.0
"""So many times as long as a node's restart."""

WAITS = "ErrImagePull: no such host"


def _cannot_start(simulation: Simulation, duration: float) -> None:
    fabric, why = simulation.fabric, simulation.engine.rng.choice((WAITS, INIT_FAILS))
    if fabric.unstartable:
        return
    simulation.engine.say("FAULT no worker can be started for {:.1f} s: {}", LASTS * duration, why)
    fabric.unstartable = why
    simulation.faults_until = max(simulation.faults_until, simulation.engine.now + LASTS * duration)
    later(simulation, LASTS * duration, setattr, fabric, "unstartable", "")


KINDS: dict[str, tuple[float, Callable[[Simulation, float], None]]] = {"workers cannot be started": (0, _cannot_start)}
"""Only where it is named: nothing of it was drawn before it was there."""
