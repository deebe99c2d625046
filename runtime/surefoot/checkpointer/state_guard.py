"""Tracks whether the program still holds the state of its last step.

Only while it stands may its state be saved as that step's: saved later, under the same number, a gradient would count
twice, or buffers be those of a step that never ended. Asked by `checkpointer` at each step and wherever it saves outside of one.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from surefoot.checkpointer.foreign_loaders import PrefetchCheck

Samples = tuple[tuple[int, int], ...]
"""Positions [start, stop) of the global order, one pair for each batch."""

PASSES_SHARE = 0.01
"""Of the time, at most, that reckoning passes over the data takes: a stream of many lanes takes a while."""

PASSES_SECONDS = 1.0
"""So old the passes told may be, whatever they cost."""


class StateGuard:
    """Compares loaders and optimizers with where the last step left them.

    Loaders that can count by steps are switched to it.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._loaders = {name: o for name, o in objects.items() if callable(getattr(o, "count_by_step", None))}
        self._foreign: PrefetchCheck | None = PrefetchCheck(objects)
        """Until a step has ended: what was restored had its first step before."""
        self._optimizing = False
        self._at_step = 0
        for loader in self._loaders.values():
            loader.count_by_step()
        self.consumed: Samples | None = None
        """What this rank's share of the last step was; None if the program has no `loader` that tells."""
        self.step_samples: int | None = None
        """How many samples that share had; None likewise."""
        self.step_span: tuple[int, int] | None = None
        """Positions [start, stop) of all ranks' shares together, where a loader tells that steps' sizes may differ."""
        self._passes: float | None = None
        self._reckon_at = -math.inf

    def restored(self, step: int) -> None:
        """Takes the present state for that of a restored step; 0: none."""
        if step > 0:
            self._foreign = None
        self._optimizing, self._at_step = False, self._handed_out()

    def step_ends(self) -> None:
        """Takes the present state for that of the step that ends here.

        Raises ConfigurationError where it is uncertain which batches the step used.
        """
        if self._foreign is not None:
            self._foreign.first_step_ends()
            self._foreign = None
        told = {name: loader.step_ends() for name, loader in self._loaders.items()}
        self.consumed = told.get("loader")
        self.step_samples = getattr(self._loaders.get("loader"), "step_samples", None)
        self.step_span = getattr(self._loaders.get("loader"), "step_span", None)
        self._optimizing, self._at_step = False, self._handed_out()

    def passes(self, now: float) -> float | None:
        """Passes over the data of the source furthest behind; None: unknown.

        Reckoned again as soon as that is little of the time since; older ones would stand beside a step that is not
        theirs.
        """
        told = getattr(self._loaders.get("loader"), "passes", None)
        if callable(told) and now >= self._reckon_at:
            self._passes = min(told(), default=None)
            self._reckon_at = now + min(PASSES_SECONDS, (time.perf_counter() - now) / PASSES_SHARE)
        return self._passes

    def optimizer_begins(self) -> None:
        """Tensors change from here on."""
        self._optimizing = True

    def changed_by(self) -> str | None:
        """Names what changed the state since the last step; None: nothing.

        Where no loader counts what it hands out, an exception being handled is taken to have come within a step.
        """
        if self._optimizing:
            return "an optimizer has begun"
        if self._handed_out() != self._at_step:
            return "a batch was taken from the loader"
        if not self._loaders and sys.exc_info()[0] is not None:
            return "an exception is being handled"
        return None

    def _handed_out(self) -> int:
        return sum(loader.handed_out for loader in self._loaders.values())
