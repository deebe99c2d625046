"""Derives a job's phase, conditions, events and tier contents from a snapshot, for its status.

Pure; the last part of a plan. Equal input gives equal output, so that a status at a fixed point is not written again. A
condition whose input is unknown (an unreachable memory server, a new operator) keeps its last value instead of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    count_copies,
    effective_replicas,
    newest_checkpoint,
)
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.text import count_of
from surefoot_operator import reasons
from surefoot_operator.api.status import (
    CheckpointLatency,
    Condition,
    JobStatus,
    LatencyQuantiles,
    Membership,
    Phase,
    StoredCheckpoints,
    TierContents,
    condition_of,
)
from surefoot_operator.api.topology_levels import spread_levels
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    NodeFacts,
    cached_by_identity,
    data_progress,
    domains_of,
    has_stepped,
    last_step_seconds,
    mean_reported_loss,
    saving_steps,
    seconds_per_step,
    server_domains,
    servers_reading,
    sessions_in_generation,
    step_of,
    tier_reading,
    topology_of_job,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.loss_anomalies import find_loss_anomaly
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_message
from surefoot_operator.policy.failure.spare_workers import spare_agents, target_size
from surefoot_operator.policy.failure.stragglers import describe_straggler
from surefoot_operator.policy.membership.claim import RELEASED, constraint_message, is_released
from surefoot_operator.policy.membership.claim import release_message as released
from surefoot_operator.policy.membership.lifecycle import INVALID_SPEC_REASON
from surefoot_operator.policy.membership.rollback import describe_rollback_rejection as rollback_rejection
from surefoot_operator.policy.membership.workers import has_trained
from surefoot_operator.policy.report.blockers import (
    CREATION_REJECTED,
    EXITED_EARLY,
    NO_GROUP,
    OUT_OF_BOUNDS,
    OUT_OF_MEMORY,
    UNSCHEDULABLE,
    describe_rejected_records,
    evaluate_agents_connected,
    evaluate_api_accepted,
    event_reason_of,
    find_blocker,
    find_spare_blocker,
    unconnected_members,
)
from surefoot_operator.policy.report.time_spent import update_time_spent

# ---- spread of copies ------------------------------------------------------------------------------------------------
# Describes over how many racks, zones or nodes the copies of a checkpoint are spread, for the condition
# `CheckpointProtected`. A checkpoint with copies in two racks survives the loss of one.


@cached_by_identity
def copy_spread(
    reading: TierReading, checkpoint: Checkpoint, copies: int, topology: Topology, topology_key: str
) -> str:
    """Returns text such as "2 copies in 2 racks", for the rank whose copies are closest together."""
    copies_text = "1 copy" if copies == 1 else f"{copies} copies"
    servers_by_rank = reading.servers_by_rank().get(checkpoint, {}).values()
    level = topology.highest_differing_level(server.node for server in reading.servers)
    if level is None or not servers_by_rank:
        return f"{copies_text} on {count_of(copies, 'node')}"
    paths = topology.differing_paths(server.node for server in reading.servers)
    domain_count = min(len({paths[server.node][0] for server in servers}) for servers in servers_by_rank)
    domains_text = count_of(domain_count, spread_levels(topology_key)[level].noun)
    # fewer domains than copies: one failed domain could take every copy of that rank
    if domain_count < copies:
        return f"{copies_text}, for some ranks all within {domains_text}"
    return f"{copies_text} in {domains_text}"


# ---- status conditions -----------------------------------------------------------------------------------------------

PROGRESS_SECONDS = 5.0
"""Minimum time between two statuses that differ only in the step, so that progress costs few API writes."""

STALLED_INTERVALS = 3
"""Save intervals without a new complete checkpoint after which checkpoints count as overdue."""
STALLED_SECONDS = 4.0
"""Minimum time before checkpoints count as overdue. With a short interval, saves arrive some steps late and the operator
reads the memory servers only now and then."""

UNREAD_SECONDS = 5.0
"""Time that a new leader, or a new generation, may take to read the memory servers before it counts as too long."""

_DOES_NOT_FIT = "; checkpoints do not fit: "
"""Separates the message of CheckpointProtected from that of CheckpointsFit, which is appended to it."""

Truth = Literal["True", "False", "Unknown"]


def summarize_status(facts: Facts, status: JobStatus, message: str, lost: str = "") -> JobStatus:
    """Sets phase, message, conditions, progress and time accounting in a status.

    Args:
        status: the planned status.
        message: the current activity of the job, as a sentence.
        lost: why every checkpoint is lost; empty if one is left. It becomes the condition `CheckpointLost`.
    """
    status = _with_progress(facts, status)
    status = replace(status, observed_generation=facts.job.metadata_generation)
    if status.phase not in ("Complete", "Failed"):
        status = replace(status, phase="Recovering" if lost else _derive_phase(facts, status), message=message)
    return replace(
        status, conditions=_derive_conditions(facts, status, lost), time_spent=update_time_spent(facts, status)
    )


def reported_loss_message(facts: JobFacts) -> str:
    """Returns the message of the condition `CheckpointLost`, or "" if it is not set.

    A total loss that was reported stays reported while the tiers are read again, until a checkpoint is found.
    """
    condition = condition_of(facts.status, reasons.CHECKPOINT_LOST)
    return condition.message if condition is not None else ""


def evaluate_pods_scheduled(facts: MembershipNodeFacts, status: JobStatus) -> tuple[Truth, str, str]:
    """Returns (truth, reason, message) of `PodsScheduled`: whether every desired worker has a node."""
    if facts.spec.suspend or facts.status.phase in ("Complete", "Failed"):
        return "False", "NoWorkersWanted", "the job needs no workers: it is suspended or has ended"
    if is_released(facts, status):
        return "False", RELEASED, released(status.scheduling)
    live = [w for w in facts.worker_list if w.phase not in ("Succeeded", "Failed") and not w.deleting]
    placed_count, target_count = len({w.index for w in live if w.node is not None}), target_size(facts.spec)
    count_text = f"{min(placed_count, target_count)} of {target_count} workers have a node"
    blocker = find_blocker(facts)
    if placed_count >= target_count:
        # a worker with a node may still be unable to start: True, but with that reason
        if blocker is None or not blocker.has_node:
            return "True", "Scheduled", count_text
        return "True", blocker.reason, f"{count_text}; {blocker.text}"
    if blocker is None:
        return "False", "WaitingForNodes", count_text
    return "False", blocker.reason, f"{count_text}; {blocker.text}"


def evaluate_checkpoint_protected(facts: Facts) -> tuple[Truth, str, str]:
    """Returns (truth, reason, message) of `CheckpointProtected`: whether a checkpoint survives a failure."""
    membership = facts.status.membership
    # an unreachable server is neither empty nor intact
    unreachable = unreachable_message(facts)
    if unreachable:
        return "Unknown", reasons.MEMORY_SERVERS_UNREACHABLE, unreachable
    if membership is None or membership.state != "Committed":
        return _last_protection(facts)
    reading = tier_reading(facts, membership.generation)
    if not reading.servers:
        return _protection_when_unread(facts, membership)
    # the newest checkpoint with enough copies, or the last uploaded one, whichever is newer
    domains = domains_of(facts)
    replicas = effective_replicas(
        facts.spec.checkpoint.memory.replicas, len({domains[server] for server in reading.servers})
    )
    complete = complete_checkpoints(
        reading, facts.status.lineage, membership.generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    replicated = newest_checkpoint(c for c in complete if count_copies(c, reading, domains) >= replicas)
    protected = newest_checkpoint(c for c in (replicated, facts.status.last_uploaded) if c is not None)
    unsaved_steps = step_of(facts, membership.generation) - max(
        _interval_start_step(facts), *(c.step for c in complete), membership.start_step
    )
    if _is_overdue(facts, unsaved_steps):
        return "False", "Overdue", f"no checkpoint became complete within {STALLED_INTERVALS} save intervals"
    if protected is not None:
        return "True", "SufficientCopies", _describe_protection(facts, protected, reading, replicas)
    if complete:
        return "False", "TooFewCopies", f"no complete checkpoint has {replicas} copies yet"
    return "False", "NoCheckpoint", "no checkpoint is complete yet"


def _describe_protection(facts: NodeFacts, checkpoint: Checkpoint, reading: TierReading, copies: int) -> str:
    """Describes where the protected checkpoint is and how its copies are spread."""
    if checkpoint == facts.status.last_uploaded:
        return "a complete checkpoint is in the persistent tier"
    key = facts.spec.checkpoint.memory.topology_key
    return f"a complete checkpoint has {copy_spread(reading, checkpoint, copies, topology_of_job(facts), key)}"


def _protection_when_unread(facts: MembershipFacts, membership: Membership) -> tuple[Truth, str, str]:
    """Returns `CheckpointProtected` while no memory server was read in this generation.

    The last value is kept until training has advanced so far that a failure would cost more than it may.
    """
    last_complete = facts.status.last_complete
    unsaved_steps = step_of(facts, membership.generation) - max(
        membership.start_step, _interval_start_step(facts), last_complete.step if last_complete is not None else 0
    )
    reading_started_seconds = max(facts.term_seconds, membership.changed_seconds)
    if _is_overdue(facts, unsaved_steps) and facts.now > reading_started_seconds + UNREAD_SECONDS:
        return (
            "False",
            "Overdue",
            f"no memory server answers, and no checkpoint became complete within {STALLED_INTERVALS} save intervals",
        )
    return _last_protection(facts)


def _is_overdue(facts: MembershipFacts, unsaved_steps: int) -> bool:
    """Whether so many steps without a new checkpoint are too many, and took longer than a save needs to arrive."""
    if unsaved_steps <= (STALLED_INTERVALS + 1) * saving_steps(facts):
        return False
    step_seconds, last_step_at = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    if step_seconds is None or last_step_at is None:
        return True
    return unsaved_steps * step_seconds + facts.now - last_step_at > STALLED_SECONDS


def _interval_start_step(facts: MembershipFacts) -> int:
    """Returns the step at which the present save interval took effect; 0: from the start."""
    interval = facts.status.memory_interval
    return 0 if interval is None else min(interval.since_step, step_of(facts, facts.membership.generation))


def _last_protection(facts: JobFacts) -> tuple[Truth, str, str]:
    """Returns the last value of `CheckpointProtected`."""
    condition = condition_of(facts.status, reasons.CHECKPOINT_PROTECTED)
    if condition is None:
        return "False", "NoCheckpoint", "no checkpoint is complete yet"
    return _unchanged(condition)


def _with_progress(facts: MembershipFacts, status: JobStatus) -> JobStatus:
    """Sets step, data progress and loss, at most every `PROGRESS_SECONDS` unless the status changes anyway."""
    generation = facts.running_generation
    step, progress_seconds = (
        step_of(facts, generation),
        last_step_seconds(facts, generation) if status.membership is not None else None,
    )
    if progress_seconds is None or step == status.step:
        return status
    is_changed = status.membership != facts.status.membership or status.phase in ("Complete", "Failed")
    if is_changed or status.progress_seconds is None or progress_seconds - status.progress_seconds >= PROGRESS_SECONDS:
        data = data_progress(facts, generation) or status.data
        loss = _loss_for_status(facts, generation, status.loss)
        return replace(status, step=step, progress_seconds=progress_seconds, data=data, loss=loss)
    return status


def _loss_for_status(facts: MembershipFacts, generation: int, last_loss: float | None) -> float | None:
    """Returns the mean loss to write; None if it is not finite, which `LossFinite` reports."""
    loss = mean_reported_loss(facts, generation)
    if loss is None:
        return last_loss
    return float(f"{loss:.6g}") if math.isfinite(loss) else None


def _derive_phase(facts: MembershipNodeFacts, status: JobStatus) -> Phase:
    """Derives the phase, the summary of the job in one word, from the rest of the status."""
    membership = status.membership
    if membership is None:
        return "Suspended" if facts.spec.suspend else "Pending"
    if facts.spec.suspend and (membership.state == "Claimed" or not membership.members):
        return "Suspended" if not membership.members else "Resizing"
    incident = open_incident(status.incidents)
    if status.ending is not None or _waits_for_start(facts, membership):
        return "Recovering"
    if incident is not None:
        return "Resizing" if incident.kind == "planned" else "Recovering"
    if membership.state == "Claimed":
        return "Pending" if not status.lineage else "Starting"
    has_first_step = membership == facts.status.membership and has_stepped(facts, membership.generation)
    # a new leader waits for agents to connect before it contradicts the former one
    if not has_first_step and facts.status.phase == "Running" and unconnected_members(facts):
        return "Running"
    return "Running" if has_first_step else "Starting"


def _waits_for_start(facts: MembershipNodeFacts, membership: Membership) -> bool:
    """Whether a job that has trained waits for a worker that cannot be created or started."""
    blocker = find_blocker(facts) if membership.state == "Claimed" and has_trained(facts) else None
    return blocker is not None and blocker.reason != UNSCHEDULABLE


def _derive_conditions(facts: Facts, status: JobStatus, lost: str) -> tuple[Condition, ...]:
    """Returns every condition of the status, in the order in which users read them."""
    phase, message = status.phase, status.message
    old_by_type = {c.type: c for c in facts.status.conditions}
    checkpoints_fit = old_by_type.get(reasons.CHECKPOINTS_FIT)  # set by the maintenance plan

    # conditions that every job has
    entries: list[tuple[str, Truth, str, str]] = [
        (kind, "True" if phase == kind else "False", phase, message if phase == kind else "")
        for kind in (reasons.SUSPENDED, reasons.RUNNING, reasons.RECOVERING, reasons.RESIZING)
    ]
    entries.insert(1, (reasons.PODS_SCHEDULED, *evaluate_pods_scheduled(facts, status)))
    protection = _with_memory_shortfall(evaluate_checkpoint_protected(facts), checkpoints_fit)
    entries.append((reasons.CHECKPOINT_PROTECTED, *protection))

    # conditions that appear once there is something to report
    entries += _loss_finite(facts, old_by_type.get(reasons.LOSS_FINITE))
    entries += _loss_normal(facts, old_by_type.get(reasons.LOSS_NORMAL))
    entries += _no_stragglers(status, old_by_type.get(reasons.NO_STRAGGLERS))
    if rejection := rollback_rejection(facts):
        entries.append((reasons.ROLLBACK_REJECTED, "True", "CheckpointNotFound", rejection))
    spares = evaluate_spares_ready(facts, status)
    entries += [(reasons.SPARES_READY, *spares)] if spares is not None else []
    constraint = constraint_message(facts, status)
    if constraint is not None:
        entries.append((reasons.WORLD_SIZE_FIXED, "True", "PerRankState", constraint))
    if lost:
        entries.append((reasons.CHECKPOINT_LOST, "True", "AllCopiesLost", lost))
    connected = evaluate_agents_connected(facts, old_by_type.get(reasons.AGENTS_CONNECTED))
    entries += [(reasons.AGENTS_CONNECTED, *connected)] if connected is not None else []
    accepted = evaluate_api_accepted(facts.rejected_calls, old_by_type.get(reasons.API_ACCEPTED))
    entries += [(reasons.API_ACCEPTED, *accepted)] if accepted is not None else []
    if facts.rejected_records:
        entries.append(
            (reasons.RECORDS_REJECTED, "True", OUT_OF_BOUNDS, describe_rejected_records(facts.rejected_records))
        )
    if facts.spec_rejection:
        entries.append((reasons.SPEC_REJECTED, "True", INVALID_SPEC_REASON, facts.spec_rejection))

    # memory room no longer matters once the job has ended
    if phase in ("Complete", "Failed"):
        entries.append((phase, "True", phase, message))
    elif checkpoints_fit is not None:
        entries.append((checkpoints_fit.type, checkpoints_fit.status, checkpoints_fit.reason, checkpoints_fit.message))
    return tuple(
        _build_condition(old_by_type.get(kind), (kind, truth, reason, text), facts.now)
        for kind, truth, reason, text in entries
    )


def evaluate_spares_ready(facts: MembershipNodeFacts, status: JobStatus) -> tuple[Truth, str, str] | None:
    """Returns (truth, reason, message) of `SparesReady`; None if the job has no spares."""
    spare_count, membership = facts.spec.spares, facts.status.membership
    if not spare_count:
        return None
    if facts.spec.suspend or status.phase in ("Complete", "Failed"):
        return "False", "NoWorkersWanted", "the job needs no workers: it is suspended or has ended"
    if membership is None or membership.state != "Committed" or membership != status.membership:
        condition = condition_of(facts.status, reasons.SPARES_READY)
        if condition is None:
            return "False", "Waiting", "spares are started after the workers that train"
        return _unchanged(condition)
    warm_count = min(spare_count, len(spare_agents(facts)))
    count_text = f"{warm_count} of {spare_count} spares are warm"
    if warm_count == spare_count:
        return "True", "AllWarm", count_text
    blocker = find_spare_blocker(facts)
    if blocker is None:
        return "False", "Waiting", count_text
    return "False", blocker.reason, f"{count_text}; {blocker.text}"


def _unchanged(condition: Condition) -> tuple[Truth, str, str]:
    return condition.status, condition.reason, condition.message


def _loss_finite(facts: MembershipFacts, old: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Returns `LossFinite`; empty until a loss was NaN or infinite. Without newer losses it stays as it was."""
    membership = facts.status.membership
    generation = membership.generation if membership is not None and membership.state == "Committed" else 0
    reporting = sorted(
        (s for s in sessions_in_generation(facts, generation) if generation and s.progress.loss_is_finite is not None),
        key=lambda s: s.index,
    )
    non_finite = next((s for s in reporting if not s.progress.loss_is_finite), None)
    if non_finite is not None and old is not None and old.status == "False":
        return [(old.type, old.status, old.reason, old.message)]  # it names the first such step
    if non_finite is not None:
        text = (
            f"the loss on worker {non_finite.index} is NaN or infinite at step {non_finite.progress.step}; to return to a"
            " checkpoint before it, run surefoot rollback --to, or set healthPolicy.numerics"
        )
        return [(reasons.LOSS_FINITE, "False", "NonFinite", text)]
    if old is None or not reporting:
        return [] if old is None else [(old.type, old.status, old.reason, old.message)]
    return [(reasons.LOSS_FINITE, "True", "Finite", "losses are finite again")]


