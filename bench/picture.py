"""The picture beside the figures: stall, throughput and lost step time of every system. Called by `__main__`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

PANELS = (
    ("stall_seconds", "stall of a save, s (warm)"),
    ("first_stall_seconds", "stall of the first save, s"),
    ("gb_per_second", "GB/s until safe\n(Surefoot: two copies on two holders)"),
    ("lost_step_percent_every_10", "step time lost, %\n(a save every 10 steps)"),
)
OURS, OTHERS = "#1f6f8b", "#b9c4c9"


def draw(figures: Mapping[str, Mapping[str, float | None]], to: Path) -> None:
    mpl.use("svg")
    drawn, axes = pyplot.subplots(1, len(PANELS), figsize=(15, 4.2), sharey=True)
    names = list(figures)[::-1]
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        values = [figures[name].get(key) for name in names]
        bars = axis.barh(names, [v or 0 for v in values], color=[OURS if n == "surefoot" else OTHERS for n in names])
        labels = ["not measured" if v is None else f"{v:.3g}" for v in values]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    drawn.savefig(to)
