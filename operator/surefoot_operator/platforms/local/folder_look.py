"""Reads what a run folder holds of its job, without changing anything.

Touches files and /proc. Called by `platform`, which binds workers beside it, and by the commands that look at a run of
`surefoot local`: a look must never schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from surefoot.linux_process import ProcessIdentity, is_alive
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import FabricError
from surefoot_operator.job_snapshot import NodeSeen
from surefoot_operator.memory.holder_place import HolderPlace
from surefoot_operator.platforms.interface import FabricSeen
from surefoot_operator.platforms.local import scheduling
from surefoot_operator.platforms.local.job_store import Store
from surefoot_operator.platforms.local.run_folder import LockBusy, RunFolder, read_json
from surefoot_operator.platforms.local.run_records import Deletion, NodeRecord, WorkerRecord, WorkerState, from_json

T = TypeVar("T")
Nodes = Mapping[str, NodeRecord]


def look(folder: RunFolder) -> FabricSeen:
    """Reads job, status, workers and nodes. Raises FabricError."""
    store = Store(folder)
    job, status = store.job(), store.status()
    nodes = as_fabric_error(node_records, folder)
    return folder_seen(job, status, nodes, live_nodes(nodes), as_fabric_error(worker_files, folder))


def folder_seen(
    job: TrainingJob, status: JobStatus, nodes: Nodes, live: Nodes, workers: Sequence[scheduling.WorkerFiles]
) -> FabricSeen:
    """Builds the observation; `live`: nodes whose leader still is."""
    return FabricSeen(
        job=_as_it_is_here(job),
        status=status,
        workers=tuple(shown for w in workers if (shown := scheduling.seen(w, live)) is not None),
        nodes=tuple(
            NodeSeen(
                node.name,
                node.domain,
                ready=node.name in live and bool(node.holders),
                schedulable=not node.cordoned,
                reason=node.message if node.name in live else "its process is gone",
            )
            for node in nodes.values()
        ),
        holders=tuple(
            _place_of(node, number, node.name in live) for node in nodes.values() for number in range(len(node.holders))
        ),
        free_nodes=len(scheduling.free_nodes(workers, live)),
    )


def live_nodes(nodes: Nodes) -> dict[str, NodeRecord]:
    """Those whose leader still is."""
    return {name: node for name, node in nodes.items() if is_alive(ProcessIdentity.parse(node.life))}


def node_records(folder: RunFolder) -> dict[str, NodeRecord]:
    bodies = [read_json(path) for path in sorted(folder.nodes.glob("*.json"))]
    records = [from_json(NodeRecord, body) for body in bodies if body is not None]
    return {
        record.name: dataclasses.replace(record, cordoned=folder.cordon(record.name).exists()) for record in records
    }


def worker_files(folder: RunFolder) -> list[scheduling.WorkerFiles]:
    found = [worker_file(folder, path.stem) for path in sorted(folder.workers.glob("*.json"))]
    return [worker for worker in found if worker is not None]


def worker_file(folder: RunFolder, name: str) -> scheduling.WorkerFiles | None:
    """One worker's files; None where it has no record."""
    # state first: a record that vanishes after it is a worker that is gone, never a running one without state
    state, deletion = read_json(folder.worker_state(name)), read_json(folder.worker_deletion(name))
    body = read_json(folder.worker(name))
    if body is None:
        return None
    record = from_json(WorkerRecord, body)
    return scheduling.WorkerFiles(
        record,
        from_json(WorkerState, state) if state is not None and state["uid"] == record.uid else None,
        from_json(Deletion, deletion) if deletion is not None and deletion["uid"] == record.uid else None,
    )


def as_fabric_error(call: Callable[..., T], *arguments: Any) -> T:
    """Runs `call`; file system errors and damaged files become FabricErrors."""
    try:
        return call(*arguments)
    except (OSError, ValueError, KeyError, TypeError, LockBusy) as error:
        raise FabricError(
            f"the run folder cannot be used: {error!r}; is the disk full, or was a file edited?"
        ) from error


def _as_it_is_here(job: TrainingJob) -> TrainingJob:
    """Nobody deletes a job here, so nothing is to be deleted with it; `surefoot local` says that it ignores this."""
    persistent = job.spec.checkpoint.persistent
    if persistent is None or persistent.on_job_deletion == "Keep":
        return job
    checkpoint = dataclasses.replace(
        job.spec.checkpoint, persistent=dataclasses.replace(persistent, on_job_deletion="Keep")
    )
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, checkpoint=checkpoint))


def _place_of(node: NodeRecord, server: int, node_alive: bool) -> HolderPlace:
    holder = node.holders[server]
    return HolderPlace(
        node=node.name,
        domain=node.domain,
        host=holder.host,
        port=holder.port,
        process=holder.life,
        running=node_alive and is_alive(ProcessIdentity.parse(holder.life)),
        admin_user=holder.admin_user,
        admin_password=holder.admin_password,
        server=server,
        servers=len(node.holders),
    )
