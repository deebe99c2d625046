"""A node of one machine on a full disk: it lives on, and says what became of its workers once there is room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.small_disk import fill, small_disk
from surefoot.linux_process import ProcessIdentity, list_group_members
from surefoot_operator.platforms.local.local_nodes import LocalNodes
from surefoot_operator.platforms.local.run_folder import RunFolder, WorkerRecord, read_json, record_to_json, write_json

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone may mount a small disk")


def wait(what: str, condition: Callable[[], object], machine: LocalNodes) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        machine.poll()
        assert time.monotonic() < deadline, f"not within a minute: {what}"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_node_that_cannot_write_for_a_while_lives_on_and_says_it_later(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    with small_disk(place):
        folder = RunFolder(place)
        machine = LocalNodes(folder, memory_bytes=64 << 20)
        machine.lock_run_folder()
        try:
            machine.start_node("node-0")
            wait("its node is up", lambda: (r := machine.read_node_record("node-0")) and r.servers, machine)
            node = machine.read_node_record("node-0")
            assert node is not None
            program = ("python", "train.py")  # never reached: the agent is given no settings, and ends
            record = WorkerRecord("j-0-1", "u", 0, 1, 0.0, program, {}, node="node-0", node_life=node.life)
            aside = folder.root / "aside.json"
            write_json(aside, record_to_json(record), durable=False)
            fill(folder.root / "filler")
            os.rename(aside, folder.worker_file("j-0-1"))  # a name takes no room
            group = ProcessIdentity.parse(node.life).pid
            wait("an agent on the full disk", lambda: len(list_group_members(group)) == 3, machine)
            wait("the agent's end", lambda: len(list_group_members(group)) != 3, machine)
            assert machine.collect_unexpected_exits() == {}, "the node ended with its first write"
            assert not folder.worker_state_file("j-0-1").exists()
            (folder.root / "filler").unlink()
            wait("a word on what became of the worker", folder.worker_state_file("j-0-1").exists, machine)
            assert machine.collect_unexpected_exits() == {}
            state = read_json(folder.worker_state_file("j-0-1"))
            assert state is not None
            assert state["phase"] == "Failed"
        finally:
            machine.close()
