"""Claims and commits generations, selects their members, and releases workers that wait too long for enough others.

Pure. Each change is one new status; the reconciler writes it by compare-and-swap on the old membership, so that only one of
two leaders succeeds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain

from surefoot.protocol.checkpoints.completeness import (
    Lineage,
    LineageEntry,
    complete_checkpoints,
    complete_in_persistent_tier,
    find_watermark,
    is_on_lineage,
    newest_checkpoint,
    prune_lineage,
)
from surefoot.protocol.checkpoints.completeness import effective_replicas as effective
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.save_state import tied_objects
from surefoot.protocol.identities import Checkpoint, WorkerId
from surefoot.protocol.text import join_names
from surefoot.protocol.timeouts import Backoff
from surefoot_operator import reasons
from surefoot_operator.api.spec import TrainingJobSpec, allowed_sizes
from surefoot_operator.api.status import JobStatus, Member, Membership, Scheduling, condition_of
from surefoot_operator.job_snapshot import MAX_GENERATION, ObservedSession, ObservedWorker
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.availability import (
    costly_nodes,
    evacuation_reason,
    is_node_lost,
    is_usable,
    termination_reason,
)
from surefoot_operator.policy.core.facts import (
    RECONNECT_GRACE_SECONDS,
    JobFacts,
    MembershipNodeFacts,
    MembershipTierFacts,
    NodeFacts,
    TierFacts,
    cached_per_snapshot,
    domains_of,
    fenced_servers,
    step_of,
    tier_reading,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.failure_detection import connection_deadline, most_members_connected
from surefoot_operator.policy.failure.spare_workers import (
    largest_size,
    newest_responsive_sessions,
    required_indexes,
    target_size,
)
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_nodes
from surefoot_operator.policy.membership.expected_cost import (
    NOT_MEASURED,
    CostDecision,
    costs_more_than_staying,
    wait_or_shrink,
)
from surefoot_operator.policy.membership.node_exclusion import suspect_nodes
from surefoot_operator.policy.membership.restore_decisions import (
    RestoreChosen,
    may_drops_be_in_progress,
    record_rollback,
    restore_limit,
    surviving_last_good,
)

# ---- scheduling deadline ---------------------------------------------------------------------------------------------
# Releases nodes that are occupied too long by too few workers to train. Two jobs that each got half of a small cluster would
# wait for each other for ever. So a job that is short of workers for too long releases all of them, and requests them again
# after a backoff that differs between jobs.

RELEASED = "NodesReleased"
"""Reason of the condition PodsScheduled while no workers are requested."""

_FIRST_BACKOFF_SHARE = 0.1
"""First backoff as a share of the deadline; it doubles with each further release, up to the whole deadline."""


@dataclass(frozen=True, slots=True)
class SchedulingRelease:
    """Scheduling state after a decision."""

    scheduling: Scheduling
    reason: str = ""
    """Why no workers are requested; empty: they are."""
    events: tuple[Event, ...] = ()


def update_scheduling(facts: MembershipNodeFacts, required_size: int | None = None) -> SchedulingRelease:
    """Decides whether workers keep their nodes while too few of them are scheduled to train."""
    scheduling, deadline = facts.status.scheduling, facts.spec.run_policy.scheduling_deadline_seconds
    if is_released(facts, facts.status):
        return SchedulingRelease(scheduling, release_message(scheduling))
    placed_workers = _count_placed(facts)
    # Workers that can train, or occupy nothing, need no deadline.
    if not placed_workers or largest_size(facts.spec, placed_workers, required_size):
        return SchedulingRelease(Scheduling(releases=scheduling.releases))
    short_since = facts.now if scheduling.since_seconds is None else min(scheduling.since_seconds, facts.now)
    if facts.now < short_since + deadline:
        return SchedulingRelease(Scheduling(short_since, scheduling.releases))
    releases = scheduling.releases + 1
    backoff = release_backoff_seconds(facts.job.uid, releases, deadline)
    released = Scheduling(None, releases, facts.now + backoff)
    text = (
        f"{placed_workers} of {target_size(facts.spec)} workers occupied nodes for schedulingDeadlineSeconds ({deadline:g} s), too"
        f" few to train: their nodes are released, and requested again after {backoff:.0f} s"
    )
    return SchedulingRelease(released, release_message(released), (Event("WorkersReleased", text, warning=True),))


def release_deadline(facts: JobFacts, scheduling: Scheduling) -> float | None:
    """Returns when nodes are released or requested again (Unix time); None: neither is planned."""
    if scheduling.since_seconds is None:
        return scheduling.until_seconds
    return scheduling.since_seconds + facts.spec.run_policy.scheduling_deadline_seconds


def is_released(facts: JobFacts, status: JobStatus) -> bool:
    """Whether the job requests no workers now because it released them."""
    release_end = status.scheduling.until_seconds
    # an end beyond the longest possible backoff comes from a clock that ran ahead
    return (
        release_end is not None
        and facts.now < release_end <= facts.now + facts.spec.run_policy.scheduling_deadline_seconds
    )


def release_message(scheduling: Scheduling) -> str:
    """Describes a job whose workers were released, with the time of the next request."""
    retry_time = datetime.fromtimestamp(scheduling.until_seconds or 0.0, UTC).strftime("%H:%M:%S")
    count_clause = f" ({scheduling.releases} times so far)" if scheduling.releases > 1 else ""
    return f"too few workers got nodes, so their nodes were released{count_clause}; the job requests them again at {retry_time} UTC"


def release_backoff_seconds(uid: str, releases: int, deadline: float) -> float:
    """Returns the backoff after a release, different for each job, so that one finds the nodes free."""
    # Derived from the job's uid, so that every leader computes the same backoff.
    jitter = int.from_bytes(hashlib.sha256(f"{uid}:{releases}".encode()).digest()[:8], "big") / 2**64
    return Backoff(deadline * _FIRST_BACKOFF_SHARE, deadline).wait_seconds(releases, jitter)


def _count_placed(facts: MembershipNodeFacts) -> int:
    """Counts required workers that occupy a node."""
    ended_phases, required = ("Succeeded", "Failed"), required_indexes(facts)
    live_workers = (
        w
        for w in facts.worker_list
        if w.phase not in ended_phases and not w.deleting and not is_node_lost(facts, w.node)
    )
    return len({w.index for w in live_workers if w.node is not None and w.index in required})


# ---- world size required by checkpoints ------------------------------------------------------------------------------
# Keeps the membership at the size that its checkpoint was saved at, if the checkpoint has state of each rank's own. Such a
# job waits for a replacement, as one of fixed size does. At another size every rank would reject the checkpoint, until the
# restart budget is used up.


@dataclass(frozen=True, slots=True)
class WorldSizeConstraint:
    """The world size that a checkpoint's state requires."""

    message: str
    """Sentence that names the objects and the remedies."""
    ranks: int
    """Required number of ranks."""

    def workers(self, spec: TrainingJobSpec) -> int:
        """Returns the required number of workers; 0: no number of workers gives that many ranks."""
        workers, remainder = divmod(self.ranks, spec.nproc_per_node)
        return 0 if remainder else workers


