"""Indexes a snapshot and derives the facts every decision uses.

Pure; read by every decision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from surefoot.protocol.completeness import TierReading
from surefoot.protocol.identities import Checkpoint, HolderId, WorkerId
from surefoot.protocol.progress import mean_passes
from surefoot_operator.api.spec import TrainingJobSpec
from surefoot_operator.api.status import DataRead, JobStatus, Member, World
from surefoot_operator.observed import HolderSeen, NodeSeen, Observed, SessionSeen, WorkerSeen

P = ParamSpec("P")
T = TypeVar("T")

UNHEARD_SECONDS = 30.0
"""Workers not heard in this term are judged only after so long, and only with a witness."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A snapshot with its indexes: built once per plan, so that no decision searches a list per worker."""

    seen: Observed
    workers: Mapping[WorkerId, WorkerSeen]
    sessions: Mapping[WorkerId, SessionSeen]
    nodes: Mapping[str, NodeSeen]
    holders: Mapping[HolderId, HolderSeen]
    heard_on: Mapping[str, bool]
    """Of each node that an agent said hello from in this term: whether one there is heard now."""
    members: Mapping[WorkerId, Member]
    """Those of the present world, claimed or committed; none before the first."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was derived from this snapshot before; see `derived_once`."""

    @property
    def now(self) -> float:
        return self.seen.now

    @property
    def spec(self) -> TrainingJobSpec:
        return self.seen.job.spec

    @property
    def status(self) -> JobStatus:
        return self.seen.status

    @property
    def world(self) -> World:
        """The present world; only where one was claimed already."""
        world = self.seen.status.world
        if world is None:
            raise LookupError("this job has no world yet")
        return world

    @property
    def running_epoch(self) -> int:
        """The newest epoch that was committed, 0 before the first."""
        return self.seen.status.lineage[-1].epoch if self.seen.status.lineage else 0


def derived_once(function: Callable[Concatenate[Facts, P], T]) -> Callable[Concatenate[Facts, P], T]:
    """Derives a fact once for each snapshot; later callers get the same value, and must not change it.

    What looks at every worker, asked for by the decision about each of them, would cost the square of their number.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def once(facts: Facts, /, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "arguments are given by position, so that they can be looked up"
        key = (name, *arguments)
        if key not in facts._derived:
            facts._derived[key] = function(facts, *arguments, **named)
        return cast(T, facts._derived[key])

    return once


def gather(seen: Observed) -> Facts:
    """Indexes the snapshot once for all decisions."""
    sessions: dict[WorkerId, SessionSeen] = {}
    for session in sorted(seen.sessions, key=lambda s: (s.connected, s.since_seconds, s.incarnation)):
        sessions[WorkerId(session.index, session.attempt)] = session
    silence = seen.job.spec.health_policy.heartbeat_timeout_seconds
    heard_on: dict[str, bool] = {}
    for session in sessions.values():
        heard = session.connected and seen.now - session.heard_seconds <= silence
        heard_on[session.node] = heard_on.get(session.node, False) or heard
    world = seen.status.world
    return Facts(
        seen,
        {WorkerId(w.index, w.attempt): w for w in seen.workers},
        sessions,
        {node.name: node for node in seen.nodes},
        {h.endpoint.holder: h for h in seen.holders},
        heard_on,
        {} if world is None else {worker_id(m): m for m in world.members},
    )


def worker_id(one: Member | SessionSeen | WorkerSeen) -> WorkerId:
    return WorkerId(one.index, one.attempt)


def node_lost(facts: Facts, name: str | None) -> bool:
    """Whether the fabric itself says that this node is gone: a witness, where silence alone is none.

    Not while an agent there is heard: who was away is then the node's observer, and what runs there must not be deleted.
    """
    if name is None or not facts.nodes:
        return False
    node = facts.nodes.get(name)
    if node is not None and node.ready and not node.doubt:
        return False
    if facts.heard_on.get(name):
        return False
    if node is None or not node.ready:
        return True
    # two witnesses that know nothing of each other: the cluster's, and our own line, which reaches others
    unheard = name in facts.heard_on or facts.now >= facts.seen.term_seconds + UNHEARD_SECONDS
    return unheard and _observers_agree(facts)


@derived_once
def _observers_agree(facts: Facts) -> bool:
    """Whether some node is known to live: then another one that is doubted is not the observer's own trouble."""
    return any(facts.heard_on.values()) or any(n.ready and not n.doubt for n in facts.seen.nodes)


