"""Remembers which checkpoints are being dropped from memory.

Pure; read by `maintenance_plan` and by whoever believes a listing. A drop takes its time, and an index that was read before it
still shows what it takes: a checkpoint that is on its way out must not become the last good one, for which an older good
one goes. What this leader has deleted from the persistent tier is out of its listing at once (`PersistentSeen.without`).
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.core.actions import DropSaves
from surefoot_operator.policy.core.facts import Facts

DROP_SECONDS = 5.0
"""A drop is void after so long, and sooner where holders are given up sooner: it must not reach one that returns."""

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


def may_be_under_way(facts: Facts) -> bool:
    """Whether a former leader's drops may still be carried out.

    Only jobs that go back to good checkpoints wait for them: others need the newest, which no leader drops.
    """
    return facts.spec.health_policy.numerics is not None and facts.now < facts.seen.term_seconds + DROP_SECONDS
