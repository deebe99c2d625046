"""Documents stay short: each page has a limit, and all together may only become smaller until they are small enough."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)

LIMIT_KB = 9
"""Of a page that is not listed: ten minutes of reading."""
LIMITS_KB: dict[str, float] = {
    # references, written by `make manifests` for the most part
    "docs/api.md": 27,
    "docs/cli.md": 12,
    "docs/monitoring.md": 16,
    "docs/node-health.md": 11,
    "docs/python.md": 18,
    # specifications
    "docs/architecture.md": 17.5,
    "docs/format.md": 12,
    "docs/protocol.md": 12,
    "docs/compatibility.md": 10,
}
TARGET_KB = 210
TOTAL_KB = 295
"""All pages together. A number may only become smaller."""
SLACK_KB = 120
"""A total that is smaller by more than this lowers TOTAL_KB."""


def kilobytes(page: Path) -> float:
    return page.stat().st_size / 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_no_longer_than_its_limit(page: Path) -> None:
    limit = LIMITS_KB.get(page.relative_to(ROOT).as_posix(), LIMIT_KB)
    assert kilobytes(page) <= limit, "take out what another page has, or divide it; raise a limit only for a reference"


def test_every_limit_is_of_a_page() -> None:
    assert set(LIMITS_KB) <= {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_all_pages_together_become_smaller() -> None:
    total = sum(map(kilobytes, PAGES))
    assert total <= TOTAL_KB, f"{total:.1f} kB in all"
    assert total > TOTAL_KB - SLACK_KB or TOTAL_KB <= TARGET_KB, f"TOTAL_KB can become {total:.0f}"
