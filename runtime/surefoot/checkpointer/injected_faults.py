"""Injects faults that only a trainer can do to itself.

Used by `loss_check` and `checkpointer`, for `surefoot local`. Nothing outside of a process can turn its model NaN, have it work for
longer, or stand still in the middle of its program; and what a run does about that should be seen before a long training needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch

from surefoot.fault_files import fault_word, take
from surefoot.state import Program

SLOW_SECONDS = 0.1
"""How much longer each step takes a rank that is made slow."""

_FOR_EVER_SECONDS = 1e8


class InjectedFaults:
    """Looks at each step whether this trainer shall misbehave.

    Without SUREFOOT_FAULTS_FOLDER, which `surefoot local` alone sets, it does nothing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._spoiling, self._slowing, self._hanging = (
            fault_word(kind, environment) for kind in ("nan", "slow", "hang")
        )

    def slow(self) -> None:
        """Takes longer for a step, as long as that is asked for."""
        if self._slowing is not None and self._slowing.exists():
            time.sleep(SLOW_SECONDS)

    def hang(self) -> None:
        """Does not return, or not for so long, where asked.

        It is one wait: a loop would read and compute, and so look alive.
        """
        said = take(self._hanging)
        if said is not None:
            time.sleep(float(said) if said else _FOR_EVER_SECONDS)

    def spoil(self, program: Program) -> None:
        """Turns the first tensor of numbers NaN, where asked."""
        if take(self._spoiling) is None:
            return  # nobody asked, or another rank of this node was faster
        floating = (e.local_part() for e in program.standing() if e.local_part().is_floating_point())
        with torch.no_grad():
            next(floating).fill_(float("nan"))
