"""Plans voluntary changes of the membership: grow, shrink, suspend, evacuate a node.

Pure. They lose no step: a barrier at a later step is proposed, every rank saves there and waits, and only then is the next
generation claimed. The coordinator binds the barrier once every member accepted it; after a rejection a later step is
proposed. A terminating worker is handled in this way even if training is impossible without it: every step is then saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from surefoot.protocol.checkpoints import retention
from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    count_copies,
    newest_checkpoint,
)
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Barrier
from surefoot_operator.api.status import JobStatus, Member
from surefoot_operator.job_snapshot import JobSnapshot, ObservedBarrier
from surefoot_operator.policy.core.actions import Action
from surefoot_operator.policy.core.availability import costly_nodes, evacuation_reason, termination_reason
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    barrier_checkpoint,
    build_facts,
    does_wait_at_barrier,
    domains_of,
    fenced_servers,
    has_stepped,
    last_step,
    last_step_seconds,
    member_sessions,
    saving_steps,
    seconds_per_step,
    step_of,
    tier_reading,
    topology_of_job,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.failure.spare_workers import largest_size, spare_agents
from surefoot_operator.policy.membership import lifecycle
from surefoot_operator.policy.membership.claim import current_size_constraint
from surefoot_operator.policy.membership.expected_cost import (
    NOT_MEASURED,
    CostDecision,
    costs_more_than_staying,
    grow_or_stay,
)

# ---- copies on nodes that stay ---------------------------------------------------------------------------------------
# Selects copies that survive when nodes are evacuated. A job that waits at a barrier because a worker terminates continues
# elsewhere only once its step survives the node: the copy in that node's memory server is lost with it, and where two nodes
# of a placement group are evacuated at once, both copies are.


def termination_barrier_checkpoint(facts: MembershipFacts) -> Checkpoint | None:
    """Returns the step at which every rank waits because a worker terminates; None: no such wait."""
    checkpoint = barrier_checkpoint(facts)
    return (
        checkpoint
        if checkpoint is not None and any(termination_reason(facts, member) for member in facts.membership.members)
        else None
    )


def reading_of_staying(facts: Facts) -> TierReading:
    """Returns the memory reading without the failure domains that are being evacuated."""
    domains, evacuated = domains_of(facts), domains_being_evacuated(facts)
    reading = tier_reading(facts, facts.membership.generation)
    return TierReading({h: entries for h, entries in reading.servers.items() if domains[h] not in evacuated}, None)


def required_copies(facts: Facts, continues: bool) -> int:
    """Returns the number of copies needed on nodes that stay.

    `continues`: whether a smaller membership trains on at once and makes the other copies while training.
    """
    domains = domains_of(facts)
    live_domains = {domains[h] for h in reading_of_staying(facts).servers}
    return min(facts.spec.checkpoint.memory.replicas, len(live_domains), 1 if continues else len(live_domains))


def describe_missing_copies(facts: Facts, checkpoint: Checkpoint, continues: bool) -> str:
    """Describes the copies that a checkpoint lacks to survive the evacuation of nodes; empty: nothing."""
    last_uploaded = facts.status.last_uploaded
    if last_uploaded is not None and last_uploaded.step >= checkpoint.step:
        return ""
    required = required_copies(facts, continues)
    if not required:
        text = f"{checkpoint} has no copy on a node that stays"
        return text if facts.spec.checkpoint.persistent is None else f"{text}, and is not in the persistent tier yet"
    # Agents report copies sooner than the operator reads them from the servers.
    reported = min((s.copies for _, s in member_sessions(facts) if s is not None), default=0)
    if reported - _max_lost_copies(facts) >= required:
        return ""
    domains, reading = domains_of(facts), reading_of_staying(facts)
    is_complete = checkpoint in complete_checkpoints(
        reading, facts.status.lineage, checkpoint.generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    copies = count_copies(checkpoint, reading, domains) if is_complete else 0
    return "" if copies >= required else f"{checkpoint} has {copies} of {required} copies on nodes that stay"


def termination_needs_upload(facts: Facts) -> bool:
    """Whether no memory server stays, so that only the persistent tier can keep the barrier's step."""
    return termination_barrier_checkpoint(facts) is not None and not required_copies(facts, continues=False)


