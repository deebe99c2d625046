"""Defines the layout of a run folder and writes its files.

Touches files only; standard library only. Called by `job_store`, `processes_fabric`, `node` and `machine`. Every file
is written whole beside its place and renamed, so that a reader sees the old or the new content and never half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOCK_WAIT_SECONDS = 2.0
_LOCK_PAUSE_SECONDS = 0.005
# what a run makes in its folder; the rest of a folder is never touched
_OWN = ("job.json", "status.json", "events.jsonl", "operator.json", "marker")
_OWN_FOLDERS = ("nodes", "workers", "ledger", "logs", "metrics", "persistent")


class LockBusy(Exception):
    """Somebody holds the run folder's lock longer than any correct writer does."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of everything in one run folder."""

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
        """Where each exporter answers, in the form of Prometheus' file_sd; empty unless metrics are asked for."""
        return self.root / "metrics"

    @property
    def marker(self) -> Path:
        """Says that this folder is a run folder, so that a later run may clean it."""
        return self.root / "marker"

    def node(self, name: str) -> Path:
        return self.nodes / f"{name}.json"

    def cordon(self, name: str) -> Path:
        """There while the node is to take no further workers."""
        return self.nodes / f"{name}.cordon"

    def holder_socket(self, node: str) -> Path:
        """Where the workers of a node reach its Redis."""
        return self.root / f"{node}.sock"

    def worker(self, name: str) -> Path:
        return self.workers / f"{name}.json"

    def worker_state(self, name: str) -> Path:
        return self.workers / f"{name}.state"

    def worker_deletion(self, name: str) -> Path:
        return self.workers / f"{name}.delete"

    def make(self) -> None:
        """Creates the folders; readable by their owner alone, for worker files hold credentials."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.nodes, self.workers, self.ledger, self.logs, self.metrics):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.marker, {"surefoot": "run folder"}, durable=False)

    def is_foreign(self) -> bool:
        """Whether something lies here that is no former run: then nothing may be cleaned."""
        return self.root.exists() and any(self.root.iterdir()) and not self.marker.exists()

    def own_entries(self) -> list[Path]:
        """What a run made here and a new one removes."""
        named = [self.root / name for name in (*_OWN, *_OWN_FOLDERS)]
        return [path for path in named if path.exists()] + self.sockets()

    def sockets(self) -> list[Path]:
        """Names of sockets of agents and holders: one that was killed leaves its own behind."""
        return sorted(self.root.glob("*.sock"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive among the writers of status and bindings; the kernel frees it when its holder dies."""
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
    """The mapping in `path`, or None where there is no such file."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(body, dict):
        raise ValueError(f"{path} holds a JSON {type(body).__name__}, not an object")
    return body


def write_json(path: Path, body: dict[str, Any] | list[Any], durable: bool) -> None:
    """Replaces `path` at once. `durable` waits for the disk: for what must survive the machine."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    _write(scratch, body, os.O_TRUNC, durable)
    os.rename(scratch, path)
    if durable:
        _sync_folder(path.parent)


def create_json(path: Path, body: dict[str, Any]) -> bool:
    """Creates `path` with all of its content, or returns False where it exists."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    _write(scratch, body, os.O_TRUNC, durable=False)
    try:
        os.link(scratch, path)  # fails if the name is taken; O_EXCL on the name would show an empty file for a moment
    except FileExistsError:
        return False
    finally:
        os.unlink(scratch)
    return True


def open_private(path: str, flags: int) -> int:
    """For `open(opener=…)`: what is made is its owner's alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write(path: Path, body: dict[str, Any] | list[Any], flags: int, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(body, separators=(",", ":")).encode())
        if durable:
            file.flush()
            os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
