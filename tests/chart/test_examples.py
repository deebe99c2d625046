"""The jobs that people begin with are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from chart.helm import PROJECT
from surefoot_operator.api.spec import allowed_sizes
from surefoot_operator.cli.job_files import read_job

SIZES = {"minimal": [2], "s3": [3], "elastic": [2, 3], "two-nodes": [1, 2]}
FILES = sorted(path for folder in ("cluster", "gpu") for path in (PROJECT / "examples" / folder).glob("*.yaml"))


def test_each_example_is_tried() -> None:
    assert {path.stem for path in FILES} == SIZES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_sound(path: Path) -> None:
    assert list(allowed_sizes(read_job(path).spec)) == SIZES[path.stem]
