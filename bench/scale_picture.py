"""Draws what one job costs the operator over its number of workers. Called by `bench.scale`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

OURS = "#1f6f8b"
Row = dict[str, Any]


def _round_ms(row: Row) -> float:
    return float(row["plan_ms"] + row["check_ms"] + row["maintain_ms"])


def _kilobytes(row: Row) -> float:
    return float(row["status_bytes"] / 1e3)


def _first_word(row: Row) -> float:
    return float(row["told"]["first"]["bytes_a_worker"] / 1e3)


PANELS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("CPU of a round (plan, check, upkeep), ms", _round_ms),
    ("status, kB", _kilobytes),
    ("first word to an agent, kB", _first_word),
)


def draw(rows: Sequence[Row], lines: Sequence[Row], to: Path) -> None:
    """One panel a cost; the last is of real lines, each run a dot and their median the curve."""
    mpl.use("svg")
    drawn, axes = pyplot.subplots(1, len(PANELS) + 1, figsize=(15, 3.6))
    for axis, (title, cost) in zip(axes, PANELS, strict=False):
        _curve(axis, title, [(row["workers"], cost(row)) for row in rows])
    _curve(axes[-1], "one lost: all orders out, s", [(row["workers"], row["committed_seconds"]) for row in lines[:-1]])
    drawn.tight_layout()
    to.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(to, metadata={"Date": None})


def _curve(axis: Any, title: str, points: Sequence[tuple[int, float]]) -> None:
    sizes = sorted({size for size, _ in points})
    axis.plot(sizes, [median(cost for at, cost in points if at == size) for size in sizes], color=OURS)
    axis.scatter([size for size, _ in points], [cost for _, cost in points], color=OURS, s=14)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("workers", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
