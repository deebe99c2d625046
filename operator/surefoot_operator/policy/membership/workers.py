"""Creates, replaces and deletes workers, and the pod group that a gang scheduler requires.

Pure. An attempt is counted in the status before it is created, so none is ever used twice; a rejected create is retried under
its own attempt. Members of a committed generation are not touched here: losing one changes the membership, which is decided
first.
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
    is_node_lost,
    nodes_to_evacuate,
    termination_reason,
)
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    doubtful_nodes,
    earliest,
    is_responsive,
    worker_id,
)
from surefoot_operator.policy.failure.spare_workers import indexes_to_train
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_since
from surefoot_operator.reasons import WORKER_LOST

# ---- pod group of a gang ---------------------------------------------------------------------------------------------
# Plans the pod group that a gang scheduler reads. Workers created before their group would be rejected by the scheduler, or
# be placed one by one while another job gets the other half of the nodes; so none is created before the group is observed.

_ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodGroupDecision:
    """Actions on pod groups, and when to reconcile again."""

    actions: tuple[Action, ...] = ()
    until_seconds: float | None = None


def plan_pod_group(facts: MembershipFacts) -> PodGroupDecision:
    """Plans the one pod group that the spec requires while workers are needed, and no other.

    Nothing is done for a deleted job: its group is deleted with it.
    """
    pod_groups, job = facts.pod_groups, facts.job
    if pod_groups is None or job.deleted:
        return PodGroupDecision()
    policy = facts.spec.scheduling_policy
    kept_gang = policy.gang if policy is not None and (_needs_workers(facts) or _has_live_workers(facts)) else None
    removal_reason = _removal_reason(facts)
    # Groups of another scheduler, or no longer needed, are deleted.
    actions_by_gang: dict[Gang, Action] = {
        pod_group.group.gang: DeletePodGroup(pod_group.group.gang, pod_group.uid, removal_reason)
        for pod_group in pod_groups.groups
        if pod_group.group.gang != kept_gang and not pod_group.deleting
    }
    # The desired group is created or updated; calls that are under way or backing off are not repeated.
    desired, existing = desired_pod_group(facts), _find_pod_group(facts)
    if desired is not None and desired.gang not in pod_groups.unavailable and not _is_up_to_date(existing, desired):
        actions_by_gang[desired.gang] = ApplyPodGroup(desired)
    calls_by_gang = {call.gang: call for call in facts.group_calls}
    waiting_gangs = {
        gang
        for gang in actions_by_gang
        if gang in calls_by_gang and (calls_by_gang[gang].in_progress or facts.now < calls_by_gang[gang].until_seconds)
    }
    return PodGroupDecision(
        tuple(action for gang, action in actions_by_gang.items() if gang not in waiting_gangs),
        earliest(
            tuple(calls_by_gang[gang].until_seconds for gang in waiting_gangs if not calls_by_gang[gang].in_progress)
        ),
    )


def desired_pod_group(facts: JobFacts) -> PodGroup | None:
    """Returns the pod group that should exist; None: none should.

    Its minimum is the smallest allowed number of workers: the job starts with it, and is shrunk to it rather than ended if another
    job takes its nodes. Spares belong to the group but never to the minimum.
    """
    policy = facts.spec.scheduling_policy
    if policy is None or not _needs_workers(facts):
        return None
    return PodGroup(policy.gang, min(allowed_sizes(facts.spec)), policy.schedule_timeout_seconds)


def lacks_pod_group(facts: MembershipFacts) -> bool:
    """Whether workers must not be created because their pod group does not exist."""
    if facts.pod_groups is None or facts.spec.scheduling_policy is None:
        return False
    existing = _find_pod_group(facts)
    return existing is None or existing.deleting


def pod_group_blocker(facts: MembershipFacts) -> str:
    """Returns why the pod group that workers wait for is missing; empty: it exists, or nothing is known to block it."""
    policy, pod_groups = facts.spec.scheduling_policy, facts.pod_groups
    if policy is None or pod_groups is None or not lacks_pod_group(facts):
        return ""
    unavailable_reason = pod_groups.unavailable.get(policy.gang)
    if unavailable_reason:
        return f"no worker is created without its pod group for {policy.gang}: {unavailable_reason}"
    rejection = next((call.rejection for call in facts.group_calls if call.gang == policy.gang), "")
    return (
        f"no worker is created without its pod group for {policy.gang}, which was rejected: {rejection}"
        if rejection
        else ""
    )


def _find_pod_group(facts: MembershipFacts) -> ObservedPodGroup | None:
    """Returns the observed pod group of the gang scheduler that the spec names; None: there is none."""
    policy, pod_groups = facts.spec.scheduling_policy, facts.pod_groups
    if policy is None or pod_groups is None:
        return None
    return next((pod_group for pod_group in pod_groups.groups if pod_group.group.gang == policy.gang), None)


def _is_up_to_date(existing: ObservedPodGroup | None, desired: PodGroup) -> bool:
    """Whether the pod group needs no update; fields that the job does not set may have any value."""
    if existing is None:
        return False
    if existing.deleting:
        return True  # it is created again once it is gone
    timeout = desired.schedule_timeout_seconds
    timeout_fits = timeout is None or existing.group.schedule_timeout_seconds == timeout
    return existing.group.min_members == desired.min_members and timeout_fits


def _needs_workers(facts: JobFacts) -> bool:
    """Whether the job needs workers at all: it neither ended nor is suspended."""
    return not facts.spec.suspend and facts.status.phase not in ("Complete", "Failed")


def _has_live_workers(facts: MembershipFacts) -> bool:
    """Whether any worker has not ended yet: its scheduler may count it until then."""
    return any(worker.phase not in _ENDED_PHASES for worker in facts.worker_list)


def _removal_reason(facts: JobFacts) -> str:
    """Returns why a pod group is deleted."""
    if facts.spec.scheduling_policy is None:
        return "schedulingPolicy no longer requires it"
    return "the job is suspended" if facts.spec.suspend else "the job no longer needs workers in it"


# ---- workers ---------------------------------------------------------------------------------------------------------

SILENCE_GRACE_SECONDS = 0.5
"""Silence beyond the heartbeat timeout after which an agent without a rank is replaced, if a node may be free."""

SILENCE_GRACE_WITHOUT_ROOM_SECONDS = 30.0
"""The same if only its own node could take the replacement: the node may recover, with the agent still warm."""

REPLACEMENT_BACKOFF = Backoff(5.0, 160.0)
"""Shortest time from the creation of a worker that failed to its replacement, so that failures do not cause a tight loop."""

START_TIMEOUT_SECONDS = 60.0
"""Time after which a worker that cannot be started is replaced although the platform retries: another node may have its image."""

RECENTLY_PLACED_SECONDS = 30.0
"""A worker placed more recently is not replaced because of its node: the scheduler has just taken the node for healthy."""

_MAX_NAMED = 4
"""Failed workers that get an event of their own."""
_MAX_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class WorkerChanges:
    """Actions on workers, with the counters that the status must keep before they are carried out."""

    actions: tuple[Action, ...]
    next_attempt: int
    """Number of the next attempt."""
    failed_starts: int = 0
    """Consecutive starts that failed by themselves since the last commit."""
    failed_starts_counted: int = 0
    """Number of them that count for `backoffLimit`."""
    events: tuple[Event, ...] = ()
    until_seconds: float | None = None
    """Unix time at which to reconcile again; None: only a new observation helps."""


@dataclass(frozen=True, slots=True)
class _IndexPlan:
    """Plan for one index: which workers to delete, whether to create one, and when to reconcile again."""

    to_delete: tuple[ObservedWorker, ...] = ()
    needs_worker: bool = False
    replace_alongside: bool = False
    """Whether the new worker is created while the present one still runs, to take its place."""
    until_seconds: float | None = None


_NO_CHANGE = _IndexPlan(())


def reconcile_workers(facts: MembershipNodeFacts, indexes: frozenset[int]) -> WorkerChanges:
    """Plans one live worker for each of these indexes, and no other."""
    members = _committed_members(facts)
    by_index: dict[int, list[ObservedWorker]] = {index: [] for index in indexes}
    for worker in sorted(facts.worker_list, key=lambda w: (w.index, w.attempt)):
        by_index.setdefault(worker.index, []).append(worker)
    # Plan each index by itself, oldest attempt first.
    is_blind = _observer_is_blind(facts)
    plans = {i: _plan_index(facts, workers, members, is_blind, i in indexes) for i, workers in sorted(by_index.items())}
    deletes = [d for plan in plans.values() for w in plan.to_delete for d in _build_delete(facts, w)]
    # One attempt number for all workers created now; members keep their workers unless they are replaced alongside.
    attempt = _next_attempt(facts)
    member_indexes = {member.index for member in members}
    vacant = {
        i: plan
        for i, plan in plans.items()
        if plan.needs_worker and (plan.replace_alongside or i not in member_indexes)
    }
    if lacks_pod_group(facts):
        vacant = {}  # no attempt is counted either: workers are created once their group exists
    pending_creates = _pending_creates(facts)
    avoided = (
        _nodes_to_avoid(facts) if vacant else ()
    )  # skipped if not needed: in an outage every node of every job is checked
    new = [
        CreateWorker(i, attempt, _nodes_to_avoid_for(avoided, plan))
        for i, plan in vacant.items()
        if i not in pending_creates
    ]
    retried = [
        pending_creates[index]
        for index in vacant
        if index in pending_creates and not pending_creates[index].in_progress
    ]
    retries = [CreateWorker(c.index, c.attempt, avoided) for c in retried if facts.now >= c.until_seconds]
    replaced_workers = [vacant[create.index].to_delete[-1:] for create in new]
    failed_workers = [w for goes in replaced_workers for w in goes if has_failed_by_itself(facts, w)]
    return WorkerChanges(
        actions=(*deletes, *sorted((*new, *retries), key=lambda c: c.index)),
        next_attempt=attempt + 1 if new else facts.status.next_attempt,
        failed_starts=facts.status.failed_starts + bool(failed_workers),
        failed_starts_counted=facts.status.failed_starts_counted
        + any(_counts_for_backoff_limit(facts, w) for w in failed_workers),
        events=(
            *(Event(WORKER_LOST, describe_failed_start(w), warning=True) for w in failed_workers[:_MAX_NAMED]),
            *(Event("WorkerCreated", f"worker {c.index} (attempt {c.attempt})") for c in new),
        ),
        until_seconds=earliest(
            (
                *(p.until_seconds for p in plans.values()),
                *(c.until_seconds for c in retried if facts.now < c.until_seconds),
            )
        ),
    )


def describe_start_failure(facts: MembershipNodeFacts) -> str | None:
    """Returns why a claimed generation is abandoned; None: it is not.

    Its workers repeatedly end by themselves before they become members, or the first ones can never be created. Temporary
    rejections and start failures (a quota, a registry, a secret) are retried without limit.
    """
    # A template that the API server rejects for good fails the job before its first generation.
    if not has_trained(facts) and not any(w.phase in ("Pending", "Running") for w in facts.worker_list):
        permanent = next((c for c in facts.pending_creates if c.permanent), None)
        if permanent is not None:
            return f"worker {permanent.index} can never be created from this pod template: {permanent.rejection}"
    failed_starts, limit = facts.status.failed_starts_counted, facts.spec.run_policy.backoff_limit
    if failed_starts < limit:
        return None
    attempts = [(w.index, w.attempt) for w in facts.worker_list] + [(c.index, c.attempt) for c in facts.pending_creates]
    newest_attempts = dict(sorted(attempts))
    failed_workers = [
        w for w in facts.worker_list if w.attempt == newest_attempts[w.index] and w.index in indexes_to_train(facts)
    ]
    failed_workers = [
        w for w in failed_workers if has_failed_by_itself(facts, w) and _counts_for_backoff_limit(facts, w)
    ]
    if not failed_workers:
        return None  # the last replacement may still start
    return f"{describe_failed_start(max(failed_workers, key=lambda w: w.attempt))}; {failed_starts} replacements used up backoffLimit ({limit})"


def has_trained(facts: JobFacts) -> bool:
    """Whether any generation of the job had members: then its template works, and there is state to lose."""
    return any(entry.world_size for entry in facts.status.lineage)


def _counts_for_backoff_limit(facts: JobFacts, worker: ObservedWorker) -> bool:
    """Whether a failed start counts for `backoffLimit`: its container has ended, as for a Kubernetes Job.

    A worker that cannot be started does not count: a registry, a secret or a node may recover. Neither does a failed init
    container once the job has trained: it depends on other services, and has worked before.
    """
    return worker.phase == "Failed" and (not worker.start_blocker or not has_trained(facts))


def has_failed_by_itself(facts: MembershipNodeFacts, worker: ObservedWorker) -> bool:
    """Whether a worker failed by itself before it was a member, so that its replacement may fail as well.

    False if its node or a deletion ended it.
    """
    has_failed = worker.phase == "Failed" and (bool(worker.exit_code) or bool(worker.start_blocker))
    if not has_failed and not _start_timed_out(facts, worker):
        return False
    is_explained = worker_id(worker) in facts.members or announced_termination(facts, worker)
    return not is_explained and not is_node_lost(facts, worker.node)


def _start_timed_out(facts: JobFacts, worker: ObservedWorker) -> bool:
    """Whether the platform has failed to start this worker for too long."""
    deadline = _start_deadline(worker)
    return deadline is not None and facts.now >= deadline


def _start_deadline(worker: ObservedWorker) -> float | None:
    """Returns when a worker that the platform cannot start is replaced (Unix time); None: it has no known blocker."""
    is_blocked = worker.phase == "Pending" and bool(worker.start_blocker)
    return worker.created_seconds + START_TIMEOUT_SECONDS if is_blocked else None


def describe_start_blocker(worker: ObservedWorker) -> str:
    """Describes a worker that could not be started."""
    lines = worker.start_blocker.strip().splitlines()
    return f"worker {worker.index} could not be started: {' '.join(lines)[:_MAX_DETAIL_CHARACTERS]}"


def describe_failed_start(worker: ObservedWorker) -> str:
    """Describes a worker that failed before it was a member."""
    if worker.start_blocker:
        return describe_start_blocker(worker)
    last_lines = worker.message.strip().splitlines()[-1:]  # a traceback names its cause in the last line of the log
    detail = f": {last_lines[0][:_MAX_DETAIL_CHARACTERS]}" if last_lines else ""
    return f"worker {worker.index} {worker.exit_description} before it could train{detail}"


def _retry_time_after_failure(facts: JobFacts, workers: Iterable[ObservedWorker]) -> float:
    """Returns until when an index whose workers failed gets no new worker (Unix time; 0: it may)."""
    backoff_seconds = REPLACEMENT_BACKOFF.wait_seconds(facts.status.failed_starts + 1)
    retry_times = [
        (_start_deadline(w) or w.created_seconds) + backoff_seconds
        for w in workers
        if w.phase == "Failed" or _start_timed_out(facts, w)
    ]
    return max(retry_times, default=0.0)


def _committed_members(facts: MembershipFacts) -> Collection[WorkerId]:
    """Returns the members of a committed generation; empty if the generation is only claimed."""
    membership = facts.status.membership
    return facts.members if membership is not None and membership.state == "Committed" else ()


def _next_attempt(facts: MembershipFacts) -> int:
    """Returns an attempt number beyond any counted in the status or observed."""
    attempts = [w.attempt for w in facts.worker_list] + [s.attempt for s in facts.sessions.values()]
    attempts += [c.attempt for c in facts.pending_creates]
    return max(facts.status.next_attempt, max(attempts, default=0) + 1)


def _pending_creates(facts: MembershipFacts) -> dict[int, PendingCreate]:
    """Returns, by index, the newest create that has led to no worker yet."""
    newest_attempts = {w.index: w.attempt for w in sorted(facts.worker_list, key=lambda w: w.attempt)}
    creates = sorted(facts.pending_creates, key=lambda c: c.attempt)
    return {c.index: c for c in creates if c.attempt > newest_attempts.get(c.index, 0)}


def _member_of(workers: list[ObservedWorker], members: Collection[WorkerId]) -> ObservedWorker | None:
    """Returns the worker that is a member, if one is."""
    for worker in workers:
        if worker_id(worker) in members:
            return worker
    return None


def _plan_index(
    facts: MembershipNodeFacts,
    workers: list[ObservedWorker],
    members: Collection[WorkerId],
    is_blind: bool,
    is_required: bool,
) -> _IndexPlan:
    """Plans one index; `workers` are its workers, oldest attempt first."""
    member = _member_of(workers, members)
    # A member keeps its index, unless it has to move.
    if member is not None and is_required and has_evacuation_or_termination(facts) and _must_move(facts, member):
        return _replace_alongside(facts, workers, member)
    if member is not None:
        return _IndexPlan(tuple(w for w in workers if w is not member)) if len(workers) > 1 else _NO_CHANGE
    if not is_required:
        return _IndexPlan(tuple(workers))
    # A worker without a rank: replace it if its node is unhealthy, else keep the newest attempt that may still join.
    misplaced = _worker_on_unhealthy_node(facts, workers)
    if misplaced is not None:
        return _replace_alongside(facts, workers, misplaced)
    for worker in reversed(workers):
        has_ended = worker.phase in ("Succeeded", "Failed") or _start_timed_out(facts, worker)
        if has_ended or termination_reason(facts, worker):
            continue
        if is_node_lost(facts, worker.node):
            placed_until = _placed_until(facts, worker)
            if placed_until is None:
                continue
            return _IndexPlan(tuple(w for w in workers if w is not worker), until_seconds=placed_until)
        deadline = _silence_deadline(facts, worker)
        if deadline is None or is_blind or facts.now < deadline:
            recheck_seconds = _start_deadline(worker) if deadline is None or is_blind else deadline
            return _IndexPlan(tuple(w for w in workers if w is not worker), until_seconds=recheck_seconds)
    deadline = _retry_time_after_failure(facts, workers)
    if facts.now < deadline:
        return _IndexPlan(until_seconds=deadline)
    return _IndexPlan(tuple(workers), needs_worker=True)


def _worker_on_unhealthy_node(facts: MembershipNodeFacts, workers: list[ObservedWorker]) -> ObservedWorker | None:
    """Returns the newest live worker without a rank whose node was found unhealthy after the worker's creation.

    A worker created later got this node because no other was free.
    """
    if not facts.status.unhealthy_nodes or (facts.free_nodes == 0 and len(workers) == 1):
        return None  # the only free node may be this one
    for worker in reversed(workers):
        unhealthy_seconds = unhealthy_since(facts, worker.node) if worker.node is not None else None
        is_live = (
            worker.phase == "Running" and not termination_reason(facts, worker) and not is_node_lost(facts, worker.node)
        )
        if unhealthy_seconds is not None and is_live and worker.created_seconds <= unhealthy_seconds:
            return worker
    return None


def _must_move(facts: MembershipNodeFacts, member: ObservedWorker) -> bool:
    """Whether the member is to move to another worker: its node is to be evacuated, or it is terminating."""
    return bool(evacuation_reason(facts, member.node) or termination_reason(facts, member))


def _replace_alongside(facts: MembershipNodeFacts, workers: list[ObservedWorker], member: ObservedWorker) -> _IndexPlan:
    """Plans a replacement that starts while the present worker, which has to go, trains on."""
    ended_phases = ("Succeeded", "Failed")
    newer = [w for w in workers if w.attempt > member.attempt and not termination_reason(facts, w)]
    live_workers = [
        w
        for w in newer
        if w.phase not in ended_phases and not _start_timed_out(facts, w) and not is_node_lost(facts, w.node)
    ]
    kept_workers = (member, *live_workers[-1:])
    to_delete = tuple(w for w in workers if w not in kept_workers)
    retry_seconds = _retry_time_after_failure(facts, newer)
    if live_workers:
        return _IndexPlan((*to_delete, member) if _blocks_node(facts, member, live_workers[-1]) else to_delete)
    if facts.now < retry_seconds:
        return _IndexPlan(until_seconds=retry_seconds)
    return _IndexPlan(to_delete, needs_worker=True, replace_alongside=True)


def _blocks_node(facts: MembershipFacts, member: ObservedWorker, newer: ObservedWorker) -> bool:
    """Whether a terminating worker must be deleted now, because another one of a claim needs its node.

    `newer`, its replacement, is warm. Nothing trains in such a claim, and it cannot be committed: both workers would wait for
    each other. The terminating worker first flushes its last saves.
    """
    session, member_session = facts.sessions.get(worker_id(newer)), facts.sessions.get(worker_id(member))
    if session is None or facts.membership.state != "Claimed" or not is_responsive(facts, session):
        return False
    generation = facts.membership.generation
    is_writing = (
        member_session is not None
        and is_responsive(facts, member_session)
        and (member_session.stopped < generation or bool(member_session.pending))
    )
    has_unscheduled = any(w.phase == "Pending" and w.node is None for w in facts.worker_list)
    return has_unscheduled and not is_writing and session.warm and session.stopped >= generation


def _placed_until(facts: MembershipNodeFacts, worker: ObservedWorker) -> float | None:
    """Returns until when a node that seems lost is taken for healthy, because this worker was just placed there.

    Otherwise workers would be created and deleted on it each second, for as long as two observers disagree.
    """
    if facts.free_nodes is not None or worker_id(worker) in facts.sessions:
        return None
    age_seconds = facts.now - worker.created_seconds
    return worker.created_seconds + RECENTLY_PLACED_SECONDS if 0.0 <= age_seconds < RECENTLY_PLACED_SECONDS else None


def _silence_deadline(facts: MembershipNodeFacts, worker: ObservedWorker) -> float | None:
    """Returns when a running worker counts as dead by silence; None: its agent is responsive."""
    session = facts.sessions.get(worker_id(worker))
    if worker.phase == "Pending":
        return None
    if session is None:
        known_since = max(worker.created_seconds, facts.term_seconds)
        return known_since + facts.spec.run_policy.startup_deadline_seconds
    if is_responsive(facts, session):
        return None
    has_room = facts.free_nodes is None or facts.free_nodes > 0
    if not has_room:
        return session.last_message_seconds + SILENCE_GRACE_WITHOUT_ROOM_SECONDS
    return session.last_message_seconds + facts.spec.health_policy.heartbeat_timeout_seconds + SILENCE_GRACE_SECONDS


def _observer_is_blind(facts: MembershipNodeFacts) -> bool:
    """Whether most running workers are silent at once, which points to the operator's own network."""
    if not facts.silent_agents:
        return False
    running = [w for w in facts.worker_list if w.phase == "Running" and not is_node_lost(facts, w.node)]
    sessions = [facts.sessions.get(worker_id(w)) for w in running]
    silent_count = sum(session is not None and not is_responsive(facts, session) for session in sessions)
    return len(running) > 1 and 2 * silent_count > len(running)


