"""Names the tests that only `make test-nightly` runs, and the faster test of the gate that covers the same class of defect.

A test that is nightly by itself carries the marker `nightly`. Rows of matrices are named here, because one list shows what the
gate does without, and tests/README.md explains it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NightlyRows:
    """Tests of one file that the gate leaves out."""

    file: str
    """Relative to tests/."""
    tests: str
    """Regular expression over the whole name of a test with its parameters, as `test_x[row]`."""
    covered_by: tuple[str, ...]
    """Tests of the gate, as `file::test`, that find the same class of defect."""
    kept: str = ""
    """Regular expression over names that stay in the gate although `tests` matches them: one real row per family."""


ROWS: tuple[NightlyRows, ...] = ()


def is_left_to_the_night(file: str, name: str) -> bool:
    """Whether a test, named by its file below tests/ and its name with parameters, runs only in the nightly run."""
    return any(
        rows.file == file and re.fullmatch(rows.tests, name) and not (rows.kept and re.fullmatch(rows.kept, name))
        for rows in ROWS
    )
