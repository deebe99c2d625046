"""Reconciles workers: creates missing, replaces dead, deletes surplus ones.

Pure. An attempt is counted in status before it is created, so none is ever used twice; a refused create is retried
under its own. Members of a committed world are not touched here: losing one changes the world, which is decided first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from surefoot.protocol.backoff import Backoff
from surefoot.protocol.identities import WorkerId
from surefoot_operator.job_snapshot import CreateSeen, WorkerSeen
from surefoot_operator.policy.core.actions import Action, CreateWorker, DeleteWorker, Event
from surefoot_operator.policy.core.availability import (
    announced_departure,
    anybody_leaves,
    departure_reason,
    node_lost,
    vacate_reason,
    vacated_nodes,
)
from surefoot_operator.policy.core.facts import Facts, is_responsive, soonest
from surefoot_operator.policy.core.indexes import doubtful_nodes, worker_id
from surefoot_operator.policy.failure.spare_workers import world_indexes
from surefoot_operator.policy.failure.unhealthy_nodes import sick_since
from surefoot_operator.policy.membership.gang import lacks_group
from surefoot_operator.reasons import WORKER_CREATED, WORKER_LOST

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

_MOST_NAMED = 4
_LONGEST_DETAIL = 300


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
class _Place:
    """One index: who stays there, who goes, whether somebody has to be created, and when to look again."""

    goes: tuple[WorkerSeen, ...] = ()
    vacant: bool = False
    beside: bool = False
    """A worker is needed beside the one that is there, to take its place."""
    until_seconds: float | None = None


_WELL = _Place(())


def reconcile_workers(facts: Facts, wanted: frozenset[int]) -> WorkerChanges:
    """Plans one live worker for each wanted index, and no other."""
    members = _training(facts)
    by_index: dict[int, list[WorkerSeen]] = {index: [] for index in wanted}
    for worker in sorted(facts.seen.workers, key=lambda w: (w.index, w.attempt)):
        by_index.setdefault(worker.index, []).append(worker)
    blind = _observer_is_blind(facts)
    places = {i: _place(facts, workers, members, blind, i in wanted) for i, workers in sorted(by_index.items())}
    deletes = [d for place in places.values() for w in place.goes for d in _delete(facts, w)]
    attempt = _next_attempt(facts)
    taken = {member.index for member in members}
    vacant = {i: place for i, place in places.items() if place.vacant and (place.beside or i not in taken)}
    if lacks_group(facts):
        vacant = {}  # no attempt is counted either: each is asked for once its group is there
    asked = _asked(facts)
    avoided = _avoided(facts) if vacant else ()  # in an outage all nodes are in doubt, for each of a thousand jobs
    new = [CreateWorker(i, attempt, _avoiding(avoided, place)) for i, place in vacant.items() if i not in asked]
    again = [asked[index] for index in vacant if index in asked and not asked[index].under_way]
    due = [CreateWorker(c.index, c.attempt, avoided) for c in again if facts.now >= c.until_seconds]
    replaced = [vacant[create.index].goes[-1:] for create in new]
    failed = [w for goes in replaced for w in goes if ended_by_itself(facts, w)]
    return WorkerChanges(
        actions=(*deletes, *sorted((*new, *due), key=lambda c: c.index)),
        next_attempt=attempt + 1 if new else facts.status.next_attempt,
        failed_starts=facts.status.failed_starts + bool(failed),
        failed_starts_counted=facts.status.failed_starts_counted + any(_counts(facts, w) for w in failed),
        events=(
            *(Event(WORKER_LOST, never_trained(w), warning=True) for w in failed[:_MOST_NAMED]),
            *(Event(WORKER_CREATED, f"worker {c.index} (attempt {c.attempt})") for c in new),
        ),
        until_seconds=soonest(
            (
                *(p.until_seconds for p in places.values()),
                *(c.until_seconds for c in again if facts.now < c.until_seconds),
            )
        ),
    )


def start_failure(facts: Facts) -> str | None:
    """Says why a claimed epoch is given up; None: it is not.

    Its workers end by themselves before they can be members, again and again, or the first ones can never be created.
    What the fabric refuses or cannot start for now (a quota, a registry, a secret) is tried again without limit.
    """
    if not has_trained(facts) and not any(w.phase in ("Pending", "Running") for w in facts.seen.workers):
        never = next((c for c in facts.seen.creates if c.lasting), None)
        if never is not None:
            return f"worker {never.index} can never be made as the job asks for it: {never.refusal}"
    rounds, limit = facts.status.failed_starts_counted, facts.spec.run_policy.backoff_limit
    if rounds < limit:
        return None
    known = [(w.index, w.attempt) for w in facts.seen.workers] + [(c.index, c.attempt) for c in facts.seen.creates]
    newest = dict(sorted(known))
    failed = [w for w in facts.seen.workers if w.attempt == newest[w.index] and w.index in world_indexes(facts)]
    failed = [w for w in failed if ended_by_itself(facts, w) and _counts(facts, w)]
    if not failed:
        return None  # or the last replacement has not had its chance
    return (
        f"{never_trained(max(failed, key=lambda w: w.attempt))}; {rounds} replacements used up backoffLimit ({limit})"
    )


def has_trained(facts: Facts) -> bool:
    """Whether some world of the job had members: its template works, and there is something to lose."""
    return any(entry.size for entry in facts.status.lineage)


def _counts(facts: Facts, worker: WorkerSeen) -> bool:
    """Whether a failed start counts towards `backoffLimit`, as it does for a Job of Kubernetes: the container has ended.

    What cannot be started does not count: a registry, a secret or a node may come back. Nor does a failed init container
    once the job has trained: it fetches what others serve, and has worked.
    """
    return worker.phase == "Failed" and (not worker.unstarted or not has_trained(facts))


def ended_by_itself(facts: Facts, worker: WorkerSeen) -> bool:
    """Decides whether a worker failed by itself before it was a member.

    Neither its node nor a deletion ended it, so its replacement may fail as well.
    """
    ended = worker.phase == "Failed" and (bool(worker.exit_code) or bool(worker.unstarted))
    if not ended and not _stuck(facts, worker):
        return False
    known = worker_id(worker) in facts.members or announced_departure(facts, worker)
    return not known and not node_lost(facts, worker.node)


def _stuck(facts: Facts, worker: WorkerSeen) -> bool:
    due = _stuck_at(worker)
    return due is not None and facts.now >= due


def _stuck_at(worker: WorkerSeen) -> float | None:
    """When a worker that its fabric cannot start is given up; None: nothing is known to be in its way."""
    waits = worker.phase == "Pending" and bool(worker.unstarted)
    return worker.created_seconds + UNSTARTED_SECONDS if waits else None


def could_not_start(worker: WorkerSeen) -> str:
    lines = worker.unstarted.strip().splitlines()
    return f"worker {worker.index} could not be started: {' '.join(lines)[:_LONGEST_DETAIL]}"


def never_trained(worker: WorkerSeen) -> str:
    """Describes a worker that failed before it was a member."""
    if worker.unstarted:
        return could_not_start(worker)
    said = worker.message.strip().splitlines()[-1:]  # the last line of a log is where a traceback names its cause
    detail = f": {said[0][:_LONGEST_DETAIL]}" if said else ""
    return f"worker {worker.index} {worker.ended} before it could train{detail}"


def _failing_until(facts: Facts, workers: Iterable[WorkerSeen]) -> float:
    """Until when a place whose workers failed stays empty."""
    wait = REPLACEMENTS.seconds(facts.status.failed_starts + 1)
    over = [(_stuck_at(w) or w.created_seconds) + wait for w in workers if w.phase == "Failed" or _stuck(facts, w)]
    return max(over, default=0.0)


def _training(facts: Facts) -> Collection[WorkerId]:
    """Members of a committed world."""
    world = facts.status.world
    return facts.members if world is not None and world.state == "Committed" else ()


def _next_attempt(facts: Facts) -> int:
    """Beyond whatever status counted and whatever is seen to exist."""
    seen = [w.attempt for w in facts.seen.workers] + [s.attempt for s in facts.sessions.values()]
    seen += [c.attempt for c in facts.seen.creates]
    return max(facts.status.next_attempt, max(seen, default=0) + 1)


def _asked(facts: Facts) -> dict[int, CreateSeen]:
    """By index, the newest create that nothing has come of yet."""
    there = {w.index: w.attempt for w in sorted(facts.seen.workers, key=lambda w: w.attempt)}
    waiting = sorted(facts.seen.creates, key=lambda c: c.attempt)
    return {c.index: c for c in waiting if c.attempt > there.get(c.index, 0)}


def _member_of(workers: list[WorkerSeen], members: Collection[WorkerId]) -> WorkerSeen | None:
    for worker in workers:
        if worker_id(worker) in members:
            return worker
    return None


def _place(facts: Facts, workers: list[WorkerSeen], members: Collection[WorkerId], blind: bool, wanted: bool) -> _Place:
    member = _member_of(workers, members)
    if member is not None and wanted and anybody_leaves(facts) and _leaves(facts, member):
        return _beside(facts, workers, member)
    if member is not None:
        return _Place(tuple(w for w in workers if w is not member)) if len(workers) > 1 else _WELL
    if not wanted:
        return _Place(tuple(workers))
    misplaced = _misplaced(facts, workers)
    if misplaced is not None:
        return _beside(facts, workers, misplaced)
    for worker in reversed(workers):
        over = worker.phase in ("Succeeded", "Failed") or _stuck(facts, worker)
        if over or departure_reason(facts, worker):
            continue
        if node_lost(facts, worker.node):
            placed = _placed_until(facts, worker)
            if placed is None:
                continue
            return _Place(tuple(w for w in workers if w is not worker), until_seconds=placed)
        due = _patience_ends(facts, worker)
        if due is None or blind or facts.now < due:
            look = _stuck_at(worker) if due is None or blind else due
            return _Place(tuple(w for w in workers if w is not worker), until_seconds=look)
    due = _failing_until(facts, workers)
    if facts.now < due:
        return _Place(until_seconds=due)
    return _Place(tuple(workers), vacant=True)


def _misplaced(facts: Facts, workers: list[WorkerSeen]) -> WorkerSeen | None:
    """The newest live worker without a rank whose node was found sick since it came; one that came later had no other."""
    if not facts.status.sick_nodes or (facts.seen.free_nodes == 0 and len(workers) == 1):
        return None  # or another one has taken the last free node
    for worker in reversed(workers):
        since = sick_since(facts, worker.node) if worker.node is not None else None
        live = worker.phase == "Running" and not departure_reason(facts, worker) and not node_lost(facts, worker.node)
        if since is not None and live and worker.created_seconds <= since:
            return worker
    return None


def _leaves(facts: Facts, member: WorkerSeen) -> bool:
    return bool(vacate_reason(facts, member.node) or departure_reason(facts, member))


def _beside(facts: Facts, workers: list[WorkerSeen], member: WorkerSeen) -> _Place:
    """It is to end, or others want its node left: it trains on while another one is made to take its place."""
    over = ("Succeeded", "Failed")
    newer = [w for w in workers if w.attempt > member.attempt and not departure_reason(facts, w)]
    live = [w for w in newer if w.phase not in over and not _stuck(facts, w) and not node_lost(facts, w.node)]
    kept = (member, *live[-1:])
    goes = tuple(w for w in workers if w not in kept)
    due = _failing_until(facts, newer)
    if live:
        return _Place((*goes, member) if _takes_room(facts, member, live[-1]) else goes)
    if facts.now < due:
        return _Place(until_seconds=due)
    return _Place(goes, vacant=True, beside=True)


def _takes_room(facts: Facts, member: WorkerSeen, newer: WorkerSeen) -> bool:
    """Whether a worker that leaves keeps its node from another one of a claimed world, while `newer` stands ready.

    Nobody trains in such a world, and it cannot begin: both would wait for each other. What it saved last is written first.
    """
    session, left = facts.sessions.get(worker_id(newer)), facts.sessions.get(worker_id(member))
    if session is None or facts.world.state != "Claimed" or not is_responsive(facts, session):
        return False
    epoch = facts.world.epoch
    writes = left is not None and is_responsive(facts, left) and (left.stopped < epoch or bool(left.pending))
    waits = any(w.phase == "Pending" and w.node is None for w in facts.seen.workers)
    return waits and not writes and session.warm and session.stopped >= epoch


def _placed_until(facts: Facts, worker: WorkerSeen) -> float | None:
    """Until when it is believed that a node is well, which seems gone, because this worker was just placed there.

    Otherwise workers would be made and deleted on it by the second, for as long as two observers disagree.
    """
    if facts.seen.free_nodes is not None or worker_id(worker) in facts.sessions:
        return None
    age = facts.now - worker.created_seconds
    return worker.created_seconds + PLACED_SECONDS if 0.0 <= age < PLACED_SECONDS else None


def _patience_ends(facts: Facts, worker: WorkerSeen) -> float | None:
    """When a worker that the fabric calls well counts as dead because nobody hears its agent; None: it is heard."""
    session = facts.sessions.get(worker_id(worker))
    if worker.phase == "Pending":
        return None
    if session is None:
        known_since = max(worker.created_seconds, facts.seen.term_seconds)
        return known_since + facts.spec.run_policy.startup_deadline_seconds
    if is_responsive(facts, session):
        return None
    room = facts.seen.free_nodes is None or facts.seen.free_nodes > 0
    if not room:
        return session.heard_seconds + SILENT_WITHOUT_ROOM_SECONDS
    return session.heard_seconds + facts.spec.health_policy.heartbeat_timeout_seconds + SILENT_SECONDS


def _observer_is_blind(facts: Facts) -> bool:
    """Most workers silent at once, all running as far as the fabric knows: nothing is replaced for silence."""
    if not facts.silent_agents:
        return False
    running = [w for w in facts.seen.workers if w.phase == "Running" and not node_lost(facts, w.node)]
    heard = [facts.sessions.get(worker_id(w)) for w in running]
    silent = sum(session is not None and not is_responsive(facts, session) for session in heard)
    return len(running) > 1 and 2 * silent > len(running)


def _delete(facts: Facts, worker: WorkerSeen) -> list[DeleteWorker]:
    """Gently, or by force where its node cannot be reached; once is enough unless force becomes possible."""
    force = node_lost(facts, worker.node)
    if worker.deleting and not force:
        return []
    if force:
        reason = f"node {worker.node} is gone"
    elif worker.unstarted and ended_by_itself(facts, worker):
        reason = "it could not be started"
    elif worker.phase in ("Succeeded", "Failed"):
        reason = f"it {worker.ended}"
    else:
        reason = "it is not needed any more, or silent and replaced"
    return [DeleteWorker(worker.name, worker.uid, force, reason)]


def _avoiding(avoided: tuple[str, ...], place: _Place) -> tuple[str, ...]:
    """Also the node on which the last one could not be started: another may have the image."""
    return tuple(sorted({*avoided, *(w.node for w in place.goes[-1:] if w.unstarted and w.node is not None)}))


def _avoided(facts: Facts) -> tuple[str, ...]:
    lost = [name for name in doubtful_nodes(facts.seen.nodes) if node_lost(facts, name)]
    return tuple(sorted({*vacated_nodes(facts), *lost}))
