"""Creates, replaces and deletes workers, and the pod group that a gang scheduler requires.

Pure. An attempt is counted in status before it is created, so none is ever used twice; a refused create is retried
under its own. Members of a committed world are not touched here: losing one changes the world, which is decided first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from surefoot.protocol.identities import WorkerId
from surefoot.protocol.timeouts import Backoff
from surefoot_operator.api.spec import Gang, allowed_sizes
from surefoot_operator.job_snapshot import ObservedPodGroup, ObservedWorker, PendingCreate, PodGroup
from surefoot_operator.policy.core.actions import (
    Action,
    ApplyPodGroup,
    CreateWorker,
    DeletePodGroup,
    DeleteWorker,
    Event,
)
from surefoot_operator.policy.core.availability import (
    announced_termination,
    evacuation_reason,
    has_evacuation_or_termination,
    node_lost,
    nodes_to_evacuate,
    termination_reason,
)
from surefoot_operator.policy.core.facts import (
    JobFacts,
    WorldFacts,
    WorldNodeFacts,
    doubtful_nodes,
    earliest,
    is_responsive,
    worker_id,
)
from surefoot_operator.policy.failure.spare_workers import member_indices
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_since
from surefoot_operator.reasons import WORKER_CREATED, WORKER_LOST

# ---- pod group of a gang ---------------------------------------------------------------------------------------------
# Decides the pod group that a gang scheduler reads. Workers that were made before their group would be held back by
# their scheduler, or be placed one by one while another job gets the other half of the nodes; so none is made before
# the group is seen.

_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodGroupDecision:
    """Actions on pod groups, and when to look again."""

    actions: tuple[Action, ...] = ()
    until_seconds: float | None = None


def group_step(facts: WorldFacts) -> PodGroupDecision:
    """Plans one pod group while workers are wanted, else none.

    It is as the spec asks. Of a deleted job nothing is done: its group goes with it.
    """
    seen, job = facts.pod_groups, facts.job
    if seen is None or job.deleted:
        return PodGroupDecision()
    policy = facts.spec.scheduling_policy
    kept = policy.gang if policy is not None and (_needs_workers(facts) or _workers_still_ending(facts)) else None
    why = _why_removed(facts)
    wishes: dict[Gang, Action] = {
        one.group.gang: DeletePodGroup(one.group.gang, one.uid, why)
        for one in seen.groups
        if one.group.gang != kept and not one.deleting
    }
    wanted, there = desired_group(facts), _there(facts)
    if wanted is not None and wanted.gang not in seen.unavailable and not _fits(there, wanted):
        wishes[wanted.gang] = ApplyPodGroup(wanted)
    asked = {call.gang: call for call in facts.group_calls}
    waits = {
        gang for gang in wishes if gang in asked and (asked[gang].under_way or facts.now < asked[gang].until_seconds)
    }
    return PodGroupDecision(
        tuple(wish for gang, wish in wishes.items() if gang not in waits),
        earliest(tuple(asked[gang].until_seconds for gang in waits if not asked[gang].under_way)),
    )


def desired_group(facts: JobFacts) -> PodGroup | None:
    """Returns the pod group that shall exist; None: there shall be none.

    Its minimum is the smallest world: the job begins with it, and is shrunk to it rather than ended where another
    job takes its nodes. Spares are members and never part of the minimum.
    """
    policy = facts.spec.scheduling_policy
    if policy is None or not _needs_workers(facts):
        return None
    return PodGroup(policy.gang, min(allowed_sizes(facts.spec)), policy.schedule_timeout_seconds)


def lacks_group(facts: WorldFacts) -> bool:
    """Whether workers must not be created because their group is not there."""
    if facts.pod_groups is None or facts.spec.scheduling_policy is None:
        return False
    there = _there(facts)
    return there is None or there.deleting


def group_rejection(facts: WorldFacts) -> str:
    """Says why the group that workers wait for is missing.

    Empty: it is there, or nothing is known to be in its way.
    """
    policy, seen = facts.spec.scheduling_policy, facts.pod_groups
    if policy is None or seen is None or not lacks_group(facts):
        return ""
    unseen = seen.unavailable.get(policy.gang)
    if unseen:
        return f"no worker is created without its pod group for {policy.gang}: {unseen}"
    refused = next((call.rejection for call in facts.group_calls if call.gang == policy.gang), "")
    return (
        f"no worker is created without its pod group for {policy.gang}, which was refused: {refused}" if refused else ""
    )


def _there(facts: WorldFacts) -> ObservedPodGroup | None:
    policy, seen = facts.spec.scheduling_policy, facts.pod_groups
    if policy is None or seen is None:
        return None
    return next((one for one in seen.groups if one.group.gang == policy.gang), None)


def _fits(there: ObservedPodGroup | None, wanted: PodGroup) -> bool:
    """Whether nothing is to be written: what the job leaves to the cluster may say anything."""
    if there is None:
        return False
    if there.deleting:
        return True  # it is made anew once it is gone
    timeout = wanted.schedule_timeout_seconds
    timeout_fits = timeout is None or there.group.schedule_timeout_seconds == timeout
    return there.group.min_members == wanted.min_members and timeout_fits


def _needs_workers(facts: JobFacts) -> bool:
    return not facts.spec.suspend and facts.status.phase not in ("Complete", "Failed")


def _workers_still_ending(facts: WorldFacts) -> bool:
    """Workers that still end: their scheduler may count them until then."""
    return any(worker.phase not in _OVER for worker in facts.worker_list)


def _why_removed(facts: JobFacts) -> str:
    if facts.spec.scheduling_policy is None:
        return "schedulingPolicy does not ask for it any more"
    return "the job is suspended" if facts.spec.suspend else "the job wants no workers of it any more"


# ---- workers ---------------------------------------------------------------------------------------------------------

SILENT_SECONDS = 0.5
"""An agent out of the world that is unheard for so much longer than its heartbeat allows is replaced, if there may be room."""

SILENT_WITHOUT_ROOM_SECONDS = 30.0
"""The same where only its own node could take the replacement: it may well thaw and be warm."""

REPLACEMENTS = Backoff(5.0, 160.0)
"""A worker that failed sooner after its creation is not replaced before that, so that nothing spins."""

UNSTARTED_SECONDS = 60.0
"""A worker that its fabric cannot start, and tries to by itself, is made anew after so long: another node may have its image."""

PLACED_SECONDS = 30.0
"""A scheduler that has just placed a worker took its node for well: so soon it is not replaced for its node's sake."""

