"""Remembers which checkpoints are being dropped.

Pure; called by `maintain`. A drop takes its time, and an index that was read before it still shows what it takes: a
checkpoint that is on its way out must not become the last good one, for which an older good one goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.actions import DropSaves

Going = dict[Checkpoint, float]
"""Checkpoints that were to be dropped, and until when such a drop may still reach a holder."""


def going_after(before: Going, drops: Iterable[DropSaves], now_seconds: float) -> Going:
    """Adds the drops of a round, and forgets those that are void."""
    going = {checkpoint: until for checkpoint, until in before.items() if until > now_seconds}
    for drop in drops:
        for save in drop.saves:
            going[save.checkpoint] = max(going.get(save.checkpoint, 0.0), drop.expires_seconds)
    return going


def staying(complete: Iterable[Checkpoint], going: Going, now_seconds: float) -> list[Checkpoint]:
    """Leaves out what may be gone by now."""
    return [one for one in complete if going.get(one, 0.0) <= now_seconds]
