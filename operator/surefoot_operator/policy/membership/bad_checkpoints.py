"""Remembers which checkpoints of a job are bad.

Pure; read by `plan` and `plan_invariants`. A bad checkpoint below the floor can never be chosen and is forgotten; otherwise the status of a
job on bad disks would grow for ever.
"""

from __future__ import annotations

from surefoot.protocol.checkpoints.lineage import on_lineage
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus
from surefoot_operator.policy.core.facts import Facts, bad_of

MOST_REMEMBERED = 64
"""Of this job's own. The oldest go first: chosen again, such a one is read again and found to be bad again."""


def found_by_uploads(facts: Facts) -> tuple[Checkpoint, ...]:
    """Checkpoints of which an upload found no good copy, oldest first.

    A restore would find the same, and whoever waits for the upload would wait for ever.
    """
    status, persistent = facts.status, facts.seen.persistent
    world = status.world
    if not facts.seen.unreadable or world is None or world.state != "Committed":
        return ()
    there = {m.save for m in persistent.entries or ()}.union(*facts.seen.promoted.values())
    found = {s.checkpoint for s in facts.seen.unreadable - there} - bad_of(facts)
    found = {c for c in found if on_lineage(status.lineage, c, world.epoch) and not _passed(c, status)}
    return tuple(sorted(found - {status.floor}, key=lambda c: (c.step, c.epoch)))


def with_bad(status: JobStatus, found: Checkpoint | None) -> tuple[Checkpoint, ...]:
    """Adds a bad checkpoint and forgets those no longer needed."""
    bad = status.bad if found is None or found in status.bad else (*status.bad, found)
    if found is None:
        return bad
    own = [c for c in bad if not c.imported and (c == found or not _passed(c, status))]
    kept = set(sorted(own, key=lambda c: (c.step, c.epoch))[-MOST_REMEMBERED:])
    return tuple(c for c in bad if c.imported or c in kept or c == found)


def may_be_forgotten(checkpoint: Checkpoint, status: JobStatus) -> bool:
    """Whether a later status may lack this bad checkpoint."""
    own = [c for c in status.bad if not c.imported]
    return not checkpoint.imported and (_passed(checkpoint, status) or len(own) >= MOST_REMEMBERED)


def _passed(checkpoint: Checkpoint, status: JobStatus) -> bool:
    floor = status.floor
    return floor is not None and floor not in status.bad and checkpoint.step < floor.step
