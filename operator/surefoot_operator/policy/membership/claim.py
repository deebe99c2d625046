"""Claims and commits worlds, selects members, and releases workers that wait too long for a world.

Pure. Each change is one new status; the reconciler writes it by compare-and-swap on the old world, so of two leaders
one loses.
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
    complete_persistent,
    newest_checkpoint,
    on_lineage,
    pruned,
    watermark,
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
from surefoot_operator.job_snapshot import HIGHEST_EPOCH, ObservedSession, ObservedWorker
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.availability import (
    costly_nodes,
    evacuation_reason,
    is_usable,
    node_lost,
    termination_reason,
)
from surefoot_operator.policy.core.facts import (
    RECONNECT_GRACE_SECONDS,
    JobFacts,
    NodeFacts,
    TierFacts,
    WorldNodeFacts,
    WorldTierFacts,
    cached_per_snapshot,
    domains_of,
    fenced_servers,
    reading_at,
    step_of,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.failure import incidents
from surefoot_operator.policy.failure.failure_detection import connection_deadline, most_members_connected
from surefoot_operator.policy.failure.spare_workers import largest_size, newest_attempts, required_indices, target_size
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
    may_be_under_way,
    record_rollback,
    restore_limit,
    surviving_last_good,
)

# ---- scheduling deadline ---------------------------------------------------------------------------------------------
# Releases nodes held too long without enough workers for a world. Two jobs that each got half of a small cluster would
# wait for each other for ever. So a job that is short of workers for too long releases all of them, and asks again
# after a pause of its own.

RELEASED = "NodesReleased"
"""Reason of PodsScheduled while no workers are asked for."""

_FIRST_PAUSE = 0.1
"""Of the deadline; doubled with each further release, up to the whole of it."""


@dataclass(frozen=True, slots=True)
class SchedulingRelease:
    """Scheduling state after a decision.

    `reason`: why no workers are asked for; empty: they are.
    """

    scheduling: Scheduling
    reason: str = ""
    events: tuple[Event, ...] = ()


def update_scheduling(facts: WorldNodeFacts, tied: int | None = None) -> SchedulingRelease:
    """Decides whether workers keep their nodes while the world waits."""
    known, deadline = facts.status.scheduling, facts.spec.run_policy.scheduling_deadline_seconds
    if is_released(facts, facts.status):
        return SchedulingRelease(known, release_message(known))
    placed = _placed(facts)
    if not placed or largest_size(facts.spec, placed, tied):
        return SchedulingRelease(Scheduling(releases=known.releases))
    since = facts.now if known.since_seconds is None else min(known.since_seconds, facts.now)
    if facts.now < since + deadline:
        return SchedulingRelease(Scheduling(since, known.releases))
    releases = known.releases + 1
    pause = pause_seconds(facts.job.uid, releases, deadline)
    new = Scheduling(None, releases, facts.now + pause)
    text = (
        f"{placed} of {target_size(facts.spec)} workers held nodes for schedulingDeadlineSeconds ({deadline:g} s), too few"
        f" for any world: they are released, and requested again after {pause:.0f} s"
    )
    return SchedulingRelease(new, release_message(new), (Event(reasons.WORKERS_RELEASED, text, warning=True),))


def due_seconds(facts: JobFacts, scheduling: Scheduling) -> float | None:
    """When nodes are released, or asked for again; None: neither."""
    if scheduling.since_seconds is None:
        return scheduling.until_seconds
    return scheduling.since_seconds + facts.spec.run_policy.scheduling_deadline_seconds


def is_released(facts: JobFacts, status: JobStatus) -> bool:
    """Whether the job asks for no workers now."""
    until = status.scheduling.until_seconds
    # a pause beyond the longest is none of ours: a clock went back
    return until is not None and facts.now < until <= facts.now + facts.spec.run_policy.scheduling_deadline_seconds


def release_message(known: Scheduling) -> str:
    """Describes a job whose workers were released."""
    at = datetime.fromtimestamp(known.until_seconds or 0.0, UTC).strftime("%H:%M:%S")
    times = f" ({known.releases} times now)" if known.releases > 1 else ""
    return f"too few workers got nodes, so theirs were released{times}; the job asks for them again at {at} UTC"


def pause_seconds(uid: str, releases: int, deadline: float) -> float:
    """The pause after a release, different for each job.

    Of two jobs that release together, one returns first and finds the nodes free.
    """
    drawn = int.from_bytes(hashlib.sha256(f"{uid}:{releases}".encode()).digest()[:8], "big") / 2**64
    return Backoff(deadline * _FIRST_PAUSE, deadline).seconds(releases, drawn)


def _placed(facts: WorldNodeFacts) -> int:
    """Workers that keep a node from others."""
    over, wanted = ("Succeeded", "Failed"), required_indices(facts)
    live = (w for w in facts.worker_list if w.phase not in over and not w.deleting and not node_lost(facts, w.node))
    return len({w.index for w in live if w.node is not None and w.index in wanted})


# ---- sizes that checkpoints tie a job to -----------------------------------------------------------------------------
# Ties a world to the size that its checkpoint was saved at. A job with state that is each rank's own waits for a
# replacement, as one of fixed size does. Shrunk or grown, every rank of the new world would refuse the checkpoint until
# the budget for restarts is used up.


@dataclass(frozen=True, slots=True)
class WorldSizeConstraint:
    """The size that the state requires; `text` names objects and remedies."""

    text: str
    ranks: int

    def workers(self, spec: TrainingJobSpec) -> int:
        """The required number of workers; 0: none gives those ranks."""
        workers, rest = divmod(self.ranks, spec.nproc_per_node)
        return 0 if rest else workers


def tie_of(facts: TierFacts, parent: Checkpoint | None) -> WorldSizeConstraint | None:
    """Returns what ties the world about to be committed; None: nothing."""
    if parent is None:
        return None
    older = facts.older.entries or ()
    return _tie(m for m in chain(_entries(facts), older) if m.save.checkpoint == parent)


@cached_per_snapshot
def present_tie(facts: TierFacts) -> WorldSizeConstraint | None:
    """Returns what ties the committed world; None: nothing."""
    membership = facts.membership
    read = reading_at(facts, membership.generation).manifests()
    found = {c: ranks for c, ranks in read.items() if c.generation == membership.generation or c == membership.parent}
    # of some ranks alone nobody could tell that values differ
    whole = [c for c, ranks in found.items() if len(ranks) == next(iter(ranks.values()))[-1].world_size]
    if whole:
        return _tie(copies[-1] for copies in found[max(whole, key=lambda c: c.step)].values())
    known = condition_of(facts.status, reasons.WORLD_SIZE_FIXED)
    return (
        WorldSizeConstraint(known.message, membership.world_size)
        if known is not None and membership.world_size
        else None
    )


def constraint_message(facts: TierFacts, status: JobStatus) -> str | None:
    """Returns the condition's message; None: no other size was asked for."""
    membership, known = status.membership, condition_of(facts.status, reasons.WORLD_SIZE_FIXED)
    if membership is None or status.phase in ("Complete", "Failed"):
        return None
    if membership.state == "Claimed" or not membership.members:
        return known.message if known is not None else None
    tie = tie_of(facts, membership.parent) if membership != facts.status.membership else present_tie(facts)
    if tie is None or allowed_sizes(facts.spec) == (tie.workers(facts.spec),):
        return None
    return tie.text