_MAX_NAMED = 4
_MAX_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class WorkerChanges:
    """Actions on workers, and the next attempt once they are counted."""

    actions: tuple[Action, ...]
    next_attempt: int
    failed_starts: int = 0
    failed_starts_counted: int = 0
    events: tuple[Event, ...] = ()
    until_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _IndexPlan:
    """One index: who stays there, who goes, whether somebody has to be created, and when to look again."""

    to_delete: tuple[ObservedWorker, ...] = ()
    needs_worker: bool = False
    replace_alongside: bool = False
    """A worker is needed beside the one that is there, to take its place."""
    until_seconds: float | None = None


_WELL = _IndexPlan(())


def reconcile_workers(facts: WorldNodeFacts, wanted: frozenset[int]) -> WorkerChanges:
    """Plans one live worker for each wanted index, and no other."""
    members = _training(facts)
    by_index: dict[int, list[ObservedWorker]] = {index: [] for index in wanted}
    for worker in sorted(facts.worker_list, key=lambda w: (w.index, w.attempt)):
        by_index.setdefault(worker.index, []).append(worker)
    blind = _observer_is_blind(facts)
    places = {i: _plan_index(facts, workers, members, blind, i in wanted) for i, workers in sorted(by_index.items())}
    deletes = [d for place in places.values() for w in place.to_delete for d in _delete(facts, w)]
    attempt = _next_attempt(facts)
    taken = {member.index for member in members}
    vacant = {
        i: place for i, place in places.items() if place.needs_worker and (place.replace_alongside or i not in taken)
    }
    if lacks_group(facts):
        vacant = {}  # no attempt is counted either: each is asked for once its group is there
    asked = _pending_creates(facts)
    avoided = _avoided(facts) if vacant else ()  # in an outage all nodes are in doubt, for each of a thousand jobs
    new = [CreateWorker(i, attempt, _avoiding(avoided, place)) for i, place in vacant.items() if i not in asked]
    again = [asked[index] for index in vacant if index in asked and not asked[index].in_progress]
    due = [CreateWorker(c.index, c.attempt, avoided) for c in again if facts.now >= c.until_seconds]
    replaced = [vacant[create.index].to_delete[-1:] for create in new]
    failed = [w for goes in replaced for w in goes if ended_by_itself(facts, w)]
    return WorkerChanges(
        actions=(*deletes, *sorted((*new, *due), key=lambda c: c.index)),
        next_attempt=attempt + 1 if new else facts.status.next_attempt,
        failed_starts=facts.status.failed_starts + bool(failed),
        failed_starts_counted=facts.status.failed_starts_counted + any(_counts(facts, w) for w in failed),
        events=(
            *(Event(WORKER_LOST, never_trained(w), warning=True) for w in failed[:_MAX_NAMED]),
            *(Event(WORKER_CREATED, f"worker {c.index} (attempt {c.attempt})") for c in new),
        ),
        until_seconds=earliest(
            (
                *(p.until_seconds for p in places.values()),
                *(c.until_seconds for c in again if facts.now < c.until_seconds),
            )
        ),
    )