def can_make_copies(facts: Facts) -> bool:
    """Whether missing copies can be made, in memory or in the persistent tier."""
    return bool(required_copies(facts, continues=False)) or facts.spec.checkpoint.persistent is not None


def plan_repairs_before_termination(facts: Facts, checkpoint: Checkpoint, continues: bool) -> list[retention.Repair]:
    """Plans copies onto nodes that stay; `continues` as in `required_copies`."""
    reading, domains = tier_reading(facts, facts.membership.generation), domains_of(facts)
    required = required_copies(facts, continues)
    if not required:
        return []
    return retention.plan_repairs(
        dict(reading.servers),
        domains,
        checkpoint,
        required,
        frozenset(domains_being_evacuated(facts)),
        topology_of_job(facts),
    )


def domains_being_evacuated(facts: Facts) -> set[str]:
    """Returns the failure domains with a node that is being evacuated."""
    domains = {h.endpoint.instance.node: h.endpoint.domain for h in facts.server_list}
    nodes = {name for name, n in facts.nodes.items() if n.evacuation_reason or not n.schedulable or not n.ready}
    nodes |= {node.name for node in facts.status.unhealthy_nodes if node.until_seconds > facts.now}
    for session in facts.sessions.values():
        worker = facts.workers.get(worker_id(session)) if session.terminating else None
        if session.terminating and (worker is None or not worker.deleting):
            nodes.add(session.node)
    return {domains[name] for name in nodes if name in domains}


def _max_lost_copies(facts: Facts) -> int:
    """Returns how many copies a save may lose with the nodes being evacuated: one for each failure domain."""
    servers = {h.endpoint.domain for h in fenced_servers(facts, facts.membership.generation)}
    return len(servers & domains_being_evacuated(facts))


# ---- planned change --------------------------------------------------------------------------------------------------

AHEAD_SECONDS = 0.5
"""How far ahead a barrier is proposed, so that the proposal arrives before the first rank reaches the step."""

ANSWER_TIMEOUT_SECONDS = 5.0
"""Time after which a proposal that not every worker answered is withdrawn."""

RETRY_SECONDS = 0.5
"""Shortest time between a rejected proposal and the next."""

MOVE_SECONDS = 120.0
"""How long a replacement may take to become warm before a node is evacuated with fewer workers instead."""

FIRST_STEP_SECONDS = 10.0
"""A generation this young that rejects a barrier is still starting: it is asked again, as its first step may be under way."""

MAX_NAMED = 4
"""Terminating workers that a reason lists."""

BARRIER_TIMEOUT_SECONDS = 30.0
"""How long the saves of a bound barrier may take after its step; then the generation is claimed without all copies."""


@dataclass(frozen=True, slots=True)
class DesiredChange:
    """A change of the membership that should be made."""

    reason: str
    is_immediate: bool
    """True if the change does not wait for a better moment, such as the first step or `scaleUpSnoozeTimeSeconds`."""
    grows_to: int = 0
    """Number of workers after growing; 0: the change does not grow the job."""


@dataclass(frozen=True, slots=True)
class ChangeStep:
    """The next step of a planned change: actions, a wait, or the claim."""

    reason: str
    actions: tuple[Action, ...] = ()
    must_claim: bool = False
    """Whether to claim the next generation now."""
    until_seconds: float | None = None
    """Unix time of the next decision; None: only a new observation helps."""


