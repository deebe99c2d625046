"""docs/monitoring.md has every metric with its type, labels and help text, and no page names a metric that is not exported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.metrics_reference import PAGE, metrics, written

ROOT = Path(__file__).parents[2]
EXPORTED = {name: kind for rows in metrics().values() for name, kind, _, _ in rows}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAME = re.compile(r"(?<![\w.])surefoot_[a-z0-9_]+(?=[`{\[])")
"""A metric in code: before a selector, a range or the closing mark."""
PACKAGES = {"surefoot_operator"}


def test_the_tables_are_those_of_the_declarations() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "write them again: make manifests"


def test_every_table_has_metrics_and_every_metric_is_in_one() -> None:
    assert all(metrics().values())
    assert len(EXPORTED) == sum(len(rows) for rows in metrics().values())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_metric_that_a_page_names_is_exported(page: Path) -> None:
    unknown = []
    for name in set(NAME.findall(page.read_text(encoding="utf-8"))) - PACKAGES:
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        if name not in EXPORTED and EXPORTED.get(plain) != "histogram":
            unknown.append(name)
    assert sorted(unknown) == []
