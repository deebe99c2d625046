"""Defines the layout of a run folder and writes its files.

Standard library only. Called by `job_store`, `platform`, `node_process` and `local_nodes`. Every file is written whole
under a scratch name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def holder_socket(self, node: str, server: int) -> Path:
        """The Unix socket of one Redis of a node."""
        return Path(self.holder_sockets(node).replace("{server}", str(server)))

    def holder_sockets(self, node: str) -> str:
        """The path of a node's sockets, with `{server}` for the server's number."""
        return str(self.root / f"{node}-{{server}}.sock")

    def holder_log(self, node: str, server: int) -> Path:
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