def desired_change(facts: Facts) -> DesiredChange | None:
    """Decides whether the committed membership should change; None: no."""
    members = len(facts.membership.members)
    if facts.spec.suspend:
        return DesiredChange("the job is suspended", is_immediate=True) if members else None
    if not members:
        return DesiredChange("the job is resumed", is_immediate=True)
    # Terminating workers come first, then evacuation, then the size.
    termination_reasons = {m: reason for m in facts.membership.members if (reason := termination_reason(facts, m))}
    if termination_reasons:
        return DesiredChange(_describe_terminations(termination_reasons), is_immediate=True)
    member_indexes = {m.index for m in facts.membership.members}
    spare_indexes = {s.index for s in spare_agents(facts)}
    tie = current_size_constraint(facts)
    required_size = None if tie is None else tie.workers(facts.spec)
    possible_size = largest_size(facts.spec, len(member_indexes | spare_indexes), required_size)
    evacuation = _plan_evacuation(facts, list(facts.membership.members), spare_indexes, required_size)
    if evacuation is not None:
        return evacuation
    if required_size is None and possible_size < members and largest_size(facts.spec, members) < members:
        return DesiredChange(f"scale from {members} to {largest_size(facts.spec, members)} workers", is_immediate=True)
    if possible_size > members:
        return DesiredChange(
            f"grow from {members} to {possible_size} workers", is_immediate=False, grows_to=possible_size
        )
    return None


def _describe_terminations(reasons: Mapping[Member, str]) -> str:
    """Describes which workers terminate and why, in a sentence of bounded length."""
    descriptions = [f"worker {m.index} {reason}" for m, reason in reasons.items()][:MAX_NAMED]
    unlisted_count = len(reasons) - len(descriptions)
    return "; ".join((*descriptions, f"{unlisted_count} more")) if unlisted_count else "; ".join(descriptions)


def _plan_evacuation(
    facts: MembershipNodeFacts, members: list[Member], spare_indexes: set[int], required_size: int | None
) -> DesiredChange | None:
    """Plans to move workers off nodes: at once if the size is kept, else after `MOVE_SECONDS`.

    Such a node still trains, so nothing is planned that would stop training altogether.
    """
    members_to_move = {m.index: m for m in members if evacuation_reason(facts, m.node)}
    off_costly_nodes = {index: m for index, m in members_to_move.items() if m.node not in costly_nodes(facts)}
    member_indexes = {m.index for m in members}
    size = largest_size(facts.spec, len(member_indexes - set(members_to_move) | spare_indexes), required_size)
    if len(off_costly_nodes) < len(members_to_move):
        size_with_slow = largest_size(
            facts.spec, len(member_indexes - set(off_costly_nodes) | spare_indexes), required_size
        )
        if costs_more_than_staying(facts, size, size_with_slow):
            members_to_move, size = off_costly_nodes, size_with_slow
    if not members_to_move or size == 0:
        return None
    replacements = [
        w for w in facts.worker_list if w.index in members_to_move and w.attempt > members_to_move[w.index].attempt
    ]
    # With fewer workers the job waits for replacements for a while.
    if size < largest_size(facts.spec, len(members)):
        newest_created_seconds = max((w.created_seconds for w in replacements), default=facts.now)
        if facts.now < newest_created_seconds + MOVE_SECONDS:
            return None
    names = ", ".join(
        f"{m.index} is moved off node {m.node} ({evacuation_reason(facts, m.node)})" for m in members_to_move.values()
    )
    return DesiredChange(f"worker {names}", is_immediate=False)


def next_change_step(facts: Facts) -> ChangeStep | None:
    """Plans the next step of a desired change; None: nothing to do."""
    barrier = facts.barrier
    if barrier is not None and barrier.barrier.generation != facts.membership.generation:
        barrier = None
    change = desired_change(facts)
    # A bound barrier is always completed, because all ranks stop at it.
    if barrier is not None and barrier.barrier.phase == "bound":
        return _complete_barrier(facts, barrier, change)
    if barrier is None and _all_ranks_wait(facts):
        return ChangeStep("every rank waits at a barrier that an earlier operator proposed", must_claim=True)
    if change is None:
        if barrier is not None and barrier.barrier.phase == "proposed":
            return ChangeStep("the planned change is no longer needed", (replace(barrier.barrier, phase="cancelled"),))
        return None
    # No step can be saved by a barrier, so the generation is claimed at once.
    if not facts.membership.members or (change.is_immediate and _makes_no_step(facts, barrier)):
        return ChangeStep(change.reason, must_claim=True)
    # A change that is not urgent waits for a better moment.
    if not change.is_immediate:
        delay = _growth_delay(facts, change)
        if delay.until_seconds is not None and facts.now < delay.until_seconds:
            reason_clause = f": {delay.reason}" if delay.reason else ""
            return ChangeStep(f"{change.reason}, later{reason_clause}", until_seconds=delay.until_seconds)
        if not has_stepped(facts, facts.membership.generation):
            return ChangeStep(f"{change.reason} once generation {facts.membership.generation} made its first step")
    return _propose_barrier(facts, barrier, change)