def start_failure(facts: WorldNodeFacts) -> str | None:
    """Says why a claimed epoch is given up; None: it is not.

    Its workers end by themselves before they can be members, again and again, or the first ones can never be created.
    What the fabric refuses or cannot start for now (a quota, a registry, a secret) is tried again without limit.
    """
    if not has_trained(facts) and not any(w.phase in ("Pending", "Running") for w in facts.worker_list):
        never = next((c for c in facts.creates if c.permanent), None)
        if never is not None:
            return f"worker {never.index} can never be made as the job asks for it: {never.rejection}"
    rounds, limit = facts.status.failed_starts_counted, facts.spec.run_policy.backoff_limit
    if rounds < limit:
        return None
    known = [(w.index, w.attempt) for w in facts.worker_list] + [(c.index, c.attempt) for c in facts.creates]
    newest = dict(sorted(known))
    failed = [w for w in facts.worker_list if w.attempt == newest[w.index] and w.index in member_indices(facts)]
    failed = [w for w in failed if ended_by_itself(facts, w) and _counts(facts, w)]
    if not failed:
        return None  # or the last replacement has not had its chance
    return (
        f"{never_trained(max(failed, key=lambda w: w.attempt))}; {rounds} replacements used up backoffLimit ({limit})"
    )


def has_trained(facts: JobFacts) -> bool:
    """Whether some world of the job had members: its template works, and there is something to lose."""
    return any(entry.world_size for entry in facts.status.lineage)


def _counts(facts: JobFacts, worker: ObservedWorker) -> bool:
    """Whether a failed start counts towards `backoffLimit`, as it does for a Job of Kubernetes: the container has ended.

    What cannot be started does not count: a registry, a secret or a node may come back. Nor does a failed init container
    once the job has trained: it fetches what others serve, and has worked.
    """
    return worker.phase == "Failed" and (not worker.start_blocker or not has_trained(facts))


def ended_by_itself(facts: WorldNodeFacts, worker: ObservedWorker) -> bool:
    """Decides whether a worker failed by itself before it was a member.

    Neither its node nor a deletion ended it, so its replacement may fail as well.
    """
    ended = worker.phase == "Failed" and (bool(worker.exit_code) or bool(worker.start_blocker))
    if not ended and not _start_timed_out(facts, worker):
        return False
    known = worker_id(worker) in facts.members or announced_termination(facts, worker)
    return not known and not node_lost(facts, worker.node)


def _start_timed_out(facts: JobFacts, worker: ObservedWorker) -> bool:
    due = _start_deadline(worker)
    return due is not None and facts.now >= due


def _start_deadline(worker: ObservedWorker) -> float | None:
    """When a worker that its fabric cannot start is given up; None: nothing is known to be in its way."""
    waits = worker.phase == "Pending" and bool(worker.start_blocker)
    return worker.created_seconds + UNSTARTED_SECONDS if waits else None


def could_not_start(worker: ObservedWorker) -> str:
    lines = worker.start_blocker.strip().splitlines()
    return f"worker {worker.index} could not be started: {' '.join(lines)[:_MAX_DETAIL_CHARACTERS]}"


def never_trained(worker: ObservedWorker) -> str:
    """Describes a worker that failed before it was a member."""
    if worker.start_blocker:
        return could_not_start(worker)
    said = worker.message.strip().splitlines()[-1:]  # the last line of a log is where a traceback names its cause
    detail = f": {said[0][:_MAX_DETAIL_CHARACTERS]}" if said else ""
    return f"worker {worker.index} {worker.exit_description} before it could train{detail}"


