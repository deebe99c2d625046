"""Binds pending workers to free nodes and derives their phase.

Pure; called by `platform`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surefoot_operator.job_snapshot import WorkerSeen
from surefoot_operator.platforms.local.run_records import Deletion, NodeRecord, WorkerRecord, WorkerState


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker; `state` and `deletion` have its uid."""

    record: WorkerRecord
    state: WorkerState | None = None
    deletion: Deletion | None = None

    @property
    def over(self) -> bool:
        return self.state is not None and self.state.over


def node_is_gone(record: WorkerRecord, live: Mapping[str, NodeRecord]) -> bool:
    """Whether the node process that the worker was bound to has ended."""
    if record.node is None:
        return False
    node = live.get(record.node)
    return node is None or node.life != record.node_life


def has_no_process(worker: WorkerFiles, live: Mapping[str, NodeRecord]) -> bool:
    """Whether nothing runs for this worker, nor will unless it is bound."""
    return worker.record.node is None or worker.over or node_is_gone(worker.record, live)


def seen(worker: WorkerFiles, live: Mapping[str, NodeRecord]) -> WorkerSeen | None:
    """The worker as `observe` reports it; None once it was force-deleted."""
    record, state = worker.record, worker.state
    if worker.deletion is not None and worker.deletion.force:
        return None
    gone = node_is_gone(record, live)
    running = state is None or not state.over
    message = f"its node {record.node} is gone" if gone and running else (state.message if state else "")
    message = message or (worker.deletion.reason if worker.deletion is not None else "")
    return WorkerSeen(
        index=record.index,
        attempt=record.attempt,
        name=record.name,
        uid=record.uid,
        node=record.node,
        phase="Failed" if gone and running else state.phase if state else "Pending",
        exit_code=state.exit_code if state else None,
        message=message,
        created_seconds=record.created_seconds,
        deleting=worker.deletion is not None,
        unstarted=state.message if state is not None and state.unstarted else "",
    )


def free_nodes(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[NodeRecord]:
    """Lists uncordoned live nodes with holders and no worker, by name.

    A force-deleted worker occupies its node until its process has ended.
    """
    taken = {w.record.node for w in workers if not has_no_process(w, live)}
    open_ = (node for _, node in sorted(live.items()) if node.holders and not node.cordoned)
    return [node for node in open_ if node.name not in taken]


def bindings(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """Maps pending workers to free nodes: oldest first, avoided nodes last."""
    workers = list(workers)
    free = free_nodes(workers, live)
    chosen: dict[str, NodeRecord] = {}
    waiting = [w.record for w in workers if w.record.node is None and w.deletion is None]
    for record in sorted(waiting, key=lambda r: (r.created_seconds, r.index)):
        if not free:
            break
        node = min(free, key=lambda n: n.name in record.avoid_nodes)
        free.remove(node)
        chosen[record.name] = node
    return chosen


def tidy(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[WorkerRecord]:
    """Lists workers to delete that no node is left to end."""
    return [w.record for w in workers if w.deletion is not None and has_no_process(w, live)]
