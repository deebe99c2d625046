"""Implements the Fabric protocol for one job in a run folder.

Touches the run folder and /proc. It binds pending workers to free live nodes, as a scheduler does; nodes start and end
the processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from surefoot.linux_process import ProcessIdentity, is_alive
from surefoot_operator.api.status import JobStatus
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.interface import FabricSeen, WorkerEnvironment
from surefoot_operator.platforms.local import scheduling
from surefoot_operator.platforms.local.folder_look import (
    as_fabric_error,
    folder_seen,
    live_nodes,
    node_records,
    worker_file,
    worker_files,
)
from surefoot_operator.platforms.local.folder_watch import FolderWatch
from surefoot_operator.platforms.local.ignored_template import grace_seconds
from surefoot_operator.platforms.local.job_store import Store
from surefoot_operator.platforms.local.run_folder import RunFolder, create_json, write_json
from surefoot_operator.platforms.local.run_records import Deletion, NodeRecord, WorkerRecord, to_json
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Event, KeepGroup, RemoveGroup
from surefoot_operator.rejected_calls import RefusedCall

T = TypeVar("T")


class ProcessesFabric:
    """The fabric of one job in a run folder, for one loop."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._store = Store(self.folder)
        self._changed = asyncio.Event()
        self._closed = False
        self._ends: dict[ProcessIdentity, int] = {}

    async def observe(self) -> FabricSeen:
        """Reads the run folder and binds pending workers to free nodes."""
        seen, lives = await asyncio.to_thread(self._observe)
        self._follow(lives)
        return seen

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        await asyncio.to_thread(as_fabric_error, self._create, worker, environment)
        self._changed.set()

    async def delete_worker(self, worker: DeleteWorker) -> None:
        await asyncio.to_thread(as_fabric_error, self._delete, worker)
        self._changed.set()

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        return await asyncio.to_thread(self._store.patch_status, new, old)

    def refused_calls(self) -> tuple[RefusedCall, ...]:
        """Nothing: there is no API between them."""
        return ()

    async def hold_job(self, held: bool) -> None:
        """Does nothing: a run folder is removed by hand, never deleted here."""

    async def purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        raise FabricError("a run folder is removed by hand, and its persistent tier with it")

    async def keep_group(self, wanted: KeepGroup) -> None:
        raise FabricError(f"processes on one machine have no gang scheduler: cannot {wanted}")

    async def remove_group(self, removed: RemoveGroup) -> None:
        raise FabricError(f"processes on one machine have no gang scheduler: cannot {removed}")

    async def delete_job(self) -> None:
        """Does nothing, as `hold_job`."""

    async def record(self, events: Sequence[Event]) -> None:
        if events:
            await asyncio.to_thread(self._store.record, events)

    async def changes(self) -> AsyncIterator[None]:
        """Yields when files changed, or a node's leader or holder ended."""
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
        job, status = self._store.job(), self._store.status()
        nodes = as_fabric_error(node_records, self.folder)
        live = live_nodes(nodes)
        workers = as_fabric_error(worker_files, self.folder)
        if scheduling.bindings(workers, live) or scheduling.tidy(workers, live):
            workers = as_fabric_error(self._place, live)
        holders = [holder for node in live.values() for holder in node.holders]
        lives = {ProcessIdentity.parse(text) for text in (*(n.life for n in live.values()), *(h.life for h in holders))}
        return folder_seen(job, status, nodes, live, workers), {life for life in lives if is_alive(life)}

    def _place(self, live: Mapping[str, NodeRecord]) -> list[scheduling.WorkerFiles]:
        """Binds and tidies under the lock, from what stands there now."""
        with self.folder.locked():
            workers = worker_files(self.folder)
            for record in scheduling.tidy(workers, live):
                self._remove(record.name)
            for name, node in scheduling.bindings(workers, live).items():
                record = next(w.record for w in workers if w.record.name == name)
                bound = dataclasses.replace(record, node=node.name, node_life=node.life)
                write_json(self.folder.worker(name), to_json(bound), durable=False)
        return worker_files(self.folder)

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
        live = live_nodes(node_records(self.folder))
        with self.folder.locked():
            found = worker_file(self.folder, worker.name)
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
