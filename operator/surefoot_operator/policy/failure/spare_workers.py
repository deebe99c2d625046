"""Decides how many workers a job needs, which of them belong to the membership, and which are spares.

Pure; read by `claim`, `workers` and `report`. A worker is not a spare by its index: the spares are those that the membership
does not need now. So a spare that takes a lost worker's rank costs no other pod than the lost one's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice

from surefoot_operator.api.spec import TrainingJobSpec, allowed_sizes
from surefoot_operator.job_snapshot import ObservedSession, ObservedWorker
from surefoot_operator.policy.core.availability import evacuation_reason, is_usable
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    MembershipNodeFacts,
    cached_per_snapshot,
    is_responsive,
    worker_id,
)
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_nodes

# ---- sizes of the membership -----------------------------------------------------------------------------------------
# Computes the allowed, target and possible numbers of workers.


def target_size(spec: TrainingJobSpec) -> int:
    """Returns the number of workers that should train: `replicas`, or the largest allowed number below it."""
    sizes = allowed_sizes(spec)
    return sizes[max(0, bisect_right(sizes, spec.replicas) - 1)]


def largest_size(spec: TrainingJobSpec, available: int, required_size: int | None = None) -> int:
    """Returns the largest allowed number of workers up to `available`, never beyond the target; 0: none is allowed.

    `required_size`: the only number at which the checkpoint can be restored; None: any.
    """
    sizes, max_workers = allowed_sizes(spec), min(available, target_size(spec))
    if required_size is not None:
        return required_size if required_size <= max_workers and required_size in sizes else 0
    allowed_count = bisect_right(sizes, max_workers)
    return sizes[allowed_count - 1] if allowed_count else 0


def is_allowed_size(spec: TrainingJobSpec, workers: int) -> bool:
    """Whether the spec allows this number of workers."""
    return workers in allowed_sizes(spec)


# ---- spare workers ---------------------------------------------------------------------------------------------------

_ENDED_PHASES = ("Succeeded", "Failed")


@cached_per_snapshot
def required_indexes(facts: MembershipFacts) -> frozenset[int]:
    """Returns the indexes that need a worker: those of the members, then the lowest free ones.

    By index alone, a member that started as a spare would be deleted when the number of spares is reduced.
    """
    count = target_size(facts.spec) + facts.spec.spares
    member_indexes = frozenset(sorted(member.index for member in facts.members.values())[:count])
    unused_indexes = (index for index in range(count) if index not in member_indexes)
    return member_indexes.union(islice(unused_indexes, count - len(member_indexes)))


@cached_per_snapshot
def indexes_to_train(facts: MembershipNodeFacts) -> frozenset[int]:
    """Returns the required indexes that should train: those closest to training. The others are spares."""
    required = required_indexes(facts)
    # Without spares, every required worker trains.
    if not facts.spec.spares:
        return required
    newest = newest_workers(facts)
    ranked = sorted(required, key=lambda index: (_distance_from_training(facts, newest.get(index)), index))
    return frozenset(ranked[: target_size(facts.spec)])


@cached_per_snapshot
def newest_workers(facts: MembershipFacts) -> Mapping[int, ObservedWorker]:
    """Returns the newest attempt of each index, by index; older attempts have been dealt with."""
    return {w.index: w for w in sorted(facts.worker_list, key=lambda w: (w.index, w.attempt))}


@cached_per_snapshot
def newest_responsive_sessions(facts: MembershipNodeFacts) -> list[ObservedSession]:
    """Returns one session per required index: its newest responsive attempt.

    An attempt that is to replace another counts once it is warm. An attempt whose pod is gone or whose agent is silent does
    not count: the connection to a machine without power may stay open, and its session would hide the replacement's.
    """
    sessions_by_index: dict[int, ObservedSession] = {}
    required = required_indexes(facts)
    for session in sorted(facts.sessions.values(), key=lambda s: s.attempt):
        is_usable_attempt = worker_id(session) in facts.workers and is_responsive(facts, session)
        if is_usable_attempt and session.index in required:
            chosen = sessions_by_index.get(session.index)
            if chosen is None or session.warm or not (chosen.warm and evacuation_reason(facts, chosen.node)):
                sessions_by_index[session.index] = session
    return list(sessions_by_index.values())


def spare_agents(facts: MembershipNodeFacts) -> list[ObservedSession]:
    """Returns warm agents without a rank, on nodes that are neither unhealthy nor to be evacuated.

    A membership that grew onto an unhealthy node would stop for each attempt.
    """
    unassigned = (
        s
        for s in newest_responsive_sessions(facts)
        if s.warm and worker_id(s) not in facts.members and is_usable(facts, s)
    )
    return [s for s in unassigned if not evacuation_reason(facts, s.node) and s.node not in unhealthy_nodes(facts)]


def _distance_from_training(facts: MembershipNodeFacts, worker: ObservedWorker | None) -> int:
    """Ranks how far a worker is from training, from 0 (a member) to 5 (ended, missing or unable to start)."""
    if worker is None or worker.phase in _ENDED_PHASES or worker.start_blocker:
        return 5
    if worker_id(worker) in facts.members:
        return 0
    session = facts.sessions.get(worker_id(worker))
    if session is not None and session.warm and is_usable(facts, session):
        return 1
    if worker.phase == "Running":
        return 2
    return 3 if worker.node is not None else 4