def _makes_no_step(facts: MembershipFacts, barrier: ObservedBarrier | None) -> bool:
    """Whether a generation that rejected a barrier has had the time for a step and made none.

    A younger one may be in its first step, which a claim without a barrier would lose.
    """
    if has_stepped(facts, facts.membership.generation) or barrier is None or barrier.barrier.phase != "cancelled":
        return False
    return facts.now >= facts.membership.changed_seconds + FIRST_STEP_SECONDS


def _propose_barrier(facts: MembershipFacts, barrier: ObservedBarrier | None, change: DesiredChange) -> ChangeStep:
    """Proposes a barrier, waits for the answers to one, or withdraws it."""
    if barrier is not None and barrier.barrier.phase == "proposed":
        deadline, step = barrier.proposed_seconds + ANSWER_TIMEOUT_SECONDS, barrier.barrier.step
        if facts.now < deadline:
            return ChangeStep(f"{change.reason}: asking every worker to stop at step {step}", until_seconds=deadline)
        cancelled = replace(barrier.barrier, phase="cancelled")
        return ChangeStep(f"not every worker answered whether it can stop at step {step}", (cancelled,))
    # Rejected or withdrawn: propose again later, and at a later step.
    if barrier is not None and facts.now < barrier.proposed_seconds + RETRY_SECONDS:
        return ChangeStep(
            f"{change.reason}: a worker rejected the barrier at step {barrier.barrier.step}",
            until_seconds=barrier.proposed_seconds + RETRY_SECONDS,
        )
    retry_seconds = _barrier_retry_seconds(facts, barrier)
    if retry_seconds is not None and facts.now < retry_seconds:
        return ChangeStep(
            f"{change.reason}: no rank completes a step, so no other barrier is proposed yet",
            until_seconds=retry_seconds,
        )
    generation = facts.membership.generation
    steps_ahead = _steps_to_barrier(facts)
    current_step, previous_step = last_step(facts), barrier.barrier.step if barrier is not None else 0
    # each barrier has a step of its own, so that no answer to an older one is taken for it; without progress since the
    # last one, the next step is enough: barriers that run ahead of a stalled job would end up hundreds of steps away
    step = (
        max(current_step, previous_step) + steps_ahead
        if retry_seconds is None
        else max(current_step + steps_ahead, previous_step + 1)
    )
    return ChangeStep(
        f"{change.reason}: proposing a barrier at step {step}",
        (Barrier(generation, step, "proposed"),),
        until_seconds=facts.now + ANSWER_TIMEOUT_SECONDS,
    )


def _steps_to_barrier(facts: MembershipFacts) -> int:
    """Returns how many steps ahead the barrier is: no rank may have finished the step before the proposal arrives.

    The end of the present step suffices if it is far off: a terminating worker may not have the time for two steps.
    """
    step_seconds, last_step_at = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    if not step_seconds:
        return 3
    if last_step_at is not None and facts.now + 2 * AHEAD_SECONDS <= last_step_at + step_seconds:
        return 1
    return max(2, ceil(AHEAD_SECONDS / step_seconds) + 1)


