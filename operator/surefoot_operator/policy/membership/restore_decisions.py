"""Defines the outcomes of choosing a restore point, and requests listings.

Pure; see `restore_point`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import Lineage, ancestry, complete_checkpoints, on_lineage
from surefoot.protocol.checkpoints.retention import anomalous_checkpoints
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, SourceJob
from surefoot_operator.api.status import JobStatus, SkippedData
from surefoot_operator.job_snapshot import PersistentListing
from surefoot_operator.policy.core.actions import Action, DropSaves, ListPersistentTier
from surefoot_operator.policy.core.facts import (
    JobFacts,
    TierFacts,
    WorldFacts,
    is_responsive,
    reading_at,
    unreadable_checkpoints,
    worker_id,
)

LISTING_SECONDS = 60.0
"""How long one agent may be at a listing before another one is asked too; the first may still answer."""

LIST_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RestorePending:
    """No decision yet; look again at `until_seconds` at the latest."""

    reason: str
    actions: tuple[Action, ...] = ()
    until_seconds: float | None = None
    stopped: bool = True
    lost: str = ""
    """What people are told where everything is lost; empty: it is not."""


@dataclass(frozen=True, slots=True)
class RestoreChosen:
    """The parent, and the holders that were given up."""

    parent: Checkpoint | None
    lost_servers: tuple[MemoryServerEndpoint, ...] = ()
    unlisted: bool = False
    """The persistent tier did not answer, and the parent is good enough without it."""
    source_job: SourceJob | None = None
    """Whose the parent is, if it is not this job's."""


@dataclass(frozen=True, slots=True)
class TotalLoss:
    """Every recorded checkpoint is lost, and the job fails."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceCheckpointMissing:
    """The older job lacks the checkpoint to start from."""

    reason: str


@dataclass(frozen=True, slots=True)
class RollbackTargetLost:
    """Moves a rollback on, as what it goes back to is lost."""

    to_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class LastUploadedLost:
    """The newest stored checkpoint is gone from its tier.

    An older one can be read.
    """

    last_uploaded: Checkpoint
    reason: str


Choice = RestorePending | RestoreChosen | RollbackTargetLost | LastUploadedLost | TotalLoss | SourceCheckpointMissing


def listing(facts: WorldFacts, seen: PersistentListing, older: SourceJob | None = None) -> RestorePending:
    """Asks an agent for a listing, and another where none comes.

    A machine that lost its power never breaks its line: who is not heard any more is not waited for.
    """
    what = "the persistent tier" if older is None else str(older)
    asked, failed = seen.requested_seconds, seen.error is not None
    again = asked + (LIST_RETRY_SECONDS if failed else LISTING_SECONDS) if asked is not None else facts.now
    heard = {worker_id(s) for s in facts.sessions.values() if is_responsive(facts, s)}
    unheard = bool(seen.requested_from) and not heard & seen.requested_from
    if facts.now < again and not (unheard and heard):
        trouble = f" (last answer: {seen.error})" if failed else ""
        return RestorePending(f"waiting for the listing of {what}{trouble}", until_seconds=again)
    asked_of = min(heard - seen.requested_from or heard, default=None)
    if asked_of is None:
        return RestorePending(f"no agent is connected that could list {what}")
    action = ListPersistentTier(facts.membership.generation, asked_of.index, older)
    return RestorePending(f"listing {what} through worker {asked_of.index}", (action,), max(again, facts.now) + 1.0)


# ---- rollback record -------------------------------------------------------------------------------------------------
# Keeps what a rollback means for claim, restore point and commit. Pure; `rollback` decides that there is one. Until the
# next epoch is committed it bounds what may be restored, and from then on it says whose loaders leave out what.


def restore_limit(facts: JobFacts) -> int | None:
    """The last step that the claimed epoch may restore; None: any."""
    back = facts.status.rollback
    return back.to_step if back is not None and back.generation == facts.running_generation else None


def older_target(facts: TierFacts) -> RollbackTargetLost | None:
    """Finds the nearest checkpoint behind what a rollback goes back to.

    Called where nothing up to there can be read. One whose own loss was odd is no better than what the rollback leaves; of others the
    oldest is the likeliest to be good, and if it is not, its next odd step counts as one more rollback in a row.
    """
    most, generation = restore_limit(facts), facts.running_generation
    if not most or not generation:
        return None
    reading = reading_at(facts, facts.membership.generation)
    manifests = chain(chain.from_iterable(reading.servers.values()), reading.persistent or ())
    found = complete_checkpoints(reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.covers)
    step = min((c.step for c in set(found) - anomalous_checkpoints(manifests) if c.step > most), default=None)
    if step is None:
        return None
    return RollbackTargetLost(
        step, f"no checkpoint up to step {most} is left: going back to step {step}, which is not known to be good"
    )


def record_rollback(status: JobStatus, lineage: Lineage, told_step: int) -> JobStatus:
    """Records what the loaders of a committed epoch leave out.

    Args:
        status: As it was claimed.
        lineage: With the epoch that is committed as its last entry.
        told_step: The last that any rank of the epoch that ended has told by now: one may have been under way at the claim.
    """
    back, entry = status.rollback, lineage[-1]
    if back is None:
        return status
    parent, ended = entry.parent, lineage[-2].generation if len(lineage) > 1 else 0
    if back.generation == ended:
        skipped, reached = 0, max(back.reached_step, told_step)
        if not back.keep_data:
            # what was left out before is left out again: the epoch that ended had begun behind it
            skipped = (
                reached + _skipped_steps(status.skipped_data, lineage, ended) - _batches_before(status, lineage, parent)
            )
        good = parent if status.last_good is not None and back.target_known_good else status.last_good
        back = replace(back, parent=parent, reached_step=reached, skipped_steps=max(0, skipped))
        status = replace(status, rollback=back, rollback_count=status.rollback_count + 1, last_good=good)
    if not back.skipped_steps or parent != back.parent:
        return status
    known = {one.generation for one in lineage}
    kept = (one for one in status.skipped_data if one.generation in known)
    return replace(status, skipped_data=(*kept, SkippedData(entry.generation, back.skipped_steps)))


def surviving_last_good(status: JobStatus, lineage: Lineage) -> Checkpoint | None:
    """The last good checkpoint that the new lineage still has."""
    good, entry = status.last_good, lineage[-1]
    return good if good is None or on_lineage(lineage, good, entry.generation) else entry.parent


def _skipped_steps(skipped: Iterable[SkippedData], lineage: Lineage, generation: int) -> int:
    """Steps whose batches were left out in the history of `epoch`, its own begin included."""
    history = frozenset(ancestry(lineage, generation))
    return sum(one.steps for one in skipped if one.generation in history)


def _batches_before(status: JobStatus, lineage: Lineage, checkpoint: Checkpoint | None) -> int:
    """How many steps' batches lie before a checkpoint, in the order of the data."""
    if checkpoint is None:
        return 0
    return checkpoint.step + _skipped_steps(status.skipped_data, lineage, checkpoint.generation)


