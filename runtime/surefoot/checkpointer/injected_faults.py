"""Injects faults that only a trainer can do to itself.

Used by `loss_check` and `facade`, for `surefoot local`. Nothing outside of a process can turn its model NaN, or work for
longer; and what a run does about that should be seen before a long training needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from surefoot.state import Program

SLOW_SECONDS = 0.1
"""How much longer each step takes a rank that is made slow."""


class InjectedFaults:
    """Looks at each step whether this trainer shall err or be slow.

    Without SUREFOOT_FAULTS_FOLDER, which `surefoot local` alone sets, it does nothing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        folder, node = environment.get("SUREFOOT_FAULTS_FOLDER"), environment.get("SUREFOOT_NODE")
        self._spoiling = Path(folder) / f"nan-{node}" if folder and node else None
        self._slowing = Path(folder) / f"slow-{node}" if folder and node else None

    def slow(self) -> None:
        """Takes longer for a step, as long as that is asked for."""
        if self._slowing is not None and self._slowing.exists():
            time.sleep(SLOW_SECONDS)

    def spoil(self, program: Program) -> None:
        """Turns the first tensor of numbers NaN, where asked."""
        if self._spoiling is None or not self._spoiling.exists():
            return
        try:
            self._spoiling.unlink()
        except FileNotFoundError:
            return  # another rank of this node was faster
        floating = (e.local_part() for e in program.standing() if e.local_part().is_floating_point())
        with torch.no_grad():
            next(floating).fill_(float("nan"))
