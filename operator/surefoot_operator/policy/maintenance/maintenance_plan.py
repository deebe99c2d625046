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
from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    copies_of,
    effective_replicas,
    newest_checkpoint,
)
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import ClosedSteps
from surefoot.protocol.identities import (
    INSTANCE_ORDER,
    Checkpoint,
    MemoryServerEndpoint,
    MemoryServerId,
    MemoryServerInstance,
    WorkerId,
)
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import JobSnapshot, ObservedMemoryServer, ObservedSession
from surefoot_operator.policy.core.actions import DropSaves, Event, FenceMemoryServer, MaintenanceAction, RequestRepair
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    TierFacts,
    WorldFacts,
    WorldTierFacts,
    domains_of,
    fenced_endpoints,
    gather,
    is_responsive,
    last_step_seconds,
    member_sessions,
    memory_reading,
    saving_steps,
    seconds_per_step,
    step_of,
    topology_of_job,
    unreadable_checkpoints,
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
    generation = facts.membership.generation
    there = {checkpoint for checkpoint in reading.having() if checkpoint.generation == generation}
    sessions = reporting_sessions(facts)
    found = []
    for checkpoint in sorted(there.difference(complete)):
        without = next((s for s in sessions if s.progress.closed_steps.is_missing(checkpoint.step)), None)
        if without is not None:
            who = f"worker {without.index} on {without.node} has not saved it, and never will"
            found.append(Unrecoverable(checkpoint, without.index, f"{checkpoint} can never become complete: {who}"))
    return tuple(found)


def reporting_sessions(facts: WorldFacts) -> list[ObservedSession]:
    """Returns the members' sessions that report on the committed epoch.

    A report about saves stays true however old it is.
    """
    generation = facts.membership.generation
    return [
        session for _, session in member_sessions(facts) if session is not None and session.generation == generation
    ]


# ---- maintenance plan ------------------------------------------------------------------------------------------------

SOON_SECONDS = 5.0
"""A save that is due within so long makes repairing an older one pointless."""

_MAX_LISTED = 32
"""Actions that the reason names."""

PATIENT_INTERVALS = 2
"""But not if so many intervals went by without a checkpoint at full replication."""


@dataclass(frozen=True, slots=True)
class MaintenancePlan:
    """One round's actions, status and figures.

    `status`: the whole new status, its world unchanged. `holders`: to be named to agents once it is written.
    """

    actions: tuple[MaintenanceAction, ...]
    status: JobStatus
    reason: str
    servers: tuple[MemoryServerEndpoint, ...] = ()
    replicas: int = 1
    """R_eff: copies that a save needs to be Full now."""
    copies: int = 0
    """Of the newest complete checkpoint in memory, the least over its ranks."""
    watermark: Checkpoint | None = None
    pinned: Checkpoint | None = None
    """The checkpoint being promoted; to be handed to the next upkeep."""
    pending_deletions: Going = field(default_factory=dict)
    """Checkpoints whose drops are under way; to be handed to the next upkeep."""
    unrecoverable: tuple[Unrecoverable, ...] = ()
    """Checkpoints in memory that can never become complete, and go."""
    steady: tuple[ClosedSteps, ...] = ()
    """What each worker of the epoch said of its saves."""
    events: tuple[Event, ...] = ()
    shares: tuple[memory_budget.MemoryServerBudget, ...] = ()
    """What each holder must take of this job, and may; none while that is not known."""
    wake_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _MemoryReading:
    """The memory tier as it was read for the committed epoch."""

    reading: TierReading
    domains: dict[MemoryServerInstance, str]
    replicas: int
    complete: list[Checkpoint]
    full: Checkpoint | None
    unrecoverable: tuple[Unrecoverable, ...]
    staying: list[Checkpoint]
    """Of `complete`, those that no drop is under way for."""

    @property
    def manifests(self) -> tuple[RankManifest, ...]:
        return tuple(chain.from_iterable(self.reading.servers.values()))


