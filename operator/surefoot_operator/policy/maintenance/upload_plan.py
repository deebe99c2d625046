"""Plans promotion to the persistent tier, and retention there.

Pure; called by `maintenance_plan`. One checkpoint at a time. The pin is soft state of the leader: after a failover the next
listing finds what was uploaded already. The floor moves only when every manifest of a lineage checkpoint is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import complete_persistent, entry_of, newest_checkpoint, on_lineage
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
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    fenced_servers,
    final_checkpoint,
    is_broken,
    is_responsive,
    member_sessions,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.maintenance import last_good
from surefoot_operator.policy.membership import final_checkpoint as last_checkpoint
from surefoot_operator.policy.membership import lifecycle, planned_change
from surefoot_operator.policy.membership.restore_decisions import may_be_under_way
from surefoot_operator.reasons import CHECKPOINT_UPLOADED, UPLOAD_ABANDONED

LIST_RETRY_SECONDS = 60.0
"""A listing that answered but lacks what was promoted is asked for again no sooner; a failed one likewise."""

UNANSWERED_SECONDS = 10.0

MAX_FAILED_UPLOADS = 5
"""Failed uploads of one save, each after several tries of its agent, until a newer checkpoint has the way."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The new floor, the pinned checkpoint, and the actions for it."""

    last_uploaded: Checkpoint | None
    pinned: Checkpoint | None = None
    actions: tuple[MaintenanceAction, ...] = ()
    events: tuple[Event, ...] = ()


def plan_uploads(facts: Facts, in_memory: list[Checkpoint], pinned: Checkpoint | None) -> UploadPlan:
    """Chooses the checkpoint to promote, and by which agents.

    `in_memory`: complete lineage checkpoints on the holders, oldest first. `pinned`: the one being promoted.
    """
    if facts.spec.checkpoint.persistent is None:
        return UploadPlan(facts.status.last_uploaded)
    floor = _last_uploaded(facts)
    events: tuple[Event, ...] = ()
    if floor is not None and floor != facts.status.last_uploaded:
        events = (Event(CHECKPOINT_UPLOADED, f"{floor} is complete in the persistent tier"),)
    # nothing newer comes of a world that has ended, that waits, or halts with no node that stays: the newest goes first, however often its upload failed
    over = final_checkpoint(facts) is not None or is_broken(facts)
    over = (
        over
        or facts.uploads
        or planned_change.departure_needs_upload(facts)
        or lifecycle.suspension_needs_upload(facts)
    )
    there = last_checkpoint.at_hand(facts) if over else in_memory
    due = [
        c
        for c in there
        if (c.step % interval_of(facts) == 0 or (over and c == there[-1]))
        and (floor is None or c.step > floor.step)
        and not c.imported
        and c not in facts.persistent.deleting
    ]
    if not due:
        return UploadPlan(floor, events=events)
    chosen = due[-1] if over else _chosen(due, pinned, _not_uploadable(facts))
    if pinned is not None and pinned in due and chosen != pinned and not over:
        text = f"{pinned} could not be uploaded in {MAX_FAILED_UPLOADS} tries (its copies are damaged, or the tier does not answer); next is {chosen}"
        events = (*events, Event(UPLOAD_ABANDONED, text, warning=True))
    return UploadPlan(floor, chosen, _uploads(facts, chosen), events)


def _chosen(due: list[Checkpoint], pinned: Checkpoint | None, unpromotable: set[Checkpoint]) -> Checkpoint:
    """The pinned one until it is there, or unpromotable; else the newest that is not."""
    hopeful = [c for c in due if c not in unpromotable] or due
    return pinned if pinned is not None and pinned in hopeful else hopeful[-1]


def _not_uploadable(facts: TierFacts) -> set[Checkpoint]:
    """One save of them failed too often: all its copies may be damaged, and newer ones must not wait for that."""
    return {save.checkpoint for save, count in facts.stumbled.items() if count >= MAX_FAILED_UPLOADS}


