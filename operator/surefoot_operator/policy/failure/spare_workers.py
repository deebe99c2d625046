"""Decides which workers are wanted, and which of them are spares.

Pure; read by `claim`, `workers` and `report`. No worker is a spare by its number: those are that the world does not
need now. So a spare that takes a lost worker's rank costs no pod but the lost one's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice

from surefoot_operator.api.spec import TrainingJobSpec, allowed_sizes
from surefoot_operator.job_snapshot import ObservedSession, ObservedWorker
from surefoot_operator.policy.core.availability import evacuation_reason, is_usable
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    is_responsive,
    worker_id,
)
from surefoot_operator.policy.failure.unhealthy_nodes import unhealthy_nodes

# ---- size of the world -----------------------------------------------------------------------------------------------
# Computes the allowed, target and possible sizes of a world.


def target_size(spec: TrainingJobSpec) -> int:
    """Returns the number of workers that should exist.

    `replicas`, or the largest allowed number below it.
    """
    sizes = allowed_sizes(spec)
    return sizes[max(0, bisect_right(sizes, spec.replicas) - 1)]


def largest_size(spec: TrainingJobSpec, available: int, tied: int | None = None) -> int:
    """The largest allowed world of `available` workers; 0: none.

    Never beyond the target. `tied`: the only size that the checkpoint can be restored at; None: any.
    """
    sizes, most = allowed_sizes(spec), min(available, target_size(spec))
    if tied is not None:
        return tied if tied <= most and tied in sizes else 0
    fitting = bisect_right(sizes, most)
    return sizes[fitting - 1] if fitting else 0


def is_allowed(spec: TrainingJobSpec, workers: int) -> bool:
    return workers in allowed_sizes(spec)


# ---- spare workers ---------------------------------------------------------------------------------------------------

_OVER = ("Succeeded", "Failed")


@cached_per_snapshot
def required_indices(facts: WorldFacts) -> frozenset[int]:
    """Lists indexes that need a worker: the world's, then the lowest.

    By number alone a member that began as a spare would be ended when fewer spares are asked for.
    """
    count = target_size(facts.spec) + facts.spec.spares
    taken = frozenset(sorted(member.index for member in facts.members.values())[:count])
    free = (index for index in range(count) if index not in taken)
    return taken.union(islice(free, count - len(taken)))


@cached_per_snapshot
def member_indices(facts: WorldNodeFacts) -> frozenset[int]:
    """Lists the wanted workers that make up the world.

    What hinders the others, which are spares, hinders no training.
    """
    wanted = required_indices(facts)
    if not facts.spec.spares:
        return wanted
    newest = newest_workers(facts)
    ranked = sorted(wanted, key=lambda index: (_distance(facts, newest.get(index)), index))
    return frozenset(ranked[: target_size(facts.spec)])


@cached_per_snapshot
def newest_workers(facts: WorldFacts) -> Mapping[int, ObservedWorker]:
    """The newest attempt of each index, by index.

    What became of older ones was answered.
    """
    return {w.index: w for w in sorted(facts.worker_list, key=lambda w: (w.index, w.attempt))}


@cached_per_snapshot
def newest_attempts(facts: WorldNodeFacts) -> list[ObservedSession]:
    """One agent per wanted index: the newest attempt that is heard.

    One that is made beside another, to take its place, counts once it is warm; no longer once its pod is gone, or nothing is
    heard of it: the line to a machine that lost its power may stand, and its agent would hide the one that lives.
    """
    newest_of: dict[int, ObservedSession] = {}
    wanted = required_indices(facts)
    for session in sorted(facts.sessions.values(), key=lambda s: s.attempt):
        there = worker_id(session) in facts.workers and is_responsive(facts, session)
        if there and session.index in wanted:
            known = newest_of.get(session.index)
            if known is None or session.warm or not (known.warm and evacuation_reason(facts, known.node)):
                newest_of[session.index] = session
    return list(newest_of.values())


def spare_agents(facts: WorldNodeFacts) -> list[ObservedSession]:
    """Warm agents without a rank, on nodes that nobody wants left.

    Nor found sick: a world that grows there would halt for each try.
    """
    found = (s for s in newest_attempts(facts) if s.warm and worker_id(s) not in facts.members and is_usable(facts, s))
    return [s for s in found if not evacuation_reason(facts, s.node) and s.node not in unhealthy_nodes(facts)]


def _distance(facts: WorldNodeFacts, worker: ObservedWorker | None) -> int:
    """How far a worker is from training."""
    if worker is None or worker.phase in _OVER or worker.start_blocker:
        return 5
    if worker_id(worker) in facts.members:
        return 0
    session = facts.sessions.get(worker_id(worker))
    if session is not None and session.warm and is_usable(facts, session):
        return 1
    if worker.phase == "Running":
        return 2
    return 3 if worker.node is not None else 4
