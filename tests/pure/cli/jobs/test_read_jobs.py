"""Tests of `cli.jobs.read_jobs`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.builders import running
from support.stored import stored_document, written
from surefoot.linux_process import identity_of
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.jobs.read_jobs import StoredJob, read_run, stored_job
from surefoot_operator.cli.jobs.suspend_and_rollback import rollback_patch
from surefoot_operator.cli.main import main
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.local.platform import RunFolderStore
from surefoot_operator.platforms.local.run_folder import (
    MemoryServerRecord,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    record_to_json,
    write_json,
)
from surefoot_operator.policy.core.actions import Event

# ---- run folder reads ------------------------------------------------------------------------------------------------
# A run folder is looked at as a cluster is, without changing it.


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """One live node with a free place and a worker that waits for one."""
    found = RunFolder(tmp_path / "run")
    found.create_folders()
    store = RunFolderStore(found)
    store.write_job(stored_document(), "uid-1")
    store.patch_status(replace(running().status, serial=0), JobStatus())
    store.record_events([Event("GenerationClaimed", "epoch 1 is claimed")])
    life = str(identity_of(os.getpid()))
    node = NodeRecord("node-0", life, "node-0", MemoryServerRecord("127.0.0.1", 1, life))
    write_json(found.node_file("node-0"), record_to_json(node), durable=False)
    waiting = WorkerRecord("gpt-0-1", "w", 0, 1, 1000.0, ("a",), {})
    write_json(found.worker_file("gpt-0-1"), record_to_json(waiting), durable=False)
    return found


def test_a_look_reads_everything_and_binds_nothing(folder: RunFolder) -> None:
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    found = read_run(folder.root)
    assert (found.stored.name, found.stored.phase, found.stored.ready) == ("gpt", "Running", "0/3")
    assert [(one.name, one.phase) for one in found.workers] == [("gpt-0-1", "Pending")]
    assert found.nodes is not None
    assert [(one.name, one.ready) for one in found.nodes] == [("node-0", True)]
    assert [one.reason for one in found.events] == ["GenerationClaimed"]
    assert {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()} == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run folder"):
        read_run(tmp_path)


def test_a_damaged_folder_is_named(folder: RunFolder) -> None:
    folder.node_file("node-0").write_text("{}")
    with pytest.raises(PlatformError, match="no file was edited"):
        read_run(folder.root)


@pytest.mark.parametrize(
    ("command", "word"),
    [("list", "gpt"), ("describe", "gpt"), ("timeline", "GenerationClaimed"), ("nodes", "node-0")],
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


# ---- stored job ------------------------------------------------------------------------------------------------------
# A job is read as far as it can be: of this and of a newer version, and damaged.

STATUS: dict[str, Any] = {
    "schemaVersion": 1,
    "phase": "Running",
    "ready": "2/3",
    "step": 42,
    "restarts": 1,
    "checkpointTime": "1970-01-01T00:16:40Z",
    "lastComplete": {"generation": 1, "step": 40},
    "membership": {
        "generation": 1,
        "state": "Committed",
        "size": 2,
        "members": ["0.1 n0 a"],
        "changedTime": "1970-01-01T00:16:40Z",
    },
}


def test_a_status_of_this_version_is_read_whole() -> None:
    seen = running()
    found = stored_job(written(seen.status, seen, creationTimestamp="1970-01-01T00:16:40Z"))
    assert found.status == seen.status
    assert found.job is not None
    assert (found.phase, found.ready, found.step, found.restarts) == ("Running", "3/3", 42, 0)
    assert (found.problems, found.created_seconds) == ((), 1000.0)


def test_a_status_of_a_newer_version_leaves_its_columns() -> None:
    found = stored_job(stored_document({**STATUS, "schemaVersion": 9}))
    assert found.status is None
    assert (found.phase, found.ready, found.step, found.restarts) == ("Running", "2/3", 42, 1)
    assert "cannot be read by this version" in found.problems[0]


def test_a_spec_that_is_refused_leaves_the_status() -> None:
    document = stored_document(STATUS)
    document["spec"] = {**document["spec"], "nodeSelector": {}}
    found = stored_job(document)
    assert (found.job, found.step) == (None, 42)
    assert found.problems[0].startswith("its spec cannot be read: spec.nodeSelector")


def test_a_job_that_no_operator_has_seen_has_no_phase() -> None:
    found = stored_job(stored_document())
    assert (found.phase, found.step, found.restarts, found.problems) == ("", None, None, ())


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"metadata": {"annotations": []}, "status": "x", "spec": 3}])
def test_anything_is_some_job(body: dict[str, Any]) -> None:
    assert stored_job(body).problems


@pytest.mark.parametrize(
    ("said", "total"), [("90", 90), ("", None), ("-1", None), ("9" * 20, None), ("1e3", None), ("٣", None)]
)
def test_steps_in_all_are_a_number_or_unknown(said: str, total: int | None) -> None:
    assert stored_job(stored_document(annotations={"surefoot.dev/total-steps": said})).total_steps == total


# ---- roll back -------------------------------------------------------------------------------------------------------
# `surefoot rollback --to` writes one annotation, for the epoch that is there, and refuses what could not be done.

WORLD = {"generation": 7, "state": "Committed", "size": 3}


def stored(phase: str = "Running", world: dict[str, Any] | None = None, **metadata: Any) -> StoredJob:
    status = {"phase": phase, "step": 100, "schemaVersion": 1, "membership": WORLD if world is None else world}
    return stored_job(stored_document(status, **metadata))


def test_the_word_names_the_epoch_and_the_step() -> None:
    patch = rollback_patch(stored(annotations={"team": "a"}), 40, keep_data=False)
    assert patch[0] == {"op": "test", "path": "/metadata/uid", "value": "uid-1"}
    assert patch[1:] == [{"op": "add", "path": "/metadata/annotations/surefoot.dev~1rollback", "value": "7/40"}]
    bare = rollback_patch(stored(), 40, keep_data=True)
    assert bare[1:] == [
        {"op": "add", "path": "/metadata/annotations", "value": {"surefoot.dev/rollback": "7/40/keep-data"}}
    ]


@pytest.mark.parametrize(
    ("found", "step", "said"),
    [
        (stored("Complete"), 40, "a job that is over cannot go back"),
        (stored(world={**WORLD, "state": "Claimed"}), 40, "just changing its world"),
        (stored(), 101, "has finished step 100"),
        (stored(), 0, "has finished step 100"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(found: StoredJob, step: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rollback_patch(found, step, keep_data=False)
