"""A node of one machine whose worker cannot be started: that worker says why, and the node lives on."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot_operator.platforms.local.node_process import Node
from surefoot_operator.platforms.local.platform import WorkerFiles, observe_worker
from surefoot_operator.platforms.local.run_folder import RunFolder, WorkerRecord, WorkerState, read_json


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"working_dir": "/no/such/folder"}, "/no/such/folder"),
        ({"working_dir": "a\0b"}, "null byte"),
        ({"command": ("python", "a\0b")}, "null byte"),
        ({"environment": {"A=B": "c"}}, "illegal environment variable name"),
        ({"environment": {"A": 3}}, "expected str"),
    ],
    ids=["no folder", "NUL in the folder", "NUL in an argument", "no name", "no text"],
)
def test_a_start_that_fails_is_that_workers_alone(tmp_path: Path, given: dict[str, object], why: str) -> None:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.workers_folder, folder.logs_folder, folder.nodes_folder):
        path.mkdir(parents=True)
    fields = {"command": ("python", "train.py"), "environment": {}, **given}
    record = WorkerRecord("j-0-1", "u", 0, 1, 0.0, **fields)  # type: ignore[arg-type]  # what no parser lets through
    Node(folder, "node-0", None)._start_agent(record)
    body = read_json(folder.worker_state_file("j-0-1"))
    assert body is not None
    state = WorkerState(**body)
    assert (state.phase, state.exit_code, state.start_blocker) == ("Failed", None, True)
    assert state.message.startswith("the agent could not be started: ")
    assert why in state.message
    found = observe_worker(WorkerFiles(record, state), {})
    assert found is not None
    assert found.start_blocker == state.message
