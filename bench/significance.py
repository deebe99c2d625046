"""What a ratio of two systems is worth: its spread, and whether it is ahead of 1 beyond chance. Pure.

A machine drifts by more than two systems differ, and of a ratio near 1 a median alone says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from bench.summary import LOCAL, OURS

CHANCE = 0.05
"""That so many of the pairs would be above 1 if each were as likely below it."""


def spread(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any] | None:
    """Of pairs measured in turns, in the order of measuring: theirs over ours. A sign test says whether it is ahead."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=False)]
    if not ratios:
        return None
    above = sum(ratio > 1 for ratio in ratios)
    by_chance = sum(comb(len(ratios), k) for k in range(above, len(ratios) + 1)) / 2 ** len(ratios)
    return {"least": min(ratios), "most": max(ratios), "pairs": len(ratios), "ahead": by_chance <= CHANCE}


def spreads(turns: Mapping[str, Sequence[Mapping[str, Any]]], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Of the summary's ratios whose two sides are measured alternately. Turns that failed are left out, on both sides."""
    rates = {name: spread(*_pairs(turns, name)) for name in LOCAL if name in turns}
    known = [one for one in rates.values() if one is not None]
    restores = sections.get("restores", {})
    found: dict[str, Any] = {"restore_over_dcp_load": None, "r2_over_best_local_peer": None}
    if OURS in restores and "dcp.load" in restores:
        found["restore_over_dcp_load"] = spread(*(restores[name]["seconds"][1:] for name in ("dcp.load", OURS)))
    if known:
        # ahead of the best is ahead of each
        nearest = min(known, key=lambda one: float(one["least"]))
        found["r2_over_best_local_peer"] = {**nearest, "ahead": all(one["ahead"] for one in known)}
    return found


def _pairs(turns: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> tuple[list[float], list[float]]:
    theirs: list[float] = []
    ours: list[float] = []
    for one, other in zip(turns[name], turns.get(OURS, ()), strict=False):
        if "idle" in one and "idle" in other and not one["incomplete"] and not other["incomplete"]:
            both = list(zip(one["idle"]["seconds"], other["idle"]["seconds"], strict=False))
            theirs += [a for a, _ in both]
            ours += [b for _, b in both]
    return theirs, ours
