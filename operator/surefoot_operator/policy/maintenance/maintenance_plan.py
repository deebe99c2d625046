"""Plans maintenance of both tiers while a world is committed.

Pure; called by `reconcile`. It runs beside `plan`, on the same snapshot with the plan's status, and only if that plan
does not change the world. Its status write tests the world like every other. Only holders that were read decide: one
that is silent, or not sealed at this epoch, counts as no copy, loses no save and is named to no agent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import TierReading, complete, copies_of, effective_replicas, newest
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import Settled
from surefoot.protocol.identities import HOLDER_ORDER, Checkpoint, HolderEndpoint, HolderId, ServerId, WorkerId
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import HolderSeen, Observed, SessionSeen
from surefoot_operator.policy.core.actions import CopySave, DropSaves, Event, MaintenanceAction, SealHolder
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    bad_of,
    domains_of,
    gather,
    is_responsive,
    last_step_seconds,
    member_sessions,
    memory_reading,
    saving_steps,
    sealed_endpoints,
    seconds_per_step,
    step_of,
    topology_of_job,
    worker_id,
)
from surefoot_operator.policy.maintenance import last_good, memory_budget, save_intervals, upload_plan
from surefoot_operator.policy.membership import planned_change
from surefoot_operator.policy.membership.restore_decisions import (
    DROP_SECONDS,
    Going,
    going_after,
    may_be_under_way,
    staying,
)

# ---- unrecoverable ---------------------------------------------------------------------------------------------------
# Finds memory checkpoints that can never become complete. Where one rank cannot save, for want of staging memory say,
# all others' saves would fill the tier: no checkpoint becomes complete, so none is superseded. Agents report which
# steps their ranks never handed over. That is final: no save under way and no unreachable holder can complete such a
# checkpoint. `retention` decides which saves are dropped.


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """A checkpoint that cannot become complete, and why."""

    checkpoint: Checkpoint
    worker: int
    """Index of one that has no save of it."""
    reason: str


def unrecoverable_checkpoints(
    facts: WorldFacts, reading: TierReading, complete: Collection[Checkpoint]
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


def reporting_sessions(facts: WorldFacts) -> list[SessionSeen]:
    """Returns the members' sessions that report on the committed epoch.

    A report about saves stays true however old it is.
    """
    epoch = facts.world.epoch
    return [session for _, session in member_sessions(facts) if session is not None and session.epoch == epoch]


# ---- maintenance plan ------------------------------------------------------------------------------------------------

SOON_SECONDS = 5.0
"""A save that is due within so long makes repairing an older one pointless."""

_MOST_TOLD = 32
"""Actions that the reason names."""

PATIENT_INTERVALS = 2
"""But not if so many intervals went by without a checkpoint at full replication."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One round's actions, status and figures.

    `status`: the whole new status, its world unchanged. `holders`: to be named to agents once it is written.
    """

    actions: tuple[MaintenanceAction, ...]
    status: JobStatus
    reason: str
    holders: tuple[HolderEndpoint, ...] = ()
    replicas: int = 1
    """R_eff: copies that a save needs to be Full now."""
    copies: int = 0
    """Of the newest complete checkpoint in memory, the least over its ranks."""
    watermark: Checkpoint | None = None
    pinned: Checkpoint | None = None
    """The checkpoint being promoted; to be handed to the next upkeep."""
    going: Going = field(default_factory=dict)
    """Checkpoints whose drops are under way; to be handed to the next upkeep."""
    unrecoverable: tuple[Unrecoverable, ...] = ()
    """Checkpoints in memory that can never become complete, and go."""
    settled: tuple[Settled, ...] = ()
    """What each worker of the epoch said of its saves."""
    events: tuple[Event, ...] = ()
    shares: tuple[memory_budget.HolderShare, ...] = ()
    """What each holder must take of this job, and may; none while that is not known."""
    wake_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory tier as it was read for the committed epoch."""

    reading: TierReading
    domains: dict[HolderId, str]
    replicas: int
    complete: list[Checkpoint]
    full: Checkpoint | None
    unrecoverable: tuple[Unrecoverable, ...]
    staying: list[Checkpoint]
    """Of `complete`, those that no drop is under way for."""

    @property
    def manifests(self) -> tuple[RankManifest, ...]:
        return tuple(chain.from_iterable(self.reading.holders.values()))


