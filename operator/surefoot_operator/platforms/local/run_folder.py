"""Defines the layout of a run folder, its records, and how its files are written and watched.

Imports little, so that nodes start fast. Used by `platform`, `node_process` and `local_nodes`. Every file is written
under a temporary name and renamed, so that a reader never reads half of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import struct
import tempfile
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from surefoot.protocol.codec import TypeMismatch, build_from_json

_LOCK_WAIT_SECONDS = 2.0
_LOCK_PAUSE_SECONDS = 0.005
# a new run removes only these files and folders of a former one, and nothing else in the folder
_OWN = ("job.json", "status.json", "events.jsonl", "operator.json", "marker")
_OWN_FOLDERS = ("nodes", "workers", "ledger", "logs", "metrics", "persistent", "faults")


class LockBusy(Exception):
    """The run folder is locked for longer than any correct writer needs."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths in one run folder."""

    root: Path
    """The run folder itself."""

    @property
    def job_file(self) -> Path:
        """File with the TrainingJob."""
        return self.root / "job.json"

    @property
    def status_file(self) -> Path:
        """File with the job's status."""
        return self.root / "status.json"

    @property
    def events_file(self) -> Path:
        """File with the job's events, one line of JSON each."""
        return self.root / "events.jsonl"

    @property
    def nodes_folder(self) -> Path:
        """Folder with one `NodeRecord` for each node."""
        return self.root / "nodes"

    @property
    def workers_folder(self) -> Path:
        """Folder with the records, states and deletion requests of workers."""
        return self.root / "workers"

    @property
    def ledger_folder(self) -> Path:
        """Folder with the ledger in which each rank records its steps."""
        return self.root / "ledger"

    @property
    def logs_folder(self) -> Path:
        """Folder with the logs of all processes."""
        return self.root / "logs"

    @property
    def metrics_folder(self) -> Path:
        """Folder with the Prometheus file_sd targets of all exporters; empty without `--metrics`."""
        return self.root / "metrics"

    @property
    def faults_folder(self) -> Path:
        """Folder with one file for each injected fault, which trainers and nodes read."""
        return self.root / "faults"

    @property
    def marker_file(self) -> Path:
        """File that marks a run folder, so that a later run may clean it."""
        return self.root / "marker"

    def node_file(self, name: str) -> Path:
        """File with a node's `NodeRecord`."""
        return self.nodes_folder / f"{name}.json"

    def cordon_file(self, name: str) -> Path:
        """File that exists while the node takes no further workers."""
        return self.nodes_folder / f"{name}.cordon"

    def server_socket(self, node: str, server: int) -> Path:
        """Unix socket of one memory server of a node."""
        return Path(self.server_socket_pattern(node).replace("{server}", str(server)))

    def server_socket_pattern(self, node: str) -> str:
        """Path of a node's sockets, with `{server}` in place of the server's index."""
        return str(self.root / f"{node}-{{server}}.sock")

    def server_log_folder(self, node: str, server: int) -> Path:
        """Folder with the log and the configuration of one memory server of a node."""
        return self.logs_folder / (f"{node}-holder-{server}" if server else f"{node}-holder")

    def worker_file(self, name: str) -> Path:
        """File with a worker's `WorkerRecord`."""
        return self.workers_folder / f"{name}.json"

    def worker_state_file(self, name: str) -> Path:
        """File with a worker's `WorkerState`."""
        return self.workers_folder / f"{name}.state"

    def worker_deletion_file(self, name: str) -> Path:
        """File with a worker's `DeletionRequest`."""
        return self.workers_folder / f"{name}.delete"

    def create_folders(self) -> None:
        """Creates the folders, accessible only to their owner, because worker files contain credentials."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (
            self.nodes_folder,
            self.workers_folder,
            self.ledger_folder,
            self.logs_folder,
            self.metrics_folder,
        ):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.marker_file, {"surefoot": "run folder"}, durable=False)

    def is_foreign(self) -> bool:
        """Whether the folder has content but no marker, so that it must never be cleaned."""
        return self.root.exists() and any(self.root.iterdir()) and not self.marker_file.exists()

    def list_own_entries(self) -> list[Path]:
        """Lists the existing files and folders that a run creates and the next run removes."""
        own_paths = [self.root / name for name in (*_OWN, *_OWN_FOLDERS)]
        return [path for path in own_paths if path.exists()] + self.list_sockets()

    def list_passing_entries(self) -> list[Path]:
        """Lists the existing files and folders that concern only the processes of one run, not its state."""
        faults = [self.faults_folder] if self.faults_folder.exists() else []
        return [*faults, *self.nodes_folder.glob(self.cordon_file("*").name), *self.list_sockets()]

    def list_sockets(self) -> list[Path]:
        """Lists the sockets of agents and memory servers; killed processes do not remove theirs."""
        return sorted(self.root.glob("*.sock"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks status and bindings against other writers; raises LockBusy if that takes too long.

        The kernel releases the lock when the process that has it dies.
        """
        lock_descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_WAIT_SECONDS
            while True:
                try:
                    fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LockBusy(
                            f"another process has locked {self.root} for over {_LOCK_WAIT_SECONDS:g} s"
                        ) from None
                    time.sleep(_LOCK_PAUSE_SECONDS)  # flock has no time limit of its own
            yield
        finally:
            os.close(lock_descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file does not exist."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a JSON {type(content).__name__} instead of an object")
    return content


