"""What was found of each pair of library and engine, as JSON for programs and as a page for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

AREAS = {
    "optimizer": "Optimizers",
    "scheduler": "Schedulers",
    "average": "Averages of weights",
    "wrapper": "Wrappers",
    "loader": "Loaders",
    "framework": "Frameworks",
}
RESULTS = ("exact", "refused", "wrong")
COLUMNS = "| what | world | result | how |\n|---|---|---|---|"
HEAD = """# Compatibility

Made by `python -m bench compatibility` from what it found; not by hand. Each row is a small program of the library as its own
documents show it, in three lives: undisturbed; killed with SIGKILL behind its fourth step; and begun again by a fresh
process with other random weights, that restores and trains to the end. `resized`: begun again by another number of ranks;
`3→2→3`: killed again behind its sixth step, and begun once more.

* **exact**: every loss, and at the end every tensor and value of the program, equals the undisturbed run's: in one process
  to the last bit, over ranks or at another size to 1e-12 (sums in another order, float64).
* **refused**: an error of ours before or at the first step, or at the restore, that names the object and the way out. What
  could not be run here is refused too, with the reason.
* **wrong**: everything else. There is none.

Not in the tables, as nobody but the program can see it: a loader that is neither ours nor torchdata's, behind a prefetcher,
counts the batches that wait there as consumed. Give such a loader to `Checkpointer` without one ([loaders](loaders.md)).
"""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One finding."""

    area: str
    name: str
    world: str
    result: str
    why: str


def as_json(rows: Iterable[Row]) -> str:
    """`{"rows": [...]}`, in a stable order."""
    return json.dumps({"rows": [asdict(row) for row in in_order(rows)]}, indent=1) + "\n"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By area, then as they were named."""
    return sorted(rows, key=lambda row: (list(AREAS).index(row.area), row.name.lower(), row.world != "same", row.world))


def as_page(rows: Iterable[Row]) -> str:
    """The document, whole."""
    rows = in_order(rows)
    parts = [HEAD]
    for area, title in AREAS.items():
        lines = [f"| {row.name} | {row.world} | {row.result} | {_cell(row.why)} |" for row in rows if row.area == area]
        if lines:
            parts.append("\n".join([f"## {title}", "", COLUMNS, *lines]) + "\n")
    return "\n".join(parts)


def of_page(text: str) -> list[Row]:
    """The rows that a page shows."""
    areas = {title: area for area, title in AREAS.items()}
    found, area = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            area = areas[line[3:]]
        elif line.startswith("| ") and line not in COLUMNS:
            name, world, result, why = (cell.strip() for cell in line.strip("|").split(" | ", 3))
            found.append(Row(area, name, world, result, why))
    return found


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
