"""Other people's loaders, accumulation and batches drawn ahead go on exactly after a kill: losses equal in every bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_whole, faults, run, running

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "stream_trainer.py"
STEPS = 9


def trained(folder: Path, kind: str, *options: str, code: int = 0) -> dict[int, str]:
    """One process in library mode; step -> loss, as it was last run."""
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROGRAM.parent.parent),
        "SUREFOOT_PERSISTENT_URI": f"file://{folder}/saved",
        "SUREFOOT_PERSISTENT_INTERVAL_STEPS": "2",
    }
    command = [sys.executable, str(PROGRAM), str(STEPS), str(folder), "--kind", kind, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stderr
    lines = (folder / "losses-0.txt").read_text().split("\n")[:-1]
    return {int(step): loss for step, loss in (line.split() for line in lines)}


@pytest.mark.parametrize(
    ("kind", "workers"), [("stream", 2), ("accumulate", 0), pytest.param("ahead", 0, marks=pytest.mark.nightly)]
)
def test_a_killed_program_goes_on_as_if_nothing_had_been(tmp_path: Path, kind: str, workers: int) -> None:
    options = ("--workers", str(workers))
    expected = trained(tmp_path / "undisturbed", kind, *options)
    assert len(set(expected.values())) == STEPS
    trained(tmp_path / "killed", kind, *options, "--dies", "5", code=-signal.SIGKILL)
    found = trained(tmp_path / "killed", kind, *options, "--dies", "5")
    lines = (tmp_path / "killed" / "losses-0.txt").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 9], "it went on behind step 5"
    assert found == expected


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_ranks_over_their_own_streams_each_go_on_where_they_were(tmp_path: Path) -> None:
    job = Job(steps=50, program=PROGRAM, trainer=("--kind", "stream", "--pace", "0.05"))
    done = run(tmp_path, job, *faults("trainer:1@step=27"), "--compare")
    assert_equal(done.report, 0.0)
    assert (done.report["outcome"], len(done.report["generations"])) == ("Complete", 2)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_an_elastic_job_over_streams_keeps_its_size_and_says_why(tmp_path: Path) -> None:
    job = Job(steps=50, elastic=(1, 2), program=PROGRAM, trainer=("--kind", "stream", "--pace", "0.1"))
    done = run(tmp_path, job, *faults("node:1@step=20,for=2"))
    assert done.report["outcome"] == "Complete"
    (size,) = {
        generation["world_size"] for generation in done.report["generations"]
    }  # 1 if the other worker came too late to begin with
    told = f"loader: each rank has its own state, which only {size} ranks can restore"
    assert done.told("WorldSizeFixed")[0].startswith(told)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_accumulation_behind_a_prefetcher_loses_no_sample_whatever_the_size(tmp_path: Path) -> None:
    job = Job(steps=80, elastic=(1, 2), program=PROGRAM, trainer=("--kind", "accumulate", "--pace", "0.1"))
    done = run(tmp_path, job, *faults("node:1@step=30,for=2"), "--compare")
    assert_whole(done.report, 80)
    assert_equal(done.report)
    assert {generation["world_size"] for generation in done.report["generations"]} == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_each_sample_of_a_batch_samplers_lists_is_counted_through_a_kill_and_a_resize(tmp_path: Path) -> None:
    # long enough that a worker which imports torch beside other tests is there before the end
    job = Job(steps=130, elastic=(1, 2), trainer=("--pace", "0.12", "--uneven-batches"))
    with running(tmp_path, job, *faults("trainer:0@step=20", "node:1@step=45,for=1"), "--compare") as under_way:
        done = under_way.finish()
        read = under_way.status.data
    assert read is not None
    assert 1 < read.epochs < 2, "of a data set of 960 samples, some 1,600"
    assert (read.samples_per_second or 0) > 0
    assert_whole(done.report, 130)
    assert_equal(done.report)
    assert {generation["world_size"] for generation in done.report["generations"]} == {1, 2}