def maintain(seen: Observed, pinned: Checkpoint | None = None, going: Going | None = None) -> Maintenance:
    """Plans what to seal, drop, copy, promote and delete now.

    `pinned`: the checkpoint being promoted, `going`: those being dropped, as the last round returned them.
    """
    facts = gather(seen)
    world = facts.status.world
    over = facts.status.phase in ("Complete", "Failed") or seen.job.deleted
    if world is not None and world.state == "Claimed" and seen.uploads and not over:
        return _upload_alone(facts, pinned)
    if world is None or world.state != "Committed" or over:
        return Maintenance((), facts.status, "no maintenance while no world is committed", _named(facts, facts.status))
    memory = _read(facts, going or {})
    status = save_intervals.with_intervals(facts, _remembered(facts, memory), memory.replicas)
    promoting = upload_plan.promote(facts, memory.complete, pinned)
    status = replace(status, floor=promoting.floor, recorded=status.recorded or promoting.floor is not None)
    drops = _drops(facts, memory, status, promoting.pinned)
    actions: tuple[MaintenanceAction, ...] = (
        *_seals(facts),
        *drops,
        *_repairs(facts, memory),
        *promoting.actions,
        *upload_plan.persistent_drops(facts, status.floor, promoting.pinned),
    )
    sentences = (*(h.reason for h in memory.unrecoverable), *map(str, actions[:_MOST_TOLD]))
    reason = "; ".join(sentences) or "no maintenance is needed"
    budget = memory_budget.judged(facts)
    status = memory_budget.with_condition(status, budget, facts.now)
    return Maintenance(
        actions=actions,
        status=status,
        reason=reason,
        holders=_named(facts, status),
        replicas=memory.replicas,
        copies=_copies(memory),
        watermark=memory.full,
        pinned=promoting.pinned,
        going=going_after(going or {}, drops, facts.now),
        unrecoverable=memory.unrecoverable,
        settled=tuple(session.progress.settled for session in reporting_sessions(facts)),
        events=(
            *promoting.events,
            *save_intervals.changes(facts.status, status),
            *memory_budget.budget_events(facts.status, budget),
        ),
        shares=budget.shares if budget is not None else (),
        wake_after_seconds=_wake(facts),
    )


def _upload_alone(facts: Facts, pinned: Checkpoint | None) -> Maintenance:
    """Of a world that is claimed and waits, or never begins: all that was read for it stays, and its newest is uploaded."""
    promoting = upload_plan.promote(facts, [], pinned)
    status = replace(facts.status, floor=promoting.floor, recorded=facts.status.recorded or promoting.floor is not None)
    reason = "; ".join(map(str, promoting.actions[:_MOST_TOLD])) or "no upload is needed"
    named = _named(facts, status)
    return Maintenance(promoting.actions, status, reason, named, pinned=promoting.pinned, events=promoting.events)


def _read(facts: WorldTierFacts, going: Going) -> _Memory:
    epoch = facts.world.epoch
    reading = memory_reading(facts, epoch)
    domains = domains_of(facts)
    live = {domains[holder] for holder in reading.holders}
    replicas = effective_replicas(facts.spec.checkpoint.memory.replicas, len(live))
    found = complete(reading, facts.status.lineage, epoch, bad_of(facts), facts.covers)
    full = newest(c for c in found if copies_of(c, reading, domains) >= replicas)
    hopeless = unrecoverable_checkpoints(facts, reading, found)
    return _Memory(reading, domains, replicas, found, full, hopeless, staying(found, going, facts.now))


def _copies(memory: _Memory) -> int:
    latest = newest(memory.complete)
    return 0 if latest is None else copies_of(latest, memory.reading, memory.domains)


def _remembered(facts: WorldTierFacts, memory: _Memory) -> JobStatus:
    """What has to outlive this operator: which holders agents know, and that there is something to lose.

    A holder is named once it is sealed and read. One that is known to be gone, or in whose place another instance
    runs, is forgotten; a silent one is not: agents may write to it still.
    """
    status = facts.status
    sealed = sealed_endpoints(facts.holder_list, facts.world.epoch)
    servers = {endpoint.server_id for endpoint in sealed.values()}
    kept = [e for e in status.named_holders if not _forgotten(e, facts.holders, sealed, servers)]
    missing = sorted(sealed.keys() - {e.holder for e in kept})
    back = {holder.instance for holder in sealed}
    latest = newest(c for c in memory.complete) or status.last_complete
    return replace(
        status,
        named_holders=(*kept, *(sealed[holder] for holder in missing)),
        given_up=tuple(instance for instance in status.given_up if instance not in back),
        last_complete=latest,
        last_good=last_good.newest_good(facts, memory.staying, memory.manifests),
        recorded=status.recorded or memory.full is not None,
    )


def _forgotten(
    endpoint: HolderEndpoint,
    known: Mapping[HolderId, HolderSeen],
    sealed: Mapping[HolderId, HolderEndpoint],
    servers: set[ServerId],
) -> bool:
    if endpoint.holder in sealed:
        return sealed[endpoint.holder] != endpoint  # it answers at another address now: named anew
    seen = known.get(endpoint.holder)
    return (seen is not None and seen.state == "Gone") or endpoint.server_id in servers


def _named(facts: TierFacts, status: JobStatus) -> tuple[HolderEndpoint, ...]:
    """Named ones that answer."""
    if status.world is None:
        return ()
    ready = sealed_endpoints(facts.holder_list, status.world.epoch)
    return tuple(e for e in status.named_holders if e.holder in ready)


