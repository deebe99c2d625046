"""Renders the result of each compatibility case as JSON and as docs/compatibility.md. Pure."""

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
RESULTS = ("exact", "rejected", "wrong")
COLUMNS = "| case | world size | result | detail |\n|---|---|---|---|"
HEAD = """# Compatibility

`python -m bench compatibility` writes this page from its results. Do not edit it. Each row is a small program of a library, as in the
library's own documentation. It runs three times: undisturbed; killed with SIGKILL after its fourth step; and restarted as a new
process with other random weights, which restores and trains to the end. `resized` restarts it with another number of ranks.
`3→2→3` kills it again after its sixth step, and restarts it once more.

* **exact**: every loss, and at the end every tensor and value of the program, equals the undisturbed run's: in one process
  to the last bit, over ranks or at another world size to 1e-12 (sums in another order, float64).
* **rejected**: Surefoot raises an error before or at the first step, or at the restore, that names the object and the remedy. A case
  that could not be run here also counts as rejected, with the reason.
* **wrong**: everything else. There is none.

One case is not in the tables, because only the program can detect it: a loader that is neither Surefoot's nor torchdata's counts the
batches that a prefetcher has taken as consumed. Give such a loader to `Checkpointer` without a prefetcher ([loaders](loaders.md)).
"""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """The result of one case."""

    area: str
    name: str
    world: str
    result: str
    why: str


def as_json(rows: Iterable[Row]) -> str:
    """Renders `{"rows": [...]}` in a stable order."""
    return json.dumps({"rows": [asdict(row) for row in in_order(rows)]}, indent=1) + "\n"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows by area, then by name."""
    return sorted(rows, key=lambda row: (list(AREAS).index(row.area), row.name.lower(), row.world != "same", row.world))


def as_page(rows: Iterable[Row]) -> str:
    """Renders the whole document."""
    rows = in_order(rows)
    parts = [HEAD]
    for area, title in AREAS.items():
        lines = [f"| {row.name} | {row.world} | {row.result} | {_cell(row.why)} |" for row in rows if row.area == area]
        if lines:
            parts.append("\n".join([f"## {title}", "", COLUMNS, *lines]) + "\n")
    return "\n".join(parts)


def of_page(text: str) -> list[Row]:
    """Reads the rows from a rendered page."""
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
