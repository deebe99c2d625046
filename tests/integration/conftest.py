"""Shows what a run of `surefoot local` said where the test of it fails, and ends what worlds of ranks were forked from."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support import gloo_world

LONGEST_CHARACTERS = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure that comes once in ten runs is understood from its first report, or not at all."""
    report = yield
    given: dict[str, Any] = getattr(item, "funcargs", {})
    folder = given.get("tmp_path")
    if report.when == "call" and report.failed and isinstance(folder, Path):
        for said in sorted(folder.rglob("said.txt")):
            text = said.read_text(errors="replace")[-LONGEST_CHARACTERS:]
            report.sections.append((f"what the run said, {said.relative_to(folder)}", text))
    return report


def pytest_sessionfinish() -> None:
    gloo_world.close()
