"""Plans uploads to the persistent tier, and retention there.

Pure; called by `maintenance_plan`. One checkpoint is uploaded at a time. Which one is soft state of the leader: after a
failover, the next listing shows the parts that are uploaded already. The last uploaded checkpoint advances only when every
manifest of a checkpoint on the lineage is in the tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import (
    complete_in_persistent_tier,
    is_on_lineage,
    lineage_entry_of,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint, RankSave, WorkerId
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.actions import (
    DeleteUploaded,
    Event,
    ListPersistentTier,
    MaintenanceAction,
    UploadSaves,
)
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipTierFacts,
    TierFacts,
    fenced_servers,
    final_checkpoint,
    has_trainer_failed,
    is_responsive,
    member_sessions,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.maintenance import last_good
from surefoot_operator.policy.membership import final_checkpoint as last_checkpoint
from surefoot_operator.policy.membership import lifecycle, planned_change
from surefoot_operator.policy.membership.restore_decisions import may_drops_be_in_progress
from surefoot_operator.reasons import UPLOAD_ABANDONED

LISTING_INTERVAL_SECONDS = 60.0
"""Time between listings if the last one failed, or lacks the last uploaded checkpoint."""

LISTING_TIMEOUT_SECONDS = 10.0
"""Time after which a listing without an answer is requested again."""

MAX_FAILED_UPLOADS = 5
"""Failed uploads of one save, each after several attempts of its agent, until a newer checkpoint is uploaded instead."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The last uploaded checkpoint, the one to upload next, and the actions for it."""

    last_uploaded: Checkpoint | None
    pinned: Checkpoint | None = None
    """Checkpoint being uploaded; None: none is due."""
    actions: tuple[MaintenanceAction, ...] = ()
    events: tuple[Event, ...] = ()


def plan_uploads(facts: Facts, in_memory: list[Checkpoint], pinned: Checkpoint | None) -> UploadPlan:
    """Chooses the checkpoint to upload and the agents that upload it.

    Args:
        facts: The job's facts.
        in_memory: Complete lineage checkpoints on the memory servers, oldest first.
        pinned: The checkpoint being uploaded; None: none is.
    """
    if facts.spec.checkpoint.persistent is None:
        return UploadPlan(facts.status.last_uploaded)
    last_uploaded = _newest_uploaded(facts)
    events: tuple[Event, ...] = ()
    if last_uploaded is not None and last_uploaded != facts.status.last_uploaded:
        events = (Event("CheckpointUploaded", f"{last_uploaded} is complete in the persistent tier"),)
    # a job that ended, waits, or stops at a barrier with no remaining node makes no newer checkpoint: the newest goes first,
    # however often its upload failed
    must_upload_newest = final_checkpoint(facts) is not None or has_trainer_failed(facts)
    must_upload_newest = (
        must_upload_newest
        or facts.uploads_newest
        or planned_change.termination_needs_upload(facts)
        or lifecycle.suspension_needs_upload(facts)
    )
    available = last_checkpoint.uploadable_checkpoints(facts) if must_upload_newest else in_memory
    # Due are steps at the upload interval that are newer than the last uploaded checkpoint.
    due_checkpoints = [
        c
        for c in available
        if (c.step % upload_interval_steps(facts) == 0 or (must_upload_newest and c == available[-1]))
        and (last_uploaded is None or c.step > last_uploaded.step)
        and not c.is_imported
        and c not in facts.persistent.deleting
    ]
    if not due_checkpoints:
        return UploadPlan(last_uploaded, events=events)
    checkpoint = (
        due_checkpoints[-1]
        if must_upload_newest
        else _choose_checkpoint(due_checkpoints, pinned, _repeatedly_failing(facts))
    )
    # The pinned checkpoint is replaced by a newer one: report it once.
    if pinned is not None and pinned in due_checkpoints and checkpoint != pinned and not must_upload_newest:
        text = f"{pinned} could not be uploaded in {MAX_FAILED_UPLOADS} attempts (its copies are damaged, or the tier does not answer); next is {checkpoint}"
        events = (*events, Event(UPLOAD_ABANDONED, text, warning=True))
    return UploadPlan(last_uploaded, checkpoint, _assign_uploads(facts, checkpoint), events)


