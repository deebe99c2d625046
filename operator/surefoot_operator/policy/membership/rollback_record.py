"""Keeps what a rollback means for claim, restore point and commit.

Pure; `rollback` decides that there is one. Until the next epoch is committed it bounds what may be restored, and from then on it
says whose loaders leave out what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import complete
from surefoot.protocol.checkpoints.lineage import Lineage, ancestry, on_lineage
from surefoot.protocol.checkpoints.retention import suspects
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, SkippedData
from surefoot_operator.policy.core.facts import Facts, bad_of, reading_at
from surefoot_operator.policy.membership.restore_decisions import FurtherOn


def ceiling(facts: Facts) -> int | None:
    """The last step that the claimed epoch may restore; None: any."""
    back = facts.status.rollback
    return back.to_step if back is not None and back.epoch == facts.running_epoch else None


def further_on(facts: Facts) -> FurtherOn | None:
    """Finds the nearest checkpoint behind what a rollback goes back to.

    Called where nothing up to there can be read. One whose own loss was odd is no better than what the rollback leaves; of others the
    oldest is the likeliest to be good, and if it is not, its next odd step counts as one more rollback in a row.
    """
    most, epoch = ceiling(facts), facts.running_epoch
    if not most or not epoch:
        return None
    reading = reading_at(facts, facts.world.epoch)
    manifests = chain(chain.from_iterable(reading.holders.values()), reading.persistent or ())
    found = complete(reading, facts.status.lineage, epoch, bad_of(facts), facts.seen.covers)
    step = min((c.step for c in set(found) - suspects(manifests) if c.step > most), default=None)
    if step is None:
        return None
    return FurtherOn(
        step, f"no checkpoint up to step {most} is left: going back to step {step}, which is not known to be good"
    )


def gone_back(status: JobStatus, lineage: Lineage, told_step: int) -> JobStatus:
    """Records what the loaders of a committed epoch leave out.

    Args:
        status: As it was claimed.
        lineage: With the epoch that is committed as its last entry.
        told_step: The last that any rank of the epoch that ended has told by now: one may have been under way at the claim.
    """
    back, entry = status.rollback, lineage[-1]
    if back is None:
        return status
    parent, ended = entry.parent, lineage[-2].epoch if len(lineage) > 1 else 0
    if back.epoch == ended:
        skipped, reached = 0, max(back.reached_step, told_step)
        if not back.keeps_data:
            # what was left out before is left out again: the epoch that ended had begun behind it
            skipped = reached + _left_out(status.skipped, lineage, ended) - _place(status, lineage, parent)
        good = parent if status.last_good is not None and back.proven else status.last_good
        back = replace(back, parent=parent, reached_step=reached, skipped_steps=max(0, skipped))
        status = replace(status, rollback=back, rollbacks=status.rollbacks + 1, last_good=good)
    if not back.skipped_steps or parent != back.parent:
        return status
    known = {one.epoch for one in lineage}
    kept = (one for one in status.skipped if one.epoch in known)
    return replace(status, skipped=(*kept, SkippedData(entry.epoch, back.skipped_steps)))


def still_good(status: JobStatus, lineage: Lineage) -> Checkpoint | None:
    """The last good checkpoint that the new lineage still has."""
    good, entry = status.last_good, lineage[-1]
    return good if good is None or on_lineage(lineage, good, entry.epoch) else entry.parent


def _left_out(skipped: Iterable[SkippedData], lineage: Lineage, epoch: int) -> int:
    """Steps whose batches were left out in the history of `epoch`, its own begin included."""
    history = frozenset(ancestry(lineage, epoch))
    return sum(one.steps for one in skipped if one.epoch in history)


def _place(status: JobStatus, lineage: Lineage, checkpoint: Checkpoint | None) -> int:
    """How many steps' batches lie before a checkpoint, in the order of the data."""
    if checkpoint is None:
        return 0
    return checkpoint.step + _left_out(status.skipped, lineage, checkpoint.epoch)
