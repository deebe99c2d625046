"""Defines the outcomes of choosing a restore point, and what rollbacks and lost checkpoints mean for it.

Pure; see `restore_point`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from surefoot.protocol.checkpoints.completeness import (
    Lineage,
    ancestor_generations,
    complete_checkpoints,
    is_on_lineage,
)
from surefoot.protocol.checkpoints.retention import anomalous_checkpoints
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, SourceJob
from surefoot_operator.api.status import JobStatus, SkippedData
from surefoot_operator.job_snapshot import PersistentListing
from surefoot_operator.policy.core.actions import Action, DropSaves, ListPersistentTier
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    TierFacts,
    is_responsive,
    tier_reading,
    unreadable_checkpoints,
    worker_id,
)

LISTING_SECONDS = 60.0
"""Time after which another agent is asked for a listing too; the first may still answer."""

LIST_RETRY_SECONDS = 1.0
"""Time from one request of a listing that failed to the next."""


@dataclass(frozen=True, slots=True)
class RestorePending:
    """No decision yet; decide again at `until_seconds` at the latest."""

    reason: str
    """Sentence for the status."""
    actions: tuple[Action, ...] = ()
    """Requests that bring the missing information, such as a listing."""
    until_seconds: float | None = None
    """Unix time of the next decision; None: only a new observation helps."""
    are_trainers_stopped: bool = True
    """False while trainers of the previous generation still run."""
    loss_message: str = ""
    """Message about the loss of every checkpoint; empty: not every checkpoint is lost."""


@dataclass(frozen=True, slots=True)
class RestoreChosen:
    """The chosen restore point, and the memory servers that are declared lost with this choice."""

    parent: Checkpoint | None
    """Checkpoint to restore; None: start at step 0."""
    lost_servers: tuple[MemoryServerEndpoint, ...] = ()
    """Memory servers that were unreachable when the choice was made."""
    is_unlisted: bool = False
    """True if the persistent tier did not answer, and the parent is good enough without its listing."""
    source_job: SourceJob | None = None
    """The job that the parent was saved by; None: this one."""


@dataclass(frozen=True, slots=True)
class TotalLoss:
    """Every recorded checkpoint is lost, so the job fails."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceCheckpointMissing:
    """The source job lacks the checkpoint to start from."""

    reason: str


@dataclass(frozen=True, slots=True)
class RollbackTargetLost:
    """Every checkpoint up to a rollback's target is lost; the rollback takes a later step instead."""

    to_step: int
    """The new target."""
    reason: str


@dataclass(frozen=True, slots=True)
class LastUploadedLost:
    """The newest uploaded checkpoint is missing from the persistent tier, but an older one can be read."""

    last_uploaded: Checkpoint
    """The missing checkpoint."""
    reason: str


Choice = RestorePending | RestoreChosen | RollbackTargetLost | LastUploadedLost | TotalLoss | SourceCheckpointMissing


def request_listing(
    facts: MembershipFacts, listing_state: PersistentListing, source: SourceJob | None = None
) -> RestorePending:
    """Requests a listing from an agent, and from another one if it does not answer.

    A machine that lost power never closes its connection, so an agent without heartbeats is not waited for.
    """
    tier_name = "the persistent tier" if source is None else str(source)
    requested_seconds, has_failed = listing_state.requested_seconds, listing_state.error is not None
    retry_seconds = (
        requested_seconds + (LIST_RETRY_SECONDS if has_failed else LISTING_SECONDS)
        if requested_seconds is not None
        else facts.now
    )
    responsive = {worker_id(s) for s in facts.sessions.values() if is_responsive(facts, s)}
    is_agent_silent = bool(listing_state.requested_from) and not responsive & listing_state.requested_from
    if facts.now < retry_seconds and not (is_agent_silent and responsive):
        error_clause = f" (last answer: {listing_state.error})" if has_failed else ""
        return RestorePending(f"waiting for the listing of {tier_name}{error_clause}", until_seconds=retry_seconds)
    worker = min(responsive - listing_state.requested_from or responsive, default=None)
    if worker is None:
        return RestorePending(f"no agent is connected that could list {tier_name}")
    action = ListPersistentTier(facts.membership.generation, worker.index, source)
    return RestorePending(
        f"listing {tier_name} through worker {worker.index}", (action,), max(retry_seconds, facts.now) + 1.0
    )