def vacate_reason(facts: Facts, name: str | None) -> str:
    """Why this node should be left, though it lives: others say so, or it failed this job too often. Empty: stay."""
    if name is None:
        return ""
    node = facts.nodes.get(name)
    if node is not None and node.signal:
        return node.signal
    return _excluded(facts).get(name, "")


@derived_once
def _excluded(facts: Facts) -> Mapping[str, str]:
    """Why nodes are excluded from this job now, by name."""
    lasting = [e for e in facts.status.excluded_nodes if e.until_seconds > facts.now]
    return {e.name: e.reason for e in reversed(lasting)}


def departure_reason(facts: Facts, one: Member | WorkerSeen | SessionSeen) -> str:
    """Why this worker is about to end by somebody's will, itself and its program well; empty: it is not, or has ended."""
    worker = facts.workers.get(worker_id(one))
    return "" if worker is not None and worker.phase in ("Succeeded", "Failed") else announced_departure(facts, one)


def announced_departure(facts: Facts, one: Member | WorkerSeen | SessionSeen) -> str:
    """Why somebody wanted this worker to end, whether it has ended or not; empty: nobody said so."""
    worker, session = facts.workers.get(worker_id(one)), facts.sessions.get(worker_id(one))
    if worker is not None and (worker.deleting or worker.disrupted):
        return f"is being deleted ({worker.message})" if worker.message else "is being deleted"
    return "was told to end" if session is not None and session.leaving else ""


def is_responsive(facts: Facts, session: SessionSeen) -> bool:
    """Connected, and heard within the heartbeat timeout."""
    return session.connected and facts.now - session.heard_seconds <= facts.spec.health_policy.heartbeat_timeout_seconds


def usable(facts: Facts, session: SessionSeen) -> bool:
    """Whether this agent could be a member of a new world as far as its worker and its line go."""
    worker = facts.workers.get(worker_id(session))
    if worker is None or worker.phase in ("Succeeded", "Failed") or departure_reason(facts, session):
        return False
    return is_responsive(facts, session) and not node_lost(facts, session.node)


@derived_once
def member_sessions(facts: Facts) -> tuple[tuple[Member, SessionSeen | None], ...]:
    """Each member of the world with its own agent's session: None if another incarnation, or nobody, speaks."""
    found: list[tuple[Member, SessionSeen | None]] = []
    for worker, member in facts.members.items():
        session = facts.sessions.get(worker)
        own = session is not None and session.incarnation == member.incarnation
        found.append((member, session if own else None))
    return tuple(found)


@derived_once
def held_checkpoint(facts: Facts) -> Checkpoint | None:
    """The step at which every rank of the committed world waits for the leader; None: some go on, or nobody halted them."""
    world, hold = facts.status.world, facts.seen.hold
    if world is None or world.state != "Committed" or not world.members or hold is None:
        return None
    if (hold.epoch, hold.state) != (world.epoch, "Bound"):
        return None
    reached = all(s is not None and s.epoch == hold.epoch and s.held == hold.step for _, s in member_sessions(facts))
    return Checkpoint(hold.epoch, hold.step) if reached else None


@derived_once
def final_checkpoint(facts: Facts) -> Checkpoint | None:
    """What the program ended with, saved or not, once every member of the committed world has finished well.

    An epoch that made no step of its own ended where it began. None also where steps are not known (a plain torchrun).
    """
    sessions = [s for _, s in member_sessions(facts)]
    if not sessions or any(s is None or s.epoch != facts.world.epoch or s.finished != 0 for s in sessions):
        return None
    steps = [s.finished_steps for s in sessions if s is not None]
    if min(steps) < 0:
        return None
    return Checkpoint(facts.world.epoch, max(steps)) if any(steps) else facts.world.parent


