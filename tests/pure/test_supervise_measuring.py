"""The size that the live view shows is a figure for people: whatever happens to it, the run goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.cli import supervise


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
