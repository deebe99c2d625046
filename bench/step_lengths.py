"""A save each step, at steps from half a drain to five: what one length alone would hide. Pure but for the turns it is given.

At steps as long as a drain every save fits just; shorter ones skip saves, or wait for them; in longer ones all systems lose
less. So the share of saves that became safe stands beside each figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lost import DENSE, lost_figures


def figure(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Step time with a save each step over that without, and which share of the saves became safe."""
    if "error" in turn:
        return {"error": turn["error"]}
    stretches = turn["spare"]["stretches"]
    due = sum(len(stretch["stalls"]) for stretch in stretches)
    found = lost_figures([stretches])
    return {
        "step_seconds": found.get("step_seconds"),
        "relative_step": found.get("relative_step_every_1"),
        "saves_safe": (due - len(turn["incomplete"])) / due if due else None,
    }


def row(drains: float, turns: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One length: each system's figure, by name."""
    return {"step_over_drain": drains, "interval": DENSE, **{name: figure(turn) for name, turn in turns.items()}}