def _loss_normal(facts: MembershipFacts, old: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Returns `LossNormal`; empty until a loss or gradient norm was far above those before it."""
    membership = facts.status.membership
    anomaly = find_loss_anomaly(facts) if membership is not None and membership.state == "Committed" else None
    if anomaly is not None and anomaly.kind == "spike":
        if old is not None and old.status == "False":
            return [(old.type, old.status, old.reason, old.message)]  # it names the step of the first anomaly
        return [(reasons.LOSS_NORMAL, "False", "Spike", anomaly.reason)]
    has_first_step = (
        membership is not None and membership.state == "Committed" and has_stepped(facts, membership.generation)
    )
    if old is None or not has_first_step:
        return [] if old is None else [(old.type, old.status, old.reason, old.message)]
    return [(reasons.LOSS_NORMAL, "True", "Recovered", "losses and gradient norms are back in their normal range")]


def _no_stragglers(status: JobStatus, old: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Returns `NoStragglers`; empty until a rank was persistently slower than ranks with the same work."""
    if status.stragglers:
        return [
            (reasons.NO_STRAGGLERS, "False", reasons.STRAGGLER, "; ".join(map(describe_straggler, status.stragglers)))
        ]
    return (
        []
        if old is None
        else [(reasons.NO_STRAGGLERS, "True", "NoneDetected", "no rank is persistently slower than its peers")]
    )


def _with_memory_shortfall(protection: tuple[Truth, str, str], fit: Condition | None) -> tuple[Truth, str, str]:
    """Appends the message of `CheckpointsFit` if checkpoints are unprotected and do not fit into memory."""
    truth, reason, message = protection
    message = message.partition(_DOES_NOT_FIT)[0]
    if truth == "False" and fit is not None and fit.status == "False":
        message = f"{message}{_DOES_NOT_FIT}{fit.message}"
    return truth, reason, message


def _build_condition(old: Condition | None, entry: tuple[str, Truth, str, str], now: float) -> Condition:
    kind, truth, reason, message = entry
    transition_seconds = old.last_transition_seconds if old is not None and old.status == truth else now
    return Condition(kind, truth, reason, message, transition_seconds)


# ---- status events ---------------------------------------------------------------------------------------------------
# Derives events from the difference between two statuses. Each event is recorded once per change, not once per reconcile.

_NO_BLOCKER = ("Scheduled", "WaitingForNodes", "NoWorkersWanted", EXITED_EARLY, OUT_OF_MEMORY, RELEASED)
"""Reasons of PodsScheduled that need no event: nothing is wrong, or another event reports it (an ended worker is a
WorkerLost)."""

_MAX_STACKS_CHARACTERS = 800
"""Characters of stacks in an event; the incident in the status has more of them."""


def status_change_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Returns the events that the difference between two statuses of a job calls for."""
    derivations = (
        _generation_events,
        _protection_events,
        _world_size_events,
        _spec_events,
        _record_events,
        _rollback_events,
        _straggler_events,
        _blocker_events,
        _stacks_events,
        _checkpoint_lost_events,
        _unconnected_events,
    )
    return tuple(event for derive in derivations for event in derive(old, new))


def _generation_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports a newly claimed generation."""
    membership = new.membership
    if (
        membership is None
        or membership.state != "Claimed"
        or (old.membership is not None and old.membership.generation >= membership.generation)
    ):
        return ()
    text = f"generation {membership.generation} is claimed: {membership.reason}"
    return (Event("GenerationClaimed", text),)


def _protection_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports that checkpoints became protected, unprotected, overdue or unknown."""
    old_condition, new_condition = (
        _condition_of(old, reasons.CHECKPOINT_PROTECTED),
        _condition_of(new, reasons.CHECKPOINT_PROTECTED),
    )
    if new_condition is None:
        return ()
    if new_condition.reason == reasons.MEMORY_SERVERS_UNREACHABLE:
        is_reported = old_condition is not None and old_condition.reason == new_condition.reason
        return () if is_reported else (Event(reasons.MEMORY_SERVERS_UNREACHABLE, new_condition.message, True),)
    is_overdue = new_condition.reason == "Overdue"
    if is_overdue and (old_condition is None or old_condition.reason != "Overdue"):
        return (Event("CheckpointOverdue", new_condition.message, True),)
    if old_condition is not None and old_condition.status != "True" and new_condition.status == "True":
        newest = f": step {new.last_complete.step}" if new.last_complete is not None else ""
        return (Event(reasons.CHECKPOINT_PROTECTED, f"{new_condition.message}{newest}"),)
    if old_condition is not None and old_condition.status == "True" and new_condition.status == "False":
        return (
            Event(
                "CheckpointUnprotected",
                f"{new_condition.message}; a failure now would lose every step since the last complete checkpoint",
                True,
            ),
        )
    return ()


def _stacks_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports the stacks of an incident once, when every worker had time to send its own."""
    incident = new.incidents[-1] if new.incidents else None
    if incident is None or not incident.detail or new.membership is None:
        return ()
    is_recovered = (
        new.membership.state == "Committed"
        and new.membership.generation == incident.generation + 1
        and new.membership != old.membership
    )
    has_failed = new.phase == "Failed" and old.phase != "Failed"
    if not has_failed and not (is_recovered and old.membership is not None and old.membership.state == "Claimed"):
        return ()
    stacks = incident.detail[:_MAX_STACKS_CHARACTERS]
    text = f"stacks of the ranks at the end of generation {incident.generation}:\n{stacks}"
    return (Event("StacksCollected", text),)


def _spec_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports a spec that was rejected."""
    old_condition, new_condition = _condition_of(old, reasons.SPEC_REJECTED), _condition_of(new, reasons.SPEC_REJECTED)
    if new_condition is None or (old_condition is not None and old_condition.message == new_condition.message):
        return ()
    return (Event(reasons.JOB_SPEC_REJECTED, f"{new_condition.message}; the job continues with its former spec", True),)


def _record_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports records of the job that exceed a limit."""
    old_condition, new_condition = (
        _condition_of(old, reasons.RECORDS_REJECTED),
        _condition_of(new, reasons.RECORDS_REJECTED),
    )
    if new_condition is None or (old_condition is not None and old_condition.message == new_condition.message):
        return ()
    return (Event(reasons.RECORDS_REJECTED, f"ignored a record of this job: {new_condition.message}", True),)


def _rollback_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports a rollback that was rejected."""
    old_condition, new_condition = (
        _condition_of(old, reasons.ROLLBACK_REJECTED),
        _condition_of(new, reasons.ROLLBACK_REJECTED),
    )
    if new_condition is None or (old_condition is not None and old_condition.message == new_condition.message):
        return ()
    return (Event(reasons.ROLLBACK_REJECTED, new_condition.message, True),)


def _straggler_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports each slow rank once per node, and the end only when no rank is slow."""
    reported = {(straggler.rank, straggler.node) for straggler in old.stragglers}
    detected_events = [
        Event(reasons.STRAGGLER, describe_straggler(straggler), True)
        for straggler in new.stragglers
        if (straggler.rank, straggler.node) not in reported
    ]
    recovered = [straggler for straggler in old.stragglers if not new.stragglers]
    resolved_events = [
        Event(
            "StragglerResolved",
            f"rank {straggler.rank} on node {straggler.node} is no longer slower than its peers",
        )
        for straggler in recovered
    ]
    return (*detected_events, *resolved_events)


def _blocker_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports each cause that keeps workers from running once, although its text returns with other numbers."""
    old_condition, new_condition = (
        _condition_of(old, reasons.PODS_SCHEDULED),
        _condition_of(new, reasons.PODS_SCHEDULED),
    )
    if new_condition is None or new_condition.reason in _NO_BLOCKER:
        return ()
    is_rejection = new_condition.reason in (CREATION_REJECTED, NO_GROUP)
    if (
        old_condition is not None
        and old_condition.reason == new_condition.reason
        and (not is_rejection or _message_without_digits(old_condition) == _message_without_digits(new_condition))
    ):
        return ()
    retry_text = "; the operator tries again" if is_rejection else ""
    return (Event(event_reason_of(new_condition.reason), f"{new_condition.message}{retry_text}", True),)


def _message_without_digits(condition: Condition) -> str:
    """Returns the message without numbers, such as attempts or the rest of a quota, to compare causes."""
    return "".join(letter for letter in condition.message if not letter.isdigit())


def _checkpoint_lost_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    old_condition, new_condition = (
        _condition_of(old, reasons.CHECKPOINT_LOST),
        _condition_of(new, reasons.CHECKPOINT_LOST),
    )
    return (
        (Event(reasons.CHECKPOINT_LOST, new_condition.message, True),)
        if new_condition is not None and old_condition is None
        else ()
    )


def _unconnected_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports agents that have not connected to this leader."""
    old_condition, new_condition = (
        _condition_of(old, reasons.AGENTS_CONNECTED),
        _condition_of(new, reasons.AGENTS_CONNECTED),
    )
    if (
        new_condition is None
        or new_condition.status != "False"
        or (old_condition is not None and old_condition.status == "False")
    ):
        return ()
    return (Event("AgentsNotConnected", new_condition.message, True),)


def _world_size_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Reports that a checkpoint fixes the world size."""
    old_condition, new_condition = (
        _condition_of(old, reasons.WORLD_SIZE_FIXED),
        _condition_of(new, reasons.WORLD_SIZE_FIXED),
    )
    if new_condition is None or (old_condition is not None and old_condition.message == new_condition.message):
        return ()
    return (Event(reasons.WORLD_SIZE_FIXED, new_condition.message, True),)


def _condition_of(status: JobStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


# ---- contents of the tiers -------------------------------------------------------------------------------------------
# Counts the saves of a job in each tier, for its status. `reconcile` calls it only when a status is about to be written
# anyway: saves come and go with every interval, and a status for their bytes alone would be a stream of API writes.


def update_contents(snapshot: JobSnapshot, status: JobStatus) -> JobStatus:
    """Adds checkpoint latency and the contents of both tiers to a status that differs from the stored one.

    What was not read or measured in this generation keeps its last value.
    """
    if status == snapshot.status:
        return status
    membership, contents = status.membership, status.checkpoints
    if status.memory_cleared:
        return replace(status, checkpoints=StoredCheckpoints(persistent=contents.persistent))
    if membership is None or membership.state != "Committed":
        return status
    latency = _measure_latency(snapshot, membership.generation, status.checkpoint_latency)
    status = replace(status, checkpoint_latency=latency)
    reading = servers_reading(snapshot.servers, membership.generation)
    if reading.servers:
        newest = status.last_complete
        copies = 0 if newest is None else count_copies(newest, reading, server_domains(snapshot.servers))
        in_memory = _count_contents(m for entries in reading.servers.values() for m in entries)
        contents = replace(contents, memory=in_memory, copies=copies)
    persistent = _persistent_contents(snapshot, status, reading)
    return replace(status, checkpoints=replace(contents, persistent=persistent))


def _persistent_contents(snapshot: JobSnapshot, status: JobStatus, reading: TierReading) -> TierContents | None:
    """Returns the listed contents, or the last ones plus later uploads if the listing is older."""
    last_contents, listing = status.checkpoints.persistent, snapshot.persistent
    last_uploaded = status.last_uploaded
    is_current = status.membership is not None and listing.read_generation == status.membership.generation
    manifests = listing.entries if is_current else None
    # a listing that lacks the last upload is older than it
    if manifests is not None and (last_uploaded is None or any(m.save.checkpoint == last_uploaded for m in manifests)):
        return _count_contents(manifests)
    if last_contents is None and manifests is not None:
        last_contents = _count_contents(manifests)
    if last_uploaded is None or last_uploaded == snapshot.status.last_uploaded:
        return last_contents
    uploaded = _count_contents(copies[0] for copies in reading.manifests_by_rank().get(last_uploaded, {}).values())
    return uploaded if last_contents is None else _sum(last_contents, uploaded)


def _sum(first: TierContents, second: TierContents) -> TierContents:
    return TierContents(first.bytes + second.bytes, first.checkpoints + second.checkpoints)


def _count_contents(saves: Iterable[RankManifest]) -> TierContents:
    """Adds up the bytes of saves, and counts their checkpoints."""
    size_bytes, checkpoints = 0, set()
    for manifest in saves:
        size_bytes += manifest.stream_bytes + manifest.digests_bytes + manifest.values_bytes
        checkpoints.add((manifest.save.generation, manifest.save.step))
    return TierContents(size_bytes, len(checkpoints))


def _measure_latency(snapshot: JobSnapshot, generation: int, last: CheckpointLatency) -> CheckpointLatency:
    """Returns the latency of the generation's newest saves, over all agents."""
    timings = [session.timings for session in snapshot.sessions if session.generation == generation]
    return CheckpointLatency(
        stall=_quantiles(seconds for timing in timings for seconds in timing.stalls) or last.stall,
        replicated=_quantiles(seconds for timing in timings for seconds in timing.flushes) or last.replicated,
        persistent=_quantiles(snapshot.recent_upload_seconds) or last.persistent,
    )


def _quantiles(durations: Iterable[float]) -> LatencyQuantiles | None:
    """Returns median and 99th percentile, by nearest rank; None without a measurement."""
    seconds = sorted(durations)
    if not seconds:
        return None
    p50, p99 = (float(f"{seconds[math.ceil(share * len(seconds)) - 1]:.3g}") for share in (0.5, 0.99))
    return LatencyQuantiles(p50, p99)