def interval_of(facts: JobFacts) -> int:
    """Returns the steps between promotions, a multiple of the memory tier's.

    Where the operator has not chosen yet, every save is due: one upload shows how long uploads take.
    """
    persistent, base = facts.spec.checkpoint.persistent, facts.spec.checkpoint.memory.base_steps
    if persistent is None or persistent.is_adaptive:
        chosen = facts.status.persistent_interval
        return base if chosen is None else chosen.steps
    wanted = persistent.fixed_steps or base
    return -(-wanted // base) * base


def persistent_drops(
    facts: WorldTierFacts, floor: Checkpoint | None, pinned: Checkpoint | None
) -> tuple[MaintenanceAction, ...]:
    """Deletes checkpoints that retention does not keep.

    Only by a listing that has the floor; without one it asks for a listing.
    """
    spec = facts.spec.checkpoint.persistent
    if spec is None or floor is None:
        return ()
    worker = _any_agent(facts)
    if worker is None:
        return ()
    due = listing_due(facts)
    if due is not None:
        return (ListPersistentTier(facts.membership.generation, worker.index),) if facts.now >= due else ()
    if may_be_under_way(facts):
        return ()
    entries = facts.persistent.entries or ()
    kept = complete_persistent(
        entries, facts.status.lineage, facts.membership.generation, unreadable_checkpoints(facts), facts.covers
    )
    standing = retention.RetentionInputs(
        lineage=facts.status.lineage,
        generation=facts.membership.generation,
        claimed=False,
        parent=facts.membership.parent,
        watermark=None,
        persistent=floor,
        pinned=pinned,
        unreadable=unreadable_checkpoints(facts),
        known_good=last_good.kept_for_rollback(facts, kept, entries),
    )
    there = {m.save.checkpoint for m in entries} | facts.persistent.deleting  # again, until one has answered
    also = _kept_by_age_or_milestone(facts, spec, {*kept, floor})
    unjudged = facts.persistent.undecidable
    gone = retention.persistent_drops({*kept, floor} - unjudged, there, standing, spec.keep, also, unjudged)
    return (DeleteUploaded(worker, facts.membership.generation, tuple(gone)),) if gone else ()


def _kept_by_age_or_milestone(
    facts: TierFacts, spec: PersistentTierSpec, complete: set[Checkpoint]
) -> frozenset[Checkpoint]:
    """What stays beside the newest few: milestones, and what is young enough."""
    also = retention.milestone_checkpoints(complete, spec.keep_every_steps) if spec.keep_every_steps else frozenset()
    if spec.keep_seconds is None:
        return also
    since = facts.now - spec.keep_seconds
    entries = facts.persistent.entries or ()
    return also | frozenset(m.save.checkpoint for m in entries if m.saved_at >= since)


def listing_due(facts: TierFacts) -> float | None:
    """When to list again, as the floor is missing; None: not."""
    persistent, floor = facts.persistent, facts.status.last_uploaded
    if facts.spec.checkpoint.persistent is None or floor is None:
        return None
    listed = persistent.read_generation == facts.membership.generation and persistent.entries is not None
    if listed and (
        floor in persistent.undecidable or any(m.save.checkpoint == floor for m in persistent.entries or ())
    ):
        return None
    if persistent.requested_seconds is None:
        return facts.now
    answered = listed or persistent.error is not None
    return persistent.requested_seconds + (LIST_RETRY_SECONDS if answered else UNANSWERED_SECONDS)


def _last_uploaded(facts: TierFacts) -> Checkpoint | None:
    """The newest lineage checkpoint known to be complete there: by status, by listing, or by what agents uploaded."""
    lineage, generation, bad = facts.status.lineage, facts.running_generation, unreadable_checkpoints(facts)
    # an operator that came in between finds some ranks in the listing, and hears of the others
    listed = frozenset(m.save for m in facts.persistent.entries or ())
    found = {c for c, saves in facts.promoted.items() if not _missing(facts, c, saves | listed)}
    if facts.persistent.read_generation == facts.membership.generation and facts.persistent.entries is not None:
        found |= set(complete_persistent(facts.persistent.entries, lineage, generation, bad, facts.covers))
    old = facts.status.last_uploaded
    newer = {
        c
        for c in found
        if c not in bad and on_lineage(lineage, c, generation) and (old is None or old in bad or c.step > old.step)
    }
    return newest_checkpoint(newer) or old


def _missing(facts: JobFacts, checkpoint: Checkpoint, there: frozenset[RankSave]) -> list[RankSave]:
    entry = entry_of(facts.status.lineage, checkpoint.generation)
    if entry is None:
        return [RankSave(checkpoint.generation, checkpoint.step, 0)]
    saves = (RankSave(checkpoint.generation, checkpoint.step, rank) for rank in range(entry.world_size))
    return [save for save in saves if save not in there]


def _uploads(facts: WorldTierFacts, chosen: Checkpoint) -> tuple[MaintenanceAction, ...]:
    """Each rank save through an agent that has it at hand: the rank's own, else one beside a holder that keeps it."""
    there = set(facts.promoted.get(chosen, frozenset()))
    there |= {m.save for m in facts.persistent.entries or () if m.save.checkpoint == chosen}
    # members only: nobody else was told where the holders are
    agents = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    if not agents:
        return ()
    nodes, reached = _nodes_having(facts, chosen), {worker_id(s) for s in agents}
    on: dict[str, list[ObservedSession]] = defaultdict(list)
    for agent in agents:
        on[agent.node].append(agent)
    shares: dict[WorkerId, list[RankSave]] = defaultdict(list)
    for save in _missing(facts, chosen, frozenset(there)):
        own = _owner(facts, save)
        if own not in reached:
            beside = [s for node in sorted(nodes.get(save, ())) for s in on.get(node, ())]
            turn = facts.stumbled.get(save, 0)
            choice = (
                agents if turn or not beside else beside
            )  # whoever failed may not know of a holder that another knows
            own = worker_id(choice[(save.rank + turn) % len(choice)])
        shares[own].append(save)
    return tuple(
        UploadSaves(worker, facts.membership.generation, tuple(saves)) for worker, saves in sorted(shares.items())
    )


def _nodes_having(facts: TierFacts, chosen: Checkpoint) -> Mapping[RankSave, set[str]]:
    nodes: dict[RankSave, set[str]] = defaultdict(set)
    for server in fenced_servers(facts, facts.membership.generation):
        for manifest in server.entries:
            if manifest.save.checkpoint == chosen:
                nodes[manifest.save].add(server.endpoint.instance.node)
    return nodes


def _owner(facts: JobFacts, save: RankSave) -> WorkerId | None:
    """The worker whose own rank made this save; None: of another epoch."""
    membership = facts.membership
    group = save.rank // facts.spec.nproc_per_node
    return (
        worker_id(membership.members[group])
        if save.generation == facts.running_generation and group < len(membership.members)
        else None
    )


def _any_agent(facts: WorldFacts) -> WorkerId | None:
    heard = [worker_id(s) for s in facts.sessions.values() if is_responsive(facts, s)]
    return min(heard, default=None)