def size_constraint_of(facts: TierFacts, parent: Checkpoint | None) -> WorldSizeConstraint | None:
    """Returns the world size that restoring `parent` requires; None: any size will do."""
    if parent is None:
        return None
    source_entries = facts.source_listing.entries or ()
    return _find_constraint(m for m in chain(_read_manifests(facts), source_entries) if m.save.checkpoint == parent)


@cached_per_snapshot
def current_size_constraint(facts: TierFacts) -> WorldSizeConstraint | None:
    """Returns the world size that the committed membership's newest checkpoint requires; None: any size will do."""
    membership = facts.membership
    manifests = tier_reading(facts, membership.generation).manifests_by_rank()
    candidates = {
        c: ranks for c, ranks in manifests.items() if c.generation == membership.generation or c == membership.parent
    }
    # from some of the ranks alone it cannot be seen whether their values differ
    complete = [c for c, ranks in candidates.items() if len(ranks) == next(iter(ranks.values()))[-1].world_size]
    if complete:
        return _find_constraint(copies[-1] for copies in candidates[max(complete, key=lambda c: c.step)].values())
    condition = condition_of(facts.status, reasons.WORLD_SIZE_FIXED)
    return (
        WorldSizeConstraint(condition.message, membership.world_size)
        if condition is not None and membership.world_size
        else None
    )


