"""A run's files are followed while the run goes on: new lines, new attempts, and its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.builders import running
from support.stored import stored_document
from surefoot.linux_process import identity_of
from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.command_base import StopRequest
from surefoot_operator.cli.follow_logs import FileFollower, FollowChoice
from surefoot_operator.platforms.local.platform import Store
from surefoot_operator.platforms.local.run_folder import HolderRecord, NodeRecord, RunFolder, to_json, write_json


def a_run(tmp_path: Path, phase: str = "Running", alive: bool = True) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.make()
    Store(folder).write_job(stored_document(), "uid-1")
    set_phase(folder, phase)
    life = str(identity_of(os.getpid())) if alive else "1:1"
    write_json(
        folder.node("n0"), to_json(NodeRecord("n0", life, "n0", HolderRecord("127.0.0.1", 1, life))), durable=False
    )
    return folder


def set_phase(folder: RunFolder, phase: str) -> None:
    store = Store(folder)
    before = store.status()
    store.patch_status(
        replace(running().status, serial=before.serial, phase=phase), before if before.serial else JobStatus()
    )  # type: ignore[arg-type]


def write(folder: RunFolder, where: str, text: str) -> None:
    path = folder.logs / where
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_lines_attempts_and_the_end_are_shown_as_they_come(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    write(folder, "worker-0-1/epoch-1/rank-0.log", "".join(f"old {n}\n" for n in range(9)))
    write(folder, "worker-0-1/agent.log", "agent\n[rank 0] old 8\n")
    shown: list[str] = []
    acts = [
        lambda: write(folder, "worker-0-1/epoch-1/rank-0.log", "half a "),
        lambda: write(folder, "worker-0-1/epoch-1/rank-0.log", "line\n"),
        lambda: write(folder, "worker-0-2/epoch-2/rank-0.log", "".join(f"new {n}\n" for n in range(4))),
        lambda: (write(folder, "worker-0-2/epoch-2/rank-0.log", "last\n"), set_phase(folder, "Complete")),
    ]

    def show(lines: Sequence[str]) -> None:
        shown.extend(lines)
        if acts:
            acts.pop(0)()

    assert FileFollower(tmp_path, FollowChoice(tail=2), show, StopRequest(), look_seconds=0).run() == "Complete"
    assert [line for line in shown if "|" in line] == [
        "0.1 rank 0   | old 7", "0.1 rank 0   | old 8", "0.1 agent    | agent", "0.1 rank 0   | half a line",
        "0.2 rank 0   | new 0", "0.2 rank 0   | new 1", "0.2 rank 0   | new 2", "0.2 rank 0   | new 3", "0.2 rank 0   | last",
    ]  # fmt: skip


def test_a_run_whose_processes_are_gone_is_not_waited_for(tmp_path: Path) -> None:
    folder = a_run(tmp_path, alive=False)
    write(folder, "worker-0-1/epoch-1/rank-0.log", "x\n")
    shown: list[str] = []
    assert FileFollower(tmp_path, FollowChoice(), shown.extend, StopRequest(), look_seconds=0).run() == "Running"
    assert "it ended before the job did" in shown[-1]


def test_a_file_of_megabytes_is_read_in_parts(tmp_path: Path) -> None:
    folder = a_run(tmp_path, "Complete")
    line = "y" * 999 + "\n"
    write(folder, "worker-0-1/epoch-1/rank-0.log", line * 3000)
    shown: list[str] = []
    FileFollower(tmp_path, FollowChoice(tail=3), shown.extend, StopRequest(), look_seconds=0).run()
    assert len([one for one in shown if "|" in one]) == 3
