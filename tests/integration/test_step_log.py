"""TensorBoard's files and a run's history after a training was killed and went back: each step once, none missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import surefoot
from support.wandb_file import history
from surefoot.checkpointer.checkpointer import RankStatus
from surefoot.integrations.step_log import StepLog, step_events, tensorboard, wandb_run


class Killed(Exception):
    """Stands in for a SIGKILL: nothing is closed behind it."""


class Run:
    """A W&B run as far as a sink sees it: `step` is the next one's number."""

    def __init__(self) -> None:
        self.step, self.history, self.finished = 0, [], False

    def log(self, values: dict[str, Any], step: int) -> None:
        assert step >= self.step, "W&B drops what is older"
        self.history.append((step, values))
        self.step = step + 1

    def finish(self) -> None:
        self.finished = True


def train(folder: Path, sink: Any, steps: int, killed_behind: int | None = None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = surefoot.Checkpointer(model=model, optimizer=optimizer, folder=str(folder), interval_steps=4)
    log = StepLog(checkpointer, sink)
    start = checkpointer.restore()
    for step in range(start + 1, steps + 1):
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert log.step(loss, rate=0.1) == step
        if step == killed_behind:
            checkpointer.__exit__(Killed, Killed(), None)  # so that the folder is free for the next life; saves nothing
            return
    log.close()
    checkpointer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_restart(tmp_path: Path) -> None:
    sink = tensorboard(str(tmp_path / "events"))
    train(tmp_path / "checkpoints", sink, 12, killed_behind=10)
    train(tmp_path / "checkpoints", sink, 12)
    read = EventAccumulator(str(tmp_path / "events"), purge_orphaned_data=True).Reload()
    assert [one.step for one in read.Scalars("train/loss")] == list(range(1, 13))
    assert [one.value for one in read.Scalars("surefoot/world_size")] == [1.0] * 12
    assert {"train/rate", "surefoot/step_seconds", "surefoot/stall_seconds"} <= set(read.Tags()["scalars"])
    texts = [bytes(one.tensor_proto.string_val[0]).decode() for one in read.Tensors("surefoot/world/text_summary")]
    assert texts == ["generation 1 with 1 rank begins at step 0", "generation 2 with 1 rank continues from step 8"]


def test_a_run_s_history_has_each_step_once_after_a_restart(tmp_path: Path) -> None:
    run = Run()
    train(tmp_path, wandb_run(run), 12, killed_behind=10)
    train(tmp_path, wandb_run(run), 12)
    assert [step for step, _ in run.history] == list(range(1, 13))
    assert run.finished
    assert any("step 4 is copied" in str(values.get("surefoot/checkpoint")) for _, values in run.history)


@pytest.mark.nightly
def test_wandb_itself_keeps_each_step_with_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a run is quicker."""
    wandb = pytest.importorskip("wandb", reason="python -m bench frameworks brings it")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", project="surefoot", id="one", resume="allow", dir=str(tmp_path))
    train(tmp_path / "checkpoints", wandb_run(run), 12)
    [file] = tmp_path.glob("wandb/offline-run-*/run-one.wandb")
    logged = history(file)
    assert [line["_step"] for line in logged] == list(range(1, 13))
    assert logged[0]["surefoot/world"] == "generation 1 with 1 rank begins at step 0"
    assert {"train/loss", "train/rate", "surefoot/step_seconds", "surefoot/world_size"} <= set(logged[0])
    assert any("step 4 is copied" in str(line.get("surefoot/checkpoint")) for line in logged)


def test_events_are_told_once() -> None:
    at = RankStatus(generation=3, rank=0, world_size=2, restored_step=8, step=8, saved_step=0, stall_seconds=None)
    assert step_events(None, at) == {"surefoot/world": "generation 3 with 2 ranks continues from step 8"}
    saved = RankStatus(generation=3, rank=0, world_size=2, restored_step=8, step=12, saved_step=12, stall_seconds=0.1)
    assert step_events(at, saved) == {"surefoot/checkpoint": "step 12 is copied, and goes to its tiers"}
    assert step_events(saved, saved) == {}