def constraint_message(facts: TierFacts, status: JobStatus) -> str | None:
    """Returns the message of the condition that the size is fixed; None: no other size is requested."""
    membership, condition = status.membership, condition_of(facts.status, reasons.WORLD_SIZE_FIXED)
    if membership is None or status.phase in ("Complete", "Failed"):
        return None
    # A claim reads the tiers again; until then the condition stays as it is.
    if membership.state == "Claimed" or not membership.members:
        return condition.message if condition is not None else None
    tie = (
        size_constraint_of(facts, membership.parent)
        if membership != facts.status.membership
        else current_size_constraint(facts)
    )
    if tie is None or allowed_sizes(facts.spec) == (tie.workers(facts.spec),):
        return None
    return tie.message


def _find_constraint(manifests: Iterable[RankManifest]) -> WorldSizeConstraint | None:
    """Returns the world size that these manifests of one checkpoint require; None: any size will do."""
    manifests_by_rank = {m.save.rank: m for m in manifests}
    objects = tied_objects(manifests_by_rank.values())
    if not objects:
        return None
    ranks = next(iter(manifests_by_rank.values())).world_size
    text = (
        f"{', '.join(objects)}: each rank has its own state, which only {ranks} ranks can restore, so the job keeps that"
        f" size and waits for a replacement when it loses a worker. To allow other sizes, use surefoot.ElasticLoader, give the"
        f" object load_state_dicts, or name it in Checkpointer(reset_on_resize=…)"
    )
    return WorldSizeConstraint(text, ranks)


def _read_manifests(facts: TierFacts) -> Iterator[RankManifest]:
    """Iterates over all manifests of this job read for the present generation."""
    reading = tier_reading(facts, facts.membership.generation)
    return chain(*reading.servers.values(), reading.persistent or ())


# ---- claim -----------------------------------------------------------------------------------------------------------

STOPPING_WAIT_SECONDS = 3.0
"""How long to wait until connected agents have stopped their trainers and are warm again."""

RECONNECT_WAIT_SECONDS = 5.0
"""How long a new leader waits for the agents of the previous generation to connect."""

STARTING_WAIT_SECONDS = 30.0
"""How long a first (or resumed) generation waits for workers that are starting, before it starts with fewer."""

COUNTED_NODES_WAIT_SECONDS = 600.0
"""The same where the platform counts its nodes, as `surefoot local` does: a worker that lives there is certain to come."""

UNSCHEDULED_WAIT_SECONDS = 5.0
"""The same for workers without a node."""

REPLACEMENT_WAIT_SECONDS = 60.0
"""How long to wait for another worker if training is possible only with a node that its own agent found unhealthy."""

MAX_LINEAGE_ENTRIES = 200
"""Lineage entries kept in the status; beyond that, those that no stored checkpoint needs are removed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected members, or why and until when none are selected."""

    members: tuple[Member, ...] = ()
    """In rank order; empty: wait."""
    waiting_reason: str | None = None
    """Why no members are selected yet."""
    until_seconds: float | None = None
    """Unix time at which to select again; None: only a new observation helps."""
    cost_estimate: str = ""
    """Cost estimate that explains why workers that may still come were not waited for; empty: none was made."""


def newest_known_generation(facts: MembershipTierFacts) -> int:
    """Returns the newest generation known to the status, memory servers, agents or the persistent tier.

    A status that was restored from an old backup lacks generations that the others remember.
    """
    status = facts.status
    generations = [status.membership.generation if status.membership else 0]
    generations += [h.fence for h in facts.server_list if h.fence is not None]
    generations += [max(s.generation, s.stopped - 1) for s in facts.sessions.values()]
    return max(*generations, newest_stored_generation(facts))


def newest_stored_generation(facts: TierFacts) -> int:
    """Returns the newest generation found in the persistent tier, apart from this claim; 0: none, or not listed."""
    listing = facts.persistent
    generations = (listing.newest_generation, *(m.save.generation for m in listing.entries or ()))
    return max((generation for generation in generations if generation <= MAX_GENERATION), default=0)


