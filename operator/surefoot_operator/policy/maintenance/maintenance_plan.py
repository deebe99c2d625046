"""Plans maintenance of both tiers while a generation is committed.

Pure; called by `reconcile` after `plan`, on the same snapshot with the plan's status, and only if that plan does not change
the membership. Its status write is a compare-and-swap like every other. Only memory servers that were fenced at this
generation and read count: any other counts as no copy, loses no save, and is not announced to agents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    count_copies,
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
    MembershipFacts,
    MembershipTierFacts,
    TierFacts,
    build_facts,
    domains_of,
    fenced_endpoints,
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
    DropsInProgress,
    add_drops,
    may_drops_be_in_progress,
    without_drops,
)

# ---- unrecoverable ---------------------------------------------------------------------------------------------------
# Finds checkpoints in memory that can never become complete. If one rank cannot save, for lack of staging memory for example,
# the others' saves would fill the tier: no checkpoint becomes complete, so none is superseded. Agents report for which steps
# their ranks never staged a save. That is final: no save under way and no unreachable server can complete such a checkpoint.
# `retention` decides which saves are dropped.


@dataclass(frozen=True, slots=True)
class Unrecoverable:
    """A checkpoint that can never become complete, and why."""

    checkpoint: Checkpoint
    worker: int
    """Index of a worker without a save of it."""
    reason: str


def unrecoverable_checkpoints(
    facts: MembershipFacts, reading: TierReading, complete: Collection[Checkpoint]
) -> tuple[Unrecoverable, ...]:
    """Lists the committed generation's checkpoints that lack a rank for good, oldest first, without complete ones."""
    generation = facts.membership.generation
    saved_checkpoints = {checkpoint for checkpoint in reading.servers_by_rank() if checkpoint.generation == generation}
    sessions = reporting_sessions(facts)
    unrecoverable = []
    for checkpoint in sorted(saved_checkpoints.difference(complete)):
        session = next((s for s in sessions if s.progress.closed_steps.is_missing(checkpoint.step)), None)
        if session is not None:
            cause = f"worker {session.index} on {session.node} has not saved it, and never will"
            unrecoverable.append(
                Unrecoverable(checkpoint, session.index, f"{checkpoint} can never become complete: {cause}")
            )
    return tuple(unrecoverable)


def reporting_sessions(facts: MembershipFacts) -> list[ObservedSession]:
    """Returns the members' sessions that report on the committed generation, however old the report."""
    generation = facts.membership.generation
    return [
        session for _, session in member_sessions(facts) if session is not None and session.generation == generation
    ]


# ---- maintenance plan ------------------------------------------------------------------------------------------------

MIN_REPAIR_LEAD_SECONDS = 5.0
"""A save that is due within this time makes it pointless to repair an older one."""

_MAX_LISTED = 32
"""Actions that the reason lists."""

MAX_UNPROTECTED_INTERVALS = 2
"""Save intervals without a checkpoint at full replication after which repairs no longer wait for a newer save."""


@dataclass(frozen=True, slots=True)
class MaintenancePlan:
    """The actions, the next status and the figures of one maintenance."""

    actions: tuple[MaintenanceAction, ...]
    status: JobStatus
    """The whole next status; its membership is unchanged."""
    reason: str
    servers: tuple[MemoryServerEndpoint, ...] = ()
    """Memory servers to announce to agents once the status is written."""
    replicas: int = 1
    """Copies that a save needs now to be fully replicated: at most one per live failure domain."""
    copies: int = 0
    """Copies of the newest complete checkpoint in memory, the minimum over its ranks."""
    watermark: Checkpoint | None = None
    """Newest checkpoint in memory with that many copies."""
    pinned: Checkpoint | None = None
    """Checkpoint being uploaded; to be passed to the next maintenance."""
    pending_deletions: DropsInProgress = field(default_factory=dict)
    """Checkpoints whose drops are in progress; to be passed to the next maintenance."""
    unrecoverable: tuple[Unrecoverable, ...] = ()
    """Checkpoints in memory that can never become complete; they are dropped."""
    closed_steps: tuple[ClosedSteps, ...] = ()
    """For each reporting worker, the steps without a save."""
    events: tuple[Event, ...] = ()
    memory_budgets: tuple[memory_budget.MemoryServerBudget, ...] = ()
    """Memory budget of each server; empty while it is unknown."""
    wake_after_seconds: float | None = None
    """Time until the next maintenance is due; None: only a new observation matters."""


