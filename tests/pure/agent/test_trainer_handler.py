"""A ledger on a full disk: what could not be written follows, whole and in order."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.agent import trainer_handler as ledger
from surefoot.agent.trainer_handler import StepLedger
from surefoot.ipc.trainer_messages import StepReport
from surefoot.protocol.progress import Progress
from surefoot_operator.cli.local.progress import TrainerStart, parse_line


class Disk:
    """Has room for so many bytes, and takes what fits, as a file system does."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, content: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(descriptor, content[: self.room])
        self.room -= written
        return written


def steps(path: Path) -> list[int]:
    lines = [parse_line(text) for text in path.read_text().splitlines()]
    return [line.step for line in lines if line is not None]


def stepped(step: int) -> StepReport:
    return StepReport(Progress(step, 1.0, 0.1), None, False)


def test_what_a_full_disk_refused_follows_when_there_is_room(tmp_path: Path) -> None:
    timers: list[Callable[[], None]] = []
    later = timers.append
    disk = Disk(room=250)  # ends in the middle of a line
    found = StepLedger(tmp_path / "ledger" / "worker-0-1.jsonl", later, disk.write)
    path = tmp_path / "ledger" / "worker-0-1.jsonl"
    for step in range(1, 11):
        found.write(1, 0, stepped(step), {})
    assert 0 < len(steps(path)) < 10
    assert len(timers) == 1
    timers.pop()()  # still full: asked again later
    assert len(timers) == 1
    disk.room = 1 << 20
    timers.pop()()
    assert steps(path) == list(range(1, 11))  # nobody had to make another step for it
    found.write(1, 0, stepped(11), {})
    found.close()
    assert timers == []
    assert steps(path) == list(range(1, 12))
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == list(range(1, 12))
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_waits_is_bounded_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "MAX_WAITING", 3)
    later: Callable[[Callable[[], None]], None] = [].append
    disk = Disk(room=0)
    found = StepLedger(tmp_path / "worker-0-1.jsonl", later, disk.write)
    for step in range(1, 9):
        found.write(1, 0, stepped(step), {})
    assert [record.message.count("cannot be written") for record in caplog.records] == [1, 0]
    disk.room = 1 << 20
    found.write(1, 0, stepped(9), {})
    found.write(1, 0, stepped(10), {})
    found.close()
    assert steps(tmp_path / "worker-0-1.jsonl") == [1, 2, 3, 10]


def test_a_first_step_is_recorded_with_the_times_of_its_trainers_start(tmp_path: Path) -> None:
    later: Callable[[Callable[[], None]], None] = [].append
    found = StepLedger(tmp_path / "worker-0-1.jsonl", later)
    found.write(2, 0, stepped(11), {"attached_at": 100.0, "restored_at": 103.0, "restore_seconds": 2.0})
    found.write(2, 0, stepped(12), {})
    found.close()
    lines = [parse_line(text) for text in (tmp_path / "worker-0-1.jsonl").read_text().splitlines()]
    assert [line and line.start for line in lines] == [TrainerStart(100.0, 101.0, 103.0), None]
