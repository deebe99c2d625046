"""A run folder is looked at as a cluster is, without changing it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from support.builders import running
from support.stored import stored_document
from surefoot.linux_process import identity_of
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.jobs.read_jobs import read_run
from surefoot_operator.cli.main import main
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.local.platform import Store
from surefoot_operator.platforms.local.run_folder import (
    HolderRecord,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    to_json,
    write_json,
)
from surefoot_operator.policy.core.actions import Event


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """One live node with a free place and a worker that waits for one."""
    found = RunFolder(tmp_path / "run")
    found.make()
    store = Store(found)
    store.write_job(stored_document(), "uid-1")
    store.patch_status(replace(running().status, serial=0), JobStatus())
    store.record([Event("WorldClaimed", "epoch 1 is claimed")])
    life = str(identity_of(os.getpid()))
    node = NodeRecord("node-0", life, "node-0", HolderRecord("127.0.0.1", 1, life))
    write_json(found.node("node-0"), to_json(node), durable=False)
    waiting = WorkerRecord("gpt-0-1", "w", 0, 1, 1000.0, ("a",), {})
    write_json(found.worker("gpt-0-1"), to_json(waiting), durable=False)
    return found


def test_a_look_reads_everything_and_binds_nothing(folder: RunFolder) -> None:
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    found = read_run(folder.root)
    assert (found.stored.name, found.stored.phase, found.stored.ready) == ("gpt", "Running", "0/3")
    assert [(one.name, one.phase) for one in found.workers] == [("gpt-0-1", "Pending")]
    assert found.nodes is not None
    assert [(one.name, one.ready) for one in found.nodes] == [("node-0", True)]
    assert [one.reason for one in found.events] == ["WorldClaimed"]
    assert {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run folder"):
        read_run(tmp_path)


def test_a_damaged_folder_is_named(folder: RunFolder) -> None:
    folder.node("node-0").write_text("{}")
    with pytest.raises(FabricError, match="was a file edited"):
        read_run(folder.root)


@pytest.mark.parametrize(
    ("command", "word"),
    [("list", "gpt"), ("describe", "gpt"), ("timeline", "WorldClaimed"), ("nodes", "node-0")],
)
@pytest.mark.parametrize("output", [[], ["-o", "json"], ["-o", "yaml"]])
def test_commands_show_a_run_in_every_format(
    folder: RunFolder, command: str, word: str, output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--run-folder", str(folder.root), *output]) == 0
    assert word in capsys.readouterr().out


@pytest.mark.parametrize("given", [[], ["gpt", "--run-folder", "x"]])
def test_one_job_is_named_at_one_place(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", *given]) == 2
    assert "needs the name of a TrainingJob, or --run-folder" in capsys.readouterr().err