def _failing_until(facts: JobFacts, workers: Iterable[ObservedWorker]) -> float:
    """Until when a place whose workers failed stays empty."""
    wait = REPLACEMENTS.seconds(facts.status.failed_starts + 1)
    over = [
        (_start_deadline(w) or w.created_seconds) + wait
        for w in workers
        if w.phase == "Failed" or _start_timed_out(facts, w)
    ]
    return max(over, default=0.0)


def _training(facts: WorldFacts) -> Collection[WorkerId]:
    """Members of a committed world."""
    membership = facts.status.membership
    return facts.members if membership is not None and membership.state == "Committed" else ()


def _next_attempt(facts: WorldFacts) -> int:
    """Beyond whatever status counted and whatever is seen to exist."""
    seen = [w.attempt for w in facts.worker_list] + [s.attempt for s in facts.sessions.values()]
    seen += [c.attempt for c in facts.creates]
    return max(facts.status.next_attempt, max(seen, default=0) + 1)


def _pending_creates(facts: WorldFacts) -> dict[int, PendingCreate]:
    """By index, the newest create that nothing has come of yet."""
    there = {w.index: w.attempt for w in sorted(facts.worker_list, key=lambda w: w.attempt)}
    waiting = sorted(facts.creates, key=lambda c: c.attempt)
    return {c.index: c for c in waiting if c.attempt > there.get(c.index, 0)}


def _member_of(workers: list[ObservedWorker], members: Collection[WorkerId]) -> ObservedWorker | None:
    for worker in workers:
        if worker_id(worker) in members:
            return worker
    return None


def _plan_index(
    facts: WorldNodeFacts, workers: list[ObservedWorker], members: Collection[WorkerId], blind: bool, wanted: bool
) -> _IndexPlan:
    member = _member_of(workers, members)
    if member is not None and wanted and has_evacuation_or_termination(facts) and _leaves(facts, member):
        return _replace_alongside(facts, workers, member)
    if member is not None:
        return _IndexPlan(tuple(w for w in workers if w is not member)) if len(workers) > 1 else _WELL
    if not wanted:
        return _IndexPlan(tuple(workers))
    misplaced = _worker_on_unhealthy_node(facts, workers)
    if misplaced is not None:
        return _replace_alongside(facts, workers, misplaced)
    for worker in reversed(workers):
        over = worker.phase in ("Succeeded", "Failed") or _start_timed_out(facts, worker)
        if over or termination_reason(facts, worker):
            continue
        if node_lost(facts, worker.node):
            placed = _placed_until(facts, worker)
            if placed is None:
                continue
            return _IndexPlan(tuple(w for w in workers if w is not worker), until_seconds=placed)
        due = _silence_deadline(facts, worker)
        if due is None or blind or facts.now < due:
            look = _start_deadline(worker) if due is None or blind else due
            return _IndexPlan(tuple(w for w in workers if w is not worker), until_seconds=look)
    due = _failing_until(facts, workers)
    if facts.now < due:
        return _IndexPlan(until_seconds=due)
    return _IndexPlan(tuple(workers), needs_worker=True)


def _worker_on_unhealthy_node(facts: WorldNodeFacts, workers: list[ObservedWorker]) -> ObservedWorker | None:
    """The newest live worker without a rank whose node was found sick since it came; one that came later had no other."""
    if not facts.status.unhealthy_nodes or (facts.free_nodes == 0 and len(workers) == 1):
        return None  # or another one has taken the last free node
    for worker in reversed(workers):
        since = unhealthy_since(facts, worker.node) if worker.node is not None else None
        live = worker.phase == "Running" and not termination_reason(facts, worker) and not node_lost(facts, worker.node)
        if since is not None and live and worker.created_seconds <= since:
            return worker
    return None


def _leaves(facts: WorldNodeFacts, member: ObservedWorker) -> bool:
    return bool(evacuation_reason(facts, member.node) or termination_reason(facts, member))