@derived_once
def is_broken(facts: Facts) -> bool:
    """Whether a trainer of the committed world has failed: it makes no further step."""
    epoch = facts.world.epoch
    return any(s is not None and s.exit is not None and s.exit.epoch == epoch for _, s in member_sessions(facts))


@derived_once
def in_epoch(facts: Facts, epoch: int) -> tuple[SessionSeen, ...]:
    """Sessions whose facts (step, exit, held…) are about this epoch."""
    return tuple(s for s in facts.sessions.values() if s.epoch == epoch)


@derived_once
def step_of(facts: Facts, epoch: int) -> int:
    """The highest step that any rank of `epoch` is known to have finished, 0 if none is."""
    return max((s.progress.step for s in in_epoch(facts, epoch)), default=0)


@derived_once
def has_stepped(facts: Facts, epoch: int) -> bool:
    """Whether `epoch` made a step of its own: beyond the one that it was restored from."""
    parent = facts.world.parent.step if facts.world.parent else 0
    return any(s.step_at_seconds is not None or s.progress.step > parent for s in in_epoch(facts, epoch))


@derived_once
def last_step_seconds(facts: Facts, epoch: int) -> float | None:
    """When a step of `epoch` was last reported; an operator that just came counts from its first word."""
    world = facts.status.world
    parent = world.parent.step if world is not None and world.parent is not None else 0
    times = [
        s.step_at_seconds if s.step_at_seconds is not None else s.since_seconds
        for s in in_epoch(facts, epoch)
        if s.step_at_seconds is not None or s.progress.step > parent
    ]
    return max(times, default=None)


@derived_once
def seconds_per_step(facts: Facts) -> float | None:
    """The slowest rank's step time; None if nobody said one."""
    return max(
        (s.progress.step_seconds for s in facts.sessions.values() if s.progress.step_seconds is not None), default=None
    )


def data_read(facts: Facts, epoch: int) -> DataRead | None:
    """How far the workers of `epoch` have come in their data; None where no loader tells."""
    told = [s.progress for s in in_epoch(facts, epoch)]
    passes, pace = mean_passes(told), seconds_per_step(facts)
    if passes is None:
        return None
    samples = sum(one.step_samples or 0 for one in told)
    return DataRead(round(passes, 4), float(f"{samples / pace:.3g}") if samples and pace else None)


def saving_steps(facts: Facts) -> int:
    """Between two saves to memory now: what the operator chose, else the tier's base."""
    chosen = facts.status.memory_interval
    return facts.spec.checkpoint.memory.base_steps if chosen is None else chosen.steps


@derived_once
def sealed_holders(facts: Facts, epoch: int) -> tuple[HolderSeen, ...]:
    """Holders that answer, are sealed at `epoch` or newer, and whose index was read after that."""
    return tuple(
        h
        for h in facts.seen.holders
        if h.state == "Ready" and h.read_epoch == epoch and h.fence is not None and h.fence >= epoch
    )


@derived_once
def reading_at(facts: Facts, epoch: int) -> TierReading:
    """What was read for `epoch` of all tiers; holders that were not are left out, not taken as empty."""
    persistent = facts.seen.persistent
    listed = persistent.entries if persistent.read_epoch == epoch else None
    return TierReading({h.endpoint.holder: h.entries for h in sealed_holders(facts, epoch)}, listed)


@derived_once
def domains_of(facts: Facts) -> dict[HolderId, str]:
    return {h.endpoint.holder: h.endpoint.domain for h in facts.seen.holders}


@derived_once
def bad_of(facts: Facts) -> frozenset[Checkpoint]:
    return frozenset(facts.status.bad)


def soonest(times: Iterable[float | None]) -> float | None:
    """The earliest of some moments, those that are none left out."""
    return min((t for t in times if t is not None), default=None)
