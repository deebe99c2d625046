"""Defines a rank's progress in one epoch, from trainer to operator.

Pure. A field of it is written by whoever knows it, merged over a worker's ranks here, and read by whoever decides;
everything between passes the value on whole. A reset is `Progress()`: a field that a reset forgets would describe an
older world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.protocol.checkpoints.save_state import NOTHING_SETTLED, Settled
from surefoot.protocol.codec import since
from surefoot.protocol.loss_band import Oddity
from surefoot.protocol.rank_pace import RankPace


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank, or of a worker; None: not reported yet."""

    step: int = 0
    """Last finished step; of a worker, of all its ranks."""
    loss: float | None = None
    step_seconds: float | None = None
    restored: bool = False
    level: int = 0
    """Saving has backed off to every k·2^level steps."""
    stall_seconds: float | None = None
    """How long the last save held the training up."""
    restored_from: str | None = None
    """A word of `protocol.checkpoints.sources`; None before."""
    save_bytes: int = since(2, 0)
    """What one save takes; 0: not known yet."""
    unstaged: str = since(2, "")
    """Why a rank has no memory to stage saves in; empty: each has."""
    settled: Settled = since(2, NOTHING_SETTLED)  # noqa: RUF009  it makes a field, and its default is frozen
    """Which saves are not there, and never will be."""
    ended: tuple[int, ...] = since(2, ())
    """Ranks that ended with code 0, said before anybody can be hurt by it."""
    loss_is_finite: bool | None = since(3, None)
    """Whether the losses of the last step that told any are numbers, on every rank."""
    passes: float | None = since(3, None)
    """Passes over the data that are consumed, the share of the present one included; of a worker, the mean of its ranks."""
    step_samples: int | None = since(3, None)
    """Samples that the last step consumed; of a worker, of all its ranks."""
    paused: str = since(3, "")
    """Why no step is to be expected now, in the script's own word ("evaluation"); empty: one is."""
    pause_seconds: float | None = since(3, None)
    """How long that may take, where the script said so."""
    odd_step: int = since(3, 0)
    """The newest step whose loss or gradient norm was no number, or out of its band; 0: none."""
    odd_since: int = since(3, 0)
    """The first step of the unbroken run of such steps that `odd_step` belongs to."""
    odd_kind: Oddity = since(3, "")  # noqa: RUF009  it makes a field
    """What was wrong at `odd_step`; of a worker, the worst of its ranks."""
    odd_text: str = since(3, "")
    """The same for people, with the numbers."""
    offered: int = since(3, 0)
    """The step whose state the program had saved, or tried to, when it ended; of a worker, of all its ranks; 0: none."""
    paces: tuple[RankPace, ...] = since(3, ())
    """How often its ranks were found at work in this epoch; empty: nothing new."""

    def after(self, before: Progress) -> Progress:
        """Merges this report over an earlier one of the same epoch.

        Steps and restores are never taken back, and a loss stays until the next.
        """
        finite = self.loss_is_finite
        if finite is None and self.loss is not None:
            finite = math.isfinite(self.loss)  # versions before 3 told the loss alone
        kept: dict[str, Any] = {
            "step": max(self.step, before.step),
            "restored": self.restored or before.restored,
            "restored_from": self.restored_from or before.restored_from,
            "step_seconds": before.step_seconds if self.step_seconds is None else self.step_seconds,
            "loss": before.loss if self.loss is None else self.loss,
            "loss_is_finite": before.loss_is_finite if finite is None else finite,
            "passes": before.passes if self.passes is None else self.passes,
            "step_samples": before.step_samples if self.step_samples is None else self.step_samples,
        }
        if all(getattr(self, name) == value for name, value in kept.items()):
            return self  # nearly always
        return replace(self, **kept)


NOTHING_TOLD = Progress()
"""Of an epoch that has just begun."""


def of_worker(ranks: Sequence[Progress]) -> Progress:
    """Merges the progress of one worker's ranks.

    They step together: times are the first one's.
    """
    if not ranks:
        return NOTHING_TOLD
    told = [rank.loss_is_finite for rank in ranks if rank.loss_is_finite is not None]
    odd = max(ranks, key=lambda rank: (rank.odd_kind == "not-finite", rank.odd_step))
    samples = [rank.step_samples for rank in ranks if rank.step_samples is not None]
    return replace(
        ranks[0],
        step=min(rank.step for rank in ranks),
        level=max(rank.level for rank in ranks),
        settled=min((rank.settled for rank in ranks), key=lambda settled: settled.upto),
        loss_is_finite=all(told) if told else None,
        passes=mean_passes(ranks),
        step_samples=sum(samples) if samples else None,
        odd_step=max(rank.odd_step for rank in ranks),
        odd_since=odd.odd_since,
        odd_kind=odd.odd_kind,
        odd_text=odd.odd_text,
        offered=min(rank.offered for rank in ranks),
        paces=tuple(pace for rank in ranks for pace in rank.paces),
    )


def mean_passes(told: Sequence[Progress]) -> float | None:
    """Averages the passes of ranks or workers; None if none reports any."""
    passes = [one.passes for one in told if one.passes is not None]
    return sum(passes) / len(passes) if passes else None