def is_generation_taken(facts: TierFacts) -> bool:
    """Whether the claimed generation was used before, as the listing for this claim shows.

    An unused one has nothing in the persistent tier before it is committed.
    """
    membership, listing = facts.membership, facts.persistent
    is_listed = membership.state == "Claimed" and listing.read_generation == membership.generation
    return is_listed and newest_stored_generation(facts) >= membership.generation


def claim_generation(facts: MembershipTierFacts, reason: str) -> JobStatus:
    """Returns the status that claims the next generation: no member may run until it is committed.

    Members and parent stay those of the previous generation.
    """
    previous = facts.status.membership or Membership(0, "Claimed")
    membership = replace(
        previous,
        generation=newest_known_generation(facts) + 1,
        state="Claimed",
        reason=reason,
        changed_seconds=facts.now,
    )
    start_seconds = facts.status.start_seconds if facts.status.start_seconds is not None else facts.now
    # a spare or additional worker that failed next to a running membership does not affect the next start
    status = (
        facts.status if previous.state == "Claimed" else replace(facts.status, failed_starts=0, failed_starts_counted=0)
    )
    return replace(status, membership=membership, start_seconds=start_seconds)


def commit_generation(facts: MembershipTierFacts, chosen: RestoreChosen, members: tuple[Member, ...]) -> JobStatus:
    """Returns the status that commits the claimed generation with its parent and members."""
    status, claim = facts.status, facts.membership
    world_size = len(members) * facts.spec.nproc_per_node
    membership = Membership(
        generation=claim.generation,
        state="Committed",
        parent=chosen.parent,
        world_size=world_size,
        members=members,
        reason=claim.reason,
        changed_seconds=facts.now,
    )
    lineage = (*status.lineage, LineageEntry(claim.generation, chosen.parent, world_size))
    ended_generation = status.rollback.generation if status.rollback is not None else 0
    status = record_rollback(status, lineage, step_of(facts, ended_generation))
    lost_servers = tuple(dict.fromkeys((*status.lost_servers, *(e.instance.run_id for e in chosen.lost_servers))))
    had_checkpoint, last_uploaded = _read_protection(facts, lineage)
    return replace(
        status,
        membership=membership,
        lineage=_prune_lineage(facts, lineage),
        last_uploaded=last_uploaded,
        had_checkpoint=had_checkpoint,
        assigned_servers=tuple(h.endpoint for h in fenced_servers(facts, claim.generation)),
        lost_servers=lost_servers[-64:],
        failed_starts=0,
        failed_starts_counted=0,
        scheduling=Scheduling(),
        initial_checkpoint=chosen.parent if chosen.source_job is not None else status.initial_checkpoint,
        source_job=chosen.source_job or status.source_job,
        last_good=surviving_last_good(status, lineage),
        incidents=incidents.record_commit(facts, status.incidents, chosen.parent, world_size),
    )


def select_members(facts: MembershipNodeFacts, tie: WorldSizeConstraint | None = None) -> Selection:
    """Selects the members once no worker worth waiting for is missing.

    `tie`: required world size; exactly as many members are selected, or none.
    """
    generation, spec = facts.membership.generation, facts.spec
    required_size = None if tie is None else tie.workers(spec)
    # Sessions on good nodes come first; those on nodes to evacuate are used only if training is impossible without them.
    usable = [s for s in newest_responsive_sessions(facts) if is_usable(facts, s)]
    unhealthy = [s for s in usable if _is_on_unhealthy_node(facts, s)]
    preferred = _on_nodes_to_keep(facts, [s for s in usable if s not in unhealthy], required_size)
    if _startable_size(facts, preferred, required_size):
        usable = preferred
    elif unhealthy and _may_be_replaced(facts, unhealthy):
        reasons = {f"node {s.node} ({unhealthy_nodes(facts)[s.node]})" for s in unhealthy}
        reason = f"the worker on {join_names(sorted(reasons))} gets no rank; waiting for a replacement"
        return Selection((), reason, facts.membership.changed_seconds + REPLACEMENT_WAIT_SECONDS)
    # An agent is ready once it has stopped the trainers of every older generation and its fork server is warm.
    ready = [s for s in usable if s.warm and s.stopped >= generation]
    # With fewer workers than the target, wait for the others as long as that costs less than training without them.
    cost = NOT_MEASURED
    if len(ready) < target_size(spec):
        shortage = f"{len(ready)} of {target_size(spec)} workers are ready"
        deadline = _wait_deadline(facts, usable, ready)
        if deadline is not None and facts.now < deadline:
            return Selection((), f"{shortage}, others are starting", deadline)
        cost = _estimate_wait(facts, len(ready), required_size)
        if cost.until_seconds is not None and facts.now < cost.until_seconds:
            return Selection((), f"{shortage}: {cost.reason}", cost.until_seconds)
    # No wait is left: take the largest allowed number of ready workers, or report why there is none.
    size = largest_size(spec, len(ready), required_size)
    if size:
        selection = _select_ready(facts, usable, ready, size)
        return replace(selection, cost_estimate="; ".join(filter(None, (selection.cost_estimate, cost.reason))))
    if tie is not None:
        return Selection((), _describe_shortage(spec, len(ready), tie))
    return Selection((), f"{len(ready)} workers are ready, too few for any allowed size up to {spec.replicas} workers")


