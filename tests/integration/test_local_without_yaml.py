"""`surefoot local` as a newcomer types it: a program in place of YAML, a tier that cannot work, a run that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from support.local_run import Job
from support.machine_speed import scaled
from surefoot.protocol.text import format_bytes
from surefoot_operator.cli.local.progress import RunProgress
from surefoot_operator.platforms.local.run_folder import RunFolder

SECONDS = scaled(240)
SUREFOOT = [sys.executable, "-m", "surefoot_operator.cli.main"]
TRAINER = Path(__file__).parents[1] / "support" / "programs" / "local_trainer.py"


def surefoot(*words: str, folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, **(environment or {})}
    return subprocess.run(
        [*SUREFOOT, *words], cwd=folder, env=whole, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_program_runs_without_yaml_shows_its_output_and_says_where_everything_is(tmp_path: Path) -> None:
    """On three nodes from the first step; and its report is written although nobody reads the output to the end."""
    (tmp_path / "hello.py").write_text(
        TRAINER.read_text().replace(
            "import argparse\n", "import argparse\n\nprint('hello from the program', flush=True)\n"
        )
    )
    command = ["local", "--nodes", "3", "--plain", "--report", "report.json", "--run-folder", "run"]
    command += ["--", "python", "hello.py", "20", "."]
    done = surefoot(*command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] hello from the program" in done.stdout
    assert "[rank 1]" not in done.stdout
    assert done.stdout.splitlines()[-3:] == [
        "logs: surefoot logs --run-folder run, files in run/logs",
        f"report: report.json, {format_bytes((tmp_path / 'report.json').stat().st_size)}",
        "checkpoints: none outlive the run; spec.checkpoint.persistent keeps them",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["world_size"] for one in report["generations"]] == [3]


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_a_killed_run_goes_on_in_its_folder_and_no_reader_of_its_output_is_needed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(
            Job(40, gates=(22,), persistent={"uri": f"file://{tmp_path}/tier", "intervalSteps": 10}).document(tmp_path)
        )
    )
    common = ["--plain", "--run-folder", "run", "--report", "report.json"]
    first = subprocess.Popen([*SUREFOOT, "local", "-f", "job.yaml", *common], cwd=tmp_path, stdout=subprocess.DEVNULL)
    progress = RunProgress(RunFolder(tmp_path / "run"))
    deadline = time.monotonic() + SECONDS
    while (progress.status.last_uploaded is None or progress.reached_step < 22) and time.monotonic() < deadline:
        assert first.poll() is None
        time.sleep(0.1)
        progress.poll()
    first.send_signal(signal.SIGKILL)
    first.wait()
    uploaded = progress.status.last_uploaded
    assert uploaded is not None
    (tmp_path / "gate-22").touch()
    again = subprocess.Popen([*SUREFOOT, "local", "--continue", *common], cwd=tmp_path, stdout=subprocess.PIPE)
    assert again.stdout is not None
    again.stdout.readline()
    again.stdout.close()  # as `| head -1` does
    assert again.wait(SECONDS) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["outcome"], report["steps"]) == ("Complete", 40)
    assert (report["samples_lost"], report["samples_repeated"]) == (0, 0)
    assert report["generations"][-1]["from_step"] >= uploaded.step
    refused = surefoot("local", "--continue", "--run-folder", "run", folder=tmp_path)
    assert refused.returncode == 2
    assert "is Complete: there is nothing to continue" in refused.stderr


NO_KEYS = {
    **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"), ""),
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_CONFIG_FILE": "/nonexistent",
}


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("file://{folder}/file", "is a file; name a folder"),
        ("file:///proc/nowhere", "cannot be written to"),
        ("s3://surefoot-no-such-bucket/x", "redentials"),
    ],
)
def test_a_tier_that_cannot_be_used_is_refused_before_anything_starts(uri: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = Job(40, persistent={"uri": uri.format(folder=tmp_path), "intervalSteps": 10})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.document(tmp_path)))
    done = surefoot("local", "-f", "job.yaml", "--run-folder", "run", folder=tmp_path, environment=NO_KEYS)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "job.json").exists()


def test_a_run_that_kept_nothing_on_disk_cannot_be_continued(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for words, said in ((["--run-folder", "run"], "has no run to continue"), ([], "--continue needs --run-folder")):
        done = surefoot("local", "--continue", *words, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
