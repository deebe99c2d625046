"""Judges each step's loss and gradient norm, and reports what is odd.

Used by `checkpointer`. A run whose loss is NaN goes on for days, and its checkpoints push out the last good one.
"""

from __future__ import annotations

import logging
import math

import torch

from surefoot import metrics
from surefoot.checkpointer.injected_faults import InjectedFaults
from surefoot.ipc.save_backend import SaveBackend
from surefoot.protocol.loss_band import Oddity, OddSteps, RecentValues, spike_text
from surefoot.state import Program

_log = logging.getLogger(__name__)

_LOSS, _NORM = "loss", "gradient norm"


class LossCheck:
    """Judges a rank's steps; rank 0 reports what is odd, once."""

    def __init__(self, backend: SaveBackend) -> None:
        self._backend = backend
        self._recent = {_LOSS: RecentValues(), _NORM: RecentValues()}
        self._last: Oddity = ""
        self._faults = InjectedFaults()
        self.odd = OddSteps()

    def check(self, step: int, loss: float | None, gradient_norm: float | None, program: Program) -> Oddity:
        """Judges the step that ends.

        Args:
            step: its number.
            loss: of it, if the script told any.
            gradient_norm: likewise.
            program: what is saved of that step says so.

        Returns:
            What is odd about it; empty: nothing, or nothing was told.
        """
        self._faults.spoil(program)
        kind, text = self._judged(step, loss, gradient_norm)
        for name, value in ((_LOSS, loss), (_NORM, gradient_norm)):
            if value is not None:
                self._recent[name] = self._recent[name].followed_by(value)
        if kind == "not-finite":
            metrics.losses_not_finite.inc()
        elif kind:
            metrics.losses_out_of_band.inc()
        if kind and kind != self._last and self._backend.attached.rank == 0:
            said = f"{text}: checkpoints from here on hold what led to it"
            _log.warning("%s", said)
            self._backend.say("LossNotFinite" if kind == "not-finite" else "LossOutOfBand", said)
        self._last = kind
        self.odd = self.odd.followed_by(step, kind, text)
        program.suspect, program.recent, program.odd = bool(kind), self.recent, self.odd
        return kind

    @property
    def recent(self) -> dict[str, list[float]]:
        """What later steps are judged by; to be saved with the step."""
        return {name: list(recent.values) for name, recent in self._recent.items() if recent.values}

    def restored(self, program: Program) -> None:
        """Takes up what the restored checkpoint says of earlier steps.

        Without it a restart would make odd ones sound: nobody else remembers them.
        """
        for name in self._recent:
            self._recent[name] = RecentValues(tuple(float(value) for value in program.recent.get(name) or ()))
        self.odd = program.odd

    def _judged(self, step: int, loss: float | None, gradient_norm: float | None) -> tuple[Oddity, str]:
        if loss is not None and not math.isfinite(loss):
            return "not-finite", f"the loss of step {step} is {loss}"
        for name, value in ((_LOSS, loss), (_NORM, gradient_norm)):
            # a gradient norm that is no number is a spike: a scaler of mixed precision leaves such a step out by itself
            far = "" if value is None else spike_text(name, _number(value), self._recent[name])
            if far:
                return "spike", f"step {step} has a {far}"
        return "", ""


def _number(value: float) -> float:
    """NaN is not above any limit, and further out than any number."""
    return math.inf if math.isnan(value) else value


def plain_number(value: torch.Tensor | float | None) -> float | None:
    """The value as a number, whatever it was given as."""
    return None if value is None else float(value.detach() if isinstance(value, torch.Tensor) else value)
