"""Files of a run folder are whole to every reader, whoever writes beside whom."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from surefoot_operator.platforms.local import run_folder
from surefoot_operator.platforms.local.run_folder import create_json, read_json, write_json

FIRST, BOUND = {"name": "j-2-1", "node": None}, {"name": "j-2-1", "node": "node-2"}


def test_a_file_that_is_bound_while_it_is_created_is_never_seen_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record was empty for a moment; the node that read it ended, and its worker was never started."""
    path, seen = tmp_path / "j-2-1.json", list[object]()
    link, rename = os.link, os.rename

    def bound_at_once(scratch: str, to: Path) -> None:
        link(scratch, to)
        write_json(path, BOUND, durable=False)

    def looked_at(scratch: str, to: Path) -> None:
        seen.append(read_json(path))
        rename(scratch, to)

    monkeypatch.setattr(os, "link", bound_at_once)
    monkeypatch.setattr(os, "rename", looked_at)
    assert create_json(path, FIRST)
    assert seen == [FIRST], "it is as it was until the other is there whole"
    assert read_json(path) == BOUND
    assert [one.name for one in tmp_path.iterdir()] == ["j-2-1.json"], "nothing is left beside it"


def test_a_file_that_exists_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "j-2-1.json"
    assert create_json(path, FIRST)
    assert not create_json(path, BOUND)
    assert read_json(path) == FIRST
    assert path.stat().st_mode & 0o777 == 0o600, "worker files hold credentials"


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    path = tmp_path / "j-2-1.json"
    write_json(path, FIRST, durable=False)
    monkeypatch.setattr(run_folder.json, "dumps", full)
    for _ in range(3):
        with pytest.raises(OSError, match="no space left"):
            write_json(path, BOUND, durable=True)
    assert [one.name for one in tmp_path.iterdir()] == ["j-2-1.json"]
    assert read_json(path) == FIRST
