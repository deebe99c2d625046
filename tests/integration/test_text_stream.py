"""A stream of text through a world that shrinks and grows, and the command that checks one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.local_run import SECONDS, assert_equal, assert_whole

ROOT = Path(__file__).parents[2]
MOSAIC = ROOT / "tests" / "support" / "mosaic"


def surefoot(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(Path(sys.executable).with_name("surefoot")), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
def test_the_example_loses_no_row_through_two_resizes_and_has_the_undisturbed_losses(tmp_path: Path) -> None:
    job = ["local", "-f", "examples/text_stream.yaml", "--nodes", "3", "--fault", "node:1@step=30,for=1", "--compare"]
    done = surefoot(ROOT, *job, "--run-folder", str(tmp_path / "run"), "--report", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert_whole(report, 100)
    assert_equal(report)
    assert [epoch["world"] for epoch in report["epochs"]][:2] == [3, 2]
    assert len(report["epochs"]) >= 3, "it grew again"


def test_the_command_says_whether_a_source_is_elastic(tmp_path: Path) -> None:
    found = surefoot(tmp_path, "data", "check", str(MOSAIC), "--global-batch", "6", "--all")
    assert (found.returncode, found.stderr) == (0, "")
    assert "mds: 5 shards, 30 samples" in found.stdout
    assert "5 shards were read, and again from their middle: 30 samples, 0 of them bad" in found.stdout
    assert "elastic: a global batch of 6 is the same at every world size, up to 6 ranks" in found.stdout
    (tmp_path / "a.jsonl").write_text('{"x": 1}\nno json\n')
    few = surefoot(tmp_path, "data", "check", "a.jsonl")
    assert few.returncode == 1
    assert "2 samples, 1 of them bad" in few.stdout
    assert (
        "not elastic: JsonLines has 2 samples, and 8 lanes are to read it: each needs one. Give fewer lanes="
        in few.stdout
    )
