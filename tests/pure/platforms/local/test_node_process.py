"""What a full disk refused is written later, the newest content alone; until then it is what its reader gets."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from surefoot_operator.platforms.local import node_process
from surefoot_operator.platforms.local.node_process import PendingWrites
from surefoot_operator.platforms.local.run_folder import read_json, write_json


class Disk:
    """A disk that has room, or none; and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.now = 100.0
        monkeypatch.setattr(node_process, "write_json", self._write)
        monkeypatch.setattr(node_process.time, "monotonic", lambda: self.now)

    def _write(self, path: Path, body: dict[str, Any], durable: bool) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, body, durable)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_with_room_nothing_is_left_to_write(disk: Disk, tmp_path: Path) -> None:
    writes = PendingWrites()
    writes.write_or_retry(tmp_path / "a", {"x": 1})
    assert read_json(tmp_path / "a") == {"x": 1}
    assert writes.retry_at_seconds is None


def test_the_newest_content_is_written_once_there_is_room(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes, path = PendingWrites(), tmp_path / "a"
    disk.full = True
    writes.write_or_retry(path, {"x": 1})
    writes.write_or_retry(path, {"x": 2})
    assert not path.exists()
    assert writes.read(path) == {"x": 2}
    assert writes.retry_at_seconds == 100.0 + node_process.WRITE_RETRY_SECONDS
    disk.full = False
    writes.write_pending()
    assert not path.exists(), "not before its time"
    disk.now = writes.retry_at_seconds
    writes.write_pending()
    assert read_json(path) == {"x": 2}
    assert writes.retry_at_seconds is None
    said = capsys.readouterr().err
    assert "No space left" in said
    assert said.count("cannot write") == said.count("all files of the node are written again") == 1


def test_a_disk_that_stays_full_is_told_once(disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writes = PendingWrites()
    disk.full = True
    writes.write_or_retry(tmp_path / "a", {"x": 1})
    for _ in range(5):
        disk.now += 1.0
        writes.write_pending()
    assert capsys.readouterr().err.count("cannot write") == 1


def test_what_was_dropped_is_never_written(disk: Disk, tmp_path: Path) -> None:
    writes, path = PendingWrites(), tmp_path / "a"
    disk.full = True
    writes.write_or_retry(path, {"x": 1})
    writes.remove_file(path)
    disk.full = False
    disk.now += 1.0
    writes.write_pending()
    assert not path.exists()
    assert writes.read(path) is None
