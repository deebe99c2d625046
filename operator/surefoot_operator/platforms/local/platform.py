"""Implements the Platform protocol for a local run: a scheduler, and a store of job and status in the run folder.

Reads and writes the run folder, and reads /proc. It binds pending workers to free nodes, as a scheduler does; the node
processes start and stop the workers.
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
from surefoot_operator.api.status import JobStatus, precondition_of
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
    open_private_file,
    parse_record,
    read_json,
    record_to_json,
    write_json,
)
from surefoot_operator.policy.core.actions import ApplyPodGroup, CreateWorker, DeletePodGroup, DeleteWorker, Event
from surefoot_operator.rejected_calls import RejectedCall

# ---- scheduling ------------------------------------------------------------------------------------------------------
# Binds pending workers to free nodes and derives their phase. Pure.


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The contents of one worker's files."""

    record: WorkerRecord
    """The worker to run."""
    state: WorkerState | None = None
    """Its state as written by its node; None: it was not started."""
    deletion: DeletionRequest | None = None
    """The request to end it; None: there is none."""

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.state is not None and self.state.has_ended


def node_has_ended(record: WorkerRecord, live: Mapping[str, NodeRecord]) -> bool:
    """Whether the node process to which the worker was bound has ended."""
    if record.node is None:
        return False
    node = live.get(record.node)
    return node is None or node.life != record.node_life


def has_no_process(worker: WorkerFiles, live: Mapping[str, NodeRecord]) -> bool:
    """Whether no process of this worker runs, or will run unless it is bound to a node."""
    return worker.record.node is None or worker.has_ended or node_has_ended(worker.record, live)


def observe_worker(worker: WorkerFiles, live: Mapping[str, NodeRecord]) -> ObservedWorker | None:
    """Converts a worker to the observation that plans read; None if it was deleted by force."""
    record, state = worker.record, worker.state
    if worker.deletion is not None and worker.deletion.force:
        return None
    node_ended = node_has_ended(record, live)
    is_running = state is None or not state.has_ended
    message = (
        f"the process of its node {record.node} has ended"
        if node_ended and is_running
        else (state.message if state else "")
    )
    message = message or (worker.deletion.reason if worker.deletion is not None else "")
    return ObservedWorker(
        index=record.index,
        attempt=record.attempt,
        name=record.name,
        uid=record.uid,
        node=record.node,
        phase="Failed" if node_ended and is_running else state.phase if state else "Pending",
        exit_code=state.exit_code if state else None,
        message=message,
        created_seconds=record.created_seconds,
        deleting=worker.deletion is not None,
        start_blocker=state.message if state is not None and state.start_blocker else "",
    )


