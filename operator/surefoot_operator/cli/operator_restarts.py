"""How often a local run starts an operator that ended again.

A run under many faults outlives any number of operators; one whose operator ends again and again before training has
made a step would otherwise be started for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 3
"""Restarts without a step between them."""


@dataclass(frozen=True, slots=True)
class OperatorRestarts:
    """Restarts since training last made a step."""

    count: int = 0
    step: int = 0
    """The last finished step when the operator ended the last time."""

    def ended(self, step: int) -> OperatorRestarts:
        """The operator ended, and `step` is the last finished one."""
        return OperatorRestarts(1 if step > self.step else self.count + 1, step)

    @property
    def exhausted(self) -> bool:
        """Whether another restart would be one too many."""
        return self.count > LIMIT
