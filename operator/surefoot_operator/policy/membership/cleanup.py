"""Cleans up workers and memory of an ended or deleted job.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from surefoot_operator.job_snapshot import WorkerSeen
from surefoot_operator.policy.core.actions import Action, CleanMemory, DeleteJob, DeleteWorker, Event, RetireWorkers
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import Facts, is_responsive, soonest
from surefoot_operator.policy.core.indexes import worker_id
from surefoot_operator.policy.membership.finalizer import next_purge_step

LEAVING_SECONDS = 60.0
"""How long agents of an ended job have to flush and leave before they are deleted."""

UNHEARD_SECONDS = 60.0
"""A memory tier that does not answer for so long is not waited for before the job counts as tidied."""

KEPT_AFTER_FAILURE_SECONDS = 600.0
"""How long the memory of a failed job is kept, so that somebody can still look, or take it up."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    actions: tuple[Action, ...]
    reason: str
    until_seconds: float | None = None
    events: tuple[Event, ...] = ()
    done: bool = False
    """Nothing is left to tidy."""


def cleanup_after_end(facts: Facts) -> Cleanup:
    """Plans the cleanup of an ended or deleted job.

    After the end agents leave, then their memory is deleted. A deleted job keeps nothing.
    """
    return _deleted(facts) if facts.seen.job.deleted else _over(facts)


def _deleted(facts: Facts) -> Cleanup:
    reason = "the job was deleted"
    # a worker whose deletion is all it hears of trains on for some seconds, so that its world could be left in order
    told = _retires([w for w in facts.seen.workers if _hears(facts, w)], 0, reason)
    actions = (*told, *_deletes(facts, facts.seen.workers, reason), *_clean(facts, reason))
    left = next_purge_step(facts)
    if left is None:
        return Cleanup(actions, reason)
    return Cleanup((*actions, *left.actions), left.reason, left.until_seconds, left.events)


def _over(facts: Facts) -> Cleanup:
    phase, now, since = facts.status.phase, facts.now, _ended_at(facts)
    late = now >= since + LEAVING_SECONDS
    alive = [w for w in facts.seen.workers if w.phase not in ("Succeeded", "Failed")]
    hearing = [w for w in alive if not w.deleting and _hears(facts, w)]
    rest = _rest(facts, late or not alive)
    actions: list[Action] = []
    if not late:
        actions += _retires(hearing, 0 if phase == "Complete" else 1, facts.status.message)
    going = [w for w in alive if late or not _ends(facts, w)]
    actions += _deletes(facts, [*going, *rest], f"the job is {phase}")
    kept_until = since + _kept_seconds(facts)
    if not any(not w.deleting for w in alive) and now >= kept_until:
        actions += _clean(facts, f"the job is {phase}")
    lingering = any(w.lingering for w in facts.seen.workers)
    done = not alive and not rest and not lingering and _is_clean(facts)
    expiry = _expiry(facts)
    if expiry is not None and now >= expiry and (done or facts.status.tidied):
        actions.append(DeleteJob(f"it ended more than ttlSecondsAfterFinished ({expiry - since:g} s) ago"))
    moments = (since + LEAVING_SECONDS if alive or lingering else None, kept_until, expiry)
    due = soonest(at for at in moments if at is not None and now < at)
    return Cleanup(tuple(actions), facts.status.message, due, done=done)


def _ended_at(facts: Facts) -> float:
    return facts.status.completion_seconds if facts.status.completion_seconds is not None else facts.now


def _hears(facts: Facts, worker: WorkerSeen) -> bool:
    session = facts.sessions.get(worker_id(worker))
    return session is not None and is_responsive(facts, session)


def _ends(facts: Facts, worker: WorkerSeen) -> bool:
    """Whether its agent may still end by itself, so that its pod stays for its logs: it hears us, or has just left."""
    return _hears(facts, worker) or (worker.phase == "Running" and not node_lost(facts, worker.node))


def _retires(workers: Iterable[WorkerSeen], exit_code: int, reason: str) -> tuple[RetireWorkers, ...]:
    indexes = tuple(sorted({w.index for w in workers}))
    return (RetireWorkers(indexes, exit_code, reason),) if indexes else ()


def _rest(facts: Facts, late: bool) -> list[WorkerSeen]:
    """Of the workers that have ended: those whose sidecars never do, which hold a node; or all, if that is asked for.

    Others stay: they hold nothing, and their logs are people's.
    """
    if not late:
        return []
    ended = [w for w in facts.seen.workers if w.phase in ("Succeeded", "Failed")]
    if facts.spec.run_policy.clean_pod_policy == "All":
        return ended
    past = facts.now >= _ended_at(facts) + LEAVING_SECONDS
    return [w for w in ended if w.lingering and past]


def _deletes(facts: Facts, workers: Iterable[WorkerSeen], reason: str) -> tuple[DeleteWorker, ...]:
    """Once is enough, unless the node is gone since: then nobody else would ever say that the worker has ended."""
    return tuple(
        DeleteWorker(w.name, w.uid, node_lost(facts, w.node), reason)
        for w in workers
        if not w.deleting or node_lost(facts, w.node)
    )


def _expiry(facts: Facts) -> float | None:
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return None if ttl is None else _ended_at(facts) + ttl


def _kept_seconds(facts: Facts) -> float:
    if facts.status.phase == "Complete":
        return 0.0
    ttl = facts.spec.run_policy.ttl_seconds_after_finished
    return KEPT_AFTER_FAILURE_SECONDS if ttl is None else min(ttl, KEPT_AFTER_FAILURE_SECONDS)


def _is_clean(facts: Facts) -> bool:
    """Cleaned by this operator; or no holder was heard of for so long that there is nobody to clean."""
    if facts.seen.memory_cleaned:
        return True
    unheard = not any(h.state == "Ready" for h in facts.seen.holders)
    return unheard and facts.now >= max(_ended_at(facts), facts.seen.term_seconds) + UNHEARD_SECONDS


def _clean(facts: Facts, reason: str) -> tuple[Action, ...]:
    """While any holder still knows this job: a cleaned one has no fence of it any more."""
    if facts.status.tidied or facts.seen.memory_cleaned:
        return ()
    known = any(h.state == "Ready" and h.fence is not None for h in facts.seen.holders)
    return (CleanMemory(reason),) if known else ()
