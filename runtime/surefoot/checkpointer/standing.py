"""Describes a rank's step and world for the program's own log."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.ipc.trainer_messages import Attached


@dataclass(frozen=True, slots=True)
class RankStanding:
    """Where one rank is, and what of it is saved."""

    epoch: int
    """Counts the worlds that this job had; 1 is the first."""
    rank: int
    world: int
    """Number of ranks."""
    restored_step: int
    """What this world goes on from; 0: from the beginning."""
    step: int
    """Finished steps."""
    saved_step: int
    """The newest whose state this rank has copied; 0: none yet."""
    stall_seconds: float | None
    """What the newest save took of the training's time; None: none yet."""

    @classmethod
    def of(cls, attached: Attached, step: int, saved_step: int, stall_seconds: float | None) -> RankStanding:
        """Puts together what the agent said and what the rank did since."""
        restored = attached.parent.step if attached.parent else 0
        return cls(attached.epoch, attached.rank, attached.world, restored, step, saved_step, stall_seconds)