# ---- unreadable checkpoints ------------------------------------------------------------------------------------------
# Remembers which checkpoints of a job are bad. A bad checkpoint below the floor can never be chosen and is forgotten;
# otherwise the status of a job on bad disks would grow for ever.

MAX_REMEMBERED = 64
"""Of this job's own. The oldest go first: chosen again, such a one is read again and found to be bad again."""


def unreadable_by_upload(facts: TierFacts) -> tuple[Checkpoint, ...]:
    """Checkpoints of which an upload found no good copy, oldest first.

    A restore would find the same, and whoever waits for the upload would wait for ever.
    """
    status, persistent = facts.status, facts.persistent
    membership = status.membership
    if not facts.unreadable or membership is None or membership.state != "Committed":
        return ()
    there = {m.save for m in persistent.entries or ()}.union(*facts.promoted.values())
    found = {s.checkpoint for s in facts.unreadable - there} - unreadable_checkpoints(facts)
    found = {c for c in found if on_lineage(status.lineage, c, membership.generation) and not _passed(c, status)}
    return tuple(sorted(found - {status.last_uploaded}, key=lambda c: (c.step, c.generation)))


def add_unreadable(status: JobStatus, found: Checkpoint | None) -> tuple[Checkpoint, ...]:
    """Adds a bad checkpoint and forgets those no longer needed."""
    bad = (
        status.unreadable_checkpoints
        if found is None or found in status.unreadable_checkpoints
        else (*status.unreadable_checkpoints, found)
    )
    if found is None:
        return bad
    own = [c for c in bad if not c.imported and (c == found or not _passed(c, status))]
    kept = set(sorted(own, key=lambda c: (c.step, c.generation))[-MAX_REMEMBERED:])
    return tuple(c for c in bad if c.imported or c in kept or c == found)


def may_be_forgotten(checkpoint: Checkpoint, status: JobStatus) -> bool:
    """Whether a later status may lack this bad checkpoint."""
    own = [c for c in status.unreadable_checkpoints if not c.imported]
    return not checkpoint.imported and (_passed(checkpoint, status) or len(own) >= MAX_REMEMBERED)


def _passed(checkpoint: Checkpoint, status: JobStatus) -> bool:
    floor = status.last_uploaded
    return floor is not None and floor not in status.unreadable_checkpoints and checkpoint.step < floor.step


# ---- drops under way -------------------------------------------------------------------------------------------------
# Remembers which checkpoints are being dropped from memory. Pure; read by `maintenance_plan` and by whoever believes a
# listing. A drop takes its time, and an index that was read before it still shows what it takes: a checkpoint that is
# on its way out must not become the last good one, for which an older good one goes. What this leader has deleted from
# the persistent tier is out of its listing at once (`PersistentSeen.without`).

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


def may_be_under_way(facts: JobFacts) -> bool:
    """Whether a former leader's drops may still be carried out.

    Only jobs that go back to good checkpoints wait for them: others need the newest, which no leader drops.
    """
    return facts.spec.health_policy.numerics is not None and facts.now < facts.term_seconds + DROP_SECONDS
