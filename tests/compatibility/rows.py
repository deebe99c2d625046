"""Renders the result of each compatibility case as JSON and as docs/compatibility.md. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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
REASONS = "Reasons"
HEAD = """# Compatibility

Each case is a small program of a library, as in the library's own documentation. It runs three times: undisturbed; killed with SIGKILL
after its fourth step; and restarted as a new process with other random weights, which restores and trains to the end.
`python -m bench compatibility` writes this page from the results, so do not edit it. Each line has the results, then the cases.

* `same`: restarted with the same number of ranks. `resized`: with another one. `3→2→3`: killed again after its sixth step.
* `exact`: every loss, and at the end every tensor and value, equals the undisturbed run's to the last bit. With a number of ranks
  (`exact 2→3`), and in each chain of sizes, they are equal to 1e-12, because ranks add float64 numbers in another order.
* `rejected 1`: Surefoot raises an error before or at the first step, or at the restore. The number is that of the
  [reason](#reasons), which includes the remedy. Cases that could not be run count as rejected.
* `wrong` would be everything else. There is no such case.

Only the program can detect one case that is missing here: a loader that is neither Surefoot's nor torchdata's counts the
batches of a prefetcher as consumed. Give such a loader to `Checkpointer` without a prefetcher ([loaders](loaders.md)).
"""
_BITS = "equal to the last bit"
_OF_RANKS = re.compile(r"equal to 1e-12; (?P<ranks>\S+) ranks")
_NUMBERS = (
    (r"^\w+Error: ", ""),
    (r"\bof \d+ ranks and this world has \d+\b", "of N ranks and this world has M"),
    (r"\bTrain with \d+ ranks\b", "Train with N ranks"),
    (r"\bloader \(\w+\)", "loader"),
    (r"^loader is an? \w+ without", "loader is an object without"),
    (r"^\d+ batches\b", "N batches"),
    (r"batches_per_step( ?= ?)[2-9]", r"batches_per_step\1N"),
)
"""What differs between messages of one reason: replaced, so that the page has the reason once."""


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
    """Renders the whole document: the cases of equal results in one line, and each reason once."""
    rows = in_order(rows)
    reasons: dict[str, int] = {}
    parts = [HEAD]
    for area, title in AREAS.items():
        results: dict[str, list[str]] = {}
        for row in rows:
            if row.area == area:
                results.setdefault(row.name, []).append(f"{row.world} {_cell(row, reasons)}")
        cases: dict[str, list[str]] = {}
        for name, cells in results.items():
            cases.setdefault(", ".join(cells), []).append(name)
        if cases:
            lines = [f"* `{cells}`: {'; '.join(names)}" for cells, names in cases.items()]
            parts.append("\n".join([f"## {title}", "", *lines]) + "\n")
    listed = [f"{number}. {reason}" for reason, number in reasons.items()]
    parts.append("\n".join([f"## {REASONS}", "", *listed]) + "\n")
    return "\n".join(parts)


def of_page(text: str) -> list[Row]:
    """Reads the rows from a rendered page."""
    areas = {title: area for area, title in AREAS.items()}
    before, _, after = text.partition(f"\n## {REASONS}\n")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", after, re.MULTILINE))
    return [
        row
        for section in before.split("\n## ")[1:]
        for cells, names in re.findall(r"^\* `([^`]+)`: (.*)$", section, re.MULTILINE)
        for name in names.split("; ")
        for row in _rows_of(areas[section.partition("\n")[0]], name, cells, reasons)
    ]


def _rows_of(area: str, name: str, cells: str, reasons: dict[str, str]) -> Iterator[Row]:
    for cell in cells.split(", "):
        world, result, *detail = cell.split(" ")
        if result == "exact":
            ranks = detail[0] if detail else world if "→" in world else ""
            yield Row(area, name, world, result, f"equal to 1e-12; {ranks} ranks" if ranks else _BITS)
        else:
            yield Row(area, name, world, result, reasons[detail[0]])


def _cell(row: Row, reasons: dict[str, int]) -> str:
    of_ranks = _OF_RANKS.fullmatch(row.why)
    if row.result == "exact" and of_ranks is not None:
        return "exact" if of_ranks["ranks"] == row.world else f"exact {of_ranks['ranks']}"
    if row.result == "exact":
        return "exact"
    return f"{row.result} {reasons.setdefault(reason_of(row.why), len(reasons) + 1)}"


def reason_of(why: str) -> str:
    """Returns the text of a rejection without the numbers and names of its case."""
    text = " ".join(why.split())
    for pattern, instead in _NUMBERS:
        text = re.sub(pattern, instead, text)
    return text
