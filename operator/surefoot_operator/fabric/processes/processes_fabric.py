"""Implements the Fabric protocol for one job in a run folder.

Touches the run folder and /proc; the reconciler calls it through the protocol. It binds pending workers to free live
nodes (the scheduler's part); starting and ending processes is the node's own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from surefoot.linux_process import ProcessIdentity, is_alive
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import FabricError
from surefoot_operator.fabric.interface import FabricSeen, HolderPlace, WorkerEnvironment
from surefoot_operator.fabric.processes import scheduling
from surefoot_operator.fabric.processes.folder_watch import FolderWatch
from surefoot_operator.fabric.processes.ignored_template import grace_seconds
from surefoot_operator.fabric.processes.job_store import Store
from surefoot_operator.fabric.processes.run_folder import LockBusy, RunFolder, create_json, read_json, write_json
from surefoot_operator.fabric.processes.run_records import (
    Deletion,
    NodeRecord,
    WorkerRecord,
    WorkerState,
    from_json,
    to_json,
)
from surefoot_operator.observed import NodeSeen
from surefoot_operator.policy.actions import CreateWorker, DeleteWorker, Event

T = TypeVar("T")


class ProcessesFabric:
    """One job in one run folder. One instance an operator process; not for several event loops."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._store = Store(self.folder)
        self._changed = asyncio.Event()
        self._closed = False
        self._ends: dict[ProcessIdentity, int] = {}

    async def observe(self) -> FabricSeen:
        """Looks now, and binds pending workers to free nodes on the way."""
        seen, lives = await asyncio.to_thread(self._observe)
        self._follow(lives)
        return seen

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        await asyncio.to_thread(_as_fabric_error, self._create, worker, environment)
        self._changed.set()

    async def delete_worker(self, worker: DeleteWorker) -> None:
        await asyncio.to_thread(_as_fabric_error, self._delete, worker)
        self._changed.set()

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        return await asyncio.to_thread(self._store.patch_status, new, old)

    async def hold_job(self, held: bool) -> None:
        """Nobody deletes a job here: its folder goes when a person removes it."""

    async def purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        raise FabricError("a run folder is removed by hand, and what lies in its persistent tier with it")

    async def delete_job(self) -> None:
        """As above."""

    async def record(self, events: Sequence[Event]) -> None:
        if events:
            await asyncio.to_thread(self._store.record, events)

    async def changes(self) -> AsyncIterator[None]:
        """Yields when a file of a node, a worker or the job changed, or a node's leader or holder ended."""
        loop = asyncio.get_running_loop()
        watch = FolderWatch([self.folder.nodes, self.folder.workers, self.folder.root])
        loop.add_reader(watch.descriptor, self._read, watch)
        self._changed.set()  # something may have changed between the last look and this watch
        try:
            while True:
                await self._changed.wait()
                if self._closed:
                    return
                self._changed.clear()
                yield
        finally:
            loop.remove_reader(watch.descriptor)
            watch.close()

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._follow(set())

    # ---- watching -------------------------------------------------------------------------------------------------

    def _read(self, watch: FolderWatch) -> None:
        # our own status and event writes are no news
        if watch.read() - {self.folder.status.name, self.folder.events.name}:
            self._changed.set()

    def _follow(self, lives: set[ProcessIdentity]) -> None:
        """Keeps a pidfd open for each of `lives`, so that its end is heard at once."""
        loop = asyncio.get_running_loop()
        for life in set(self._ends) - lives:
            descriptor = self._ends.pop(life)
            loop.remove_reader(descriptor)
            os.close(descriptor)
        for life in lives - set(self._ends):
            try:
                descriptor = os.pidfd_open(life.pid)
            except ProcessLookupError:
                self._changed.set()  # it ended between the look and now: look again
                continue
            self._ends[life] = descriptor
            loop.add_reader(descriptor, self._ended, life)

    def _ended(self, life: ProcessIdentity) -> None:
        # a readable pidfd stays readable: without removing it the loop would spin
        descriptor = self._ends.pop(life)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._changed.set()

    # ---- blocking parts, in a thread ------------------------------------------------------------------------------

    def _observe(self) -> tuple[FabricSeen, set[ProcessIdentity]]:
        job = _as_it_is_here(self._store.job())
        status = self._store.status()
        nodes = _as_fabric_error(self._nodes)
        live = {name: node for name, node in nodes.items() if is_alive(ProcessIdentity.parse(node.life))}
        workers = _as_fabric_error(self._workers)
        if scheduling.bindings(workers, live) or scheduling.tidy(workers, live):
            workers = _as_fabric_error(self._place, live)
        holders = [node.holder for node in live.values() if node.holder is not None]
        lives = {ProcessIdentity.parse(text) for text in (*(n.life for n in live.values()), *(h.life for h in holders))}
        return FabricSeen(
            job=job,
            status=status,
            workers=tuple(shown for w in workers if (shown := scheduling.seen(w, live)) is not None),
            nodes=tuple(
                NodeSeen(
                    node.name,
                    node.domain,
                    ready=node.name in live and node.holder is not None,
                    schedulable=not node.cordoned,
                    reason=node.message if node.name in live else "its process is gone",
                )
                for node in nodes.values()
            ),
            holders=tuple(_place_of(node, node.name in live) for node in nodes.values() if node.holder is not None),
            free_nodes=len(scheduling.free_nodes(workers, live)),
        ), {life for life in lives if is_alive(life)}

    def _nodes(self) -> dict[str, NodeRecord]:
        bodies = [read_json(path) for path in sorted(self.folder.nodes.glob("*.json"))]
        records = [from_json(NodeRecord, body) for body in bodies if body is not None]
        return {
            record.name: dataclasses.replace(record, cordoned=self.folder.cordon(record.name).exists())
            for record in records
        }

    def _workers(self) -> list[scheduling.WorkerFiles]:
        found = [self._worker(path.stem) for path in sorted(self.folder.workers.glob("*.json"))]
        return [worker for worker in found if worker is not None]

    def _worker(self, name: str) -> scheduling.WorkerFiles | None:
        # state first: a record that vanishes after it is a worker that is gone, never a running one without state
        state, deletion = read_json(self.folder.worker_state(name)), read_json(self.folder.worker_deletion(name))
        body = read_json(self.folder.worker(name))
        if body is None:
            return None
        record = from_json(WorkerRecord, body)
        return scheduling.WorkerFiles(
            record,
            from_json(WorkerState, state) if state is not None and state["uid"] == record.uid else None,
            from_json(Deletion, deletion) if deletion is not None and deletion["uid"] == record.uid else None,
        )

    def _place(self, live: Mapping[str, NodeRecord]) -> list[scheduling.WorkerFiles]:
        """Binds and tidies under the lock, from what stands there now."""
        with self.folder.locked():
            workers = self._workers()
            for record in scheduling.tidy(workers, live):
                self._remove(record.name)
            for name, node in scheduling.bindings(workers, live).items():
                record = next(w.record for w in workers if w.record.name == name)
                bound = dataclasses.replace(record, node=node.name, node_life=node.life)
                write_json(self.folder.worker(name), to_json(bound), durable=False)
        return self._workers()

    def _create(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        job = self._store.job()
        template = job.spec.template
        record = WorkerRecord(
            name=f"{job.name}-{worker.index}-{worker.attempt}",
            uid=uuid.uuid4().hex,
            index=worker.index,
            attempt=worker.attempt,
            created_seconds=time.time(),
            command=(*template.command, *template.args),
            environment={**dict(template.env), **environment.plain, **environment.secret},
            avoid_nodes=worker.avoid_nodes,
            working_dir=template.working_dir,
            grace_seconds=grace_seconds(template.raw),
        )
        create_json(self.folder.worker(record.name), to_json(record))  # one that exists already is success

    def _delete(self, worker: DeleteWorker) -> None:
        nodes = self._nodes()
        live = {name: node for name, node in nodes.items() if is_alive(ProcessIdentity.parse(node.life))}
        with self.folder.locked():
            found = self._worker(worker.name)
            if found is None or found.record.uid != worker.uid:
                return
            if scheduling.has_no_process(found, live):
                self._remove(worker.name)
                return
            if found.deletion is not None and (found.deletion.force or not worker.force):
                return
            deletion = Deletion(worker.uid, worker.force, time.time())
            write_json(self.folder.worker_deletion(worker.name), to_json(deletion), durable=False)

    def _remove(self, name: str) -> None:
        # the record first: without it the rest means nothing
        for path in (self.folder.worker(name), self.folder.worker_state(name), self.folder.worker_deletion(name)):
            path.unlink(missing_ok=True)


def _as_it_is_here(job: TrainingJob) -> TrainingJob:
    """Nobody deletes a job here, so nothing is to be deleted with it; `surefoot local` says that it ignores this."""
    persistent = job.spec.checkpoint.persistent
    if persistent is None or persistent.on_job_deletion == "Keep":
        return job
    checkpoint = dataclasses.replace(
        job.spec.checkpoint, persistent=dataclasses.replace(persistent, on_job_deletion="Keep")
    )
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, checkpoint=checkpoint))


def _place_of(node: NodeRecord, node_alive: bool) -> HolderPlace:
    holder = node.holder
    assert holder is not None
    return HolderPlace(
        node=node.name,
        domain=node.domain,
        host=holder.host,
        port=holder.port,
        process=holder.life,
        running=node_alive and is_alive(ProcessIdentity.parse(holder.life)),
        admin_user=holder.admin_user,
        admin_password=holder.admin_password,
    )


def _as_fabric_error(call: Callable[..., T], *arguments: Any) -> T:
    """Runs `call`; what the file system or a damaged file does becomes a FabricError."""
    try:
        return call(*arguments)
    except (OSError, ValueError, KeyError, TypeError, LockBusy) as error:
        raise FabricError(
            f"the run folder cannot be used: {error!r}; is the disk full, or was a file edited?"
        ) from error
