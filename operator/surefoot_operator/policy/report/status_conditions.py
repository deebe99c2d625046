"""Derives a job's phase, conditions, message, events and tier contents for its status.

Pure; the last part of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from surefoot.protocol.checkpoints.completeness import (
    TierReading,
    complete_checkpoints,
    copies_of,
    effective_replicas,
    newest_checkpoint,
)
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint
from surefoot_operator import reasons
from surefoot_operator.api.status import (
    Condition,
    JobStatus,
    Membership,
    Phase,
    StoredCheckpoints,
    TierContents,
    condition_of,
)
from surefoot_operator.api.topology_levels import levels
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    Facts,
    JobFacts,
    NodeFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_by_identity,
    data_read,
    domains_of,
    has_stepped,
    last_step_seconds,
    mean_reported_loss,
    reading_at,
    saving_steps,
    seconds_per_step,
    server_domains,
    servers_reading,
    sessions_in_generation,
    step_of,
    topology_of_job,
    unreadable_checkpoints,
)
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.loss_anomalies import unsound_loss
from surefoot_operator.policy.failure.memory_server_liveness import unreachable_message
from surefoot_operator.policy.failure.spare_workers import spare_agents, target_size
from surefoot_operator.policy.failure.stragglers import describe_straggler
from surefoot_operator.policy.membership.claim import RELEASED, constraint_message, is_released
from surefoot_operator.policy.membership.claim import release_message as released
from surefoot_operator.policy.membership.lifecycle import INVALID
from surefoot_operator.policy.membership.rollback import rejection as rollback_refusal
from surefoot_operator.policy.membership.workers import has_trained
from surefoot_operator.policy.report.blockers import (
    CREATION_REJECTED,
    EXITED_EARLY,
    NO_GROUP,
    OUT_OF_MEMORY,
    REASON,
    UNSCHEDULABLE,
    acceptance,
    agents_heard,
    event_reason,
    find_blocker,
    find_spare_blocker,
    refused_message,
    unheard_members,
)
from surefoot_operator.policy.report.time_spent import update_time_spent

# ---- spread of copies ------------------------------------------------------------------------------------------------
# Says over how many racks, zones or nodes the copies of a checkpoint are spread. Pure; part of the condition
# `CheckpointProtected`. A loss of the whole rack costs no checkpoint whose copies are in two.


@cached_by_identity
def copy_spread(
    reading: TierReading, checkpoint: Checkpoint, copies: int, topology: Topology, topology_key: str
) -> str:
    """Returns "2 copies in 2 racks", by the rank whose copies are the closest together."""
    number = "1 copy" if copies == 1 else f"{copies} copies"
    holders = reading.having().get(checkpoint, {}).values()
    level = topology.highest_difference(holder.node for holder in reading.servers)
    if level is None or not holders:
        return f"{number} on {_plural(copies, 'node')}"
    paths = topology.differing(holder.node for holder in reading.servers)
    places = min(len({paths[holder.node][0] for holder in of_rank}) for of_rank in holders)
    where = _plural(places, levels(topology_key)[level].noun)
    return f"{number}, for some ranks all within {where}" if places < copies else f"{number} in {where}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---- status conditions -----------------------------------------------------------------------------------------------

PROGRESS_SECONDS = 5.0
"""Steps are written to status no more often than this, so that progress costs no stream of writes."""

STALLED_INTERVALS = 3
STALLED_SECONDS = 4.0
"""Also where intervals are short: a save of each step arrives some steps later, and holders are read now and then."""

UNREAD_SECONDS = 5.0
"""A new leader, and a new epoch, may take so long to read the holders."""

_DOES_NOT_FIT = "; checkpoints do not fit: "

Truth = Literal["True", "False", "Unknown"]


def summarize(facts: Facts, status: JobStatus, message: str, lost: str = "") -> JobStatus:
    """Sets phase, message, conditions and progress in a status.

    Equal input gives equal output, so plans reach a fixed point. `lost`: the message where every checkpoint is lost.
    """
    status = _with_progress(facts, status)
    status = replace(status, observed_generation=facts.job.metadata_generation)
    if status.phase not in ("Complete", "Failed"):
        status = replace(status, phase="Recovering" if lost else _phase(facts, status), message=message)
    return replace(status, conditions=_conditions(facts, status, lost), time_spent=update_time_spent(facts, status))


def reported_loss_message(facts: JobFacts) -> str:
    """Returns the message of a total loss already reported in this claim.

    It holds until something is found, also while tiers are asked again.
    """
    known = condition_of(facts.status, reasons.CHECKPOINT_LOST)
    return known.message if known is not None else ""


def pods_scheduled(facts: WorldNodeFacts, status: JobStatus) -> tuple[Truth, str, str]:
    """Returns (truth, reason, message): whether every wanted worker has a node."""
    if facts.spec.suspend or facts.status.phase in ("Complete", "Failed"):
        return "False", "NoWorkersWanted", "no workers are wanted"
    if is_released(facts, status):
        return "False", RELEASED, released(status.scheduling)
    live = [w for w in facts.worker_list if w.phase not in ("Succeeded", "Failed") and not w.deleting]
    placed, wanted = len({w.index for w in live if w.node is not None}), target_size(facts.spec)
    there, why = f"{min(placed, wanted)} of {wanted} workers have a node", find_blocker(facts)
    if placed >= wanted:
        if why is None or not why.placed:
            return "True", "Scheduled", there
        return "True", why.reason, f"{there}; {why.text}"
    return ("False", "Waiting", there) if why is None else ("False", why.reason, f"{there}; {why.text}")


def checkpoint_protected(facts: Facts) -> tuple[Truth, str, str]:
    """Returns (truth, reason, message): whether a failure finds a safe checkpoint."""
    world = facts.status.membership
    unseen = unreachable_message(facts)
    if unseen:
        return "Unknown", reasons.MEMORY_SERVERS_UNREACHABLE, unseen
    if world is None or world.state != "Committed":
        return _last(facts)
    reading = reading_at(facts, world.generation)
    if not reading.servers:
        return _unread(facts, world)
    domains = domains_of(facts)
    replicas = effective_replicas(
        facts.spec.checkpoint.memory.replicas, len({domains[holder] for holder in reading.servers})
    )
    found = complete_checkpoints(
        reading, facts.status.lineage, world.generation, unreadable_checkpoints(facts), facts.covers
    )
    full = newest_checkpoint(c for c in found if copies_of(c, reading, domains) >= replicas)
    safe = newest_checkpoint(c for c in (full, facts.status.last_uploaded) if c is not None)
    behind = step_of(facts, world.generation) - max(_chosen_at(facts), *(c.step for c in found), world.start_step)
    if _is_late(facts, behind):
        return "False", "Stalled", f"no checkpoint became complete for {STALLED_INTERVALS} intervals"
    if safe is not None:
        return "True", "Protected", _where_safe(facts, safe, reading, replicas)
    if found:
        return "False", "TooFewCopies", f"no complete checkpoint has {replicas} copies yet"
    return "False", "NoCheckpoint", "no checkpoint is complete yet"


def _where_safe(facts: NodeFacts, safe: Checkpoint, reading: TierReading, copies: int) -> str:
    if safe == facts.status.last_uploaded:
        return "a complete checkpoint is in the persistent tier"
    key = facts.spec.checkpoint.memory.topology_key
    return f"a complete checkpoint has {copy_spread(reading, safe, copies, topology_of_job(facts), key)}"


def _unread(facts: WorldFacts, world: Membership) -> tuple[Truth, str, str]:
    """No holder says what it has: as it was, until training has gone so far that a failure would cost more than it may."""
    known = facts.status.last_complete
    behind = step_of(facts, world.generation) - max(
        world.start_step, _chosen_at(facts), known.step if known is not None else 0
    )
    if _is_late(facts, behind) and facts.now > max(facts.term_seconds, world.changed_seconds) + UNREAD_SECONDS:
        return (
            "False",
            "Stalled",
            f"no holder answers, and no checkpoint became complete for {STALLED_INTERVALS} intervals",
        )
    return _last(facts)


def _is_late(facts: WorldFacts, behind: int) -> bool:
    """Whether `behind` steps without a new checkpoint are too many, and took too long for one that is just arriving."""
    if behind <= (STALLED_INTERVALS + 1) * saving_steps(facts):
        return False
    pace, last = seconds_per_step(facts), last_step_seconds(facts, facts.membership.generation)
    return pace is None or last is None or behind * pace + facts.now - last > STALLED_SECONDS


def _chosen_at(facts: WorldFacts) -> int:
    """The step at which saving began to be as often as it is: nothing is late by an interval that did not count yet."""
    chosen = facts.status.memory_interval
    return 0 if chosen is None else min(chosen.since_step, step_of(facts, facts.membership.generation))


def _last(facts: JobFacts) -> tuple[Truth, str, str]:
    known = condition_of(facts.status, reasons.CHECKPOINT_PROTECTED)
    if known is None:
        return "False", "NoCheckpoint", "no checkpoint is complete yet"
    return _unchanged(known)


def _with_progress(facts: WorldFacts, status: JobStatus) -> JobStatus:
    epoch = facts.running_generation
    step, at = step_of(facts, epoch), last_step_seconds(facts, epoch) if status.membership is not None else None
    if at is None or step == status.step:
        return status
    moved = status.membership != facts.status.membership or status.phase in ("Complete", "Failed")
    if moved or status.progress_seconds is None or at - status.progress_seconds >= PROGRESS_SECONDS:
        data = data_read(facts, epoch) or status.data
        return replace(status, step=step, progress_seconds=at, data=data, loss=_loss(facts, epoch, status.loss))
    return status


def _loss(facts: WorldFacts, epoch: int, known: float | None) -> float | None:
    """Returns the loss to tell; one that is no number is none.

    JSON has no such number, and `LossFinite` says it.
    """
    told = mean_reported_loss(facts, epoch)
    if told is None:
        return known
    return float(f"{told:.6g}") if math.isfinite(told) else None


def _phase(facts: WorldNodeFacts, status: JobStatus) -> Phase:
    world = status.membership
    if world is None:
        return "Suspended" if facts.spec.suspend else "Pending"
    if facts.spec.suspend and (world.state == "Claimed" or not world.members):
        return "Suspended" if not world.members else "Resizing"
    incident = open_incident(status.incidents)
    if status.ending is not None or _waits_for_start(facts, world):
        return "Recovering"
    if incident is not None:
        return "Resizing" if incident.kind == "planned" else "Recovering"
    if world.state == "Claimed":
        return "Pending" if not status.lineage else "Starting"
    stepped = world == facts.status.membership and has_stepped(facts, world.generation)
    if not stepped and facts.status.phase == "Running" and unheard_members(facts):
        return "Running"  # as the former leader saw it; this one has heard nothing that says otherwise
    return "Running" if stepped else "Starting"


def _waits_for_start(facts: WorldNodeFacts, world: Membership) -> bool:
    """Whether a job that has trained stands because a worker cannot be made or started: no planned change is that."""
    why = find_blocker(facts) if world.state == "Claimed" and has_trained(facts) else None
    return why is not None and why.reason != UNSCHEDULABLE


def _conditions(facts: Facts, status: JobStatus, lost: str) -> tuple[Condition, ...]:
    phase, message = status.phase, status.message
    known = {c.type: c for c in facts.status.conditions}
    room = known.get(reasons.CHECKPOINTS_FIT)  # `maintain` judges it
    wanted: list[tuple[str, Truth, str, str]] = [
        (kind, "True" if phase == kind else "False", phase, message if phase == kind else "")
        for kind in (reasons.SUSPENDED, reasons.RUNNING, reasons.RECOVERING, reasons.RESIZING)
    ]
    wanted.insert(1, (reasons.PODS_SCHEDULED, *pods_scheduled(facts, status)))
    wanted.append((reasons.CHECKPOINT_PROTECTED, *_with_memory_shortfall(checkpoint_protected(facts), room)))
    wanted += _finite(facts, known.get(reasons.LOSS_FINITE))
    wanted += _in_band(facts, known.get(reasons.LOSS_NORMAL))
    wanted += _no_stragglers(status, known.get(reasons.NO_STRAGGLERS))
    if why := rollback_refusal(facts):
        wanted.append((reasons.ROLLBACK_REJECTED, "True", "CheckpointNotFound", why))
    spares = spares_ready(facts, status)
    wanted += [(reasons.SPARES_READY, *spares)] if spares is not None else []
    tie = constraint_message(facts, status)
    if tie is not None:
        wanted.append((reasons.WORLD_SIZE_FIXED, "True", "PerRankState", tie))
    if lost:
        wanted.append((reasons.CHECKPOINT_LOST, "True", "AllCopiesLost", lost))
    heard = agents_heard(facts, known.get(reasons.AGENTS_HEARD))
    wanted += [(reasons.AGENTS_HEARD, *heard)] if heard is not None else []
    accepted = acceptance(facts.refused_calls, known.get(reasons.API_ACCEPTED))
    wanted += [(reasons.API_ACCEPTED, *accepted)] if accepted is not None else []
    if facts.refused_records:
        wanted.append((reasons.RECORDS_REFUSED, "True", REASON, refused_message(facts.refused_records)))
    if facts.refusal:
        wanted.append((reasons.SPEC_REJECTED, "True", INVALID, facts.refusal))
    if phase in ("Complete", "Failed"):
        wanted.append((phase, "True", phase, message))
    elif room is not None:
        wanted.append((room.type, room.status, room.reason, room.message))
    return tuple(
        _condition(known.get(kind), (kind, truth, reason, text), facts.now) for kind, truth, reason, text in wanted
    )


def spares_ready(facts: WorldNodeFacts, status: JobStatus) -> tuple[Truth, str, str] | None:
    """Returns (truth, reason, message) about the spares; None: not asked for."""
    wanted, world = facts.spec.spares, facts.status.membership
    if not wanted:
        return None
    if facts.spec.suspend or status.phase in ("Complete", "Failed"):
        return "False", "NoWorkersWanted", "no workers are wanted"
    if world is None or world.state != "Committed" or world != status.membership:
        known = condition_of(facts.status, reasons.SPARES_READY)
        return ("False", "Waiting", "the world comes first") if known is None else _unchanged(known)
    warm = min(wanted, len(spare_agents(facts)))
    there = f"{warm} of {wanted} spares are warm"
    if warm == wanted:
        return "True", "Warm", there
    why = find_spare_blocker(facts)
    return ("False", "Waiting", there) if why is None else ("False", why.reason, f"{there}; {why.text}")


def _unchanged(known: Condition) -> tuple[Truth, str, str]:
    return known.status, known.reason, known.message


def _finite(facts: WorldFacts, known: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Whether losses are numbers: told once one was not, and as it was where no step tells anything newer."""
    world = facts.status.membership
    epoch = world.generation if world is not None and world.state == "Committed" else 0
    told = sorted(
        (s for s in sessions_in_generation(facts, epoch) if epoch and s.progress.loss_is_finite is not None),
        key=lambda s: s.index,
    )
    bad = next((s for s in told if not s.progress.loss_is_finite), None)
    if bad is not None and known is not None and known.status == "False":
        return [(known.type, known.status, known.reason, known.message)]  # the step at which it was seen first
    if bad is not None:
        text = f"the loss on worker {bad.index} is NaN or infinite at step {bad.progress.step}; to start again before it, go back with"
        return [
            (reasons.LOSS_FINITE, "False", "NonFinite", f"{text} surefoot rollback --to, or set healthPolicy.numerics")
        ]
    if known is None or not told:
        return [] if known is None else [(known.type, known.status, known.reason, known.message)]
    return [(reasons.LOSS_FINITE, "True", "Finite", "losses are finite again")]