def _is_on_unhealthy_node(facts: MembershipNodeFacts, session: ObservedSession) -> bool:
    """Whether a worker without a rank is on an unhealthy node; the confirmation delay is not awaited."""
    return worker_id(session) not in facts.members and session.node in unhealthy_nodes(facts)


def _may_be_replaced(facts: MembershipNodeFacts, unhealthy: list[ObservedSession]) -> bool:
    """Whether replacements may come in time: a node may be free for them, or they are starting."""
    if facts.now >= facts.membership.changed_seconds + REPLACEMENT_WAIT_SECONDS:
        return False
    live_ids = {(w.index, w.attempt) for w in facts.worker_list if w.phase in ("Pending", "Running")}
    replaced = [s for s in unhealthy if any(index == s.index and attempt > s.attempt for index, attempt in live_ids)]
    return facts.free_nodes != 0 or len(replaced) == len(unhealthy)


def _on_nodes_to_keep(
    facts: NodeFacts, sessions: list[ObservedSession], required_size: int | None
) -> list[ObservedSession]:
    """Leaves out agents on nodes to evacuate, except a straggler that costs less than a smaller membership."""
    on_good_nodes = [s for s in sessions if not evacuation_reason(facts, s.node)]
    # Nodes that are excluded only for their cost may still be the better choice.
    slow_nodes = costly_nodes(facts)
    if not slow_nodes:
        return on_good_nodes
    with_slow_nodes = [s for s in sessions if not evacuation_reason(facts, s.node) or s.node in slow_nodes]
    keep_slow_nodes = costs_more_than_staying(
        facts,
        _startable_size(facts, on_good_nodes, required_size),
        _startable_size(facts, with_slow_nodes, required_size),
    )
    return with_slow_nodes if keep_slow_nodes else on_good_nodes


def _startable_size(facts: JobFacts, sessions: list[ObservedSession], required_size: int | None) -> int:
    """Returns the largest number of these agents that could start training now."""
    return largest_size(
        facts.spec, sum(s.warm and s.stopped >= facts.membership.generation for s in sessions), required_size
    )


def _select_ready(
    facts: MembershipNodeFacts, usable: list[ObservedSession], ready: list[ObservedSession], count: int
) -> Selection:
    """Selects `count` members: former ones first, unless they failed repeatedly on their node."""
    suspect = suspect_nodes(facts)
    by_preference = sorted(ready, key=lambda s: (s.node in suspect, worker_id(s) not in facts.members, s.index))
    ready, unselected = by_preference[:count], by_preference[count:]
    if any(worker_id(s) not in facts.members for s in ready):
        deadline = _former_members_deadline(facts, usable, {worker_id(s) for s in ready})
        if facts.now < deadline:
            return Selection(
                (), "members of the previous generation are about to be ready, and precede spares", deadline
            )
    suspect_reason = next(
        (suspect[s.node] for s in unselected if s.node in suspect and worker_id(s) in facts.members), ""
    )
    return Selection(
        tuple(Member(s.index, s.attempt, s.incarnation, s.node) for s in _order_by_rank(facts, ready)),
        cost_estimate=suspect_reason,
    )