def list_free_nodes(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[NodeRecord]:
    """Lists running nodes that have memory servers, no worker and are not cordoned, sorted by name.

    A worker that was deleted by force occupies its node until its process has ended.
    """
    used_nodes = {w.record.node for w in workers if not has_no_process(w, live)}
    usable = (node for _, node in sorted(live.items()) if node.servers and not node.cordoned)
    return [node for node in usable if node.name not in used_nodes]


def choose_nodes(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """Maps the names of pending workers to free nodes: oldest workers first, avoided nodes last."""
    workers = list(workers)
    free = list_free_nodes(workers, live)
    node_by_worker: dict[str, NodeRecord] = {}
    pending = [w.record for w in workers if w.record.node is None and w.deletion is None]
    for record in sorted(pending, key=lambda r: (r.created_seconds, r.index)):
        if not free:
            break
        node = min(free, key=lambda n: n.name in record.avoid_nodes)
        free.remove(node)
        node_by_worker[record.name] = node
    return node_by_worker


def list_removable_workers(workers: Iterable[WorkerFiles], live: Mapping[str, NodeRecord]) -> list[WorkerRecord]:
    """Lists workers that must be deleted and have no process that a node would have to end first."""
    return [w.record for w in workers if w.deletion is not None and has_no_process(w, live)]


# ---- ignored fields --------------------------------------------------------------------------------------------------
# Lists the fields of a job that have no effect in a local run. Pure; called by the CLI before a run.

_USED_POD_FIELDS = ("containers", "restartPolicy", "terminationGracePeriodSeconds")
"""Fields of the pod spec that have an effect."""
_USED_CONTAINER_FIELDS = ("name", "command", "args", "env", "workingDir")
"""Fields of the trainer's container that have an effect."""


def grace_seconds(raw: dict[str, Any], default: float = 30.0) -> float:
    """Returns the template's terminationGracePeriodSeconds, or the default if it is missing or invalid."""
    value = raw.get("spec", {}).get("terminationGracePeriodSeconds", default)
    return float(value) if isinstance(value, int | float) and value >= 0 else default


def list_ignored_fields(spec: TrainingJobSpec) -> tuple[str, ...]:
    """Lists the job's fields that have no effect in a local run, some with the reason."""
    raw = spec.template.raw
    ignored = [f"template.{name}" for name in raw if name != "spec"]
    pod_spec = raw.get("spec", {})
    ignored += [f"template.spec.{name}" for name in pod_spec if name not in _USED_POD_FIELDS]
    for container in pod_spec.get("containers", []):
        name = container.get("name")
        if name != "trainer":
            ignored.append(f"container {name}")
            continue
        ignored += [f"container trainer: {key}" for key in container if key not in _USED_CONTAINER_FIELDS]
        ignored += [
            f"container trainer: env {e['name']} (valueFrom)" for e in container.get("env") or () if "valueFrom" in e
        ]
    persistent = spec.checkpoint.persistent
    if persistent is not None and persistent.secret_ref is not None:
        ignored.append("checkpoint.persistent.secretRef (credentials are taken from this environment)")
    if persistent is not None and persistent.on_job_deletion != "Keep":
        ignored.append("checkpoint.persistent.onJobDeletion (a run folder is only removed by hand)")
    if spec.managed_by != MANAGER:
        ignored.append("managedBy (`surefoot local` runs the job, whatever this field names)")
    if spec.scheduling_policy is not None:
        ignored.append("schedulingPolicy (workers are placed one by one; a local run has no gang scheduler)")
    if spec.run_policy.ttl_seconds_after_finished is not None:
        ignored.append("runPolicy.ttlSecondsAfterFinished (a run folder is only removed by hand)")
    return tuple(ignored)


# ---- job store -------------------------------------------------------------------------------------------------------
# Stores job and status in the run folder, the status by compare-and-swap. Its calls block: the platform calls it in a
# thread, the CLI directly. The lock prevents two leaders from overwriting each other's status; the rename and both
# fsyncs make sure that a written status survives a crash.


class RunFolderStore:
    """Reads and writes the job, the status and the events of one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._job: tuple[tuple[int, int], TrainingJob] | None = None

    def write_job(self, document: Mapping[str, Any], uid: str) -> TrainingJob:
        """Stores the job; its metadata.generation grows with each change of the spec."""
        with self._folder.locked():
            old = read_json(self._folder.job_file)
            generation = 1
            if old is not None:
                generation = old["metadata"]["generation"] + (old["spec"] != document["spec"])
            metadata = {**document["metadata"], "uid": uid, "generation": generation}
            body = {**document, "metadata": metadata}
            job = parse_job(body)
            write_json(self._folder.job_file, body, durable=True)
        return job

    def read_job(self) -> TrainingJob:
        """Reads the job; raises PlatformError if there is none or it cannot be read."""
        try:
            file_status = os.stat(self._folder.job_file)
        except FileNotFoundError:
            raise PlatformError(f"{self._folder.job_file} does not exist: the run folder has no job yet") from None
        version = (file_status.st_mtime_ns, file_status.st_ino)
        if self._job is None or self._job[0] != version:
            try:
                body = read_json(self._folder.job_file)
                self._job = (version, parse_job(body or {}))
            except (ValueError, OSError, OperatorError) as error:
                raise PlatformError(f"{self._folder.job_file} cannot be read: {error}") from error
        return self._job[1]

    def read_status(self) -> JobStatus:
        """Reads the status; returns an empty one before the first write."""
        try:
            return status_from_json(read_json(self._folder.status_file) or {})
        except (ValueError, OSError) as error:
            raise PlatformError(f"{self._folder.status_file} cannot be read: {error}") from error

    def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        """Writes the new status by compare-and-swap; see `Platform.patch_status`.

        Returns:
            The new status with its serial increased by one.

        Raises:
            StatusConflict: The stored status is not the observed one any longer; nothing was written.
            PlatformError: It is unknown whether the status was written.
        """
        new_status = replace(new, serial=old.serial + 1)
        try:
            with self._folder.locked():
                stored = precondition_of(self.read_status())
                if stored != precondition_of(old):
                    raise StatusConflict(
                        f"the status was changed by another writer: it is {stored}, this write expects {precondition_of(old)};"
                        " nothing was written, observe again"
                    )
                write_json(self._folder.status_file, status_to_json(new_status), durable=True)
        except (OSError, LockBusy) as error:
            raise PlatformError(f"it is unknown whether {self._folder.status_file} was written: {error}") from error
        return new_status

    def record_events(self, events: Sequence[Event]) -> None:
        """Appends events to the run folder's event file, each as one line of JSON."""
        now = time.time()
        lines = [
            json.dumps({"at": now, "reason": e.reason, "message": e.message, "warning": e.warning}) + "\n"
            for e in events
        ]
        try:
            with open(self._folder.events_file, "a", encoding="utf-8", opener=open_private_file) as file:
                file.write("".join(lines))
        except OSError as error:
            raise PlatformError(f"{self._folder.events_file} cannot be written: {error}") from error


# ---- reads of the run folder -----------------------------------------------------------------------------------------
# Reads the state of a run from its folder and /proc, without changing anything. Called by the platform, which also
# binds workers, and by the commands that display a run of `surefoot local`, which must never bind any.

T = TypeVar("T")
Nodes = Mapping[str, NodeRecord]


def read_folder(folder: RunFolder) -> PlatformSnapshot:
    """Reads job, status, workers and nodes; raises PlatformError if a file is missing or damaged."""
    store = RunFolderStore(folder)
    job, status = store.read_job(), store.read_status()
    nodes = as_platform_error(read_node_records, folder)
    return build_snapshot(
        job, status, nodes, select_live_nodes(nodes), as_platform_error(read_all_worker_files, folder)
    )


def build_snapshot(
    job: TrainingJob, status: JobStatus, nodes: Nodes, live: Nodes, workers: Sequence[WorkerFiles]
) -> PlatformSnapshot:
    """Builds the observation from records.

    Args:
        job: The stored job.
        status: The stored status.
        nodes: All nodes by name.
        live: Those of them whose process runs.
        workers: The files of all workers.
    """
    return PlatformSnapshot(
        job=_with_deletion_ignored(job),
        status=status,
        workers=tuple(observed for w in workers if (observed := observe_worker(w, live)) is not None),
        nodes=tuple(
            ObservedNode(
                node.name,
                node.domain,
                ready=node.name in live and bool(node.servers),
                schedulable=not node.cordoned,
                reason=node.message if node.name in live else "its process has ended",
            )
            for node in nodes.values()
        ),
        servers=tuple(
            _server_address(node, number, node.name in live)
            for node in nodes.values()
            for number in range(len(node.servers))
        ),
        free_nodes=len(list_free_nodes(workers, live)),
    )


def select_live_nodes(nodes: Nodes) -> dict[str, NodeRecord]:
    """Returns the nodes whose process runs."""
    return {name: node for name, node in nodes.items() if is_alive(ProcessIdentity.parse(node.life))}


def read_node_records(folder: RunFolder) -> dict[str, NodeRecord]:
    """Reads the records of all nodes, by name."""
    bodies = [read_json(path) for path in sorted(folder.nodes_folder.glob("*.json"))]
    records = [parse_record(NodeRecord, body) for body in bodies if body is not None]
    return {
        record.name: dataclasses.replace(record, cordoned=folder.cordon_file(record.name).exists())
        for record in records
    }


def read_all_worker_files(folder: RunFolder) -> list[WorkerFiles]:
    """Reads the files of all workers, sorted by name."""
    workers = [read_worker_files(folder, path.stem) for path in sorted(folder.workers_folder.glob("*.json"))]
    return [worker for worker in workers if worker is not None]


def read_worker_files(folder: RunFolder, name: str) -> WorkerFiles | None:
    """Reads the files of one worker; None if it has no record."""
    # the state is read first: if the record is deleted in between, the worker counts as deleted, not as unstarted
    state, deletion = read_json(folder.worker_state_file(name)), read_json(folder.worker_deletion_file(name))
    body = read_json(folder.worker_file(name))
    if body is None:
        return None
    record = parse_record(WorkerRecord, body)
    return WorkerFiles(
        record,
        parse_record(WorkerState, state) if state is not None and state["uid"] == record.uid else None,
        parse_record(DeletionRequest, deletion) if deletion is not None and deletion["uid"] == record.uid else None,
    )


def as_platform_error(call: Callable[..., T], *arguments: Any) -> T:
    """Calls a function; turns errors of the file system and of damaged files into PlatformErrors."""
    try:
        return call(*arguments)
    except (OSError, ValueError, KeyError, TypeError, LockBusy) as error:
        raise PlatformError(
            f"the run folder cannot be used: {error!r}; check that the disk is not full and no file was edited"
        ) from error


def _with_deletion_ignored(job: TrainingJob) -> TrainingJob:
    """Sets onJobDeletion to Keep, as a local job is never deleted; `list_ignored_fields` reports it to the user."""
    persistent = job.spec.checkpoint.persistent
    if persistent is None or persistent.on_job_deletion == "Keep":
        return job
    checkpoint = dataclasses.replace(
        job.spec.checkpoint, persistent=dataclasses.replace(persistent, on_job_deletion="Keep")
    )
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, checkpoint=checkpoint))