def _tie(manifests: Iterable[RankManifest]) -> WorldSizeConstraint | None:
    of_rank = {m.save.rank: m for m in manifests}
    tied = tied_objects(of_rank.values())
    if not tied:
        return None
    ranks = next(iter(of_rank.values())).world_size
    text = (
        f"{', '.join(tied)}: each rank's own state, which only {ranks} ranks can restore, so the world keeps that"
        f" size and waits for a replacement where it lost a worker. For other sizes use surefoot.ElasticLoader, give the"
        f" object load_state_dicts, or name it in Checkpointer(anew=…)"
    )
    return WorldSizeConstraint(text, ranks)


def _entries(facts: TierFacts) -> Iterator[RankManifest]:
    reading = reading_at(facts, facts.membership.generation)
    return chain(*reading.servers.values(), reading.persistent or ())


# ---- claim -----------------------------------------------------------------------------------------------------------

STOPPING_SECONDS = 3.0
"""How long agents that are there are waited for until their trainers are dead and they are warm again."""

RECONNECTING_SECONDS = 5.0
"""How long a new operator waits for the agents of the old world to find it."""

STARTING_SECONDS = 30.0
"""How long a first (or resumed) world waits for workers that are on their way, before it begins with fewer."""

UNBOUND_SECONDS = 5.0
"""How long of that for workers that no node was found for."""

