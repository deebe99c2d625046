"""Jobs of which every trainer has finished, for tests of how they end."""

from __future__ import annotations

from dataclasses import replace

from support.builders import manifest, running
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.job_snapshot import JobSnapshot, PersistentListing
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance

KEPT = CheckpointPolicy(MemoryTierSpec(interval_steps=10), PersistentTierSpec("file:///there", interval_steps=20))


def finished(step: int, saved: int, persistent: bool = True) -> JobSnapshot:
    """Every trainer ended well after `step`; the newest save is of step `saved`, on two holders each."""
    seen = running(step=step, **({"checkpoint": KEPT} if persistent else {}))
    last = Checkpoint(1, saved)
    sessions = tuple(
        replace(s, finished=0, finished_steps=step, saved=last, final_saves_reported=True) for s in seen.sessions
    )
    saves = [manifest(1, saved, r, 3) for r in range(3)]
    holders = tuple(
        replace(h, entries=(*h.entries, *(m for m in saves if place in (m.save.rank, (m.save.rank + 1) % 3))))
        for place, h in enumerate(seen.servers)
    )
    return replace(seen, sessions=sessions, servers=holders)


def after(seen: JobSnapshot, seconds: float) -> JobSnapshot:
    """The same so much later, everybody still heard."""
    now = seen.now_seconds + seconds
    return replace(seen, now_seconds=now, sessions=tuple(replace(s, last_message_seconds=now) for s in seen.sessions))


def persisted(seen: JobSnapshot, checkpoint: Checkpoint) -> JobSnapshot:
    there = {checkpoint: frozenset(RankSave(checkpoint.generation, checkpoint.step, r) for r in range(3))}
    return replace(seen, status=plan_maintenance(replace(seen, uploaded=there)).status)


def listed(seen: JobSnapshot, *there: Checkpoint) -> JobSnapshot:
    """The persistent tier was listed after the last step, and has these."""
    entries = tuple(manifest(c.generation, c.step, rank, 3) for c in there for rank in range(3))
    found = PersistentListing(1, entries, requested_seconds=seen.now_seconds, error=None)
    return replace(seen, persistent=found)
