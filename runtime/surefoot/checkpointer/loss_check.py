"""Detects losses that are not finite and reports them.

Used by `facade`. A run whose loss is NaN goes on for days, and its checkpoints push out the last good one.
"""

from __future__ import annotations

import logging
import math

import torch

from surefoot import metrics
from surefoot.ipc.backend import SaveBackend

_log = logging.getLogger(__name__)


class LossCheck:
    """Counts losses that are not finite; rank 0 reports the first."""

    def __init__(self, backend: SaveBackend) -> None:
        self._backend = backend
        self._finite = True

    def check(self, step: int, loss: float | None) -> bool:
        """Whether the loss is a number, or there is none."""
        finite = loss is None or math.isfinite(loss)
        if not finite:
            metrics.losses_not_finite.inc()
        if self._finite and not finite and self._backend.attached.rank == 0:
            text = f"the loss of step {step} is {loss}: checkpoints from here on hold what led to it"
            _log.warning("%s", text)
            self._backend.say("LossNotFinite", text)
        self._finite = finite
        return finite


def plain_loss(loss: torch.Tensor | float | None) -> float | None:
    """The loss as a number, whatever it was given as."""
    return None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
