"""What a person gives the command on its line: tried before anything runs, refused in one short sentence."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot_operator.cli import run_local
from surefoot_operator.cli.checkpoints import try_file, try_folder
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.local.faults import FaultError, parse_fault
from surefoot_operator.cli.main import main

JOB: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}},
    },
}


def job(folder: Path, **spec: object) -> Path:
    body = copy.deepcopy(JOB)
    body["spec"] |= spec
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def refusal(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    run_local.add_local_arguments(parser)
    with pytest.raises(UsageError) as caught:
        run_local.check(parser.parse_args(arguments))
    return str(caught.value)


@pytest.mark.parametrize("given", [[], ["--nodes", "100000"]])
def test_a_machine_is_not_asked_for_a_hundred_thousand_nodes(tmp_path: Path, given: list[str]) -> None:
    path = job(tmp_path, replicas=100_000)
    said = refusal("-f", str(path), *given)
    assert "at most 64 nodes and 512 ranks are allowed" in said


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    (tmp_path / "file").write_text("mine")
    for report, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "report.json", "cannot be written"),
        (Path("/proc/report.json"), "cannot be written"),
        (tmp_path / ("n" * 300), "cannot be written"),
    ):
        assert said in refusal("-f", str(path), "--report", str(report))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    (tmp_path / "file").write_text("mine")
    for folder, said in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "run", "cannot be written to"),
        (Path("/proc/run"), "cannot be written to"),
        (tmp_path / ("n" * 300), "cannot be written to"),
    ):
        assert said in refusal("-f", str(path), "--run-folder", str(folder))
    assert (tmp_path / "file").read_text() == "mine"


def test_trying_leaves_things_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("a former report")
    try_file("--report", tmp_path / "old.json")
    try_file("--report", tmp_path / "new" / "report.json")
    assert (tmp_path / "old.json").read_text() == "a former report"
    assert not (tmp_path / "new" / "report.json").exists()
    try_folder("--run-folder", tmp_path / "a" / "run")
    assert list((tmp_path / "a" / "run").iterdir()) == []
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, "node:" + "n" * 100_000 + "@step=3", "node:1@step=" + "9" * 5000, "freeze:1@step=3,for=" + "z" * 90_000,
     "node:\x1b[2J@step=3"],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused_with_a_glance_of_it(text: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text, tuple(f"node-{n}" for n in range(64)))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x00" * 100, b"kind: \xed\xa0\x80", b"a" * (2 << 20)])
def test_a_file_that_holds_anything_is_one_line_and_no_traceback(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job \x1b[31m.yaml"
    path.write_bytes(content)
    assert main(["validate", "-f", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/no/such/file"])
def test_what_is_no_file_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", path]) == 2
    assert capsys.readouterr().err.startswith(f"surefoot: {path}")


@pytest.mark.parametrize("action", ["list", "verify", "export", "import", "delete"])
def test_each_action_on_checkpoints_has_help_and_an_example_of_its_own(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", action, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"surefoot checkpoints {action} " in said.split("examples:")[1]
    assert ("--to" in said, "--from" in said, "--yes" in said) == (
        action == "export",
        action == "import",
        action == "delete",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "needs either a folder or URI, or -f JOB.yaml"),
        (["a", "-f", "b"], "either a folder"),
        (["/no/such"], "is not a folder"),
        (["http://x"], "file:///folder or s3://bucket/prefix is allowed"),
    ],
)
def test_checkpoints_are_looked_for_at_one_place(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "list", *given]) == 2
    assert said in capsys.readouterr().err


def test_what_is_deleted_is_never_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "delete", str(tmp_path), "--yes"]) == 2
    assert "delete needs --job UID" in capsys.readouterr().err
