"""`surefoot convert` as it is typed."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
import yaml

from surefoot_operator.api.parse import parse_job
from surefoot_operator.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "convert.md"
PYTORCHJOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: theirs}
spec:
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template: {spec: {containers: [{name: pytorch, image: x, command: [torchrun, train.py]}]}}
"""
JOB = """
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: mine}
spec:
  replicaSpecs:
    - replicas: $NUM_NODES
      template:
        spec:
          containers:
            - {name: pytorch, command: [hyperpodrun, '--nproc_per_node=${GPU_PER_NODE}', train.py]}
---
apiVersion: v1
kind: Service
metadata: {name: etcd}
"""


def test_a_files_placeholders_are_filled_and_other_objects_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert main(["convert", "-f", str(file), "--set", "NUM_NODES=4", "--set", "GPU_PER_NODE=8"]) == 0
    said = capsys.readouterr()
    spec = parse_job(yaml.safe_load(said.out)).spec
    assert (spec.replicas, spec.nproc_per_node, spec.template.command) == (4, 8, ("python", "train.py"))
    assert "not converted: Service etcd" in said.err


def test_the_page_s_commands_end_with_a_valid_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pytorchjob.yaml").write_text(PYTORCHJOB)
    Path("hyperpod.yaml").write_text(JOB)
    [block] = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = block.splitlines()
    assert len(commands) == 4
    for command in commands:
        words, _, to = command.partition(" > ")
        assert main(shlex.split(words)[1:]) == 0, capsys.readouterr()
        said = capsys.readouterr().out
        if to:
            Path(to).write_text(said)


def test_standard_input_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(JOB))
    assert main(["convert", "-f", "-"]) == 0
    assert "spec.replicas: how many workers, where $NUM_NODES stood" in capsys.readouterr().out


def test_a_command_line_is_what_stands_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--", "torchrun", "--nnodes", "2:4", "train.py", "--lr", "1"]) == 0
    spec = parse_job(yaml.safe_load(capsys.readouterr().out)).spec
    assert (spec.replicas, spec.template.args) == (4, ("--lr", "1"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "this is not YAML"),
        ("kind: Pod\napiVersion: v1", "no object here is one of PyTorchJob, TrainJob, HyperPodPyTorchJob, JobSet"),
        ("", "there is nothing"),
    ],
)
def test_what_is_no_job_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert main(["convert", "-f", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_setting_without_a_value_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    assert main(["convert", "-f", str(file), "--set", "NUM_NODES"]) == 2
    assert "NAME=VALUE is needed" in capsys.readouterr().err