TRIED_SECONDS = 60.0
"""How long a world waits that is possible only with a node that its own worker found sick."""

MAX_LINEAGE_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class Selection:
    """The members selected, or what is waited for until when."""

    members: tuple[Member, ...] = ()
    waiting: str | None = None
    until_seconds: float | None = None
    sums: str = ""
    """Why members that may still come were not waited for, where that was weighed."""


def newest_known_generation(facts: WorldTierFacts) -> int:
    """Returns the newest epoch known to status, holders or agents.

    Status may have been restored from an old backup: fences, agents and the persistent tier remember what it forgot.
    """
    status = facts.status
    epochs = [status.membership.generation if status.membership else 0]
    epochs += [h.fence for h in facts.holder_list if h.fence is not None]
    epochs += [max(s.generation, s.stopped - 1) for s in facts.sessions.values()]
    return max(*epochs, newest_epoch_stored(facts))


def newest_epoch_stored(facts: TierFacts) -> int:
    """Returns the newest epoch that the persistent tier names, this claim aside; 0: none, or not listed."""
    listed = facts.persistent
    named = (listed.newest_epoch, *(m.save.generation for m in listed.entries or ()))
    return max((generation for generation in named if generation <= HIGHEST_EPOCH), default=0)


def is_taken(facts: TierFacts) -> bool:
    """Whether the epoch that is claimed was used before, as the listing for this claim shows.

    Before it is committed nothing of it is in the persistent tier.
    """
    membership, listed = facts.membership, facts.persistent
    is_listed = membership.state == "Claimed" and listed.read_generation == membership.generation
    return is_listed and newest_epoch_stored(facts) >= membership.generation


def claim_generation(facts: WorldTierFacts, reason: str) -> JobStatus:
    """Claims the next epoch: no member may run until it is committed.

    Members and parent stay those that the claim is based on.
    """
    old = facts.status.membership or Membership(0, "Claimed")
    membership = replace(
        old, generation=newest_known_generation(facts) + 1, state="Claimed", reason=reason, changed_seconds=facts.now
    )
    start = facts.status.start_seconds if facts.status.start_seconds is not None else facts.now
    # what failed beside a world that ran, a spare or one more worker, says nothing of the next one's start
    status = facts.status if old.state == "Claimed" else replace(facts.status, failed_starts=0, failed_starts_counted=0)
    return replace(status, membership=membership, start_seconds=start)


def commit_generation(facts: WorldTierFacts, chosen: RestoreChosen, members: tuple[Member, ...]) -> JobStatus:
    """Commits the claimed epoch with its parent and members."""
    status, claim = facts.status, facts.membership
    size = len(members) * facts.spec.nproc_per_node
    membership = Membership(
        generation=claim.generation,
        state="Committed",
        parent=chosen.parent,
        world_size=size,
        members=members,
        reason=claim.reason,
        changed_seconds=facts.now,
    )
    lineage = (*status.lineage, LineageEntry(claim.generation, chosen.parent, size))
    ended = status.rollback.generation if status.rollback is not None else 0
    status = record_rollback(status, lineage, step_of(facts, ended))
    given_up = tuple(dict.fromkeys((*status.lost_servers, *(e.instance.run_id for e in chosen.lost_servers))))
    recorded, floor = _protected_so_far(facts, lineage, chosen.parent)
    return replace(
        status,
        membership=membership,
        lineage=_bounded(facts, lineage),
        last_uploaded=floor,
        had_checkpoint=recorded,
        assigned_servers=tuple(h.endpoint for h in fenced_servers(facts, claim.generation)),
        lost_servers=given_up[-64:],
        failed_starts=0,
        failed_starts_counted=0,
        scheduling=Scheduling(),
        initial_checkpoint=chosen.parent if chosen.source_job is not None else status.initial_checkpoint,
        source_job=chosen.source_job or status.source_job,
        last_good=surviving_last_good(status, lineage),
        incidents=incidents.record_commit(facts, status.incidents, chosen.parent, size),
    )