def _server_address(node: NodeRecord, server: int, node_alive: bool) -> MemoryServerAddress:
    record = node.servers[server]
    return MemoryServerAddress(
        node=node.name,
        domain=node.domain,
        host=record.host,
        port=record.port,
        process=record.life,
        running=node_alive and is_alive(ProcessIdentity.parse(record.life)),
        admin_user=record.admin_user,
        admin_password=record.admin_password,
        server_index=server,
        servers_on_node=len(node.servers),
    )


# ---- platform --------------------------------------------------------------------------------------------------------


class LocalPlatform:
    """Implements the Platform protocol for the job in one run folder; used in one event loop."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._store = RunFolderStore(self.folder)
        self._changed = asyncio.Event()
        """Set whenever something that a plan reads has changed."""
        self._closed = False
        self._pidfds: dict[ProcessIdentity, int] = {}
        """Pidfds of the processes whose end is awaited."""

    async def observe(self) -> PlatformSnapshot:
        """Reads the run folder and binds pending workers to free nodes."""
        snapshot, processes = await asyncio.to_thread(self._read_and_bind)
        self._watch_processes(processes)
        return snapshot

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        await asyncio.to_thread(as_platform_error, self._write_worker, worker, environment)
        self._changed.set()

    async def delete_worker(self, worker: DeleteWorker) -> None:
        await asyncio.to_thread(as_platform_error, self._request_deletion, worker)
        self._changed.set()

    async def patch_status(self, new: JobStatus, old: JobStatus) -> JobStatus:
        return await asyncio.to_thread(self._store.patch_status, new, old)

    def rejected_calls(self) -> tuple[RejectedCall, ...]:
        """Returns nothing: a local run has no API server that could reject a call."""
        return ()

    async def set_finalizer(self, is_present: bool) -> None:
        """Does nothing: a run folder is only removed by hand."""

    async def start_purge(self, attempt: int, environment: WorkerEnvironment) -> None:
        raise PlatformError("a local job is never deleted: remove its run folder by hand, with its persistent tier")

    async def apply_pod_group(self, action: ApplyPodGroup) -> None:
        raise PlatformError(f"a local run has no gang scheduler: cannot carry out {action}")

    async def delete_pod_group(self, action: DeletePodGroup) -> None:
        raise PlatformError(f"a local run has no gang scheduler: cannot carry out {action}")

    async def delete_job(self) -> None:
        """Does nothing: a run folder is only removed by hand."""

    async def record_events(self, events: Sequence[Event]) -> None:
        if events:
            await asyncio.to_thread(self._store.record_events, events)

    async def watch_changes(self) -> AsyncIterator[None]:
        """Yields when a file changed, or the process of a node or a memory server ended, until `close`."""
        loop = asyncio.get_running_loop()
        watch = FolderWatch([self.folder.nodes_folder, self.folder.workers_folder, self.folder.root])
        loop.add_reader(watch.descriptor, self._on_folder_change, watch)
        self._changed.set()  # something may have changed between the last observation and this call
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
        self._watch_processes(set())

    # ---- watching -------------------------------------------------------------------------------------------------

    def _on_folder_change(self, watch: FolderWatch) -> None:
        # writes of status and events are this operator's own
        if watch.read_changes() - {self.folder.status_file.name, self.folder.events_file.name}:
            self._changed.set()

    def _watch_processes(self, processes: set[ProcessIdentity]) -> None:
        """Opens a pidfd for each of these processes, to be notified at once when it ends; closes all others."""
        loop = asyncio.get_running_loop()
        for process in set(self._pidfds) - processes:
            descriptor = self._pidfds.pop(process)
            loop.remove_reader(descriptor)
            os.close(descriptor)
        for process in processes - set(self._pidfds):
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self._changed.set()  # it ended after the observation: observe again
                continue
            self._pidfds[process] = descriptor
            loop.add_reader(descriptor, self._on_process_end, process)

    def _on_process_end(self, process: ProcessIdentity) -> None:
        # the pidfd of an ended process stays readable, so the event loop would call this again and again
        descriptor = self._pidfds.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self._changed.set()

    # ---- blocking parts, in a thread ------------------------------------------------------------------------------

    def _read_and_bind(self) -> tuple[PlatformSnapshot, set[ProcessIdentity]]:
        job, status = self._store.read_job(), self._store.read_status()
        nodes = as_platform_error(read_node_records, self.folder)
        live = select_live_nodes(nodes)
        workers = as_platform_error(read_all_worker_files, self.folder)
        if choose_nodes(workers, live) or list_removable_workers(workers, live):
            workers = as_platform_error(self._bind_workers, live)
        servers = [server for node in live.values() for server in node.servers]
        processes = {
            ProcessIdentity.parse(text) for text in (*(n.life for n in live.values()), *(h.life for h in servers))
        }
        return build_snapshot(job, status, nodes, live, workers), {
            process for process in processes if is_alive(process)
        }

    def _bind_workers(self, live: Mapping[str, NodeRecord]) -> list[WorkerFiles]:
        """Reads the workers again under the lock, binds pending ones and removes those without a process."""
        with self.folder.locked():
            workers = read_all_worker_files(self.folder)
            for record in list_removable_workers(workers, live):
                self._remove_worker_files(record.name)
            for name, node in choose_nodes(workers, live).items():
                record = next(w.record for w in workers if w.record.name == name)
                bound = dataclasses.replace(record, node=node.name, node_life=node.life)
                write_json(self.folder.worker_file(name), record_to_json(bound), durable=False)
        return read_all_worker_files(self.folder)

    def _write_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        job = self._store.read_job()
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
        # does nothing if the worker exists already, which counts as success
        create_json(self.folder.worker_file(record.name), record_to_json(record))

    def _request_deletion(self, worker: DeleteWorker) -> None:
        live = select_live_nodes(read_node_records(self.folder))
        with self.folder.locked():
            worker_to_delete = read_worker_files(self.folder, worker.name)
            if worker_to_delete is None or worker_to_delete.record.uid != worker.uid:
                return
            if has_no_process(worker_to_delete, live):
                self._remove_worker_files(worker.name)
                return
            if worker_to_delete.deletion is not None and (worker_to_delete.deletion.force or not worker.force):
                return
            deletion = DeletionRequest(worker.uid, worker.force, time.time())
            write_json(self.folder.worker_deletion_file(worker.name), record_to_json(deletion), durable=False)

    def _remove_worker_files(self, name: str) -> None:
        # the record first: the other files are ignored without it
        for path in (
            self.folder.worker_file(name),
            self.folder.worker_state_file(name),
            self.folder.worker_deletion_file(name),
        ):
            path.unlink(missing_ok=True)
