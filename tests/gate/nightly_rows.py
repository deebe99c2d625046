"""Names the tests that only `make test-nightly` runs, and the faster test of the gate that covers the same class of defect.

A test that is nightly by itself carries the marker `nightly`. Rows of matrices are named here, because one list shows what the
gate does without, and tests/README.md explains it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRIED = Path(__file__).with_name("tried.json")


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
    unless_changed: tuple[str, ...] = ()
    """Folders below the root: the gate runs the tests, too, until a nightly run has passed them on these very files."""


ROWS: tuple[NightlyRows, ...] = (
    NightlyRows(
        "simulator/test_mutations.py",
        r"test_a_broken_rule_is_found.*",
        ("simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings",),
        unless_changed=("tests/simulator", "runtime/surefoot/protocol"),
    ),
)


def is_left_to_the_night(file: str, name: str) -> bool:
    """Whether a test, named by its file below tests/ and its name with parameters, runs only in the nightly run."""
    return any(
        rows.file == file
        and re.fullmatch(rows.tests, name)
        and not (rows.kept and re.fullmatch(rows.kept, name))
        and (not rows.unless_changed or tried_digests().get(file) == digest_of(rows.unless_changed))
        for rows in ROWS
    )


@cache
def tried_digests() -> dict[str, str]:
    """For each file of tests with `unless_changed`: the digest of the sources that a nightly run last passed it on."""
    digests: dict[str, str] = json.loads(TRIED.read_text(encoding="utf-8")) if TRIED.is_file() else {}
    return digests


@cache
def digest_of(folders: tuple[str, ...]) -> str:
    """Returns the digest of all Python sources below these folders of the project."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_tried() -> None:
    """Records that the tests with `unless_changed` passed on the sources as they are now; the file is committed."""
    digests = {rows.file: digest_of(rows.unless_changed) for rows in ROWS if rows.unless_changed}
    TRIED.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