@dataclass(frozen=True, slots=True)
class _MemoryReading:
    """The memory tier as read for the committed generation."""

    reading: TierReading
    domains: dict[MemoryServerInstance, str]
    """Failure domain of each server."""
    replicas: int
    """Copies that a save needs now to be fully replicated."""
    complete: list[Checkpoint]
    watermark: Checkpoint | None
    """The watermark: newest checkpoint with that many copies."""
    unrecoverable: tuple[Unrecoverable, ...]
    not_being_dropped: list[Checkpoint]
    """Complete checkpoints that no drop in progress may remove."""

    @property
    def manifests(self) -> tuple[RankManifest, ...]:
        return tuple(chain.from_iterable(self.reading.servers.values()))


def plan_maintenance(
    snapshot: JobSnapshot, pinned: Checkpoint | None = None, pending_deletions: DropsInProgress | None = None
) -> MaintenancePlan:
    """Plans which servers to fence and which saves to drop, copy, upload and delete now.

    Args:
        snapshot: The job's snapshot, with the status that `plan` decided.
        pinned: The checkpoint being uploaded, as the last maintenance returned it.
        pending_deletions: The drops in progress, as the last maintenance returned them.
    """
    facts = build_facts(snapshot)
    membership = facts.status.membership
    has_ended = facts.status.phase in ("Complete", "Failed") or snapshot.job.deleted
    # A claimed generation gets no maintenance, except that an ending job's checkpoint is uploaded.
    if membership is not None and membership.state == "Claimed" and snapshot.upload_now and not has_ended:
        return _plan_upload_only(facts, pinned)
    if membership is None or membership.state != "Committed" or has_ended:
        return MaintenancePlan(
            (),
            facts.status,
            "no maintenance while no generation is committed",
            _answering_assigned_servers(facts, facts.status),
        )
    # Read memory, and record in the status which servers agents know and which checkpoints exist.
    memory = _read_memory(facts, pending_deletions or {})
    status = save_intervals.with_intervals(facts, _status_with_servers(facts, memory), memory.replicas)
    # Uploads come before drops, because the checkpoint being uploaded must not be dropped.
    uploads = upload_plan.plan_uploads(facts, memory.complete, pinned)
    status = replace(
        status,
        last_uploaded=uploads.last_uploaded,
        had_checkpoint=status.had_checkpoint or uploads.last_uploaded is not None,
    )
    drops = _plan_drops(facts, memory, status, uploads.pinned)
    actions: tuple[MaintenanceAction, ...] = (
        *_plan_fences(facts),
        *drops,
        *_plan_repairs(facts, memory),
        *uploads.actions,
        *upload_plan.plan_persistent_deletions(facts, status.last_uploaded, uploads.pinned),
    )
    sentences = (*(h.reason for h in memory.unrecoverable), *map(str, actions[:_MAX_LISTED]))
    reason = "; ".join(sentences) or "no maintenance is needed"
    budget = memory_budget.judge_memory_budget(facts)
    status = memory_budget.with_memory_condition(status, budget, facts.now)
    return MaintenancePlan(
        actions=actions,
        status=status,
        reason=reason,
        servers=_answering_assigned_servers(facts, status),
        replicas=memory.replicas,
        copies=_newest_copies(memory),
        watermark=memory.watermark,
        pinned=uploads.pinned,
        pending_deletions=add_drops(pending_deletions or {}, drops, facts.now),
        unrecoverable=memory.unrecoverable,
        closed_steps=tuple(session.progress.closed_steps for session in reporting_sessions(facts)),
        events=(
            *uploads.events,
            *save_intervals.interval_events(facts.status, status),
            *memory_budget.budget_events(facts.status, budget),
        ),
        memory_budgets=budget.shares if budget is not None else (),
        wake_after_seconds=_wake_seconds(facts),
    )


def _plan_upload_only(facts: Facts, pinned: Checkpoint | None) -> MaintenancePlan:
    """Plans only the upload of the newest checkpoint, for a claimed generation that may never start."""
    uploads = upload_plan.plan_uploads(facts, [], pinned)
    status = replace(
        facts.status,
        last_uploaded=uploads.last_uploaded,
        had_checkpoint=facts.status.had_checkpoint or uploads.last_uploaded is not None,
    )
    reason = "; ".join(map(str, uploads.actions[:_MAX_LISTED])) or "no upload is needed"
    servers = _answering_assigned_servers(facts, status)
    return MaintenancePlan(uploads.actions, status, reason, servers, pinned=uploads.pinned, events=uploads.events)