def _barrier_retry_seconds(facts: MembershipFacts, barrier: ObservedBarrier | None) -> float | None:
    """Returns when to propose again if no step was made since the last proposal; None: no wait."""
    if barrier is None:
        return None
    last_step_at = last_step_seconds(facts, facts.membership.generation)
    stalled_seconds = barrier.proposed_seconds - (
        last_step_at if last_step_at is not None else facts.membership.changed_seconds
    )
    return None if stalled_seconds <= 0 else barrier.proposed_seconds + max(RETRY_SECONDS, stalled_seconds)


def _complete_barrier(facts: Facts, barrier: ObservedBarrier, change: DesiredChange | None) -> ChangeStep:
    """Plans the next step at a bound barrier. No rank passes it, so a claim always follows."""
    reason = change.reason if change is not None else "the ranks were stopped for a change that is no longer needed"
    generation, step = barrier.barrier.generation, barrier.barrier.step
    checkpoint = Checkpoint(generation, step)
    sessions = [session for _, session in member_sessions(facts)]
    waiting = [s for s in sessions if s is not None and does_wait_at_barrier(s, barrier.barrier)]
    saved = [s for s in waiting if checkpoint not in s.pending and s.saved is not None and s.saved >= checkpoint]
    step_seconds = seconds_per_step(facts) or 1.0
    deadline = (
        barrier.proposed_seconds
        + BARRIER_TIMEOUT_SECONDS
        + 2 * step_seconds * max(0, step - step_of(facts, generation))
    )
    # Every save has its copies. If nodes are evacuated or the job is suspended, the copies must also survive that.
    if len(saved) == len(sessions):
        missing = (
            describe_missing_copies(facts, checkpoint, continues=_can_continue_without(facts))
            if termination_barrier_checkpoint(facts) is not None
            else ""
        )
        upload_deadline = lifecycle.barrier_upload_deadline(facts, barrier)
        if upload_deadline is not None:
            return ChangeStep(
                f"{reason}: {checkpoint} is uploaded to the persistent tier first", until_seconds=upload_deadline
            )
        if not missing or not can_make_copies(facts):
            return ChangeStep(f"{reason}; {missing}" if missing else reason, must_claim=True)
        if facts.now < deadline:
            return ChangeStep(f"{reason}: {missing}", until_seconds=deadline)
        return ChangeStep(f"{reason}; {missing}", must_claim=True)
    if len(waiting) == len(sessions) and facts.now >= deadline:
        return ChangeStep(f"{reason}; some saves of step {step} lack copies", must_claim=True)
    progress = (
        f"{len(waiting)} of {len(sessions)} workers wait at step {step}, {len(saved)} have replicated their saves"
    )
    return ChangeStep(f"{reason}: {progress}", until_seconds=deadline if facts.now < deadline else None)


def _can_continue_without(facts: Facts) -> bool:
    """Whether training can continue without the terminating workers."""
    tie = current_size_constraint(facts)
    remaining_indexes = {m.index for m in facts.membership.members if not termination_reason(facts, m)} | {
        s.index for s in spare_agents(facts)
    }
    return largest_size(facts.spec, len(remaining_indexes), None if tie is None else tie.workers(facts.spec)) > 0


def _all_ranks_wait(facts: MembershipFacts) -> bool:
    """Whether all ranks wait at a barrier bound by an operator that died since: no message would ever release them."""
    sessions = [session for _, session in member_sessions(facts)]
    return bool(sessions) and all(
        s is not None
        and s.generation == facts.membership.generation
        and s.barrier_step is not None
        and s.barrier_step == s.progress.step
        for s in sessions
    )


def _growth_delay(facts: MembershipFacts, change: DesiredChange) -> CostDecision:
    """Returns until when the membership keeps its size although a change is desired."""
    policy = facts.spec.elastic_policy
    if policy is None:
        return NOT_MEASURED
    if policy.scale_up_snooze_seconds is not None:
        return CostDecision(facts.membership.changed_seconds + policy.scale_up_snooze_seconds)
    return grow_or_stay(facts, len(facts.membership.members), change.grows_to) if change.grows_to else NOT_MEASURED