def _in_band(facts: WorldFacts, known: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Whether losses and gradient norms are near those before: told once they were not."""
    world = facts.status.membership
    found = unsound_loss(facts) if world is not None and world.state == "Committed" else None
    if found is not None and found.kind == "spike":
        if known is not None and known.status == "False":
            return [(known.type, known.status, known.reason, known.message)]  # where it began
        return [(reasons.LOSS_NORMAL, "False", "Spike", found.reason)]
    stepped = world is not None and world.state == "Committed" and has_stepped(facts, world.generation)
    if known is None or not stepped:
        return [] if known is None else [(known.type, known.status, known.reason, known.message)]
    return [(reasons.LOSS_NORMAL, "True", "Recovered", "losses are in band again")]


def _no_stragglers(status: JobStatus, known: Condition | None) -> list[tuple[str, Truth, str, str]]:
    """Whether ranks that do the same work as long for it: told once one did not."""
    if status.stragglers:
        return [
            (reasons.NO_STRAGGLERS, "False", reasons.STRAGGLER, "; ".join(map(describe_straggler, status.stragglers)))
        ]
    return (
        []
        if known is None
        else [(reasons.NO_STRAGGLERS, "True", "Even", "no rank is persistently slower than its peers")]
    )


def _with_memory_shortfall(protected: tuple[Truth, str, str], room: Condition | None) -> tuple[Truth, str, str]:
    """With the numbers, where nothing is in safety because checkpoints do not fit."""
    truth, reason, message = protected
    message = message.partition(_DOES_NOT_FIT)[0]
    if truth == "False" and room is not None and room.status == "False":
        message = f"{message}{_DOES_NOT_FIT}{room.message}"
    return truth, reason, message


def _condition(old: Condition | None, wanted: tuple[str, Truth, str, str], now: float) -> Condition:
    kind, truth, reason, message = wanted
    since = old.last_transition_seconds if old is not None and old.status == truth else now
    return Condition(kind, truth, reason, message, since)


# ---- status events ---------------------------------------------------------------------------------------------------
# Derives events from the difference between two statuses.

_NO_BLOCKER = ("Scheduled", "Waiting", "NoWorkersWanted", EXITED_EARLY, OUT_OF_MEMORY, RELEASED)
"""Reasons of PodsScheduled that are told by other events, or by none: a worker that ended is told as lost."""

_MAX_STACKS_CHARACTERS = 800
"""Characters of an event; the incident has more of them."""


def status_change_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Derives the events that a changed status calls for."""
    parts = (
        _claimed,
        _protected,
        _tied,
        _rejected,
        _records_refused,
        _retained_incidents,
        _straggler_events,
        _blocked,
        _stacks_collected,
        _lost,
        _unheard,
    )
    return tuple(event for part in parts for event in part(old, new))


def _claimed(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    world = new.membership
    if (
        world is None
        or world.state != "Claimed"
        or (old.membership is not None and old.membership.generation >= world.generation)
    ):
        return ()
    return (Event(reasons.GENERATION_CLAIMED, f"epoch {world.generation} is claimed: {world.reason}"),)


def _protected(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.CHECKPOINT_PROTECTED), _condition_of(new, reasons.CHECKPOINT_PROTECTED)
    if now is None:
        return ()
    if now.reason == reasons.MEMORY_SERVERS_UNREACHABLE:
        known = was is not None and was.reason == now.reason
        return () if known else (Event(reasons.MEMORY_SERVERS_UNREACHABLE, now.message, True),)
    stalled = now.reason == "Stalled"
    if stalled and (was is None or was.reason != "Stalled"):
        return (Event(reasons.CHECKPOINT_OVERDUE, now.message, True),)
    if was is not None and was.status != "True" and now.status == "True":
        newest = f": step {new.last_complete.step}" if new.last_complete is not None else ""
        return (Event(reasons.CHECKPOINT_PROTECTED, f"{now.message}{newest}"),)
    if was is not None and was.status == "True" and now.status == "False":
        return (
            Event(
                reasons.UNPROTECTED,
                f"{now.message}; a failure now would lose every step since the last complete checkpoint",
                True,
            ),
        )
    return ()


def _stacks_collected(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Where ranks stood, once an incident: when every worker had its time to say so."""
    incident = new.incidents[-1] if new.incidents else None
    if incident is None or not incident.detail or new.membership is None:
        return ()
    answered = (
        new.membership.state == "Committed"
        and new.membership.generation == incident.generation + 1
        and new.membership != old.membership
    )
    over = new.phase == "Failed" and old.phase != "Failed"
    if not over and not (answered and old.membership is not None and old.membership.state == "Claimed"):
        return ()
    where = incident.detail[:_MAX_STACKS_CHARACTERS]
    return (Event(reasons.STACKS_COLLECTED, f"where the ranks of epoch {incident.generation} stood:\n{where}"),)


def _rejected(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.SPEC_REJECTED), _condition_of(new, reasons.SPEC_REJECTED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.JOB_SPEC_REJECTED, f"{now.message}; the job continues with its former spec", True),)


def _records_refused(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.RECORDS_REFUSED), _condition_of(new, reasons.RECORDS_REFUSED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.RECORDS_REFUSED, f"ignored a record of this job: {now.message}", True),)


def _retained_incidents(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.ROLLBACK_REJECTED), _condition_of(new, reasons.ROLLBACK_REJECTED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.ROLLBACK_REJECTED, now.message, True),)


def _straggler_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Who is slow, once a rank and node; and once that none is any more."""
    before = {(one.rank, one.node) for one in old.stragglers}
    told = [
        Event(reasons.STRAGGLER, describe_straggler(one), True)
        for one in new.stragglers
        if (one.rank, one.node) not in before
    ]
    gone = [one for one in old.stragglers if not new.stragglers]
    over = [
        Event(reasons.STRAGGLER_RESOLVED, f"rank {one.rank} is no straggler on node {one.node} any more")
        for one in gone
    ]
    return (*told, *over)


def _blocked(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """What keeps workers from running, once a cause: its words come again with other numbers, and in other rounds."""
    was, now = _condition_of(old, reasons.PODS_SCHEDULED), _condition_of(new, reasons.PODS_SCHEDULED)
    if now is None or now.reason in _NO_BLOCKER:
        return ()
    asked = now.reason in (CREATION_REJECTED, NO_GROUP)
    if (
        was is not None
        and was.reason == now.reason
        and (not asked or _message_without_digits(was) == _message_without_digits(now))
    ):
        return ()
    again = "; the operator tries again" if asked else ""
    return (Event(event_reason(now.reason), f"{now.message}{again}", True),)


def _message_without_digits(told: Condition) -> str:
    """Without numbers: of attempts, of what a quota has left."""
    return "".join(letter for letter in told.message if not letter.isdigit())


def _lost(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.CHECKPOINT_LOST), _condition_of(new, reasons.CHECKPOINT_LOST)
    return (Event(reasons.CHECKPOINT_LOST, now.message, True),) if now is not None and was is None else ()


def _unheard(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.AGENTS_HEARD), _condition_of(new, reasons.AGENTS_HEARD)
    if now is None or now.status != "False" or (was is not None and was.status == "False"):
        return ()
    return (Event(reasons.AGENTS_UNHEARD, now.message, True),)


def _tied(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    was, now = _condition_of(old, reasons.WORLD_SIZE_FIXED), _condition_of(new, reasons.WORLD_SIZE_FIXED)
    if now is None or (was is not None and was.message == now.message):
        return ()
    return (Event(reasons.WORLD_SIZE_FIXED, now.message, True),)


def _condition_of(status: JobStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


# ---- contents of the tiers -------------------------------------------------------------------------------------------
# Counts what each tier has of a job, for its status. Pure; called by `reconcile` when a status is about to be written.
# Saves come and go with every interval: a status written for their bytes alone would be a stream of writes to the API
# server.


def update_contents(seen: JobSnapshot, status: JobStatus) -> JobStatus:
    """Adds the figures to a status that differs from the stored one.

    What was not read for its epoch stays as it was told before.
    """
    if status == seen.status:
        return status
    world, known = status.membership, status.checkpoints
    if status.memory_cleared:
        return replace(status, checkpoints=StoredCheckpoints(persistent=known.persistent))
    if world is None or world.state != "Committed":
        return status
    reading = servers_reading(seen.servers, world.generation)
    if reading.servers:
        newest = status.last_complete
        copies = 0 if newest is None else copies_of(newest, reading, server_domains(seen.servers))
        in_memory = _counted(m for entries in reading.servers.values() for m in entries)
        known = replace(known, memory=in_memory, copies=copies)
    return replace(status, checkpoints=replace(known, persistent=_persistent(seen, status, reading)))


def _persistent(seen: JobSnapshot, status: JobStatus, reading: TierReading) -> TierContents | None:
    """As it was listed, else as it was told and what was uploaded since: a listing comes once a minute at most."""
    known, listing, floor = status.checkpoints.persistent, seen.persistent, status.last_uploaded
    current = status.membership is not None and listing.read_generation == status.membership.generation
    listed = listing.entries if current else None
    if listed is not None and (floor is None or any(m.save.checkpoint == floor for m in listed)):
        return _counted(listed)
    if known is None and listed is not None:
        known = _counted(listed)
    if floor is None or floor == seen.status.last_uploaded:
        return known
    uploaded = _counted(copies[0] for copies in reading.manifests().get(floor, {}).values())
    return uploaded if known is None else _sum(known, uploaded)


def _sum(one: TierContents, other: TierContents) -> TierContents:
    return TierContents(one.bytes + other.bytes, one.checkpoints + other.checkpoints)


def _counted(saves: Iterable[RankManifest]) -> TierContents:
    size, found = 0, set()
    for one in saves:
        size += one.stream_bytes + one.digests_bytes + one.values_bytes
        found.add((one.save.generation, one.save.step))
    return TierContents(size, len(found))