def _seals(facts: TierFacts) -> tuple[SealHolder, ...]:
    """New and returned holders: sealed at this epoch before anybody hears of them."""
    epoch = facts.world.epoch
    unsealed = [
        h.endpoint.holder
        for h in facts.holder_list
        if h.state == "Ready" and (h.fence is None or h.fence < epoch or h.read_epoch != epoch)
    ]
    return tuple(SealHolder(holder, epoch) for holder in sorted(unsealed))


def _drops(
    facts: WorldTierFacts, memory: _Memory, status: JobStatus, pinned: Checkpoint | None
) -> tuple[DropSaves, ...]:
    if may_be_under_way(facts):
        return ()
    if _seals(facts):
        return ()  # a holder is just coming: how many copies make a save Full is about to change
    standing = standing_of(facts, memory.full, status.floor, pinned)
    standing = replace(
        standing,
        hopeless=frozenset(h.checkpoint for h in memory.unrecoverable),
        good=last_good.spared_in_memory(facts, memory.staying, memory.manifests),
    )
    life = min(DROP_SECONDS, facts.spec.checkpoint.holder_return_seconds / 2)
    found = retention.drops_by_holder(memory.reading.holders, standing, facts.spec.checkpoint.memory.keep)
    return tuple(
        DropSaves(holder, standing.epoch, found[holder], facts.now + life) for holder in sorted(found, key=HOLDER_ORDER)
    )


def standing_of(
    facts: JobFacts, full: Checkpoint | None, floor: Checkpoint | None, pinned: Checkpoint | None
) -> retention.Standing:
    return retention.Standing(
        lineage=facts.status.lineage,
        epoch=facts.world.epoch,
        claimed=False,
        parent=facts.world.parent,
        watermark=full,
        persistent=None if floor in facts.status.bad else floor,
        pinned=pinned,
        bad=bad_of(facts),
    )


def _repairs(facts: Facts, memory: _Memory) -> tuple[CopySave, ...]:
    """The newest complete checkpoint that has too few copies, unless a newer one will have them soon."""
    wanted, halted = newest(memory.complete), planned_change.barrier_step(facts)
    if halted is not None and halted == wanted:
        return _copied(facts, planned_change.repairs_before_departure(facts, halted, goes_on=False))
    if wanted is not None and not _is_stored(facts, wanted) and planned_change.domains_being_evacuated(facts):
        # nodes are left one after another while the world trains, and holders leave with them
        rescued = planned_change.repairs_before_departure(facts, wanted, goes_on=True)
        if rescued:
            return _copied(facts, rescued)
    if wanted is None or wanted == memory.full or _newer_is_coming(facts, memory, wanted):
        return ()
    holders, topology = dict(memory.reading.holders), topology_of_job(facts)
    return _copied(facts, retention.repairs(holders, memory.domains, wanted, memory.replicas, topology=topology))


def _is_stored(facts: JobFacts, wanted: Checkpoint) -> bool:
    """Whether the persistent tier has this checkpoint, or a newer one."""
    floor = facts.status.floor
    return floor is not None and floor not in facts.status.bad and floor.step >= wanted.step


def _copied(facts: WorldFacts, planned: list[retention.Repair]) -> tuple[CopySave, ...]:
    # members only: nobody else was told where the holders are
    agents = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    beside: dict[str, SessionSeen] = {}
    for agent in agents:
        beside.setdefault(agent.node, agent)
    return tuple(
        CopySave(_nearest(agents, beside, repair, place), facts.world.epoch, repair.save, repair.source, repair.target)
        for place, repair in enumerate(planned)
        if agents
    )


def _newer_is_coming(facts: WorldFacts, memory: _Memory, wanted: Checkpoint) -> bool:
    interval = saving_steps(facts)
    step = step_of(facts, facts.world.epoch)
    safe = max(memory.full.step if memory.full else 0, facts.world.begun_step)
    if step - safe > PATIENT_INTERVALS * interval:
        return False
    if any(c.step >= wanted.step for s in facts.sessions.values() for c in s.pending if is_responsive(facts, s)):
        return True
    pace, made = seconds_per_step(facts), last_step_seconds(facts, facts.world.epoch)
    if pace is None or not facts.world.members:
        return False
    due = (interval - step % interval) * pace
    # a world that hangs saves nothing more: what it has must not wait with too few copies until the hang is found
    hangs = made is not None and facts.now - made > due + SOON_SECONDS
    return due < SOON_SECONDS and not hangs


def _nearest(
    agents: list[SessionSeen], beside: Mapping[str, SessionSeen], repair: retention.Repair, place: int
) -> WorkerId:
    """The agent beside the target, else the one beside the source, else any in turn."""
    near = beside.get(repair.target.node) or beside.get(repair.source.node)
    return worker_id(near if near is not None else agents[place % len(agents)])


def _wake(facts: TierFacts) -> float | None:
    """Nothing here waits for a moment alone, except a listing that has to be asked for again."""
    due = upload_plan.listing_due(facts)
    return due - facts.now if due is not None and due > facts.now else None
