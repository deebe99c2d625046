"""What a supervised run survives, a figure that cannot be measured, and what ends it in words, a folder that is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.cli.command_base import RunError, StopRequest
from surefoot_operator.cli.local import supervise


def test_a_size_that_cannot_be_measured_costs_the_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise ValueError("invalid literal for int() with base 10: b'abc'")

    monkeypatch.setattr(supervise, "checkpoint_bytes", fails)
    progress = SimpleNamespace(status=SimpleNamespace(last_complete=Checkpoint(1, 10)), checkpoint_bytes=7)
    machine = SimpleNamespace(frozen_nodes=set(), read_node_record=lambda name: None)
    scene: Any = SimpleNamespace(progress=progress, machine=machine, nodes=("n",), job=SimpleNamespace(uid="u"))
    supervisor = supervise.Supervisor(scene, (), lambda: None, lambda *_: None, StopRequest())
    supervisor.measure_checkpoint()
    assert progress.checkpoint_bytes == 7


def test_a_run_whose_folder_was_removed_ends_and_says_so(tmp_path: Path) -> None:
    machine = SimpleNamespace(folder=SimpleNamespace(root=tmp_path / "gone"), poll=lambda: None)
    scene: Any = SimpleNamespace(progress=SimpleNamespace(), machine=machine, nodes=(), job=None)
    supervisor = supervise.Supervisor(scene, (), lambda: None, lambda *_: None, StopRequest())
    with pytest.raises(RunError, match="gone was removed while the job ran"):
        supervisor.tick()


def _over_nodes(tmp_path: Path, ends: dict[str, int], left: bool) -> tuple[supervise.Supervisor, list[str]]:
    told: list[str] = []
    (tmp_path / "node-0.log").write_text("Traceback\nOSError: [Errno 28] No space left on device\n")
    machine = SimpleNamespace(
        folder=SimpleNamespace(logs_folder=tmp_path), collect_unexpected_exits=lambda: ends, has_nodes=lambda: left
    )
    progress = SimpleNamespace(status=SimpleNamespace(phase="Pending"))
    scene: Any = SimpleNamespace(progress=progress, machine=machine, nodes=("node-0",), job=None)
    supervisor = supervise.Supervisor(scene, (), lambda: None, lambda text, _: told.append(text), StopRequest())
    return supervisor, told


def test_a_node_that_no_fault_ended_is_told_with_its_last_words(tmp_path: Path) -> None:
    supervisor, told = _over_nodes(tmp_path, {"node-0": 1}, left=True)
    supervisor.check_nodes()
    assert len(told) == 1
    assert told[0].startswith("node-0 ended unasked with code 1: OSError: [Errno 28] No space left on device (log: ")


def test_a_node_that_is_killed_in_its_first_second_is_a_fault_as_any_other(tmp_path: Path) -> None:
    """One that cannot start, though, ends the run: the next would fail in the same way."""
    exit_codes: dict[str, int | None] = {"node-0": None, "node-1": -9}
    record = SimpleNamespace(servers=(1,), message="")
    machine = SimpleNamespace(
        folder=SimpleNamespace(logs_folder=tmp_path),
        read_node_record=lambda name: record if exit_codes[name] is None else None,
        node_exit_code=exit_codes.__getitem__,
    )
    scene: Any = SimpleNamespace(progress=None, machine=machine, nodes=("node-0", "node-1"), job=None)
    supervisor = supervise.Supervisor(scene, (), lambda: None, lambda *_: None, StopRequest())
    supervisor.tick = lambda: None  # type: ignore[method-assign]
    supervisor._wait_for_nodes()
    exit_codes["node-1"] = 1
    with pytest.raises(RunError, match="node-1 exited during its start"):
        supervisor._wait_for_nodes()


def test_a_run_without_a_node_that_is_left_or_returns_ends(tmp_path: Path) -> None:
    supervisor, _ = _over_nodes(tmp_path, {}, left=False)
    with pytest.raises(RunError, match="no node is left and none returns"):
        supervisor.check_nodes()


def _over_operator(tmp_path: Path) -> tuple[supervise.Supervisor, SimpleNamespace, list[str]]:
    """An operator that has ended whenever it is looked at."""
    told: list[str] = []
    machine = SimpleNamespace(
        folder=SimpleNamespace(logs_folder=tmp_path), operator_exit_code=lambda: 1, start_operator=lambda: None
    )
    progress = SimpleNamespace(finished_step=0)
    scene: Any = SimpleNamespace(progress=progress, machine=machine, nodes=(), job=None)
    return (
        supervise.Supervisor(scene, (), lambda: None, lambda text, _: told.append(text), StopRequest()),
        progress,
        told,
    )


def test_an_operator_that_ends_before_any_step_is_started_three_times(tmp_path: Path) -> None:
    supervisor, _, told = _over_operator(tmp_path)
    for _ in range(supervise.OPERATOR_RESTARTS):
        supervisor.check_operator()
    with pytest.raises(RunError, match="made no progress"):
        supervisor.check_operator()
    assert len(told) == supervise.OPERATOR_RESTARTS


def test_any_number_of_deaths_is_outlived_while_training_goes_on_between_them(tmp_path: Path) -> None:
    supervisor, progress, told = _over_operator(tmp_path)
    for step in (0, 0, 0, *range(1, 50), 49, 49):
        progress.finished_step = step
        supervisor.check_operator()
    assert len(told) == 54
    with pytest.raises(RunError, match="made no progress"):
        supervisor.check_operator()