def _build_delete(facts: MembershipNodeFacts, worker: ObservedWorker) -> list[DeleteWorker]:
    """Deletes a worker once, gracefully, or by force once its node is lost."""
    force = is_node_lost(facts, worker.node)
    if worker.deleting and not force:
        return []
    if force:
        reason = f"node {worker.node} is lost"
    elif worker.start_blocker and has_failed_by_itself(facts, worker):
        reason = "it could not be started"
    elif worker.phase in ("Succeeded", "Failed"):
        reason = f"it {worker.exit_description}"
    else:
        reason = "it is no longer needed, or silent and replaced"
    return [DeleteWorker(worker.name, worker.uid, force, reason)]


def _nodes_to_avoid_for(avoided: tuple[str, ...], plan: _IndexPlan) -> tuple[str, ...]:
    """Returns the nodes to avoid, with the node on which the last worker could not be started."""
    return tuple(sorted({*avoided, *(w.node for w in plan.to_delete[-1:] if w.start_blocker and w.node is not None)}))


def _nodes_to_avoid(facts: MembershipNodeFacts) -> tuple[str, ...]:
    """Returns the nodes to evacuate and the lost ones."""
    lost = [name for name in doubtful_nodes(facts.node_list) if is_node_lost(facts, name)]
    return tuple(sorted({*nodes_to_evacuate(facts), *lost}))
