"""What the project sends, stores, prints and gives to a cluster is as tests/golden/recorded has it, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from golden.__main__ import HINT, differences
from support.machine_speed import scaled

TESTS = Path(__file__).parents[1]


def test_everything_is_as_it_was_recorded() -> None:
    """In a process of its own, whose metrics no other test has counted in."""
    command = [sys.executable, "-m", "golden", "check"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(240.0), check=False)
    assert done.returncode == 0, done.stdout[:20_000] + done.stderr + HINT


def test_what_differs_is_shown_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text("a\n")
    (tmp_path / "other.txt").write_text("a\nb\n")
    (tmp_path / "gone.txt").write_text("a\n")
    (tmp_path / "traces.txt").write_text("not asked for\n")
    diffs = "\n".join(differences(tmp_path, {"same.txt": "a\n", "other.txt": "a\nc\n", "new.txt": "a\n"}))
    assert [line for line in diffs.splitlines() if line[:1] in "+-"] == [
        "--- recorded/gone.txt", "+++ now/gone.txt", "-a",
        "--- recorded/new.txt", "+++ now/new.txt", "+a",
        "--- recorded/other.txt", "+++ now/other.txt", "-b", "+c",
    ]  # fmt: skip
