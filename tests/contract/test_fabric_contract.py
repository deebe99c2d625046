"""The processes fabric under the suite of every fabric, and what it alone can promise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from surefoot.linux_process import list_group_members
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.interface import Platform
from surefoot_operator.platforms.local.local_nodes import LocalNodes
from surefoot_operator.platforms.local.platform import LocalPlatform, RunFolderStore
from surefoot_operator.platforms.local.run_folder import RunFolder

pytest.register_assert_rewrite("support.fabric_suite")

from support.fabric_suite import *  # noqa: E402, F403 -- its tests are collected here
from support.fabric_suite import DOCUMENT, SECONDS, Lab, running, until, worker  # noqa: E402


class ProcessesLab:
    """The processes fabric in a folder of its own."""

    uid = "uid-1"
    nodes = ("node-0", "node-1")
    moment_seconds = 0.5
    node_seconds = 0.5
    tells_death = True

    def __init__(self, root: Path) -> None:
        self.machine = LocalNodes(RunFolder(root), memory_bytes=64 * 1024**2)
        self.machine.lock_run_folder()
        RunFolderStore(self.machine.folder).write_job(DOCUMENT, self.uid)
        self.fabric: Platform = LocalPlatform(root)
        for name in self.nodes:
            self.machine.start_node(name)

    def free(self, count: int) -> int:
        return count

    def kill_node(self, name: str) -> None:
        self.machine.kill_node(name)

    def return_node(self, name: str) -> None:
        self.machine.start_node(name)

    def freeze_node(self, name: str) -> None:
        self.machine.freeze_node(name)

    def kill_agent(self, name: str) -> None:
        assert self.machine.kill_agent(name)

    def kill_holder(self, name: str) -> None:
        assert self.machine.kill_servers(name)

    def return_holder(self, name: str) -> None:
        self.machine.restart_servers(name)

    async def close(self) -> None:
        await self.fabric.close()
        self.machine.close()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = ProcessesLab(tmp_path / "run")
    try:
        await until(made.fabric, lambda seen: seen.free_nodes == 2)
        yield made
    finally:
        await made.close()


async def test_nothing_of_a_node_leaves_its_group_and_a_closed_machine_leaves_nothing(tmp_path: Path) -> None:
    lab = ProcessesLab(tmp_path / "run")
    try:
        await until(lab.fabric, lambda seen: seen.free_nodes == 2)
        found = await running(lab)
        record = lab.machine.read_node_record(found.node or "")
        assert record is not None
        group = int(record.life.split(":")[0])
        assert len(list_group_members(group)) >= 3  # leader, Redis, agent
    finally:
        await lab.close()
    assert list_group_members(group) == []
    assert not any(str(tmp_path) in argument for argument in command_lines())


async def test_a_leader_that_dies_alone_takes_its_node_with_it(tmp_path: Path) -> None:
    lab = ProcessesLab(tmp_path / "run")
    try:
        await until(lab.fabric, lambda seen: seen.free_nodes == 2)
        found = await running(lab)
        record = lab.machine.read_node_record(found.node or "")
        assert record is not None
        leader = int(record.life.split(":")[0])
        os.kill(leader, 9)
        await until(lab.fabric, lambda s: worker(s, 0).phase == "Failed")
        deadline = time.monotonic() + SECONDS
        while list_group_members(leader):
            assert time.monotonic() < deadline, "the kernel ends its children (PDEATHSIG)"
            lab.machine.poll()
            await asyncio.sleep(0.01)
    finally:
        await lab.close()


async def test_a_damaged_run_folder_is_an_error_and_never_an_empty_answer(tmp_path: Path) -> None:
    fabric = LocalPlatform(tmp_path)
    folder = RunFolder(tmp_path)
    folder.create_folders()
    with pytest.raises(PlatformError, match="no job"):
        await fabric.observe()
    RunFolderStore(folder).write_job(DOCUMENT, "uid-1")
    folder.status_file.write_text("{")
    with pytest.raises(PlatformError, match="status"):
        await fabric.observe()
    folder.status_file.unlink()
    folder.node_file("node-0").write_text('{"name": 1}')
    with pytest.raises(PlatformError, match="run folder"):
        await fabric.observe()


def command_lines() -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.append(Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found
