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
    text: str
    """What these tests vary, for the table of tests/README.md."""
    kept: str = ""
    """Regular expression over names that stay in the gate although `tests` matches them: one real row per family."""
    kept_count: int = 0
    """How many of them stay."""
    unless_changed: tuple[str, ...] = ()
    """Folders below the root: the gate runs the tests, too, until a nightly run has passed them on these very files."""


ROWS: tuple[NightlyRows, ...] = (
    NightlyRows(
        "simulator/test_mutations.py",
        r"test_a_broken_rule_is_found.*",
        ("simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings",),
        text="each rule broken",
        unless_changed=("tests/simulator", "runtime/surefoot/protocol"),
    ),
    NightlyRows(
        "integration/test_layouts.py",
        r"test_a_layout_returns_into_every_layout\[.*",
        ("pure/restore/test_layout_pairs.py::test_every_pair_of_layouts_at_eight_pairs_of_sizes",),
        text="layouts of real ranks at two changes of size",
        kept_count=10,
        kept=r".*\[(4 to 2-(plain|fsdp2|fsdp_over_tp|fsdp1|flat_partition|float8)|2 to 4-(ddp|hsdp|pipeline|experts))\]",
    ),
    NightlyRows(
        "integration/test_corruption.py",
        r"test_\w+\[.*",
        (
            "integration/test_corruption.py::test_a_hole_in_one_copy_is_read_elsewhere_and_healed",
            "integration/test_corruption.py::test_different_blocks_damaged_on_each_copy_still_make_one_good_restore",
        ),
        text="damaged parts of a save, at each copy",
        kept_count=8,
        kept=r"(test_a_flipped_byte_in_memory\w+\[(chunk 1|digest table|index entry)"
        r"|test_a_flipped_byte_in_the_persistent\w+\[(values|layout)"
        r"|test_with_both\w+\[chunk 0|test_with_no_good\w+\[layout|test_a_hole_under\w+\[values)\]",
    ),
    NightlyRows(
        "integration/test_library_damage.py",
        r"test_(a_damaged_folder_is_gone_on_from|where_nothing_can_be_restored|one_request_that_fails)\w+\[.*",
        ("integration/test_library_damage.py::test_a_tier_that_is_away_at_the_start_is_an_error_and_not_an_empty_one",),
        text="damaged files of a folder",
        kept_count=8,
        kept=r".*\[(a flipped layout|a lost epoch|a removed manifest|a flipped part|two damaged checkpoints|foreign files"
        r"|parts|rank-0.json)\]",
    ),
    NightlyRows(
        "integration/test_swapped_weights.py",
        r"test_(a_change_behind_the_step|a_program_that_settles_first)\w+\[.*",
        ("integration/test_swapped_weights.py::test_a_step_whose_tensors_changed_is_not_saved_later_under_its_number",),
        text="programs that change weights after a step",
        kept_count=7,
        kept=r".*\[(0-ema_by_data|1-pointed_elsewhere|1-by_a_kernel_that_tells_nobody|3-clipped|3-one_row_of_a_view"
        r"|torch_ema|pruned_moments)\]",
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


def table() -> str:
    """Returns the table of tests/README.md: what leaves the gate, and which test of the gate covers its class."""
    lines = ["| leaves the gate | in the gate all the same | its class is covered by |", "|---|---|---|"]
    for rows in ROWS:
        kept = f"{rows.kept_count} rows" if rows.kept_count else "–"
        if rows.unless_changed:
            kept = f"all, while {' or '.join(f'`{folder}`' for folder in rows.unless_changed)} differ from what the night last passed"
        covers = ", ".join(f"`{cover.partition('::')[2]}`" for cover in rows.covered_by)
        lines.append(f"| `{rows.file}`: {rows.text} | {kept} | {covers} |")
    return "\n".join(lines)
