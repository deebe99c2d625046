"""`surefoot init` and `validate`, and how every command reads a job's file."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import yaml

from surefoot_operator.api.parse import parse_job
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.job_files import job_of_command, read_document
from surefoot_operator.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def give(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_init_writes_a_job_and_a_program_that_it_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    document, job = read_document(Path("job.yaml"))
    assert job.spec.template.command == ("python", "train.py")
    assert document["metadata"]["annotations"] == {"surefoot.dev/total-steps": "2000"}
    compile((here / "train.py").read_text(), "train.py", "exec")
    assert "surefoot local -f job.yaml" in capsys.readouterr().out
    assert main(["validate", "-f", "job.yaml"]) == 0


def test_init_replaces_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("mine")
    assert main(["init"]) == 0
    assert (here / "train.py").read_text() == "mine"
    (here / "job.yaml").write_text("mine too")
    assert main(["init"]) == 2
    assert "job.yaml exists and is not replaced" in capsys.readouterr().err
    assert (here / "job.yaml").read_text() == "mine too"


def test_init_takes_a_launcher_s_ranks_and_leaves_the_launcher_out(here: Path) -> None:
    assert main(["init", "--to", "new.yaml", "--", "torchrun", "--nproc-per-node=2", "My_Train.py", "--lr", "0.1"]) == 0
    document, job = read_document(Path("new.yaml"))
    assert (job.name, job.spec.nproc_per_node) == ("my-train", 2)
    assert job.spec.template.command == ("python", "My_Train.py", "--lr", "0.1")
    assert "annotations" not in document["metadata"], "nobody knows the steps of that program"
    assert not (here / "train.py").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "train.py", "--lr", "0.1"], "train"),
        (["./Run It!.sh"], "run-it"),
        (["python", "-m", "x"], "python"),
        (["123"], "training"),
        (["python", "a" * 80 + ".py"], "a" * 52),
    ],
    ids=str,
)
def test_a_command_is_a_job_of_any_number_of_nodes_up_to_those_that_are_given(words: list[str], name: str) -> None:
    job = parse_job(job_of_command(words, 3))
    assert (job.name, job.spec.replicas) == (name, 3)
    assert (*job.spec.template.command, *job.spec.template.args) == tuple(words)


@pytest.mark.parametrize(
    "command",
    [["validate"], ["local"], ["convert"], ["checkpoints", "list"], ["doctor", "--no-cluster"]],
    ids=lambda words: words[0],
)
def test_a_dash_reads_standard_input_wherever_a_file_is_taken(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give("kind: Nothing\n", monkeypatch)
    assert main([*command, "-f", "-"]) == 2
    error = capsys.readouterr().err
    assert "Nothing" in error
    assert "cannot be read" not in error


def test_a_job_of_another_system_is_told_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    give(yaml.safe_dump({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {}}), monkeypatch)
    with pytest.raises(UsageError, match=r"is a PyTorchJob: surefoot convert -f - makes a TrainingJob of it"):
        read_document(Path("-"))


def test_all_mistakes_are_printed_one_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["init"])
    text = (here / "job.yaml").read_text()
    (here / "job.yaml").write_text(
        text.replace("replicas: 3 ", "replicas: 0 ")
        .replace("keep: 3", "")
        .replace("intervalSteps: 10", "intervalStep: 10")
    )
    assert main(["validate", "-f", "job.yaml"]) == 2
    first, *mistakes = capsys.readouterr().err.splitlines()
    assert first == "surefoot: job.yaml has 2 mistakes:"
    assert [line.split(":")[0].strip() for line in mistakes] == ["line 10", "line 15"]
