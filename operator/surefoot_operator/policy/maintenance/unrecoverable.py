"""Finds memory checkpoints that can never become complete.

Pure; called by `maintenance_plan`. Where one rank cannot save, for want of staging memory say, all others' saves would fill the
tier: no checkpoint becomes complete, so none is superseded. Agents report which steps their ranks never handed over.
That is final: no save under way and no unreachable holder can complete such a checkpoint. `retention` decides which
saves are dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from surefoot.protocol.checkpoints.completeness import TierReading
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.job_snapshot import SessionSeen
from surefoot_operator.policy.core.facts import Facts, member_sessions


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """A checkpoint that cannot become complete, and why."""

    checkpoint: Checkpoint
    worker: int
    """Index of one that has no save of it."""
    reason: str


def unrecoverable_checkpoints(
    facts: Facts, reading: TierReading, complete: Collection[Checkpoint]
) -> tuple[Unrecoverable, ...]:
    """Lists the committed epoch's checkpoints that lack a rank for good.

    Oldest first; none that was read to be complete.
    """
    epoch = facts.world.epoch
    there = {checkpoint for checkpoint in reading.having() if checkpoint.epoch == epoch}
    sessions = reporting_sessions(facts)
    found = []
    for checkpoint in sorted(there.difference(complete)):
        without = next((s for s in sessions if s.progress.settled.misses(checkpoint.step)), None)
        if without is not None:
            who = f"worker {without.index} on {without.node} has not saved it, and never will"
            found.append(Unrecoverable(checkpoint, without.index, f"{checkpoint} can never become complete: {who}"))
    return tuple(found)


def reporting_sessions(facts: Facts) -> list[SessionSeen]:
    """Returns the members' sessions that report on the committed epoch.

    A report about saves stays true however old it is.
    """
    epoch = facts.world.epoch
    return [session for _, session in member_sessions(facts) if session is not None and session.epoch == epoch]
