"""Injects faults that only a trainer can do to itself.

Used by `loss_check`, for `surefoot local`. Nothing outside of a process can turn its model NaN; and what a run does about that should be seen
before a long training needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from surefoot.state import Program


class InjectedFaults:
    """Looks, at each step, whether this trainer shall spoil its model.

    Without SUREFOOT_FAULTS_FOLDER, which `surefoot local` alone sets, it does nothing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        folder, node = environment.get("SUREFOOT_FAULTS_FOLDER"), environment.get("SUREFOOT_NODE")
        self._spoiling = Path(folder) / f"nan-{node}" if folder and node else None

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
