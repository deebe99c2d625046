"""A stream of text through a world that shrinks and grows, and the command that checks one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.local_run import SECONDS

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


def trained(folder: Path, ranks: int, steps: int) -> dict[int, float]:
    """The example under torchrun, from its newest checkpoint to `steps`: step -> loss."""
    started = [str(Path(sys.executable).with_name("torchrun")), "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    script = ["text_stream.py", "--dtype", "float64", "--steps", str(steps), "--checkpoints", str(folder)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SUREFOOT_")}
    done = subprocess.run(
        [*started, f"--nproc-per-node={ranks}", *script],
        cwd=ROOT / "examples",
        env=kept,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert {line[3] for line in lines} == {str(ranks)}
    return {int(line[1]): float(line[5]) for line in lines}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_the_example_has_the_undisturbed_losses_through_two_resizes(tmp_path: Path) -> None:
    expected = trained(tmp_path / "undisturbed", 1, 12)
    found: dict[int, float] = {}
    for ranks, steps in ((3, 4), (2, 8), (3, 12)):
        mine = trained(tmp_path / "resized", ranks, steps)
        assert list(mine) == list(range(steps - 3, steps + 1)), "it went on behind the last step"
        found |= mine
    assert found == pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_its_job_loses_a_node_and_each_sample_is_counted(tmp_path: Path) -> None:
    """As `make demo EXAMPLE=text_stream`."""
    told = ["--nodes", "3", "--fault", "node:1@step=30,for=1", "--compare", "--plain"]
    report = tmp_path / "report.json"
    done = surefoot(ROOT, "local", "-f", "examples/text_stream.yaml", *told, "--report", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["samples_lost"], found["samples_repeated"]) == (0, 0)
    assert any(one["kind"] == "node-lost" for one in found["incidents"])
    assert max(found["max_loss_difference"], found["max_parameter_difference"]) < 1e-10


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
