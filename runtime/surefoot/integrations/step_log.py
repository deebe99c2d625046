"""Writes steps and checkpoints into TensorBoard or a W&B-style run.

    log = StepLog(checkpointer, tensorboard("runs/gpt"))
    ...
    log.step(loss)  # in place of checkpointer.step(loss)

A training that goes back to its last checkpoint runs some steps again: logged as they come, a curve has them twice.
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


class StepSink(Protocol):
    """Takes what one step has to say."""

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Writes it, and leaves nothing in the process."""

    def close(self) -> None:
        """Writes what is left."""


class StepLog:
    """Counts steps as `Checkpointer.step` does, and writes them on rank 0.

    Args:
        checkpointer: restored before the first step.
        sink: makes the sink for a run that goes on behind a step; called on rank 0 alone, at the first step.
    """

    def __init__(self, checkpointer: Checkpointer, sink: Callable[[int], StepSink]) -> None:
        self._checkpointer, self._make = checkpointer, sink
        self._sink: StepSink | None = None
        self._before: RankStatus | None = None
        self._since = time.perf_counter()

    def step(self, loss: torch.Tensor | float | None = None, **scalars: float) -> int:
        """Logs a finished step, and then calls `checkpointer.step(loss)`.

        In this order: a planned change of the world ends the process inside that call.

        Args:
            loss: as `checkpointer.step` takes it; written as `train/loss`.
            scalars: further values of this step, written as `train/NAME`.

        Returns:
            The step's number.
        """
        at = self._checkpointer.status
        if at.rank == 0:
            if self._sink is None:
                self._sink = self._make(at.step)
            self._sink.write(at.step + 1, self._values(at, loss, scalars), step_events(self._before, at))
        self._before = at
        return self._checkpointer.step(loss)

    def close(self) -> None:
        """Closes the sink. The checkpointer is closed by whoever made it."""
        if self._sink is not None:
            self._sink.close()

    def _values(
        self, at: RankStatus, loss: torch.Tensor | float | None, scalars: Mapping[str, float]
    ) -> dict[str, float]:
        now = time.perf_counter()
        values = {f"train/{name}": float(value) for name, value in scalars.items()}
        plain = plain_number(loss)
        if plain is not None:
            values["train/loss"] = plain
        values |= {"surefoot/step_seconds": now - self._since, "surefoot/world_size": float(at.world_size)}
        if at.stall_seconds is not None:
            values["surefoot/stall_seconds"] = at.stall_seconds
        self._since = now
        return values


def step_events(before: RankStatus | None, at: RankStatus) -> dict[str, str]:
    """What happened since the step before, as texts by tag. Pure."""
    found = {}
    if before is None:
        begun = f"goes on from step {at.restored_step}" if at.restored_step else "begins"
        found["surefoot/world"] = f"epoch {at.generation}: a world of {at.world_size} {begun}"
    if at.saved_step > (0 if before is None else before.saved_step):
        found["surefoot/checkpoint"] = f"step {at.saved_step} is copied, and goes to its tiers"
    return found


def tensorboard(folder: str) -> Callable[[int], StepSink]:
    """Writes event files; TensorBoard drops steps that are run again."""
    return lambda restored: _EventFiles(folder, restored)


def wandb_run(run: Any) -> Callable[[int], StepSink]:
    """Writes to a W&B run, or to what looks like one.

    Resume the run by its id (`wandb.init(id=…, resume="allow")`): steps that it has already are left out.
    """
    return lambda restored: _RunHistory(run)


class _EventFiles:
    def __init__(self, folder: str, restored: int) -> None:
        # by name: torch's part of it has no types
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(folder, purge_step=restored + 1)

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        for tag, text in texts.items():
            self._writer.add_text(tag, text, step)
        self._writer.flush()  # else a killed process leaves a hole below the step that is restored

    def close(self) -> None:
        self._writer.close()


class _RunHistory:
    """A run's history only grows: older steps are left out."""

    def __init__(self, run: Any) -> None:
        self._run, self._there = run, int(run.step or 0)

    def write(self, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        if step >= self._there:
            self._run.log({**scalars, **texts}, step=step)
            self._there = step + 1

    def close(self) -> None:
        self._run.finish()