def select_members(facts: WorldNodeFacts, tie: WorldSizeConstraint | None = None) -> Selection:
    """Selects the members once no worker worth waiting for is missing.

    With a `tie`, exactly as many as it needs, or nobody.
    """
    generation, spec = facts.membership.generation, facts.spec
    tied = None if tie is None else tie.workers(spec)
    there = [s for s in newest_attempts(facts) if is_usable(facts, s)]
    failing = [s for s in there if _fails(facts, s)]
    wanted = _on_nodes_to_keep(facts, [s for s in there if s not in failing], tied)
    if _possible(facts, wanted, tied):
        there = wanted  # nodes that others want left train only where there is no world without them
    elif failing and _may_be_replaced(facts, failing):
        reasons = {f"node {s.node} ({unhealthy_nodes(facts)[s.node]})" for s in failing}
        reason = f"the worker on {join_names(sorted(reasons))} gets no rank, another one is waited for"
        return Selection((), reason, facts.membership.changed_seconds + TRIED_SECONDS)
    ready = [s for s in there if s.warm and s.stopped >= generation]
    weighed = NOT_MEASURED
    if len(ready) < target_size(spec):
        short = f"{len(ready)} of {target_size(spec)} workers are ready"
        until = _wait_deadline(facts, there, ready)
        if until is not None and facts.now < until:
            return Selection((), f"{short}, others are on their way", until)
        weighed = _weighed(facts, len(ready), tied)
        if weighed.until_seconds is not None and facts.now < weighed.until_seconds:
            return Selection((), f"{short}: {weighed.reason}", weighed.until_seconds)
    size = largest_size(spec, len(ready), tied)
    if size:
        found = _selected(facts, there, ready, size)
        return replace(found, sums="; ".join(filter(None, (found.sums, weighed.reason))))
    if tie is not None:
        return Selection((), _short(spec, len(ready), tie))
    return Selection((), f"{len(ready)} workers are ready, too few for any allowed world of {spec.replicas}")


def _fails(facts: WorldNodeFacts, session: ObservedSession) -> bool:
    """Whether a worker that has no rank yet is on a node that it found sick: no time to settle is worth one there."""
    return worker_id(session) not in facts.members and session.node in unhealthy_nodes(facts)


def _may_be_replaced(facts: WorldNodeFacts, failing: list[ObservedSession]) -> bool:
    """Whether others may come for these in time: there may be a node for them, or they are on their way."""
    if facts.now >= facts.membership.changed_seconds + TRIED_SECONDS:
        return False
    live = {(w.index, w.attempt) for w in facts.worker_list if w.phase in ("Pending", "Running")}
    coming = [s for s in failing if any(index == s.index and attempt > s.attempt for index, attempt in live)]
    return facts.free_nodes != 0 or len(coming) == len(failing)


def _on_nodes_to_keep(facts: NodeFacts, there: list[ObservedSession], tied: int | None) -> list[ObservedSession]:
    """Leaves out agents on nodes that are to be left, but for a straggler that costs less than a smaller world."""
    wanted = [s for s in there if not evacuation_reason(facts, s.node)]
    slow = costly_nodes(facts)
    if not slow:
        return wanted
    beside_slow = [s for s in there if not evacuation_reason(facts, s.node) or s.node in slow]
    dear = costs_more_than_staying(facts, _possible(facts, wanted, tied), _possible(facts, beside_slow, tied))
    return beside_slow if dear else wanted


def _possible(facts: JobFacts, agents: list[ObservedSession], tied: int | None) -> int:
    """The largest world of these agents that could begin now."""
    return largest_size(facts.spec, sum(s.warm and s.stopped >= facts.membership.generation for s in agents), tied)


