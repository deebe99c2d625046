"""Runs one node of the processes fabric, in the kubelet's place.

Leader of the node's process group: it runs its holders (Redis) and an agent per bound worker, records their state,
and ends them on request. It decides nothing about the job. Its children die with it (PDEATHSIG) and stay in its group,
so that one SIGKILL of the group is the death of the whole node.

SIGTERM ends the node gently; SIGUSR1 restarts dead holders (Redis never restarts by itself here: whether lost memory
returns is decided by a person or a fault).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigurationError, TierError
from surefoot.linux_process import become_subreaper, die_with_parent, identity_of, reap_orphans, this_process
from surefoot.memory_server.server_process import RunningServer, ServerSettings, find_program, start
from surefoot_operator.platforms.local.run_folder import (
    DeletionRequest,
    FolderWatch,
    MemoryServerRecord,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    WorkerState,
    from_json,
    read_json,
    to_json,
    write_json,
)

# ---- writes on a full disk -------------------------------------------------------------------------------------------
# Writes a node's records, and again later what a disk refused. Owned by the node's loop. Without it the node would end
# with the first write that fails, every agent and its Redis with it, for what a machine is out of for a moment.

RETRY_SECONDS = 0.5


class PendingWrites:
    """Keeps the newest content of each file until it is written."""

    def __init__(self) -> None:
        self._pending: dict[Path, dict[str, Any]] = {}
        self._retry_at = 0.0
        self._failing = False

    @property
    def retry_at(self) -> float | None:
        """When to `flush` again, on the monotonic clock; None: everything is written."""
        return self._retry_at if self._pending else None

    def write(self, path: Path, body: dict[str, Any]) -> None:
        """Writes at once, or with a later `flush`."""
        self._pending[path] = body
        self._retry_at = 0.0
        self.flush()

    def read(self, path: Path) -> dict[str, Any] | None:
        """The content that is there, or that will be."""
        return self._pending[path] if path in self._pending else read_json(path)

    def drop(self, path: Path) -> None:
        """Removes the file, written or not."""
        self._pending.pop(path, None)
        path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Writes what is left, unless that failed a moment ago."""
        if time.monotonic() < self._retry_at:
            return
        for path, body in list(self._pending.items()):
            try:
                write_json(path, body, durable=False)
            except OSError as error:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                if not self._failing:
                    self._failing = True
                    _note(f"{path.name} could not be written and is tried again: {error}")
                return
            del self._pending[path]
        if self._failing:
            self._failing = False
            _note("everything is written again")


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may lie on the same full disk
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has


# ---- the node's Redis servers ----------------------------------------------------------------------------------------
# Runs one Redis server of a node. `surefoot.memory_server.server_process` chooses the program and its configuration.

DEFAULT_MEMORY_BYTES = 2 * 1024**3
_FILL_BYTES = 128 * 1024**2
"""Touched before use: enough that small jobs meet no slow first save, little enough that nodes start in a moment."""
_TRIES = 5
_END_SECONDS = 5.0
"""How long the kernel may take to end a killed server with much memory."""
_HOST = "127.0.0.1"


class MemoryServerStartError(Exception):
    """Redis could not be started on this node."""


