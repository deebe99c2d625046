"""Promotes a suspended job's checkpoint before its workers are deleted.

Pure; read by `planned_change`, `upload_plan` and `plan`. Nodes are rebooted while jobs are suspended, and memory is
lost with them.
"""

from __future__ import annotations

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.plain import listed
from surefoot_operator.job_snapshot import HoldSeen
from surefoot_operator.policy.core.facts import (
    Facts,
    bad_of,
    held_checkpoint,
    is_responsive,
    member_sessions,
    sealed_holders,
)

PROMOTION_SECONDS = 600.0
"""How long workers of a job that is suspended are kept for its upload."""


def needs_promotion(facts: Facts) -> bool:
    """Whether a suspending world holds at the step to be promoted."""
    return facts.spec.suspend and held_checkpoint(facts) is not None


def promotion_due(facts: Facts, hold: HoldSeen) -> float | None:
    """Until when the held step's promotion is waited for; None: not."""
    floor = facts.status.floor
    if not facts.spec.suspend or facts.spec.checkpoint.persistent is None:
        return None
    if floor is not None and floor.step >= hold.step:
        return None
    if held_checkpoint(facts) in bad_of(facts):
        return None  # no copy can be read: its upload would fail until the time is over
    if not any(s is not None and is_responsive(facts, s) for _, s in member_sessions(facts)):
        return None
    due = hold.asked_seconds + PROMOTION_SECONDS
    return due if facts.now < due else None


def suspended_message(facts: Facts, parent: Checkpoint | None) -> str:
    """Says where a suspended job will resume, and what would lose that."""
    if parent is None:
        return "the job is suspended; it will begin at step 0"
    text = f"the job is suspended; it will resume from {parent}"
    floor = facts.status.floor
    if parent.imported or (floor is not None and floor.step >= parent.step):
        return text
    nodes = sorted(
        holder.endpoint.holder.node
        for holder in sealed_holders(facts, facts.world.epoch)
        if any(m.save.checkpoint == parent for m in holder.entries)
    )
    if not nodes:
        return f"{text}, which is in memory only"
    return (
        f"{text}, which is in memory only: restarting the memory tier on {listed(nodes)} at the same time would lose it"
    )