# ---- data that a job loses with a node -------------------------------------------------------------------------------
# Determines which checkpoint a job would lose with a node. Pure; called by the eviction review through the reconciler. A
# `kubectl drain` ends, and the machine is switched off, as soon as its pods are gone; the memory server on it, which no drain
# evicts, is lost with all copies that exist only there.

MAX_SNAPSHOT_AGE_SECONDS = 15.0
"""Age of an observation from which on it is no evidence for the present."""

MAX_LAG_INTERVALS = 2
"""Save intervals by which copies may lag, because the next checkpoints are made while the newest is copied."""


def describe_data_lost_with_node(snapshot: JobSnapshot, status: JobStatus, node: str, now_seconds: float) -> str:
    """Describes the checkpoint that a job loses if `node` is switched off too.

    Args:
        snapshot: The job's last snapshot.
        status: The status decided from it.
        node: Name of the node being drained, whether or not the snapshot shows that.
        now_seconds: Unix time, by the clock of the snapshot.

    Returns:
        A sentence for the user who drains the node; empty: nothing is lost.
    """
    if status.phase in ("Complete", "Failed") or snapshot.job.deleted or not _has_data_on_node(snapshot, node):
        return ""
    # Without a recent observation, nothing is known to be safe.
    if now_seconds - snapshot.now_seconds > MAX_SNAPSHOT_AGE_SECONDS:
        return f"it was not reconciled for {now_seconds - snapshot.now_seconds:.0f} s"
    membership = status.membership
    if membership is None or status.last_complete is None:
        return ""  # there is no checkpoint to lose yet
    newest = status.last_complete
    if status.last_uploaded is not None and status.last_uploaded.step >= newest.step:
        return ""
    nodes = tuple(replace(n, schedulable=False) if n.name == node else n for n in snapshot.nodes)
    facts = build_facts(replace(snapshot, nodes=nodes, status=status))
    reading = tier_reading(facts, membership.generation)
    if not reading.servers:
        return f"no memory server reports at present where the copies of {newest} are"
    lineage_args, covers = (
        (facts.status.lineage, membership.generation, unreadable_checkpoints(facts)),
        facts.layout_covers,
    )
    # Compare the newest readable checkpoint with the newest that remains without the node.
    newest_readable = newest_checkpoint(complete_checkpoints(reading, *lineage_args, covers))
    newest_staying = newest_checkpoint(complete_checkpoints(reading_of_staying(facts), *lineage_args, covers))
    kept_step = max((c.step for c in (newest_staying, status.last_uploaded) if c is not None), default=None)
    if newest_readable is None or (
        kept_step is not None and kept_step + _allowed_lag_steps(facts) >= newest_readable.step
    ):
        return ""
    return f"{newest_readable} has no copy on a node that stays{_describe_remedy(facts)}"


def _allowed_lag_steps(facts: JobFacts) -> int:
    """Returns by how many steps copies may lag in a training job; 0 if it does not train and makes no newer copies.

    Before its worker terminates, the job stops at a barrier, and the save made there is copied before the worker ends.
    """
    is_training = facts.membership.state == "Committed" and facts.membership.members
    return MAX_LAG_INTERVALS * saving_steps(facts) if is_training else 0


def _has_data_on_node(snapshot: JobSnapshot, node: str) -> bool:
    """Whether a memory server on that node has, or may have, data of the job; for most jobs none has."""
    servers = (h for h in snapshot.servers if h.endpoint.instance.node == node and h.state != "Gone")
    return any(h.entries or h.read_generation is None for h in servers)


def _describe_remedy(facts: Facts) -> str:
    """Describes the next step, or the remedy if nothing will happen by itself."""
    if (
        facts.status.membership is not None
        and facts.status.membership.members
        and set(domains_of(facts).values()) - domains_being_evacuated(facts)
    ):
        return ", and is being copied to one"
    if facts.spec.checkpoint.persistent is not None:
        return ", and is on its way to the persistent tier"
    return "; keep one node that runs the job, or set spec.checkpoint.persistent"
