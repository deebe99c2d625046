"""Defines the layout of a run folder and writes its files.

Standard library only. Called by `platform`, `platform`, `node_process` and `local_nodes`. Every file is written whole
under a scratch name and renamed, so that a reader never sees half of one.
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

from surefoot.protocol.codec import TypeMismatch, read

_LOCK_WAIT_SECONDS = 2.0
_LOCK_PAUSE_SECONDS = 0.005
# what a run makes in its folder; the rest of a folder is never touched
_OWN = ("job.json", "status.json", "events.jsonl", "operator.json", "marker")
_OWN_FOLDERS = ("nodes", "workers", "ledger", "logs", "metrics", "persistent", "faults")


class LockBusy(Exception):
    """The run folder's lock is held longer than any correct writer needs."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths in one run folder."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    @property
    def workers(self) -> Path:
        return self.root / "workers"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """Prometheus file_sd targets of all exporters; empty without `--metrics`."""
        return self.root / "metrics"

    @property
    def faults(self) -> Path:
        """What trainers shall do to themselves, one file a fault."""
        return self.root / "faults"

    @property
    def marker(self) -> Path:
        """Marks a run folder, which a later run may clean."""
        return self.root / "marker"

    def node(self, name: str) -> Path:
        return self.nodes / f"{name}.json"

    def cordon(self, name: str) -> Path:
        """Exists while the node takes no further workers."""
        return self.nodes / f"{name}.cordon"

    def server_socket(self, node: str, server: int) -> Path:
        """The Unix socket of one Redis of a node."""
        return Path(self.server_sockets(node).replace("{server}", str(server)))

    def server_sockets(self, node: str) -> str:
        """The path of a node's sockets, with `{server}` for the server's number."""
        return str(self.root / f"{node}-{{server}}.sock")

    def server_log(self, node: str, server: int) -> Path:
        """The folder of one Redis of a node."""
        return self.logs / (f"{node}-holder-{server}" if server else f"{node}-holder")

    def worker(self, name: str) -> Path:
        return self.workers / f"{name}.json"

    def worker_state(self, name: str) -> Path:
        return self.workers / f"{name}.state"

    def worker_deletion(self, name: str) -> Path:
        return self.workers / f"{name}.delete"

    def make(self) -> None:
        """Creates the folders for their owner alone: worker files hold credentials."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.nodes, self.workers, self.ledger, self.logs, self.metrics):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.marker, {"surefoot": "run folder"}, durable=False)

    def is_foreign(self) -> bool:
        """Whether the folder has content but no marker: never clean it."""
        return self.root.exists() and any(self.root.iterdir()) and not self.marker.exists()

    def own_entries(self) -> list[Path]:
        """Everything a run creates here and a new one removes."""
        named = [self.root / name for name in (*_OWN, *_OWN_FOLDERS)]
        return [path for path in named if path.exists()] + self.sockets()

    def sockets(self) -> list[Path]:
        """Sockets of agents and holders; killed ones leave theirs behind."""
        return sorted(self.root.glob("*.sock"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other writers of status and bindings. Raises LockBusy.

        The kernel releases the lock when its holder dies.
        """
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_WAIT_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LockBusy(f"the lock of {self.root} is held for over {_LOCK_WAIT_SECONDS:g} s") from None
                    time.sleep(_LOCK_PAUSE_SECONDS)  # flock has no time limit of its own
            yield
        finally:
            os.close(descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None where there is no file."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(body, dict):
        raise ValueError(f"{path} holds a JSON {type(body).__name__}, not an object")
    return body


def write_json(path: Path, body: dict[str, Any] | list[Any], durable: bool) -> None:
    """Replaces a file atomically; `durable` waits for the disk."""
    with _scratch(path, body, durable) as scratch:
        os.rename(scratch, path)
    if durable:
        _sync_folder(path.parent)


def create_json(path: Path, body: dict[str, Any]) -> bool:
    """Creates a file with its content; False where it exists."""
    with _scratch(path, body, durable=False) as scratch:
        try:
            # fails if the name is taken; O_EXCL on the name would show an empty file for a moment
            os.link(scratch, path)
        except FileExistsError:
            return False
    return True


def open_private(path: str, flags: int) -> int:
    """An `opener` that creates files for their owner alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _scratch(path: Path, body: dict[str, Any] | list[Any], durable: bool) -> Iterator[str]:
    """Writes the content beside `path`, under a name of its own, which is gone behind the block.

    Between its link and its removal a scratch file is the published one, too: a second thread that wrote to the same name
    emptied it under its readers, and a node that read it then ended.
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
# Defines the node and worker records of a run folder. Pure values. `NodeRecord` and `WorkerState` are written by the
# node, `WorkerRecord` and `Deletion` by the fabric.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryServerRecord:
    """One Redis of a node: its address and process identity."""

    host: str
    port: int
    life: str
    admin_user: str = "default"
    admin_password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A running node; `holder` is None until every Redis ran."""

    name: str
    life: str
    domain: str
    server: MemoryServerRecord | None = None
    message: str = ""
    cordoned: bool = False
    """It takes no further workers; not in its own record, and read beside it."""
    more_servers: tuple[MemoryServerRecord, ...] = ()
    """Its servers behind the first."""

    @property
    def servers(self) -> tuple[MemoryServerRecord, ...]:
        """Every Redis of it, by its number; none until all have run."""
        return () if self.server is None else (self.server, *self.more_servers)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker to run; `node` and `node_life` are set once bound."""

    name: str
    uid: str
    index: int
    attempt: int
    created_seconds: float
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    avoid_nodes: tuple[str, ...] = ()
    working_dir: str | None = None
    grace_seconds: float = 30.0
    node: str | None = None
    node_life: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A started worker's state, written by its node."""

    uid: str
    phase: Literal["Running", "Succeeded", "Failed"]
    life: str | None = None
    exit_code: int | None = None
    message: str = ""
    start_blocker: bool = False
    """No process of it ever ran; `message` says why."""

    @property
    def over(self) -> bool:
        return self.phase != "Running"


@dataclass(frozen=True, slots=True)
class DeletionRequest:
    """A request to end a worker: SIGTERM and grace period, or `force`."""

    uid: str
    force: bool
    at_seconds: float
    reason: str = ""
    """Why somebody else than the operator wants it to end."""


def to_json(record: Any) -> dict[str, Any]:
    """Converts a record to its file's content."""
    return typing.cast(dict[str, Any], msgspec.to_builtins(record))


def from_json(cls: type[T], body: Mapping[str, Any]) -> T:
    """Parses a record. Raises ValueError with the field and its value."""
    try:
        return read(cls, dict(body))
    except TypeMismatch as misfit:
        raise ValueError(
            f"{cls.__name__}{misfit.path} {misfit.reason}: a file in the run folder is damaged"
        ) from misfit


# ---- changes of the run folder ---------------------------------------------------------------------------------------
# Reports file changes in folders through inotify. Linux and standard library only. Called by `platform` (in its event
# loop) and `node_process` (in poll).

_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000
# a rename into place, a removal, a link: every way in which `run_folder` changes a file
_IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """A descriptor that is readable after entries were renamed, created or removed."""

    def __init__(self, folders: list[Path]) -> None:
        self.descriptor = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed: too many watches on this machine?")
        for folder in folders:
            mask = _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
            if _libc.inotify_add_watch(self.descriptor, os.fsencode(folder), mask) < 0:
                number = ctypes.get_errno()
                os.close(self.descriptor)
                raise OSError(number, f"inotify_add_watch on {folder} failed")

    def read(self) -> set[str]:
        """Names that changed since the last call, without scratch files.

        "*" after an overflow of the kernel's queue: anything may have changed.
        """
        names: set[str] = set()
        while True:
            try:
                content = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return names
            at = 0
            while at < len(content):
                watch, _, _, length = _EVENT.unpack_from(content, at)
                at += _EVENT.size
                name = "*" if watch < 0 else os.fsdecode(content[at : at + length].rstrip(b"\0"))
                if not name.startswith("."):
                    names.add(name)
                at += length

    def close(self) -> None:
        os.close(self.descriptor)