def _choose_checkpoint(
    due_checkpoints: list[Checkpoint], pinned: Checkpoint | None, failing: set[Checkpoint]
) -> Checkpoint:
    """Returns the pinned checkpoint, unless it keeps failing; else the newest that does not."""
    promising = [c for c in due_checkpoints if c not in failing] or due_checkpoints
    return pinned if pinned is not None and pinned in promising else promising[-1]


def _repeatedly_failing(facts: TierFacts) -> set[Checkpoint]:
    """Returns checkpoints with a save whose upload failed too often; newer ones must not wait for them."""
    return {save.checkpoint for save, count in facts.failed_uploads.items() if count >= MAX_FAILED_UPLOADS}


def upload_interval_steps(facts: JobFacts) -> int:
    """Returns the steps between uploads, a multiple of the memory tier's interval.

    Until the operator has chosen an interval, every save is due: one upload shows how long uploads take.
    """
    persistent, base_steps = facts.spec.checkpoint.persistent, facts.spec.checkpoint.memory.base_steps
    if persistent is None or persistent.is_adaptive:
        interval = facts.status.persistent_interval
        return base_steps if interval is None else interval.steps
    requested_steps = persistent.fixed_steps or base_steps
    return -(-requested_steps // base_steps) * base_steps


def plan_persistent_deletions(
    facts: MembershipTierFacts, last_uploaded: Checkpoint | None, pinned: Checkpoint | None
) -> tuple[MaintenanceAction, ...]:
    """Deletes checkpoints that retention does not keep, or first requests a sufficient listing."""
    spec = facts.spec.checkpoint.persistent
    if spec is None or last_uploaded is None:
        return ()
    worker = _choose_agent(facts)
    if worker is None:
        return ()
    # Nothing is deleted without a listing that shows the last uploaded checkpoint.
    due_seconds = next_listing_time(facts)
    if due_seconds is not None:
        return (ListPersistentTier(facts.membership.generation, worker.index),) if facts.now >= due_seconds else ()
    if may_drops_be_in_progress(facts):
        return ()
    entries = facts.persistent.entries or ()
    complete = complete_in_persistent_tier(
        entries, facts.status.lineage, facts.membership.generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    inputs = retention.RetentionInputs(
        lineage=facts.status.lineage,
        generation=facts.membership.generation,
        is_claimed=False,
        parent=facts.membership.parent,
        watermark=None,
        persistent=last_uploaded,
        pinned=pinned,
        unreadable=unreadable_checkpoints(facts),
        known_good=last_good.checkpoints_kept_for_rollback(facts, complete, entries),
    )
    stored = {
        m.save.checkpoint for m in entries
    } | facts.persistent.deleting  # deleted again until an agent has answered
    kept_besides = _kept_by_age_or_milestone(facts, spec, {*complete, last_uploaded})
    undecidable = facts.persistent.undecidable
    to_delete = retention.persistent_checkpoints_to_delete(
        {*complete, last_uploaded} - undecidable, stored, inputs, spec.keep, kept_besides, undecidable
    )
    return (DeleteUploaded(worker, facts.membership.generation, tuple(to_delete)),) if to_delete else ()


def _kept_by_age_or_milestone(
    facts: TierFacts, spec: PersistentTierSpec, complete: set[Checkpoint]
) -> frozenset[Checkpoint]:
    """Returns the checkpoints kept in addition to the newest few: milestones, and those young enough."""
    milestones = (
        retention.milestone_checkpoints(complete, spec.keep_every_steps) if spec.keep_every_steps else frozenset()
    )
    if spec.keep_seconds is None:
        return milestones
    oldest_kept_seconds = facts.now - spec.keep_seconds
    entries = facts.persistent.entries or ()
    return milestones | frozenset(m.save.checkpoint for m in entries if m.saved_at >= oldest_kept_seconds)


def next_listing_time(facts: TierFacts) -> float | None:
    """Returns when to list again for the last uploaded checkpoint (Unix time); None: it is listed."""
    persistent, last_uploaded = facts.persistent, facts.status.last_uploaded
    if facts.spec.checkpoint.persistent is None or last_uploaded is None:
        return None
    is_listed = persistent.read_generation == facts.membership.generation and persistent.entries is not None
    if is_listed and (
        last_uploaded in persistent.undecidable
        or any(m.save.checkpoint == last_uploaded for m in persistent.entries or ())
    ):
        return None
    if persistent.requested_seconds is None:
        return facts.now
    is_answered = is_listed or persistent.error is not None
    return persistent.requested_seconds + (LISTING_INTERVAL_SECONDS if is_answered else LISTING_TIMEOUT_SECONDS)


def _newest_uploaded(facts: TierFacts) -> Checkpoint | None:
    """Returns the newest lineage checkpoint known to be uploaded: by the status, a listing, or the agents' reports."""
    lineage, generation, unreadable = facts.status.lineage, facts.running_generation, unreadable_checkpoints(facts)
    # a new operator finds some ranks' saves in the listing, and gets reports about the others
    listed_saves = frozenset(m.save for m in facts.persistent.entries or ())
    complete = {c for c, saves in facts.uploaded.items() if not _missing_saves(facts, c, saves | listed_saves)}
    if facts.persistent.read_generation == facts.membership.generation and facts.persistent.entries is not None:
        complete |= set(
            complete_in_persistent_tier(facts.persistent.entries, lineage, generation, unreadable, facts.layout_covers)
        )
    previous = facts.status.last_uploaded
    newer = {
        c
        for c in complete
        if c not in unreadable
        and is_on_lineage(lineage, c, generation)
        and (previous is None or previous in unreadable or c.step > previous.step)
    }
    return newest_checkpoint(newer) or previous


def _missing_saves(facts: JobFacts, checkpoint: Checkpoint, stored: frozenset[RankSave]) -> list[RankSave]:
    """Lists the rank saves of a checkpoint that are not stored."""
    entry = lineage_entry_of(facts.status.lineage, checkpoint.generation)
    if entry is None:
        return [RankSave(checkpoint.generation, checkpoint.step, 0)]
    saves = (RankSave(checkpoint.generation, checkpoint.step, rank) for rank in range(entry.world_size))
    return [save for save in saves if save not in stored]


def _assign_uploads(facts: MembershipTierFacts, checkpoint: Checkpoint) -> tuple[MaintenanceAction, ...]:
    """Assigns each missing rank save to an agent: the rank's own, else one on a node with a copy, else any in turn."""
    stored = set(facts.uploaded.get(checkpoint, frozenset()))
    stored |= {m.save for m in facts.persistent.entries or () if m.save.checkpoint == checkpoint}
    # members only: no other agent was sent the memory servers' addresses
    agents = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    if not agents:
        return ()
    nodes, agent_ids = _nodes_by_save(facts, checkpoint), {worker_id(s) for s in agents}
    agents_by_node: dict[str, list[ObservedSession]] = defaultdict(list)
    for agent in agents:
        agents_by_node[agent.node].append(agent)
    shares: dict[WorkerId, list[RankSave]] = defaultdict(list)
    for save in _missing_saves(facts, checkpoint, frozenset(stored)):
        uploader = _owner_of(facts, save)
        if uploader not in agent_ids:
            nearby = [s for node in sorted(nodes.get(save, ())) for s in agents_by_node.get(node, ())]
            failures = facts.failed_uploads.get(save, 0)
            # after a failure, any agent is tried: the one that failed may not know a server that another one knows
            candidates = agents if failures or not nearby else nearby
            uploader = worker_id(candidates[(save.rank + failures) % len(candidates)])
        shares[uploader].append(save)
    return tuple(
        UploadSaves(worker, facts.membership.generation, tuple(saves)) for worker, saves in sorted(shares.items())
    )


def _nodes_by_save(facts: TierFacts, checkpoint: Checkpoint) -> Mapping[RankSave, set[str]]:
    """Returns, by rank save, the nodes whose memory servers have a copy."""
    nodes: dict[RankSave, set[str]] = defaultdict(set)
    for server in fenced_servers(facts, facts.membership.generation):
        for manifest in server.entries:
            if manifest.save.checkpoint == checkpoint:
                nodes[manifest.save].add(server.endpoint.instance.node)
    return nodes


def _owner_of(facts: JobFacts, save: RankSave) -> WorkerId | None:
    """Returns the worker whose own rank made this save; None: it is of another generation."""
    membership = facts.membership
    group = save.rank // facts.spec.nproc_per_node
    return (
        worker_id(membership.members[group])
        if save.generation == facts.running_generation and group < len(membership.members)
        else None
    )


def _choose_agent(facts: MembershipFacts) -> WorkerId | None:
    """Returns the responsive agent with the lowest id; None: there is none."""
    responsive = [worker_id(s) for s in facts.sessions.values() if is_responsive(facts, s)]
    return min(responsive, default=None)
