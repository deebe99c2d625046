"""docs/architecture.md: each walk names files and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Walks\n")[2]
ROW = re.compile(r"^\| *(?P<process>\w*) *\| `(?P<path>[\w/]+\.py)` \| `(?P<name>[\w.]+)` \| [^|]+ \|$", re.MULTILINE)


PACKAGES = {"trainer": "runtime/surefoot", "agent": "runtime/surefoot", "operator": "operator/surefoot_operator"}
"""Where the files of a process are."""


def walks() -> dict[str, list[tuple[str, str]]]:
    """Title -> (file, function) of every hop. A row without a process is of the one above it."""
    hops_by_title: dict[str, list[tuple[str, str]]] = {}
    for text in PAGE.split("\n### ")[1:]:
        hops, process = hops_by_title.setdefault(text.partition("\n")[0], []), ""
        for row in ROW.finditer(text):
            process = row["process"] or process
            hops.append((f"{PACKAGES[process]}/{row['path']}", row["name"]))
    return hops_by_title


@cache
def defined(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{name}" for name in inner}
    return names


@pytest.mark.gate_only
@pytest.mark.parametrize(("path", "name"), sorted({hop for hops in walks().values() for hop in hops}))
def test_each_named_function_is_defined_in_the_named_file(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"docs/architecture.md names {path}"
    assert name in defined(ROOT / path), f"docs/architecture.md names {name} in {path}"


def test_every_row_of_a_walk_is_read_as_a_hop() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and ".py`" in line]
    assert sum(len(hops) for hops in walks().values()) == len(rows)
    assert len(walks()) == 5
    assert all(len(hops) > 10 for hops in walks().values())
