"""Writes steps and checkpoints into TensorBoard or a W&B-style run.

    log = StepLog(checkpointer, tensorboard("runs/gpt"))
    ...
    log.step(loss)  # in place of checkpointer.step(loss)

After a restart some steps since the last checkpoint run again. Logged naively, a curve would show them twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import torch

from surefoot.checkpointer import Checkpointer
from surefoot.checkpointer.checkpointer import RankStatus
from surefoot.checkpointer.step_reports import plain_number
from surefoot.protocol.text import count_of


class StepSink(Protocol):
    """Writes the values of steps to one destination."""

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Writes one step's values and texts, and flushes them out of the process."""

    def close(self) -> None:
        """Writes the remaining values and closes the destination."""


class StepLog:
    """Counts steps as `Checkpointer.step` does, and writes them on rank 0.

    Args:
        checkpointer: restored before the first step.
        sink: creates the sink for a run that continues after a given step; called on rank 0 only, at the first step.
    """

    def __init__(self, checkpointer: Checkpointer, sink: Callable[[int], StepSink]) -> None:
        self._checkpointer, self._open_sink = checkpointer, sink
        self._sink: StepSink | None = None
        self._last_status: RankStatus | None = None
        self._last_step_start = time.perf_counter()

    def step(self, loss: torch.Tensor | float | None = None, **scalars: float) -> int:
        """Logs a finished step, and then calls `checkpointer.step(loss)`.

        The order matters: at a planned change of the membership, the process exits inside that call.

        Args:
            loss: as `checkpointer.step` takes it; written as `train/loss`.
            scalars: further values of this step, written as `train/NAME`.

        Returns:
            The step's number.
        """
        status = self._checkpointer.status
        if status.rank == 0:
            if self._sink is None:
                self._sink = self._open_sink(status.step)
            self._sink.write(
                status.step + 1, self._values(status, loss, scalars), step_events(self._last_status, status)
            )
        self._last_status = status
        return self._checkpointer.step(loss)

    def close(self) -> None:
        """Closes the sink, but not the checkpointer."""
        if self._sink is not None:
            self._sink.close()

    def _values(
        self, status: RankStatus, loss: torch.Tensor | float | None, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        now = time.perf_counter()
        values = {f"train/{name}": float(value) for name, value in scalars.items()}
        loss_value = plain_number(loss)
        if loss_value is not None:
            values["train/loss"] = loss_value
        values |= {
            "surefoot/step_seconds": now - self._last_step_start,
            "surefoot/world_size": float(status.world_size),
        }
        if status.stall_seconds is not None:
            values["surefoot/stall_seconds"] = status.stall_seconds
        self._last_step_start = now
        return values


def step_events(previous: RankStatus | None, status: RankStatus) -> dict[str, str]:
    """Describes the events since the previous step, as texts by tag. Pure."""
    texts = {}
    if previous is None:
        ranks = count_of(status.world_size, "rank")
        start_text = f"continues from step {status.restored_step}" if status.restored_step else "begins at step 0"
        texts["surefoot/world"] = f"generation {status.generation} with {ranks} {start_text}"
    if status.saved_step > (0 if previous is None else previous.saved_step):
        texts["surefoot/checkpoint"] = f"step {status.saved_step} is copied, and goes to its tiers"
    return texts


def tensorboard(folder: str) -> Callable[[int], StepSink]:
    """Returns a sink for event files; TensorBoard drops steps that are run again."""
    return lambda restored: _EventFiles(folder, restored)


def wandb_run(run: Any) -> Callable[[int], StepSink]:
    """Returns a sink for a W&B run, or an object with the same interface.

    Resume the run by its id (`wandb.init(id=…, resume="allow")`): steps that it already has are skipped.
    """
    return lambda restored: _RunHistory(run)


class _EventFiles:
    def __init__(self, folder: str, restored: int) -> None:
        # imported by name: torch's wrapper has no types
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(folder, purge_step=restored + 1)

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        for tag, text in texts.items():
            self._writer.add_text(tag, text, step)
        self._writer.flush()  # else a killed process leaves a gap before the restored step

    def close(self) -> None:
        self._writer.close()


class _RunHistory:
    """Writes to a run's history; it only grows, so steps that it already has are skipped."""

    def __init__(self, run: Any) -> None:
        self._run, self._next_step = run, int(run.step or 0)

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        if step >= self._next_step:
            self._run.log({**scalars, **texts}, step=step)
            self._next_step = step + 1

    def close(self) -> None:
        self._run.finish()