def plan_maintenance(
    seen: JobSnapshot, pinned: Checkpoint | None = None, going: Going | None = None
) -> MaintenancePlan:
    """Plans what to seal, drop, copy, promote and delete now.

    `pinned`: the checkpoint being promoted, `going`: those being dropped, as the last round returned them.
    """
    facts = gather(seen)
    membership = facts.status.membership
    over = facts.status.phase in ("Complete", "Failed") or seen.job.deleted
    if membership is not None and membership.state == "Claimed" and seen.uploads and not over:
        return _upload_alone(facts, pinned)
    if membership is None or membership.state != "Committed" or over:
        return MaintenancePlan(
            (),
            facts.status,
            "no maintenance while no world is committed",
            _answering_assigned_servers(facts, facts.status),
        )
    memory = _read(facts, going or {})
    status = save_intervals.with_intervals(facts, _status_with_servers(facts, memory), memory.replicas)
    promoting = upload_plan.plan_uploads(facts, memory.complete, pinned)
    status = replace(
        status,
        last_uploaded=promoting.last_uploaded,
        had_checkpoint=status.had_checkpoint or promoting.last_uploaded is not None,
    )
    drops = _drops(facts, memory, status, promoting.pinned)
    actions: tuple[MaintenanceAction, ...] = (
        *_fences(facts),
        *drops,
        *_repairs(facts, memory),
        *promoting.actions,
        *upload_plan.persistent_drops(facts, status.last_uploaded, promoting.pinned),
    )
    sentences = (*(h.reason for h in memory.unrecoverable), *map(str, actions[:_MAX_LISTED]))
    reason = "; ".join(sentences) or "no maintenance is needed"
    budget = memory_budget.judge_fit(facts)
    status = memory_budget.with_condition(status, budget, facts.now)
    return MaintenancePlan(
        actions=actions,
        status=status,
        reason=reason,
        servers=_answering_assigned_servers(facts, status),
        replicas=memory.replicas,
        copies=_copies(memory),
        watermark=memory.full,
        pinned=promoting.pinned,
        pending_deletions=going_after(going or {}, drops, facts.now),
        unrecoverable=memory.unrecoverable,
        steady=tuple(session.progress.closed_steps for session in reporting_sessions(facts)),
        events=(
            *promoting.events,
            *save_intervals.interval_events(facts.status, status),
            *memory_budget.budget_events(facts.status, budget),
        ),
        shares=budget.shares if budget is not None else (),
        wake_after_seconds=_wake(facts),
    )


def _upload_alone(facts: Facts, pinned: Checkpoint | None) -> MaintenancePlan:
    """Of a world that is claimed and waits, or never begins: all that was read for it stays, and its newest is uploaded."""
    promoting = upload_plan.plan_uploads(facts, [], pinned)
    status = replace(
        facts.status,
        last_uploaded=promoting.last_uploaded,
        had_checkpoint=facts.status.had_checkpoint or promoting.last_uploaded is not None,
    )
    reason = "; ".join(map(str, promoting.actions[:_MAX_LISTED])) or "no upload is needed"
    named = _answering_assigned_servers(facts, status)
    return MaintenancePlan(promoting.actions, status, reason, named, pinned=promoting.pinned, events=promoting.events)


def _read(facts: WorldTierFacts, going: Going) -> _MemoryReading:
    generation = facts.membership.generation
    reading = memory_reading(facts, generation)
    domains = domains_of(facts)
    live = {domains[server] for server in reading.servers}
    replicas = effective_replicas(facts.spec.checkpoint.memory.replicas, len(live))
    found = complete_checkpoints(reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.covers)
    full = newest_checkpoint(c for c in found if copies_of(c, reading, domains) >= replicas)
    hopeless = unrecoverable_checkpoints(facts, reading, found)
    return _MemoryReading(reading, domains, replicas, found, full, hopeless, staying(found, going, facts.now))


def _copies(memory: _MemoryReading) -> int:
    latest = newest_checkpoint(memory.complete)
    return 0 if latest is None else copies_of(latest, memory.reading, memory.domains)


def _status_with_servers(facts: WorldTierFacts, memory: _MemoryReading) -> JobStatus:
    """What has to outlive this operator: which holders agents know, and that there is something to lose.

    A holder is named once it is sealed and read. One that is known to be gone, or in whose place another instance
    runs, is forgotten; a silent one is not: agents may write to it still.
    """
    status = facts.status
    sealed = fenced_endpoints(facts.holder_list, facts.membership.generation)
    servers = {endpoint.server_id for endpoint in sealed.values()}
    kept = [e for e in status.assigned_servers if not _forgotten(e, facts.servers, sealed, servers)]
    missing = sorted(sealed.keys() - {e.instance for e in kept})
    back = {server.run_id for server in sealed}
    latest = newest_checkpoint(c for c in memory.complete) or status.last_complete
    return replace(
        status,
        assigned_servers=(*kept, *(sealed[server] for server in missing)),
        lost_servers=tuple(instance for instance in status.lost_servers if instance not in back),
        last_complete=latest,
        last_good=last_good.newest_good(facts, memory.staying, memory.manifests),
        had_checkpoint=status.had_checkpoint or memory.full is not None,
    )


def _forgotten(
    endpoint: MemoryServerEndpoint,
    known: Mapping[MemoryServerInstance, ObservedMemoryServer],
    sealed: Mapping[MemoryServerInstance, MemoryServerEndpoint],
    servers: set[MemoryServerId],
) -> bool:
    if endpoint.instance in sealed:
        return sealed[endpoint.instance] != endpoint  # it answers at another address now: named anew
    seen = known.get(endpoint.instance)
    return (seen is not None and seen.state == "Gone") or endpoint.server_id in servers


def _answering_assigned_servers(facts: TierFacts, status: JobStatus) -> tuple[MemoryServerEndpoint, ...]:
    """Named ones that answer."""
    if status.membership is None:
        return ()
    ready = fenced_endpoints(facts.holder_list, status.membership.generation)
    return tuple(e for e in status.assigned_servers if e.instance in ready)


