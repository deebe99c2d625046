"""Finds memory checkpoints that can never become complete.

Pure. Where one rank cannot save, for want of staging memory say, all others' saves would pile up until the tier is
full: no checkpoint becomes complete, so none is superseded. Agents say which steps their ranks never handed over.
That is true for ever: neither a save on its way nor a holder that nobody reaches can make such a checkpoint whole.
Called by `maintain`; `retention` decides what goes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from surefoot.protocol.completeness import TierReading
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.observed import SessionSeen
from surefoot_operator.policy.facts import Facts, member_sessions


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """One checkpoint, and the sentence that says why."""

    checkpoint: Checkpoint
    worker: int
    """Index of one that has no save of it."""
    reason: str


def unrecoverable_checkpoints(
    facts: Facts, reading: TierReading, complete: Collection[Checkpoint]
) -> tuple[Unrecoverable, ...]:
    """Those of the committed epoch that have parts on holders, oldest first; none that was read to be complete."""
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

    Members of the committed world that speak of its epoch: what they say of their saves holds, however old it is.
    """
    epoch = facts.world.epoch
    return [session for _, session in member_sessions(facts) if session is not None and session.epoch == epoch]
