"""Implements the Fabric protocol for a local run: scheduler, job store, reads of the run folder.

Touches the run folder and /proc. It binds pending workers to free live nodes, as a scheduler does; nodes start and end
the processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from surefoot.linux_process import ProcessIdentity, is_alive
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import MANAGER, TrainingJob, TrainingJobSpec
from surefoot_operator.api.status import JobStatus, stamp
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.errors import OperatorError, PlatformError, StatusConflict
from surefoot_operator.job_snapshot import ObservedNode, ObservedWorker
from surefoot_operator.memory.connection_pool import MemoryServerAddress
from surefoot_operator.platforms.interface import PlatformSnapshot, WorkerEnvironment
from surefoot_operator.platforms.local.run_folder import (
    DeletionRequest,
    FolderWatch,
    LockBusy,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    WorkerState,
    create_json,
    from_json,
    open_private,
    read_json,
    to_json,
    write_json,
)
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker, Event
from surefoot_operator.rejected_calls import RefusedCall

# ---- scheduling ------------------------------------------------------------------------------------------------------
# Binds pending workers to free nodes and derives their phase. Pure.


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files of one worker; `state` and `deletion` have its uid."""

    record: WorkerRecord
    state: WorkerState | None = None
    deletion: DeletionRequest | None = None

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


def observe_worker(worker: WorkerFiles, live: Mapping[str, NodeRecord]) -> ObservedWorker | None:
    """The worker as `observe` reports it; None once it was force-deleted."""
    record, state = worker.record, worker.state
    if worker.deletion is not None and worker.deletion.force:
        return None
    gone = node_is_gone(record, live)
    running = state is None or not state.over
    message = f"its node {record.node} is gone" if gone and running else (state.message if state else "")
    message = message or (worker.deletion.reason if worker.deletion is not None else "")
    return ObservedWorker(
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
        start_blocker=state.message if state is not None and state.start_blocker else "",
    )