def write_json(path: Path, body: dict[str, Any] | list[Any], durable: bool) -> None:
    """Replaces a file atomically; if `durable`, waits until it is on the disk."""
    with _temporary_file(path, body, durable) as scratch:
        os.rename(scratch, path)
    if durable:
        _sync_folder(path.parent)


def create_json(path: Path, body: dict[str, Any]) -> bool:
    """Creates a file atomically with its content; returns False if it exists already."""
    with _temporary_file(path, body, durable=False) as scratch:
        try:
            # a link fails if the name exists; O_EXCL would let readers find an empty file for a moment
            os.link(scratch, path)
        except FileExistsError:
            return False
    return True


def open_private_file(path: str, flags: int) -> int:
    """Opens a file, for `open(opener=)`; creates it accessible only to its owner."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _temporary_file(path: Path, body: dict[str, Any] | list[Any], durable: bool) -> Iterator[str]:
    """Writes the content to a new temporary file next to `path`; yields its name and removes the name afterwards.

    Each write needs its own temporary name: between the link and the removal, the temporary file is the published one.
    A second thread that wrote to the same name once emptied it under its readers, and a node that read it ended.
    """
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(body, separators=(",", ":")).encode())
            if durable:
                file.flush()
                os.fsync(descriptor)
        yield scratch
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(scratch)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- records of the run folder ---------------------------------------------------------------------------------------
# Defines the records of nodes and workers in a run folder. `NodeRecord` and `WorkerState` are written by the node,
# `WorkerRecord` and `DeletionRequest` by the platform.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryServerRecord:
    """The address and the process of one memory server (Redis) of a node."""

    host: str
    port: int
    life: str
    """Identity of its process, as text; see `ProcessIdentity`."""
    admin_user: str = "default"
    admin_password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A running node."""

    name: str
    life: str
    """Identity of the node's leading process, as text; see `ProcessIdentity`."""
    domain: str
    """Failure domain of the node."""
    server: MemoryServerRecord | None = None
    """Its first memory server; None until all its servers have started."""
    message: str = ""
    """Why its memory servers could not be started; empty: they could."""
    cordoned: bool = False
    """Whether it takes no further workers; not stored in its file, but set when the file is read."""
    more_servers: tuple[MemoryServerRecord, ...] = ()
    """Its memory servers after the first."""

    @property
    def servers(self) -> tuple[MemoryServerRecord, ...]:
        """All its memory servers, by index; empty until all have started."""
        return () if self.server is None else (self.server, *self.more_servers)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker to run."""

    name: str
    uid: str
    index: int
    attempt: int
    created_seconds: float
    """Unix time at which the operator created it."""
    command: tuple[str, ...]
    """The trainer's command with its arguments."""
    environment: Mapping[str, str] = field(repr=False)
    """Variables of the agent and the trainer; some are secret."""
    avoid_nodes: tuple[str, ...] = ()
    """Nodes to use only if no other one is free."""
    working_dir: str | None = None
    """Working folder of the agent; None: that of the node."""
    grace_seconds: float = 30.0
    """Time between SIGTERM and SIGKILL when it is deleted."""
    node: str | None = None
    """The node to which it is bound; None: it is pending."""
    node_life: str | None = None
    """Process identity of that node; a restarted node does not start the worker."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of a worker, written by its node when it starts and when it ends."""

    uid: str
    phase: Literal["Running", "Succeeded", "Failed"]
    life: str | None = None
    """Identity of its agent's process, as text; None: it does not run."""
    exit_code: int | None = None
    """Exit code of the agent, negative for a signal; None: it has not exited."""
    message: str = ""
    """Why it failed; empty: it did not, or no reason is known."""
    start_blocker: bool = False
    """Whether its agent could not be started, for the reason in `message`."""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended."""
        return self.phase != "Running"


@dataclass(frozen=True, slots=True)
class DeletionRequest:
    """A request to end a worker."""

    uid: str
    force: bool
    """Whether to send SIGKILL at once, instead of SIGTERM and, after the grace period, SIGKILL."""
    requested_seconds: float
    """Unix time of the request."""
    reason: str = ""
    """Why it was made, if by something else than the operator; empty: the operator made it."""


def record_to_json(record: Any) -> dict[str, Any]:
    """Converts a record to the content of its file."""
    return typing.cast(dict[str, Any], msgspec.to_builtins(record))


def parse_record(cls: type[T], body: Mapping[str, Any]) -> T:
    """Parses a record; raises ValueError that names the invalid field and its value."""
    try:
        return build_from_json(cls, dict(body))
    except TypeMismatch as mismatch:
        raise ValueError(
            f"a file in the run folder is damaged: {cls.__name__}{mismatch.path} {mismatch.reason}"
        ) from mismatch


# ---- changes of the run folder ---------------------------------------------------------------------------------------
# Reports changes of files in folders through inotify (Linux). Used by `platform` in its event loop and by
# `node_process` in its poll loop.

_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000
# renames, links and removals are the only ways in which this module changes a file
_IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Provides a descriptor that is readable after files in folders were renamed, created or removed."""

    def __init__(self, folders: list[Path]) -> None:
        self.descriptor = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(
                ctypes.get_errno(),
                "inotify_init1 failed: this user may have too many inotify instances (max_user_instances)",
            )
        for folder in folders:
            mask = _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
            if _libc.inotify_add_watch(self.descriptor, os.fsencode(folder), mask) < 0:
                error_number = ctypes.get_errno()
                os.close(self.descriptor)
                raise OSError(error_number, f"inotify_add_watch on {folder} failed")

    def read_changes(self) -> set[str]:
        """Returns the names that changed since the last call, without temporary files.

        Includes "*" after an overflow of the kernel's queue: then any file may have changed.
        """
        names: set[str] = set()
        while True:
            try:
                content = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return names
            offset = 0
            while offset < len(content):
                watch, _, _, length = _EVENT.unpack_from(content, offset)
                offset += _EVENT.size
                name = "*" if watch < 0 else os.fsdecode(content[offset : offset + length].rstrip(b"\0"))
                if not name.startswith("."):
                    names.add(name)
                offset += length

    def close(self) -> None:
        os.close(self.descriptor)