def _former_members_deadline(
    facts: MembershipNodeFacts, usable: list[ObservedSession], selected: set[WorkerId]
) -> float:
    """Returns until when former members that are not selected are expected to be ready (Unix time; 0: none is)."""
    sessions_by_id = {worker_id(s): s for s in usable}
    deadlines = [0.0]
    for worker, member in facts.members.items():
        if worker in selected or member.node in suspect_nodes(facts):
            continue
        session = sessions_by_id.get(worker)
        if session is not None and session.incarnation == member.incarnation:
            deadlines.append(facts.membership.changed_seconds + STOPPING_WAIT_SECONDS)
        elif session is None and member.index in required_indexes(facts):
            deadlines.append(_return_deadline(facts, worker, member.incarnation))
    return max(deadlines)


def _order_by_rank(facts: JobFacts, selected: list[ObservedSession]) -> list[ObservedSession]:
    """Orders members by rank.

    If the size is unchanged, a member keeps its rank, and so finds its own saves on its node.
    """
    former_members = facts.membership.members
    unplaced = {worker_id(s): s for s in sorted(selected, key=lambda s: s.index)}
    if len(former_members) != len(selected):
        return list(unplaced.values())
    # First the members that stay, then replacements of the same index, then newcomers in order.
    by_rank = [unplaced.pop(worker_id(member), None) for member in former_members]
    unplaced_by_index = {s.index: s for s in unplaced.values()}
    for group_rank, member in enumerate(former_members):
        if by_rank[group_rank] is None and member.index in unplaced_by_index:
            by_rank[group_rank] = unplaced.pop(worker_id(unplaced_by_index[member.index]))
    newcomers = iter(unplaced.values())
    return [next(newcomers) if s is None else s for s in by_rank]


def _describe_shortage(spec: TrainingJobSpec, ready: int, tie: WorldSizeConstraint) -> str:
    """Describes why the ready workers cannot train at the required world size."""
    required = tie.workers(spec)
    if largest_size(spec, required, required):
        return f"{ready} of {required} workers are ready, and no other number is possible: {tie.message}"
    return (
        f"no allowed size fits: the job requests {spec.replicas} workers of {spec.nproc_per_node} ranks. Request"
        f" {tie.ranks} ranks again. {tie.message}"
    )


def _wait_deadline(
    facts: MembershipNodeFacts, usable: list[ObservedSession], ready: list[ObservedSession]
) -> float | None:
    """Returns until when the missing workers are worth waiting for (Unix time); None: they are not."""
    membership, ready_ids = facts.membership, {worker_id(s) for s in ready}
    former_members = {worker: m.incarnation for worker, m in facts.members.items()}
    deadlines: list[float] = []
    for session in usable:
        is_former_member = former_members.get(worker_id(session)) == session.incarnation
        if worker_id(session) not in ready_ids and (is_former_member or session.warm):
            deadlines.append(membership.changed_seconds + STOPPING_WAIT_SECONDS)
    for worker, incarnation in former_members.items():
        deadlines.append(_return_deadline(facts, worker, incarnation))
    policy = facts.spec.elastic_policy
    if policy is not None and policy.faulty_scale_down_timeout_seconds is not None:
        deadlines.append(membership.changed_seconds + policy.faulty_scale_down_timeout_seconds)
    if not membership.members:
        deadlines.append(_arrival_deadline(facts, ready_ids))
    return max(deadlines, default=None)


def _estimate_wait(facts: MembershipNodeFacts, ready: int, required_size: int | None) -> CostDecision:
    """Estimates the cost of waiting for more workers, unless the job itself sets the wait."""
    policy = facts.spec.elastic_policy
    if policy is None or policy.faulty_scale_down_timeout_seconds is not None or not facts.membership.members:
        return NOT_MEASURED
    return wait_or_shrink(facts, ready, required_size)


def _return_deadline(facts: MembershipNodeFacts, worker_key: WorkerId, incarnation: str) -> float:
    """Returns until when to wait for a former member's agent to reconnect; 0: not at all."""
    worker, session = facts.workers.get(worker_key), facts.sessions.get(worker_key)
    if (
        worker is None
        or worker.phase != "Running"
        or termination_reason(facts, worker)
        or is_node_lost(facts, worker.node)
    ):
        return 0.0
    if session is None:
        deadline = facts.term_seconds + RECONNECT_WAIT_SECONDS
        # this leader claimed the generation itself, and had already waited for members that did not connect
        return (
            min(deadline, connection_deadline(facts))
            if _claimed_here(facts) and most_members_connected(facts)
            else deadline
        )
    if session.incarnation == incarnation and not session.connected:
        return session.since_seconds + RECONNECT_GRACE_SECONDS
    return 0.0