def _replace_alongside(facts: WorldNodeFacts, workers: list[ObservedWorker], member: ObservedWorker) -> _IndexPlan:
    """It is to end, or others want its node left: it trains on while another one is made to take its place."""
    over = ("Succeeded", "Failed")
    newer = [w for w in workers if w.attempt > member.attempt and not termination_reason(facts, w)]
    live = [w for w in newer if w.phase not in over and not _start_timed_out(facts, w) and not node_lost(facts, w.node)]
    kept = (member, *live[-1:])
    goes = tuple(w for w in workers if w not in kept)
    due = _failing_until(facts, newer)
    if live:
        return _IndexPlan((*goes, member) if _blocks_node(facts, member, live[-1]) else goes)
    if facts.now < due:
        return _IndexPlan(until_seconds=due)
    return _IndexPlan(goes, needs_worker=True, replace_alongside=True)


def _blocks_node(facts: WorldFacts, member: ObservedWorker, newer: ObservedWorker) -> bool:
    """Whether a worker that leaves keeps its node from another one of a claimed world, while `newer` stands ready.

    Nobody trains in such a world, and it cannot begin: both would wait for each other. What it saved last is written first.
    """
    session, left = facts.sessions.get(worker_id(newer)), facts.sessions.get(worker_id(member))
    if session is None or facts.membership.state != "Claimed" or not is_responsive(facts, session):
        return False
    generation = facts.membership.generation
    writes = left is not None and is_responsive(facts, left) and (left.stopped < generation or bool(left.pending))
    waits = any(w.phase == "Pending" and w.node is None for w in facts.worker_list)
    return waits and not writes and session.warm and session.stopped >= generation


def _placed_until(facts: WorldNodeFacts, worker: ObservedWorker) -> float | None:
    """Until when it is believed that a node is well, which seems gone, because this worker was just placed there.

    Otherwise workers would be made and deleted on it by the second, for as long as two observers disagree.
    """
    if facts.free_nodes is not None or worker_id(worker) in facts.sessions:
        return None
    age = facts.now - worker.created_seconds
    return worker.created_seconds + PLACED_SECONDS if 0.0 <= age < PLACED_SECONDS else None


def _silence_deadline(facts: WorldNodeFacts, worker: ObservedWorker) -> float | None:
    """When a worker that the fabric calls well counts as dead because nobody hears its agent; None: it is heard."""
    session = facts.sessions.get(worker_id(worker))
    if worker.phase == "Pending":
        return None
    if session is None:
        known_since = max(worker.created_seconds, facts.term_seconds)
        return known_since + facts.spec.run_policy.startup_deadline_seconds
    if is_responsive(facts, session):
        return None
    room = facts.free_nodes is None or facts.free_nodes > 0
    if not room:
        return session.last_message_seconds + SILENT_WITHOUT_ROOM_SECONDS
    return session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds + SILENT_SECONDS


def _observer_is_blind(facts: WorldNodeFacts) -> bool:
    """Most workers silent at once, all running as far as the fabric knows: nothing is replaced for silence."""
    if not facts.silent_agents:
        return False
    running = [w for w in facts.worker_list if w.phase == "Running" and not node_lost(facts, w.node)]
    heard = [facts.sessions.get(worker_id(w)) for w in running]
    silent = sum(session is not None and not is_responsive(facts, session) for session in heard)
    return len(running) > 1 and 2 * silent > len(running)


def _delete(facts: WorldNodeFacts, worker: ObservedWorker) -> list[DeleteWorker]:
    """Gently, or by force where its node cannot be reached; once is enough unless force becomes possible."""
    force = node_lost(facts, worker.node)
    if worker.deleting and not force:
        return []
    if force:
        reason = f"node {worker.node} is gone"
    elif worker.start_blocker and ended_by_itself(facts, worker):
        reason = "it could not be started"
    elif worker.phase in ("Succeeded", "Failed"):
        reason = f"it {worker.exit_description}"
    else:
        reason = "it is not needed any more, or silent and replaced"
    return [DeleteWorker(worker.name, worker.uid, force, reason)]


def _avoiding(avoided: tuple[str, ...], place: _IndexPlan) -> tuple[str, ...]:
    """Also the node on which the last one could not be started: another may have the image."""
    return tuple(sorted({*avoided, *(w.node for w in place.to_delete[-1:] if w.start_blocker and w.node is not None)}))


def _avoided(facts: WorldNodeFacts) -> tuple[str, ...]:
    lost = [name for name in doubtful_nodes(facts.node_list) if node_lost(facts, name)]
    return tuple(sorted({*nodes_to_evacuate(facts), *lost}))
