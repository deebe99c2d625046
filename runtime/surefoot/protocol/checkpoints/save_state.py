"""Reports which of a worker's saves can never come any more.

Pure. The leader learns from it which checkpoints can never become complete. A save that a rank never handed over (no
staging memory, no free slot, a failed copy), or that was given up before any holder was asked to commit it, is nowhere
and will be nowhere, whatever holders that nobody reaches may have. So the report is true for ever, however late it is
read and whoever leads then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settled:
    """The closed steps of one worker's saves in its epoch.

    Made by `surefoot.agent.save_progress`, sent in every heartbeat.
    """

    upto: int = 0
    """Newest step that none of its ranks can come to save any more."""
    steps: tuple[int, ...] = ()
    """Those of which every rank handed its save over: they may be on holders."""
    forgotten: int = 0
    """`steps` says nothing of this one and older ones."""

    def misses(self, step: int) -> bool:
        """Whether some rank's save of `step` is missing for ever."""
        return self.forgotten < step <= self.upto and step not in self.steps


NOTHING_SETTLED = Settled()
"""Of a worker that has not said anything yet."""