class MemoryServerProcess:
    """Runs at most one server at a time.

    Not thread-safe: owned by the node's loop.
    """

    def __init__(self, folder: Path, socket_path: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._socket_path = socket_path
        self._memory_bytes = memory_bytes
        self._server: RunningServer | None = None
        self.record: MemoryServerRecord | None = None
        """The newest life of it, also after its end: who reads it asks whether that life still is."""

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.process.pid

    def start(self) -> None:
        """Starts the server unless it runs. Raises HolderStartError."""
        if self._server is not None and not self._has_ended(self._server):
            return
        try:
            program = find_program()
        except ConfigurationError as error:
            raise MemoryServerStartError(str(error)) from error
        last: Exception | None = None
        for _ in range(_TRIES):  # another process may take the port between our look and Redis' bind
            settings = ServerSettings(
                port=free_port(),
                memory_bytes=self._memory_bytes,
                folder=self._folder,
                host=_HOST,
                password=secrets.token_hex(16),
                socket=self._socket_path,
                fill_bytes=min(_FILL_BYTES, self._memory_bytes // 2),
            )
            try:
                self._server = start(settings, program, os.environ, partial(die_with_parent, os.getpid()))
            except TierError as error:
                last = error
                continue
            self.record = self._record_of(self._server)
            return
        raise MemoryServerStartError(f"the memory tier of this node did not start in {_TRIES} tries: {last}")

    def _has_ended(self, server: RunningServer) -> bool:
        """Also one whose first thread is dead while others still are being ended: it can be reaped in a moment."""
        if server.process.poll() is None and identity_of(server.process.pid) is not None:
            return False
        try:
            server.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise MemoryServerStartError(
                f"the former server of this node was killed and has not ended: {error}"
            ) from error
        return True

    def _record_of(self, server: RunningServer) -> MemoryServerRecord:
        life = identity_of(server.process.pid)
        if life is None:
            raise MemoryServerStartError("the memory tier of this node ended right after it had answered")
        settings = server.settings
        return MemoryServerRecord(settings.host, settings.port, str(life), admin_password=settings.password)

    def collect(self) -> None:
        """Reaps the server if it has exited."""
        if self._server is not None:
            self._server.process.poll()

    def stop(self) -> None:
        """Kills the server; it has nothing to write to disk."""
        if self._server is not None and self._server.process.poll() is None:
            self._server.kill()


def free_port() -> int:
    """Finds a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


# ---- node process ----------------------------------------------------------------------------------------------------

_LAST_LINE_BYTES = 4096
_STOP_SECONDS = 2.0
"""How long agents may take once the whole node is told to end: it is the run that ends, nothing is waited for."""


@dataclass(slots=True)
class _WorkerProcess:
    """One agent. `kill_at`: when its grace period ends, on the monotonic clock."""

    record: WorkerRecord
    process: subprocess.Popen[bytes]
    log: Path
    kill_at: float | None = None


class Node:
    """Starts, reaps and ends the node's processes in one loop.

    Single-threaded: agents die with the thread that forked them.
    """

    def __init__(self, folder: RunFolder, name: str, memory_bytes: int | None, servers: int = 1) -> None:
        self._folder = folder
        self._name = name
        self._life = str(this_process())
        self._workers: dict[str, _WorkerProcess] = {}
        part = (memory_bytes or DEFAULT_MEMORY_BYTES) // servers
        self._servers = [
            MemoryServerProcess(folder.server_log(name, number), folder.server_socket(name, number), part)
            for number in range(servers)
        ]
        self._writes = PendingWrites()
        self._stopping_until: float | None = None
        # wakes the poll below; signals may arrive at any point, their work is done in the loop
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restart_server = False

    def run(self) -> int:
        """Runs until SIGTERM; returns the exit code."""
        self._listen_to_signals()
        watch = FolderWatch([self._folder.workers])
        self._announce()
        self._start_server()
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._sync_processes()
        try:
            while not self._has_left():
                poll.poll(self._wait_milliseconds())
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                watch.read()
                if self._restart_server:
                    self._restart_server = False
                    self._start_server()
                self._sync_processes()
        finally:
            watch.close()
            for holder in self._servers:
                holder.stop()
        return 0

    # ---- what happened --------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_restart_server", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the machine's to answer

    def _leave(self) -> None:
        if self._stopping_until is None:
            self._stopping_until = time.monotonic() + _STOP_SECONDS

    def _has_left(self) -> bool:
        return self._stopping_until is not None and not self._workers

    def _wait_milliseconds(self) -> int | None:
        ends = [w.kill_at for w in self._workers.values() if w.kill_at is not None]
        if (retry_at := self._writes.retry_at) is not None:
            ends.append(retry_at)
        return max(0, int((min(ends) - time.monotonic()) * 1000) + 1) if ends else None

    def _sync_processes(self) -> None:
        """Brings what runs in line with what the run folder says; repeating it changes nothing."""
        self._reap()
        self._writes.flush()
        for path in sorted(self._folder.workers.glob("*.json")):
            body = read_json(path)
            if body is None:
                continue  # deleted meanwhile
            record = from_json(WorkerRecord, body)
            if record.node == self._name and record.node_life == self._life:
                self._run_once(record)
        if self._stopping_until is not None:
            for running in self._workers.values():
                self._end(running, max(0.0, self._stopping_until - time.monotonic()))
        now = time.monotonic()
        for running in self._workers.values():
            if running.kill_at is not None and now >= running.kill_at:
                running.process.kill()
                running.kill_at = now + 1.0  # asked again, should it be in the kernel's hands for long

    def _run_once(self, record: WorkerRecord) -> None:
        running = self._workers.get(record.uid)
        body = read_json(self._folder.worker_deletion(record.name))
        deletion = from_json(DeletionRequest, body) if body is not None and body["uid"] == record.uid else None
        if deletion is not None:
            if running is None:
                self._forget(record)
            else:
                self._end(running, 0.0 if deletion.force else record.grace_seconds)
            return
        state = self._writes.read(self._folder.worker_state(record.name))
        if running is None and self._stopping_until is None and (state is None or state["uid"] != record.uid):
            self._start(record)

    # ---- what is done about it ------------------------------------------------------------------------------------

    def _start(self, record: WorkerRecord) -> None:
        log = self._folder.logs / f"worker-{record.index}-{record.attempt}" / "agent.log"
        environment = {**os.environ, **record.environment}
        environment |= {
            "SUREFOOT_NODE": self._name,
            "SUREFOOT_MEMORY_SOCKET": self._folder.server_sockets(self._name),
            "SUREFOOT_HOST": "127.0.0.1",
            "SUREFOOT_RUN_FOLDER": str(self._folder.root),
            "SUREFOOT_TERMINATION_GRACE_SECONDS": str(record.grace_seconds),
        }
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "surefoot.agent", "--", *record.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=record.working_dir,
                    preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  # one thread here: nothing can hold a lock across the fork
                )
        except Exception as error:  # noqa: BLE001  # whatever one start meets is that worker's: the node has others, and a holder
            text = f"the agent could not be started: {error or type(error).__name__}"
            self._write_state(record, WorkerState(record.uid, "Failed", message=text, start_blocker=True))
            return
        self._workers[record.uid] = _WorkerProcess(record, process, log)
        life = identity_of(process.pid)
        self._write_state(record, WorkerState(record.uid, "Running", life=str(life) if life else None))

    def _end(self, running: _WorkerProcess, grace_seconds: float) -> None:
        kill_at = time.monotonic() + grace_seconds
        if running.kill_at is None:
            running.process.terminate()
            running.kill_at = kill_at
        running.kill_at = min(running.kill_at, kill_at)

    def _reap(self) -> None:
        """Collects what ended, orphans of dead agents included: this process is their subreaper."""
        for running in list(self._workers.values()):
            code = running.process.poll()
            if code is None:
                continue
            record = running.record
            del self._workers[record.uid]
            message = "" if code == 0 else last_log_line(running.log) if code > 0 else f"killed by signal {-code}"
            self._write_state(record, WorkerState(record.uid, "Failed" if code else "Succeeded", None, code, message))
        for holder in self._servers:
            holder.collect()
        reap_orphans({w.process.pid for w in self._workers.values()} | {holder.pid or 0 for holder in self._servers})

    def _write_state(self, record: WorkerRecord, state: WorkerState) -> None:
        self._writes.write(self._folder.worker_state(record.name), to_json(state))

    def _forget(self, record: WorkerRecord) -> None:
        name = record.name
        for path in (
            self._folder.worker(name),
            self._folder.worker_state(name),
            self._folder.worker_deletion(name),
        ):
            self._writes.drop(path)

    def _start_server(self) -> None:
        try:
            for holder in self._servers:
                holder.start()
            self._announce()
        except MemoryServerStartError as error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has
            self._announce(str(error))

    def _announce(self, message: str = "") -> None:
        started = [holder.record for holder in self._servers if holder.record is not None]
        first, *more = started if len(started) == len(self._servers) else (None,)
        record = NodeRecord(
            self._name, self._life, domain=self._name, server=first, message=message, more_servers=tuple(more)
        )
        self._writes.write(self._folder.node(self._name), to_json(record))


def last_log_line(log: Path) -> str:
    """Reads a log's last line, which usually says why its agent ended."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_LINE_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="one node of surefoot on one machine; started by `surefoot local`")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, required=True, help="process whose end is this node's end")
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--servers", type=int, default=1, help="Redis servers that share the memory")
    given = parser.parse_args()
    die_with_parent(given.parent)
    become_subreaper()
    return Node(RunFolder(given.run_folder), given.name, given.memory_bytes, given.servers).run()


if __name__ == "__main__":
    sys.exit(main())