def free_nodes(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[NodeRecord]:
    """Lists uncordoned live nodes with holders and no worker, by name.

    A force-deleted worker occupies its node until its process has ended.
    """
    taken = {w.record.node for w in workers if not has_no_process(w, live)}
    open_ = (node for _, node in sorted(live.items()) if node.servers and not node.cordoned)
    return [node for node in open_ if node.name not in taken]


def bind_workers(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
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


def workers_without_node(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[WorkerRecord]:
    """Lists workers to delete that no node is left to end."""
    return [w.record for w in workers if w.deletion is not None and has_no_process(w, live)]


# ---- parts of the pod template without effect ------------------------------------------------------------------------
# Lists the pod template fields that processes on one machine ignore. Pure; called by the CLI before a run. `command`,
# `args`, `env`, `workingDir`, `restartPolicy` and `terminationGracePeriodSeconds` are honoured.

_POD = ("containers", "restartPolicy", "terminationGracePeriodSeconds")
_CONTAINER = ("name", "command", "args", "env", "workingDir")


def grace_seconds(raw: dict[str, Any], default: float = 30.0) -> float:
    """The template's terminationGracePeriodSeconds."""
    value = raw.get("spec", {}).get("terminationGracePeriodSeconds", default)
    return float(value) if isinstance(value, int | float) and value >= 0 else default


def ignored_parts(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Lists the paths of given fields that have no effect here."""
    raw = spec.template.raw
    found = [f"template.{name}" for name in raw if name != "spec"]
    pod = raw.get("spec", {})
    found += [f"template.spec.{name}" for name in pod if name not in _POD]
    for container in pod.get("containers", []):
        name = container.get("name")
        if name != "trainer":
            found.append(f"container {name}")
            continue
        found += [f"container trainer: {key}" for key in container if key not in _CONTAINER]
        found += [
            f"container trainer: env {e['name']} (valueFrom)" for e in container.get("env") or () if "valueFrom" in e
        ]
    persistent = spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        found.append("checkpoint.persistent.secretRef (credentials are taken from this environment)")
    if persistent is not None and persistent.on_job_deletion != "Keep":
        found.append("checkpoint.persistent.onJobDeletion (a run folder is removed by hand)")
    if spec.managed_by != MANAGER:
        found.append("managedBy (it runs here whoever manages it)")
    if spec.scheduling_policy is not None:
        found.append("schedulingPolicy (workers go to free nodes one by one; no scheduler here knows groups)")
    if spec.run_policy.ttl_seconds_after_finished is not None:
        found.append("runPolicy.ttlSecondsAfterFinished (a run folder is removed by hand)")
    return tuple(found)


# ---- job store -------------------------------------------------------------------------------------------------------
# Stores job and status in the run folder by compare-and-swap. Touches files; blocking: the platform calls it in a
# thread, the CLI directly. Lock, rename and both fsyncs keep a written status through a crash, and two leaders from
# overwriting each other.


class Store:
    """Reads and writes job, status and events of one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._job: tuple[tuple[int, int], TrainingJob] | None = None

    def write_job(self, document: Mapping[str, Any], uid: str) -> TrainingJob:
        """Stores the job; its generation grows with each change of the spec."""
        with self._folder.locked():
            old = read_json(self._folder.job)
            generation = 1
            if old is not None:
                generation = old["metadata"]["generation"] + (old["spec"] != document["spec"])
            metadata = {**document["metadata"], "uid": uid, "generation": generation}
            body = {**document, "metadata": metadata}
            job = parse_job(body)
            write_json(self._folder.job, body, durable=True)
        return job

    def job(self) -> TrainingJob:
        """Reads the job. Raises FabricError where there is none."""
        try:
            found = os.stat(self._folder.job)
        except FileNotFoundError:
            raise PlatformError(f"{self._folder.job} is not there: the run folder has no job yet") from None
        stamp = (found.st_mtime_ns, found.st_ino)
        if self._job is None or self._job[0] != stamp:
            try:
                body = read_json(self._folder.job)
                self._job = (stamp, parse_job(body or {}))
            except (ValueError, OSError, OperatorError) as error:
                raise PlatformError(f"{self._folder.job} cannot be read: {error}") from error
        return self._job[1]

    def status(self) -> JobStatus:
        """Reads the status; an empty one before the first write."""
        try:
            return status_from_json(read_json(self._folder.status) or {})
        except (ValueError, OSError) as error:
            raise PlatformError(f"{self._folder.status} cannot be read: {error}") from error

    def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Writes `new` if the stored status still has the stamp of `old`.

        Returns it with its new serial. Raises WorldMoved, FabricError.
        """
        written = replace(new, serial=old.serial + 1)
        try:
            with self._folder.locked():
                stored = stamp(self.status())
                if stored != stamp(old):
                    raise StatusConflict(
                        f"the stored status is {stored}, this write expects {stamp(old)}: observe again"
                    )
                write_json(self._folder.status, status_to_json(written), durable=True)
        except (OSError, LockBusy) as error:
            raise PlatformError(f"it is unknown whether {self._folder.status} was written: {error}") from error
        return written

    def record(self, events: Sequence[Event]) -> None:
        """Appends events, each one line of JSON."""
        now = time.time()
        lines = [
            json.dumps({"at": now, "reason": e.reason, "message": e.message, "warning": e.warning}) + "\n"
            for e in events
        ]
        try:
            with open(self._folder.events, "a", encoding="utf-8", opener=open_private) as file:
                file.write("".join(lines))
        except OSError as error:
            raise PlatformError(f"{self._folder.events} cannot be written: {error}") from error


# ---- reads of the run folder -----------------------------------------------------------------------------------------
# Reads what a run folder holds of its job, without changing anything. Touches files and /proc. Called by the platform,
# which also binds workers, and by the commands that look at a run of `surefoot local`: a look must never schedule.

T = TypeVar("T")
Nodes = Mapping[str, NodeRecord]


def read_folder(folder: RunFolder) -> PlatformSnapshot:
    """Reads job, status, workers and nodes. Raises FabricError."""
    store = Store(folder)
    job, status = store.job(), store.status()
    nodes = as_platform_error(node_records, folder)
    return build_observation(job, status, nodes, live_nodes(nodes), as_platform_error(worker_files, folder))


def build_observation(
    job: TrainingJob, status: JobStatus, nodes: Nodes, live: Nodes, workers: Sequence[WorkerFiles]
) -> PlatformSnapshot:
    """Builds the observation; `live`: nodes whose leader still is."""
    return PlatformSnapshot(
        job=_as_it_is_here(job),
        status=status,
        workers=tuple(shown for w in workers if (shown := observe_worker(w, live)) is not None),
        nodes=tuple(
            ObservedNode(
                node.name,
                node.domain,
                ready=node.name in live and bool(node.servers),
                schedulable=not node.cordoned,
                reason=node.message if node.name in live else "its process is gone",
            )
            for node in nodes.values()
        ),
        servers=tuple(
            _place_of(node, number, node.name in live) for node in nodes.values() for number in range(len(node.servers))
        ),
        free_nodes=len(free_nodes(workers, live)),
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


def worker_files(folder: RunFolder) -> list[WorkerFiles]:
    found = [worker_file(folder, path.stem) for path in sorted(folder.workers.glob("*.json"))]
    return [worker for worker in found if worker is not None]


def worker_file(folder: RunFolder, name: str) -> WorkerFiles | None:
    """One worker's files; None where it has no record."""
    # state first: a record that vanishes after it is a worker that is gone, never a running one without state
    state, deletion = read_json(folder.worker_state(name)), read_json(folder.worker_deletion(name))
    body = read_json(folder.worker(name))
    if body is None:
        return None
    record = from_json(WorkerRecord, body)
    return WorkerFiles(
        record,
        from_json(WorkerState, state) if state is not None and state["uid"] == record.uid else None,
        from_json(DeletionRequest, deletion) if deletion is not None and deletion["uid"] == record.uid else None,
    )


def as_platform_error(call: Callable[..., T], *arguments: Any) -> T:
    """Runs `call`; file system errors and damaged files become FabricErrors."""
    try:
        return call(*arguments)
    except (OSError, ValueError, KeyError, TypeError, LockBusy) as error:
        raise PlatformError(
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


def _place_of(node: NodeRecord, server: int, node_alive: bool) -> MemoryServerAddress:
    holder = node.servers[server]
    return MemoryServerAddress(
        node=node.name,
        domain=node.domain,
        host=holder.host,
        port=holder.port,
        process=holder.life,
        running=node_alive and is_alive(ProcessIdentity.parse(holder.life)),
        admin_user=holder.admin_user,
        admin_password=holder.admin_password,
        server=server,
        servers=len(node.servers),
    )


# ---- platform --------------------------------------------------------------------------------------------------------


class ProcessesPlatform:
    """The fabric of one job in a run folder, for one loop."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._store = Store(self.folder)
        self._changed = asyncio.Event()
        self._closed = False
        self._ends: dict[ProcessIdentity, int] = {}

    async def observe(self) -> PlatformSnapshot:
        """Reads the run folder and binds pending workers to free nodes."""
        seen, lives = await asyncio.to_thread(self._observe)
        self._follow(lives)
        return seen

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        await asyncio.to_thread(as_platform_error, self._create, worker, environment)
        self._changed.set()

    async def delete_worker(self, worker: DeleteWorker) -> None:
        await asyncio.to_thread(as_platform_error, self._delete, worker)
        self._changed.set()

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        return await asyncio.to_thread(self._store.patch_status, new, old)

    def refused_calls(self) -> tuple[RefusedCall, ...]:
        """Nothing: there is no API between them."""
        return ()

    async def set_finalizer(self, held: bool) -> None:
        """Does nothing: a run folder is removed by hand, never deleted here."""

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        raise PlatformError("a run folder is removed by hand, and its persistent tier with it")

    async def apply_pod_group(self, wanted: ApplyPodGroup) -> None:
        raise PlatformError(f"processes on one machine have no gang scheduler: cannot {wanted}")

    async def remove_group(self, removed: DeletePodGroup) -> None:
        raise PlatformError(f"processes on one machine have no gang scheduler: cannot {removed}")

    async def delete_job(self) -> None:
        """Does nothing, as `hold_job`."""

    async def record(self, events: Sequence[Event]) -> None:
        if events:
            await asyncio.to_thread(self._store.record, events)

    async def watch_changes(self) -> AsyncIterator[None]:
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

    def _observe(self) -> tuple[PlatformSnapshot, set[ProcessIdentity]]:
        job, status = self._store.job(), self._store.status()
        nodes = as_platform_error(node_records, self.folder)
        live = live_nodes(nodes)
        workers = as_platform_error(worker_files, self.folder)
        if bind_workers(workers, live) or workers_without_node(workers, live):
            workers = as_platform_error(self._bind_workers, live)
        holders = [holder for node in live.values() for holder in node.servers]
        lives = {ProcessIdentity.parse(text) for text in (*(n.life for n in live.values()), *(h.life for h in holders))}
        return build_observation(job, status, nodes, live, workers), {life for life in lives if is_alive(life)}

    def _bind_workers(self, live: Mapping[str, NodeRecord]) -> list[WorkerFiles]:
        """Binds and tidies under the lock, from what stands there now."""
        with self.folder.locked():
            workers = worker_files(self.folder)
            for record in workers_without_node(workers, live):
                self._remove(record.name)
            for name, node in bind_workers(workers, live).items():
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
            if has_no_process(found, live):
                self._remove(worker.name)
                return
            if found.deletion is not None and (found.deletion.force or not worker.force):
                return
            deletion = DeletionRequest(worker.uid, worker.force, time.time())
            write_json(self.folder.worker_deletion(worker.name), to_json(deletion), durable=False)

    def _remove(self, name: str) -> None:
        # the record first: without it the rest means nothing
        for path in (self.folder.worker(name), self.folder.worker_state(name), self.folder.worker_deletion(name)):
            path.unlink(missing_ok=True)