def _selected(
    facts: WorldNodeFacts, there: list[ObservedSession], ready: list[ObservedSession], size: int
) -> Selection:
    """Former members first: a spare is no better than one that is about to be ready again, unless that failed there twice."""
    suspect = suspect_nodes(facts)
    kept = sorted(ready, key=lambda s: (s.node in suspect, worker_id(s) not in facts.members, s.index))
    ready, rest = kept[:size], kept[size:]
    if any(worker_id(s) not in facts.members for s in ready):
        until = _former_ready(facts, there, {worker_id(s) for s in ready})
        if facts.now < until:
            return Selection((), "members of the last world may be ready in a moment, and go before spares", until)
    left = next((suspect[s.node] for s in rest if s.node in suspect and worker_id(s) in facts.members), "")
    return Selection(tuple(Member(s.index, s.attempt, s.incarnation, s.node) for s in _ranked(facts, ready)), sums=left)


def _former_ready(facts: WorldNodeFacts, there: list[ObservedSession], ready: set[WorkerId]) -> float:
    """Until when members of the old world that are not chosen are expected to be ready."""
    found = {worker_id(s): s for s in there}
    moments = [0.0]
    for identity, member in facts.members.items():
        if identity in ready or member.node in suspect_nodes(facts):
            continue
        session = found.get(identity)
        if session is not None and session.incarnation == member.incarnation:
            moments.append(facts.membership.changed_seconds + STOPPING_SECONDS)
        elif session is None and member.index in required_indices(facts):
            moments.append(_returning(facts, identity, member.incarnation))
    return max(moments)


def _ranked(facts: JobFacts, chosen: list[ObservedSession]) -> list[ObservedSession]:
    """Members in the order of their ranks.

    Where the world keeps its size, who stays keeps its rank, and finds on its own node what it saved.
    """
    former = facts.membership.members
    left = {worker_id(s): s for s in sorted(chosen, key=lambda s: s.index)}
    if len(former) != len(chosen):
        return list(left.values())
    places = [left.pop(worker_id(member), None) for member in former]
    same = {s.index: s for s in left.values()}
    for place, member in enumerate(former):
        if places[place] is None and member.index in same:
            places[place] = left.pop(worker_id(same[member.index]))
    others = iter(left.values())
    return [next(others) if s is None else s for s in places]


def _short(spec: TrainingJobSpec, ready: int, tie: WorldSizeConstraint) -> str:
    """Why the workers that are ready do not make up a world that is tied to a size."""
    workers = tie.workers(spec)
    if largest_size(spec, workers, workers):
        return f"{ready} of {workers} workers are ready, and no other number is possible: {tie.text}"
    return (
        f"no world is possible: the job asks for {spec.replicas} workers of {spec.nproc_per_node} ranks. Ask for"
        f" {tie.ranks} ranks again. {tie.text}"
    )


def _wait_deadline(facts: WorldNodeFacts, there: list[ObservedSession], ready: list[ObservedSession]) -> float | None:
    """Until when the missing are worth waiting for; None: they are not."""
    membership, now_ready = facts.membership, {worker_id(s) for s in ready}
    former = {identity: m.incarnation for identity, m in facts.members.items()}
    moments: list[float] = []
    for session in there:
        known = former.get(worker_id(session)) == session.incarnation
        if worker_id(session) not in now_ready and (known or session.warm):
            moments.append(membership.changed_seconds + STOPPING_SECONDS)
    for identity, incarnation in former.items():
        moments.append(_returning(facts, identity, incarnation))
    policy = facts.spec.elastic_policy
    if policy is not None and policy.faulty_scale_down_timeout_seconds is not None:
        moments.append(membership.changed_seconds + policy.faulty_scale_down_timeout_seconds)
    if not membership.members:
        moments.append(_arriving(facts, now_ready))
    return max(moments, default=None)


def _weighed(facts: WorldNodeFacts, ready: int, tied: int | None) -> CostDecision:
    """What waiting for more than these workers would cost, unless the job says itself how long to wait."""
    policy = facts.spec.elastic_policy
    if policy is None or policy.faulty_scale_down_timeout_seconds is not None or not facts.membership.members:
        return NOT_MEASURED
    return wait_or_shrink(facts, ready, tied)


