"""Draws goodput over how often a job is struck. Called by `week_report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot


def draw(rows: Sequence[Mapping[str, Any]], to: Path) -> None:
    mpl.use("svg")
    drawn, axis = pyplot.subplots(figsize=(9, 4.2))
    for name in dict.fromkeys(row["way"] for row in rows):
        of = [row for row in rows if row["way"] == name]
        style = "-" if name.startswith("ours") else "--"
        axis.plot([row["faults"] for row in of], [100 * row["goodput"] for row in of], style, marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("faults, times as frequent as Llama 3's")
    axis.set_ylabel("goodput of a week, %")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    to.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(to, metadata={"Date": None})
