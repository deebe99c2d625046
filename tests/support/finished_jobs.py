"""Jobs of which every trainer has finished, for tests of how they end."""

from __future__ import annotations

from dataclasses import replace

from support.builders import manifest, running
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.job_snapshot import Observed, PersistentSeen
from surefoot_operator.policy.maintenance.maintenance_plan import maintain

KEPT = CheckpointPolicy(MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///there", interval_steps=20))


def finished(step: int, saved: int, persistent: bool = True) -> Observed:
    """Every trainer ended well after `step`; the newest save is of step `saved`, on two holders each."""
    seen = running(step=step, **({"checkpoint": KEPT} if persistent else {}))
    last = Checkpoint(1, saved)
    sessions = tuple(replace(s, finished=0, finished_steps=step, saved=last, saves_told=True) for s in seen.sessions)
    saves = [manifest(1, saved, r, 3) for r in range(3)]
    holders = tuple(
        replace(h, entries=(*h.entries, *(m for m in saves if place in (m.save.rank, (m.save.rank + 1) % 3))))
        for place, h in enumerate(seen.holders)
    )
    return replace(seen, sessions=sessions, holders=holders)


def after(seen: Observed, seconds: float) -> Observed:
    """The same so much later, everybody still heard."""
    now = seen.now + seconds
    return replace(seen, now=now, sessions=tuple(replace(s, heard_seconds=now) for s in seen.sessions))


def persisted(seen: Observed, checkpoint: Checkpoint) -> Observed:
    there = {checkpoint: frozenset(RankSave(checkpoint.epoch, checkpoint.step, r) for r in range(3))}
    return replace(seen, status=maintain(replace(seen, promoted=there)).status)


def listed(seen: Observed, *there: Checkpoint) -> Observed:
    """The persistent tier was listed after the last step, and has these."""
    entries = tuple(manifest(c.epoch, c.step, rank, 3) for c in there for rank in range(3))
    found = PersistentSeen(1, entries, asked_seconds=seen.now, error=None)
    return replace(seen, persistent=found)