def _returning(facts: WorldNodeFacts, identity: WorkerId, incarnation: str) -> float:
    """A member of the old world whose line is away for a moment, or which a new operator has not heard yet."""
    worker, session = facts.workers.get(identity), facts.sessions.get(identity)
    if (
        worker is None
        or worker.phase != "Running"
        or termination_reason(facts, worker)
        or node_lost(facts, worker.node)
    ):
        return 0.0
    if session is None:
        patience = facts.term_seconds + RECONNECTING_SECONDS
        # this leader claimed the epoch itself, and had waited for whoever did not come
        return (
            min(patience, connection_deadline(facts))
            if _claimed_here(facts) and most_members_connected(facts)
            else patience
        )
    if session.incarnation == incarnation and not session.connected:
        return session.since_seconds + RECONNECT_GRACE_SECONDS
    return 0.0


def _claimed_here(facts: JobFacts) -> bool:
    return facts.membership.changed_seconds > facts.term_seconds


def _arriving(facts: WorldNodeFacts, ready: set[WorkerId]) -> float:
    """Workers that were asked for and have not joined yet: those with a node, and those that may still get one."""
    arriving = 0.0
    places = {identity.index for identity in ready}
    live: dict[int, list[ObservedWorker]] = defaultdict(list)
    for worker in facts.worker_list:
        if worker.phase not in ("Succeeded", "Failed"):
            live[worker.index].append(worker)
    for index in required_indices(facts):
        if index in places:
            continue
        workers = live.get(index, ())
        if any(w.node is not None for w in workers):
            arriving = max(arriving, facts.membership.changed_seconds + STARTING_SECONDS)
        elif facts.free_nodes is None or facts.free_nodes > 0 or not workers:
            created = max((w.created_seconds for w in workers), default=facts.membership.changed_seconds)
            arriving = max(arriving, created + UNBOUND_SECONDS)
    return arriving


def _protected_so_far(facts: TierFacts, lineage: Lineage, parent: Checkpoint | None) -> tuple[bool, Checkpoint | None]:
    """(recorded, floor) as the readings of this claim have it. A floor off the new lineage binds no longer."""
    status, generation = facts.status, facts.membership.generation
    reading, bad, covers = reading_at(facts, generation), unreadable_checkpoints(facts), facts.covers
    domains = domains_of(facts)
    live = {domains[server] for server in reading.servers}
    replicas = effective(facts.spec.checkpoint.memory.replicas, len(live))
    full = watermark(reading, lineage, generation, bad, covers, domains, replicas)
    listed = () if may_be_under_way(facts) else reading.persistent or ()
    kept = complete_persistent(listed, lineage, generation, bad, covers)
    old = status.last_uploaded
    if old is not None and (old in bad or not on_lineage(lineage, old, generation)):
        old = None
    floor = newest_checkpoint(c for c in (*kept, *((old,) if old else ())))
    recorded = status.had_checkpoint and restore_limit(facts) != 0  # whoever begins again gave up all that there was
    return recorded or full is not None or floor is not None, floor


def _bounded(facts: TierFacts, lineage: Lineage) -> Lineage:
    """The whole history while it is short; else what the oldest checkpoint that anybody keeps still needs."""
    if len(lineage) <= MAX_LINEAGE_ENTRIES:
        return lineage
    generation = lineage[-1].generation
    reading = reading_at(facts, facts.membership.generation)
    kept = complete_checkpoints(reading, lineage, generation, frozenset(), facts.covers)
    # what lies in the persistent tier counts as this job's only while its epoch is known
    listed = facts.persistent.entries or ()
    kept += complete_persistent(listed, lineage, generation, frozenset(), facts.covers)
    needed = [c for c in (*kept, facts.status.last_uploaded, lineage[-1].parent) if c is not None]
    oldest = min(needed, key=lambda c: (c.generation, c.step), default=lineage[-1].parent)
    return pruned(lineage, oldest, generation)
