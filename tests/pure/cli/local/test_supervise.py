"""What a supervised run survives, a figure that cannot be measured, and what ends it in words, a folder that is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.cli.cli_errors import RunError
from surefoot_operator.cli.local import supervise


def test_a_size_that_cannot_be_measured_costs_the_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise ValueError("invalid literal for int() with base 10: b'abc'")

    monkeypatch.setattr(supervise, "checkpoint_bytes", fails)
    progress = SimpleNamespace(status=SimpleNamespace(last_complete=Checkpoint(1, 10)), checkpoint_bytes=7)
    machine = SimpleNamespace(frozen=set(), node_record=lambda name: None)
    scene: Any = SimpleNamespace(progress=progress, machine=machine, nodes=("n",), job=SimpleNamespace(uid="u"))
    supervisor = supervise.Supervisor(scene, (), lambda _: None, lambda *_: None)
    supervisor._measure()
    assert progress.checkpoint_bytes == 7


def test_a_run_whose_folder_was_removed_ends_and_says_so(tmp_path: Path) -> None:
    machine = SimpleNamespace(folder=SimpleNamespace(root=tmp_path / "gone"), poll=lambda: None)
    scene: Any = SimpleNamespace(progress=SimpleNamespace(), machine=machine, nodes=(), job=None)
    supervisor = supervise.Supervisor(scene, (), lambda _: None, lambda *_: None)
    with pytest.raises(RunError, match="gone was removed while the job ran"):
        supervisor._tick()
