"""Short ways to say what a decision is made from: jobs, workers, sessions, holders, manifests, snapshots."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import Heartbeat
from surefoot.protocol.progress import Progress
from surefoot_operator.api.spec import (
    CheckpointPolicy,
    ElasticPolicy,
    MemoryTierSpec,
    Template,
    TrainingJob,
    TrainingJobSpec,
)
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.job_snapshot import (
    JobSnapshot,
    ObservedMemoryServer,
    ObservedNode,
    ObservedSession,
    ObservedWorker,
)

COVERED = {frozenset({"layout"}): True}
BEGAN = 1000.0


def job(replicas: int = 3, least: int | None = None, **spec: Any) -> TrainingJob:
    """A job of `replicas` workers; with `least` it is elastic between the two."""
    elastic = ElasticPolicy(least, replicas) if least is not None else None
    checkpoint = CheckpointPolicy(memory=MemoryTierSpec(interval_steps=10))
    body = TrainingJobSpec(
        Template(("python", "train.py")),
        **{"replicas": replicas, "elastic_policy": elastic, "checkpoint": checkpoint, **spec},
    )
    return TrainingJob("gpt", "default", "uid-1", 1, body)


def manifest(epoch: int, step: int, rank: int, world: int, tag: str = "a") -> RankManifest:
    """Of `tag` depends what bytes were saved."""
    return RankManifest(RankSave(epoch, step, rank), world, "inc", "layout", 64, 1, tag * 16, 8, tag * 16, 2, 0.0)


def endpoint(node: str, instance: str = "i0", domain: str | None = None, server: int = 0) -> MemoryServerEndpoint:
    return MemoryServerEndpoint(
        MemoryServerInstance(node, f"{node}-{instance}"), "127.0.0.1", 7000, domain or node, server_index=server
    )


def holder(node: str, epoch: int | None = None, *entries: RankManifest, **other: Any) -> ObservedMemoryServer:
    """One that was sealed at `epoch` and read after that; None: it is new."""
    seen = ObservedMemoryServer(endpoint(node), "Ready", BEGAN, fence=epoch, read_generation=epoch, entries=entries)
    return replace(seen, **other)


def member(index: int, attempt: int = 1) -> Member:
    return Member(index, attempt, f"inc-{index}-{attempt}", f"n{index}")


def worker(index: int, attempt: int = 1, **other: Any) -> ObservedWorker:
    name = f"gpt-{index}-{attempt}"
    return replace(
        ObservedWorker(index, attempt, name, f"uid-{name}", f"n{index}", "Running", created_seconds=BEGAN), **other
    )


def session(index: int, attempt: int = 1, now: float = BEGAN, **other: Any) -> ObservedSession:
    """A warm agent that was just heard."""
    inc = f"inc-{index}-{attempt}"
    return told(ObservedSession(index, attempt, inc, f"n{index}", True, BEGAN, now, warm=True), **other)


_OF_PROGRESS = {field.name for field in fields(Progress)}

Told = TypeVar("Told", ObservedSession, Heartbeat)


def told(seen: Told, **other: Any) -> Told:
    """`seen` with fields changed, be they its own or of its progress."""
    progress = {name: other.pop(name) for name in _OF_PROGRESS & set(other)}
    return replace(seen, progress=replace(seen.progress, **progress), **other)


def running(now: float = BEGAN + 100, workers: int = 3, step: int = 42, **spec: Any) -> JobSnapshot:
    """Epoch 1 of `workers` workers, each of one rank, well and at `step`; saves of steps 30 and 40 on two holders each."""
    spec.setdefault("least", 1)
    members = tuple(member(i) for i in range(workers))
    world = Membership(1, "Committed", None, workers, members, "the job starts", BEGAN)
    saves = [manifest(1, s, r, workers) for s in (30, 40) for r in range(workers)]
    holders = tuple(
        holder(f"n{i}", 1, *(m for m in saves if i in (m.save.rank, (m.save.rank + 1) % workers)))
        for i in range(workers)
    )
    status = JobStatus(
        phase="Running",
        observed_generation=1,
        membership=world,
        lineage=(LineageEntry(1, None, workers),),
        next_attempt=2,
        had_checkpoint=True,
        assigned_servers=tuple(h.endpoint for h in holders),
        start_seconds=BEGAN,
        step=step,
        progress_seconds=now - 0.05,
        last_complete=Checkpoint(1, 40),
    )
    sessions = tuple(
        session(
            i, now=now, generation=1, stopped=1, step=step, step_at_seconds=now - 0.05, step_seconds=0.1, restored=True,
            saved=Checkpoint(1, 40), copies=2,
        )
        for i in range(workers)
    )  # fmt: skip
    return JobSnapshot(
        now_seconds=now,
        term_seconds=BEGAN,
        job=job(workers, **spec),
        status=status,
        workers=tuple(worker(i) for i in range(workers)),
        nodes=tuple(ObservedNode(f"n{i}", f"n{i}", True) for i in range(workers)),
        sessions=sessions,
        servers=holders,
        covers=COVERED,
        free_nodes=0,
    )


def beginning(
    now: float, body: TrainingJob, sessions: tuple[ObservedSession, ...], free_nodes: int | None
) -> JobSnapshot:
    """Epoch 1 is claimed for a job that begins: each worker, node and holder of these agents is there and well."""
    places = range(len(sessions))
    return JobSnapshot(
        now_seconds=now,
        term_seconds=BEGAN - 100,
        job=body,
        status=JobStatus(
            membership=Membership(1, "Claimed", None, 0, (), "the job starts", BEGAN),
            next_attempt=2,
            start_seconds=BEGAN,
        ),
        workers=tuple(worker(i) for i in places),
        nodes=tuple(ObservedNode(f"n{i}", f"n{i}", True) for i in places),
        sessions=sessions,
        servers=tuple(
            ObservedMemoryServer(endpoint(f"n{i}"), "Ready", BEGAN, fence=1, read_generation=1) for i in places
        ),
        free_nodes=free_nodes,
    )


def with_session(seen: JobSnapshot, index: int, **other: Any) -> JobSnapshot:
    """The same snapshot with this worker's session changed."""
    return replace(seen, sessions=tuple(told(s, **other) if s.index == index else s for s in seen.sessions))


def with_worker(seen: JobSnapshot, index: int, **other: Any) -> JobSnapshot:
    return replace(seen, workers=tuple(replace(w, **other) if w.index == index else w for w in seen.workers))


def with_node(seen: JobSnapshot, name: str, **other: Any) -> JobSnapshot:
    return replace(seen, nodes=tuple(replace(n, **other) if n.name == name else n for n in seen.nodes))


def with_holder(seen: JobSnapshot, node: str, **other: Any) -> JobSnapshot:
    changed = (replace(h, **other) if h.endpoint.instance.node == node else h for h in seen.servers)
    return replace(seen, servers=tuple(changed))