def _read_memory(facts: MembershipTierFacts, pending_deletions: DropsInProgress) -> _MemoryReading:
    """Reads the memory tier of the committed generation from the snapshot."""
    generation = facts.membership.generation
    reading = memory_reading(facts, generation)
    domains = domains_of(facts)
    live_domains = {domains[server] for server in reading.servers}
    replicas = effective_replicas(facts.spec.checkpoint.memory.replicas, len(live_domains))
    complete = complete_checkpoints(
        reading, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    watermark = newest_checkpoint(c for c in complete if count_copies(c, reading, domains) >= replicas)
    unrecoverable = unrecoverable_checkpoints(facts, reading, complete)
    return _MemoryReading(
        reading,
        domains,
        replicas,
        complete,
        watermark,
        unrecoverable,
        without_drops(complete, pending_deletions, facts.now),
    )


def _newest_copies(memory: _MemoryReading) -> int:
    """Returns the number of copies of the newest complete checkpoint; 0: there is none."""
    newest = newest_checkpoint(memory.complete)
    return 0 if newest is None else count_copies(newest, memory.reading, memory.domains)


def _status_with_servers(facts: MembershipTierFacts, memory: _MemoryReading) -> JobStatus:
    """Returns the status with the servers that agents know and the newest checkpoints.

    A server is assigned once it is fenced and read. It is removed once it is known to be gone, or another instance runs in its
    place; an unreachable server stays, because agents may still write to it.
    """
    status = facts.status
    fenced = fenced_endpoints(facts.server_list, facts.membership.generation)
    fenced_server_ids = {endpoint.server_id for endpoint in fenced.values()}
    assigned = [e for e in status.assigned_servers if not _is_removed(e, facts.servers, fenced, fenced_server_ids)]
    unassigned = sorted(fenced.keys() - {e.instance for e in assigned})
    returned_run_ids = {server.run_id for server in fenced}
    newest = newest_checkpoint(c for c in memory.complete) or status.last_complete
    return replace(
        status,
        assigned_servers=(*assigned, *(fenced[server] for server in unassigned)),
        lost_servers=tuple(instance for instance in status.lost_servers if instance not in returned_run_ids),
        last_complete=newest,
        last_good=last_good.find_last_good(facts, memory.not_being_dropped, memory.manifests),
        had_checkpoint=status.had_checkpoint or memory.watermark is not None,
    )


def _is_removed(
    endpoint: MemoryServerEndpoint,
    states: Mapping[MemoryServerInstance, ObservedMemoryServer],
    fenced: Mapping[MemoryServerInstance, MemoryServerEndpoint],
    fenced_server_ids: set[MemoryServerId],
) -> bool:
    """Whether an assigned server is removed from the status."""
    if endpoint.instance in fenced:
        return fenced[endpoint.instance] != endpoint  # it now answers at another address: assigned again with that
    state = states.get(endpoint.instance)
    return (state is not None and state.state == "Gone") or endpoint.server_id in fenced_server_ids


def _answering_assigned_servers(facts: TierFacts, status: JobStatus) -> tuple[MemoryServerEndpoint, ...]:
    """Lists the assigned memory servers that answer and are fenced."""
    if status.membership is None:
        return ()
    ready = fenced_endpoints(facts.server_list, status.membership.generation)
    return tuple(e for e in status.assigned_servers if e.instance in ready)


def _plan_fences(facts: TierFacts) -> tuple[FenceMemoryServer, ...]:
    """Fences new and returned servers at this generation, before any agent is sent their address."""
    generation = facts.membership.generation
    unfenced = [
        h.endpoint.instance
        for h in facts.server_list
        if h.state == "Ready" and (h.fence is None or h.fence < generation or h.read_generation != generation)
    ]
    return tuple(FenceMemoryServer(server, generation) for server in sorted(unfenced))


def _plan_drops(
    facts: MembershipTierFacts, memory: _MemoryReading, status: JobStatus, pinned: Checkpoint | None
) -> tuple[DropSaves, ...]:
    """Plans the deletion of saves in memory that retention does not keep."""
    if may_drops_be_in_progress(facts):
        return ()
    if _plan_fences(facts):
        return ()  # a server is just joining: the number of copies for full replication is about to change
    inputs = retention_inputs(facts, memory.watermark, status.last_uploaded, pinned)
    inputs = replace(
        inputs,
        unrecoverable=frozenset(h.checkpoint for h in memory.unrecoverable),
        known_good=last_good.checkpoints_kept_in_memory_for_rollback(facts, memory.not_being_dropped, memory.manifests),
    )
    lifetime_seconds = min(DROP_SECONDS, facts.spec.checkpoint.memory_server_timeout_seconds / 2)
    drops = retention.saves_to_delete_by_server(memory.reading.servers, inputs, facts.spec.checkpoint.memory.keep)
    return tuple(
        DropSaves(server, inputs.generation, drops[server], facts.now + lifetime_seconds)
        for server in sorted(drops, key=INSTANCE_ORDER)
    )


def retention_inputs(
    facts: JobFacts, watermark: Checkpoint | None, last_uploaded: Checkpoint | None, pinned: Checkpoint | None
) -> retention.RetentionInputs:
    """Collects the inputs of retention in the memory tier."""
    return retention.RetentionInputs(
        lineage=facts.status.lineage,
        generation=facts.membership.generation,
        is_claimed=False,
        parent=facts.membership.parent,
        watermark=watermark,
        persistent=None if last_uploaded in facts.status.unreadable_checkpoints else last_uploaded,
        pinned=pinned,
        unreadable=unreadable_checkpoints(facts),
    )


def _plan_repairs(facts: Facts, memory: _MemoryReading) -> tuple[RequestRepair, ...]:
    """Repairs the newest complete checkpoint if it has too few copies, unless a newer one will have them soon."""
    newest, at_barrier = newest_checkpoint(memory.complete), planned_change.termination_barrier_checkpoint(facts)
    # At a barrier for a terminating worker, the copies must exist on nodes that stay.
    if at_barrier is not None and at_barrier == newest:
        return _assign_repairs(
            facts, planned_change.plan_repairs_before_termination(facts, at_barrier, continues=False)
        )
    if newest is not None and not _is_uploaded(facts, newest) and planned_change.domains_being_evacuated(facts):
        # nodes are evacuated one after another while the job trains, and their memory servers are lost with them
        repairs = planned_change.plan_repairs_before_termination(facts, newest, continues=True)
        if repairs:
            return _assign_repairs(facts, repairs)
    if newest is None or newest == memory.watermark or _is_newer_expected(facts, memory, newest):
        return ()
    servers, topology = dict(memory.reading.servers), topology_of_job(facts)
    return _assign_repairs(
        facts, retention.plan_repairs(servers, memory.domains, newest, memory.replicas, topology=topology)
    )


def _is_uploaded(facts: JobFacts, checkpoint: Checkpoint) -> bool:
    """Whether the persistent tier has this checkpoint or a newer one."""
    last_uploaded = facts.status.last_uploaded
    return (
        last_uploaded is not None
        and last_uploaded not in facts.status.unreadable_checkpoints
        and last_uploaded.step >= checkpoint.step
    )


def _assign_repairs(facts: MembershipFacts, repairs: list[retention.Repair]) -> tuple[RequestRepair, ...]:
    """Assigns each repair to an agent."""
    # members only: no other agent was sent the memory servers' addresses
    agents = [s for _, s in member_sessions(facts) if s is not None and is_responsive(facts, s)]
    agents_by_node: dict[str, ObservedSession] = {}
    for agent in agents:
        agents_by_node.setdefault(agent.node, agent)
    return tuple(
        RequestRepair(
            _nearest_agent(agents, agents_by_node, repair, position),
            facts.membership.generation,
            repair.save,
            repair.source,
            repair.target,
        )
        for position, repair in enumerate(repairs)
        if agents
    )


def _is_newer_expected(facts: MembershipFacts, memory: _MemoryReading, newest: Checkpoint) -> bool:
    """Whether a newer checkpoint is expected to be fully replicated soon."""
    interval = saving_steps(facts)
    # After too long without full replication, repair now instead of waiting for a newer save.
    step = step_of(facts, facts.membership.generation)
    protected_step = max(memory.watermark.step if memory.watermark else 0, facts.membership.start_step)
    if step - protected_step > MAX_UNPROTECTED_INTERVALS * interval:
        return False
    if any(c.step >= newest.step for s in facts.sessions.values() for c in s.pending if is_responsive(facts, s)):
        return True
    step_seconds, last_step_at = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    if step_seconds is None or not facts.membership.members:
        return False
    seconds_to_save = (interval - step % interval) * step_seconds
    # a hanging job saves nothing more: its checkpoints must not wait with too few copies until the hang is detected
    is_hanging = last_step_at is not None and facts.now - last_step_at > seconds_to_save + MIN_REPAIR_LEAD_SECONDS
    return seconds_to_save < MIN_REPAIR_LEAD_SECONDS and not is_hanging


def _nearest_agent(
    agents: list[ObservedSession],
    agents_by_node: Mapping[str, ObservedSession],
    repair: retention.Repair,
    position: int,
) -> WorkerId:
    """Returns an agent on the target's node, else on the source's node, else any in turn."""
    nearest = agents_by_node.get(repair.target.node) or agents_by_node.get(repair.source.node)
    return worker_id(nearest if nearest is not None else agents[position % len(agents)])


def _wake_seconds(facts: TierFacts) -> float | None:
    """Returns when a listing must be requested again; nothing else here depends on time alone."""
    due_seconds = upload_plan.next_listing_time(facts)
    return due_seconds - facts.now if due_seconds is not None and due_seconds > facts.now else None