def _claimed_here(facts: JobFacts) -> bool:
    """Whether this leader, not an earlier one, claimed the generation."""
    return facts.membership.changed_seconds > facts.term_seconds


def _arrival_deadline(facts: MembershipNodeFacts, ready: set[WorkerId]) -> float:
    """Returns until when to wait for required workers that have a node or may get one, but have not joined."""
    deadline = 0.0
    ready_indexes = {worker_key.index for worker_key in ready}
    live_workers: dict[int, list[ObservedWorker]] = defaultdict(list)
    for worker in facts.worker_list:
        if worker.phase not in ("Succeeded", "Failed"):
            live_workers[worker.index].append(worker)
    for index in required_indexes(facts):
        if index in ready_indexes:
            continue
        workers = live_workers.get(index, ())
        if any(w.node is not None for w in workers):
            # a worker that is warm and has no rank is on an unhealthy node: its replacement may never come
            sessions = [facts.sessions.get(worker_id(w)) for w in workers]
            is_certain = facts.free_nodes is not None and not any(s is not None and s.warm for s in sessions)
            wait_seconds = COUNTED_NODES_WAIT_SECONDS if is_certain else STARTING_WAIT_SECONDS
            deadline = max(deadline, facts.membership.changed_seconds + wait_seconds)
        elif facts.free_nodes is None or facts.free_nodes > 0 or not workers:
            created = max((w.created_seconds for w in workers), default=facts.membership.changed_seconds)
            deadline = max(deadline, created + UNSCHEDULED_WAIT_SECONDS)
    return deadline


def _read_protection(facts: TierFacts, lineage: Lineage) -> tuple[bool, Checkpoint | None]:
    """Returns whether the job had a checkpoint, and the newest uploaded one on the new lineage."""
    status, generation = facts.status, facts.membership.generation
    reading, unreadable, covers = tier_reading(facts, generation), unreadable_checkpoints(facts), facts.layout_covers
    domains = domains_of(facts)
    live_domains = {domains[server] for server in reading.servers}
    replicas = effective(facts.spec.checkpoint.memory.replicas, len(live_domains))
    watermark_checkpoint = find_watermark(reading, lineage, generation, unreadable, covers, domains, replicas)
    persistent_entries = () if may_drops_be_in_progress(facts) else reading.persistent or ()
    uploaded = complete_in_persistent_tier(persistent_entries, lineage, generation, unreadable, covers)
    last_uploaded = status.last_uploaded
    if last_uploaded is not None and (
        last_uploaded in unreadable or not is_on_lineage(lineage, last_uploaded, generation)
    ):
        last_uploaded = None
    newest_uploaded = newest_checkpoint(c for c in (*uploaded, *((last_uploaded,) if last_uploaded else ())))
    had_checkpoint = (
        status.had_checkpoint and restore_limit(facts) != 0
    )  # a restart from step 0 abandoned all checkpoints
    return had_checkpoint or watermark_checkpoint is not None or newest_uploaded is not None, newest_uploaded


def _prune_lineage(facts: TierFacts, lineage: Lineage) -> Lineage:
    """Returns the lineage, if it is long without the entries that no stored checkpoint needs."""
    # A short history is kept whole.
    if len(lineage) <= MAX_LINEAGE_ENTRIES:
        return lineage
    generation = lineage[-1].generation
    reading = tier_reading(facts, facts.membership.generation)
    checkpoints = complete_checkpoints(reading, lineage, generation, frozenset(), facts.layout_covers)
    # a checkpoint in the persistent tier counts as this job's only while the lineage has its generation
    persistent_entries = facts.persistent.entries or ()
    checkpoints += complete_in_persistent_tier(
        persistent_entries, lineage, generation, frozenset(), facts.layout_covers
    )
    needed = [c for c in (*checkpoints, facts.status.last_uploaded, lineage[-1].parent) if c is not None]
    oldest = min(needed, key=lambda c: (c.generation, c.step), default=lineage[-1].parent)
    return prune_lineage(lineage, oldest, generation)