# ---- rollback record -------------------------------------------------------------------------------------------------
# Keeps the effects of a rollback on claim, restore point and commit. Pure; `rollback` decides whether there is one. Until
# the next generation is committed, a rollback limits the step that may be restored; the commit then records which
# generation's loaders skip how many steps.


def restore_limit(facts: JobFacts) -> int | None:
    """Returns the last step that the claimed generation may restore; None: any."""
    rollback = facts.status.rollback
    return rollback.to_step if rollback is not None and rollback.generation == facts.running_generation else None


def find_later_target(facts: TierFacts) -> RollbackTargetLost | None:
    """Finds the nearest readable checkpoint after a rollback's target; none up to it is readable.

    A checkpoint whose own loss was anomalous would be no better than the state that the rollback abandons. Of the others, the
    oldest is the likeliest to be good; if it is not, its next anomaly counts as one more rollback in a row.
    """
    max_step, generation = restore_limit(facts), facts.running_generation
    if not max_step or not generation:
        return None
    reading = tier_reading(facts, facts.membership.generation)
    manifests = chain(chain.from_iterable(reading.servers.values()), reading.persistent or ())
    complete = complete_checkpoints(
        reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    step = min((c.step for c in set(complete) - anomalous_checkpoints(manifests) if c.step > max_step), default=None)
    if step is None:
        return None
    return RollbackTargetLost(
        step, f"no checkpoint up to step {max_step} is left: rolling back to step {step}, which is not known to be good"
    )


def record_rollback(status: JobStatus, lineage: Lineage, reported_step: int) -> JobStatus:
    """Returns the status with the rollback that a commit carries out, and the steps that its loaders skip.

    Args:
        status: The claimed status.
        lineage: Lineage whose last entry is the generation that is committed.
        reported_step: The last step reported by any rank of the ended generation; may be one after the claim.
    """
    rollback, entry = status.rollback, lineage[-1]
    if rollback is None:
        return status
    parent, ended_generation = entry.parent, lineage[-2].generation if len(lineage) > 1 else 0
    # This commit carries the rollback out: it fixes how many steps' batches are skipped.
    if rollback.generation == ended_generation:
        skipped_steps, reached_step = 0, max(rollback.reached_step, reported_step)
        if not rollback.keep_data:
            # steps skipped before are skipped again, because the ended generation had started after them
            skipped_steps = (
                reached_step
                + _skipped_steps(status.skipped_data, lineage, ended_generation)
                - _batches_before(status, lineage, parent)
            )
        last_good = parent if status.last_good is not None and rollback.target_known_good else status.last_good
        rollback = replace(rollback, parent=parent, reached_step=reached_step, skipped_steps=max(0, skipped_steps))
        status = replace(status, rollback=rollback, rollback_count=status.rollback_count + 1, last_good=last_good)
    # A later commit that restores the same checkpoint skips the same batches.
    if not rollback.skipped_steps or parent != rollback.parent:
        return status
    generations = {item.generation for item in lineage}
    surviving = (skip for skip in status.skipped_data if skip.generation in generations)
    return replace(status, skipped_data=(*surviving, SkippedData(entry.generation, rollback.skipped_steps)))


def surviving_last_good(status: JobStatus, lineage: Lineage) -> Checkpoint | None:
    """Returns the last good checkpoint, or the parent if the new lineage no longer contains it."""
    last_good, entry = status.last_good, lineage[-1]
    return last_good if last_good is None or is_on_lineage(lineage, last_good, entry.generation) else entry.parent


def _skipped_steps(skipped: Iterable[SkippedData], lineage: Lineage, generation: int) -> int:
    """Returns the number of skipped steps in the history of a generation, including its own."""
    history = frozenset(ancestor_generations(lineage, generation))
    return sum(skip.steps for skip in skipped if skip.generation in history)


def _batches_before(status: JobStatus, lineage: Lineage, checkpoint: Checkpoint | None) -> int:
    """Returns how many steps' batches precede a checkpoint in the order of the data."""
    if checkpoint is None:
        return 0
    return checkpoint.step + _skipped_steps(status.skipped_data, lineage, checkpoint.generation)


# ---- unreadable checkpoints ------------------------------------------------------------------------------------------
# Remembers a job's unreadable checkpoints. One below the last uploaded checkpoint can never be chosen and is forgotten;
# otherwise the status of a job on bad disks would grow for ever.

MAX_UNREADABLE = 64
"""Limit for this job's own unreadable checkpoints. The oldest are forgotten first: if chosen again, they are found unreadable again."""


def unreadable_by_upload(facts: TierFacts) -> tuple[Checkpoint, ...]:
    """Lists checkpoints of which an upload found no readable copy, oldest first.

    A restore would find the same, and the upload would be awaited for ever.
    """
    status, persistent = facts.status, facts.persistent
    membership = status.membership
    if not facts.unreadable or membership is None or membership.state != "Committed":
        return ()
    uploaded_saves = {m.save for m in persistent.entries or ()}.union(*facts.uploaded.values())
    checkpoints = {s.checkpoint for s in facts.unreadable - uploaded_saves} - unreadable_checkpoints(facts)
    checkpoints = {
        c for c in checkpoints if is_on_lineage(status.lineage, c, membership.generation) and not _passed(c, status)
    }
    return tuple(sorted(checkpoints - {status.last_uploaded}, key=lambda c: (c.step, c.generation)))


def add_unreadable(status: JobStatus, new: Checkpoint | None) -> tuple[Checkpoint, ...]:
    """Returns the unreadable checkpoints with a new one, without those that no longer matter."""
    unreadable = (
        status.unreadable_checkpoints
        if new is None or new in status.unreadable_checkpoints
        else (*status.unreadable_checkpoints, new)
    )
    if new is None:
        return unreadable
    own_checkpoints = [c for c in unreadable if not c.is_imported and (c == new or not _passed(c, status))]
    remembered = set(sorted(own_checkpoints, key=lambda c: (c.step, c.generation))[-MAX_UNREADABLE:])
    return tuple(c for c in unreadable if c.is_imported or c in remembered or c == new)


def may_be_forgotten(checkpoint: Checkpoint, status: JobStatus) -> bool:
    """Whether a later status may lack this unreadable checkpoint."""
    own_checkpoints = [c for c in status.unreadable_checkpoints if not c.is_imported]
    return not checkpoint.is_imported and (_passed(checkpoint, status) or len(own_checkpoints) >= MAX_UNREADABLE)


def _passed(checkpoint: Checkpoint, status: JobStatus) -> bool:
    """Whether a later checkpoint was uploaded, so that this one can never be chosen."""
    last_uploaded = status.last_uploaded
    return (
        last_uploaded is not None
        and last_uploaded not in status.unreadable_checkpoints
        and checkpoint.step < last_uploaded.step
    )


# ---- drops in progress -----------------------------------------------------------------------------------------------
# Remembers which checkpoints are being dropped from memory. Pure; read by `maintenance_plan` and by all that rely on a
# listing. A drop takes time, and an index that was read before it still lists the dropped checkpoint: that one must not
# become the last good checkpoint, for which an older good one would be dropped. Checkpoints that this leader deleted from
# the persistent tier are removed from its listing at once (`PersistentListing.without_checkpoints`).

DROP_SECONDS = 5.0
"""Lifetime of a drop, shorter if memory servers are declared lost sooner: it must not reach a server that returns."""

DropsInProgress = dict[Checkpoint, float]
"""Checkpoints to be dropped, each with the Unix time until which the drop may still reach a memory server."""


def add_drops(drops_in_progress: DropsInProgress, drops: Iterable[DropSaves], now_seconds: float) -> DropsInProgress:
    """Returns the drops in progress with new ones added and expired ones removed."""
    updated = {checkpoint: until for checkpoint, until in drops_in_progress.items() if until > now_seconds}
    for drop in drops:
        for save in drop.saves:
            updated[save.checkpoint] = max(updated.get(save.checkpoint, 0.0), drop.expires_seconds)
    return updated


def without_drops(complete: Iterable[Checkpoint], going: DropsInProgress, now_seconds: float) -> list[Checkpoint]:
    """Lists the checkpoints that no drop in progress may have removed."""
    return [checkpoint for checkpoint in complete if going.get(checkpoint, 0.0) <= now_seconds]


def may_drops_be_in_progress(facts: JobFacts) -> bool:
    """Whether a former leader's drops may still be carried out.

    Only jobs that roll back to good checkpoints wait for them: others need the newest checkpoint, which no leader drops.
    """
    return facts.spec.health_policy.numerics is not None and facts.now < facts.term_seconds + DROP_SECONDS