def _fences(facts: TierFacts) -> tuple[FenceMemoryServer, ...]:
    """New and returned holders: sealed at this epoch before anybody hears of them."""
    generation = facts.membership.generation
    unsealed = [
        h.endpoint.instance
        for h in facts.holder_list
        if h.state == "Ready" and (h.fence is None or h.fence < generation or h.read_generation != generation)
    ]
    return tuple(FenceMemoryServer(server, generation) for server in sorted(unsealed))


def _drops(
    facts: WorldTierFacts, memory: _MemoryReading, status: JobStatus, pinned: Checkpoint | None
) -> tuple[DropSaves, ...]:
    if may_be_under_way(facts):
        return ()
    if _fences(facts):
        return ()  # a holder is just coming: how many copies make a save Full is about to change
    standing = retention_inputs(facts, memory.full, status.last_uploaded, pinned)
    standing = replace(
        standing,
        unrecoverable=frozenset(h.checkpoint for h in memory.unrecoverable),
        known_good=last_good.kept_in_memory_for_rollback(facts, memory.staying, memory.manifests),
    )
    life = min(DROP_SECONDS, facts.spec.checkpoint.memory_server_timeout_seconds / 2)
    found = retention.drops_by_server(memory.reading.servers, standing, facts.spec.checkpoint.memory.keep)
    return tuple(
        DropSaves(server, standing.generation, found[server], facts.now + life)
        for server in sorted(found, key=INSTANCE_ORDER)
    )


def retention_inputs(
    facts: JobFacts, full: Checkpoint | None, floor: Checkpoint | None, pinned: Checkpoint | None
) -> retention.RetentionInputs:
    return retention.RetentionInputs(
        lineage=facts.status.lineage,
        generation=facts.membership.generation,
        claimed=False,
        parent=facts.membership.parent,
        watermark=full,
        persistent=None if floor in facts.status.unreadable_checkpoints else floor,
        pinned=pinned,
        unreadable=unreadable_checkpoints(facts),
    )


def _repairs(facts: Facts, memory: _MemoryReading) -> tuple[RequestRepair, ...]:
    """The newest complete checkpoint that has too few copies, unless a newer one will have them soon."""
    wanted, halted = newest_checkpoint(memory.complete), planned_change.barrier_step(facts)
    if halted is not None and halted == wanted:
        return _copied(facts, planned_change.repairs_before_departure(facts, halted, goes_on=False))
    if wanted is not None and not _is_stored(facts, wanted) and planned_change.domains_being_evacuated(facts):
        # nodes are left one after another while the world trains, and holders leave with them
        rescued = planned_change.repairs_before_departure(facts, wanted, goes_on=True)
        if rescued:
            return _copied(facts, rescued)
    if wanted is None or wanted == memory.full or _newer_is_coming(facts, memory, wanted):
        return ()
    servers, topology = dict(memory.reading.servers), topology_of_job(facts)
    return _copied(facts, retention.plan_repairs(servers, memory.domains, wanted, memory.replicas, topology=topology))


def _is_stored(facts: JobFacts, wanted: Checkpoint) -> bool:
    """Whether the persistent tier has this checkpoint, or a newer one."""
    floor = facts.status.last_uploaded
    return floor is not None and floor not in facts.status.unreadable_checkpoints and floor.step >= wanted.step


def _copied(facts: WorldFacts, planned: list[retention.Repair]) -> tuple[RequestRepair, ...]:
    # members only: nobody else was told where the holders are
    agents = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    beside: dict[str, ObservedSession] = {}
    for agent in agents:
        beside.setdefault(agent.node, agent)
    return tuple(
        RequestRepair(
            _nearest(agents, beside, repair, place),
            facts.membership.generation,
            repair.save,
            repair.source,
            repair.target,
        )
        for place, repair in enumerate(planned)
        if agents
    )


def _newer_is_coming(facts: WorldFacts, memory: _MemoryReading, wanted: Checkpoint) -> bool:
    interval = saving_steps(facts)
    step = step_of(facts, facts.membership.generation)
    safe = max(memory.full.step if memory.full else 0, facts.membership.start_step)
    if step - safe > PATIENT_INTERVALS * interval:
        return False
    if any(c.step >= wanted.step for s in facts.sessions.values() for c in s.pending if is_responsive(facts, s)):
        return True
    pace, made = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    if pace is None or not facts.membership.members:
        return False
    due = (interval - step % interval) * pace
    # a world that hangs saves nothing more: what it has must not wait with too few copies until the hang is found
    hangs = made is not None and facts.now - made > due + SOON_SECONDS
    return due < SOON_SECONDS and not hangs


def _nearest(
    agents: list[ObservedSession], beside: Mapping[str, ObservedSession], repair: retention.Repair, place: int
) -> WorkerId:
    """The agent beside the target, else the one beside the source, else any in turn."""
    near = beside.get(repair.target.node) or beside.get(repair.source.node)
    return worker_id(near if near is not None else agents[place % len(agents)])


def _wake(facts: TierFacts) -> float | None:
    """Nothing here waits for a moment alone, except a listing that has to be asked for again."""
    due = upload_plan.listing_due(facts)
    return due - facts.now if due is not None and due > facts.now else None
