"""Runs one node of a local run, in the kubelet's place.

The process leads the node's process group. It runs the node's memory servers (Redis) and one agent for each worker that
is bound to the node, records their states, and ends them on request. It decides nothing about the job. Its children die
with it (PDEATHSIG) and stay in its group, so one SIGKILL to the group simulates the failure of the whole node.

SIGTERM ends the node and its agents in order. SIGUSR1 restarts memory servers that have ended; they never restart by
themselves here, so that a user or an injected fault decides whether a server with lost memory returns.
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
from surefoot.memory_server.server_process import RunningServer, ServerSettings, find_server_program, start_server
from surefoot_operator.platforms.local.run_folder import (
    DeletionRequest,
    FolderWatch,
    MemoryServerRecord,
    NodeRecord,
    RunFolder,
    WorkerRecord,
    WorkerState,
    parse_record,
    read_json,
    record_to_json,
    write_json,
)

# ---- writes on a full disk -------------------------------------------------------------------------------------------
# Writes a node's records, and retries writes that failed. Otherwise a disk that is full for a moment would end the node
# at the first failed write, and all its agents and memory servers with it.

WRITE_RETRY_SECONDS = 0.5
"""Time between a failed write and the next attempt."""


class PendingWrites:
    """Keeps the newest content of each file until it is written. Used only by the node's loop."""

    def __init__(self) -> None:
        self._pending: dict[Path, dict[str, Any]] = {}
        self._retry_at_seconds = 0.0
        self._is_failing = False

    @property
    def retry_at_seconds(self) -> float | None:
        """Monotonic time at which to call `write_pending` again; None: everything is written."""
        return self._retry_at_seconds if self._pending else None

    def write_or_retry(self, path: Path, content: dict[str, Any]) -> None:
        """Writes a file at once or, if that fails, with a later `write_pending`."""
        self._pending[path] = content
        self._retry_at_seconds = 0.0
        self.write_pending()

    def read(self, path: Path) -> dict[str, Any] | None:
        """Returns the newest content of a file, whether it is written yet or not; None: there is no file."""
        return self._pending[path] if path in self._pending else read_json(path)

    def remove_file(self, path: Path) -> None:
        """Removes a file, whether it is written yet or not."""
        self._pending.pop(path, None)
        path.unlink(missing_ok=True)

    def write_pending(self) -> None:
        """Writes all pending files, unless the last attempt failed less than `WRITE_RETRY_SECONDS` ago."""
        if time.monotonic() < self._retry_at_seconds:
            return
        for path, content in list(self._pending.items()):
            try:
                write_json(path, content, durable=False)
            except OSError as error:
                self._retry_at_seconds = time.monotonic() + WRITE_RETRY_SECONDS
                if not self._is_failing:
                    self._is_failing = True
                    _log_to_stderr(f"cannot write {path.name}, trying again: {error}")
                return
            del self._pending[path]
        if self._is_failing:
            self._is_failing = False
            _log_to_stderr("all files of the node are written again")


def _log_to_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the same full disk
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has


# ---- the node's memory servers ---------------------------------------------------------------------------------------
# Runs one memory server (Redis) of a node; `surefoot.memory_server.server_process` chooses the program and its
# configuration.

DEFAULT_MEMORY_BYTES = 2 * 1024**3
"""Memory of all memory servers of one node together."""
_PREFAULT_BYTES = 128 * 1024**2
"""Memory that is prefaulted: enough for fast first saves of small jobs, and little enough for a fast start."""
_MAX_START_ATTEMPTS = 5
_MAX_END_SECONDS = 5.0
"""Time limit for the kernel to end a killed server, which must free its memory."""
_HOST = "127.0.0.1"


class MemoryServerStartError(Exception):
    """A memory server could not be started on this node."""


class MemoryServerProcess:
    """Runs one memory server, and starts it again on request. Not thread-safe: used only by the node's loop."""

    def __init__(self, folder: Path, socket_path: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._socket_path = socket_path
        self._memory_bytes = memory_bytes
        self._server: RunningServer | None = None
        self.newest_record: MemoryServerRecord | None = None
        """The newest process of the server, even after its end; readers must check whether that process still runs."""

    @property
    def pid(self) -> int | None:
        """Process ID of the newest process; None: it was never started."""
        return None if self._server is None else self._server.process.pid

    def start(self) -> None:
        """Starts the server unless it runs; raises MemoryServerStartError if it cannot be started."""
        if self._server is not None and not self._has_ended(self._server):
            return
        try:
            program = find_server_program()
        except ConfigurationError as error:
            raise MemoryServerStartError(str(error)) from error
        last_error: Exception | None = None
        for _ in range(_MAX_START_ATTEMPTS):  # another process may bind the free port before Redis does
            settings = ServerSettings(
                port=find_free_port(),
                memory_bytes=self._memory_bytes,
                folder=self._folder,
                host=_HOST,
                password=secrets.token_hex(16),
                socket_path=self._socket_path,
                prefault_bytes=min(_PREFAULT_BYTES, self._memory_bytes // 2),
            )
            try:
                self._server = start_server(settings, program, os.environ, partial(die_with_parent, os.getpid()))
            except TierError as error:
                last_error = error
                continue
            self.newest_record = self._record_of(self._server)
            return
        raise MemoryServerStartError(
            f"a memory server of this node did not start in {_MAX_START_ATTEMPTS} attempts: {last_error}"
        )

    def _has_ended(self, server: RunningServer) -> bool:
        """Whether the process has ended; waits for one whose main thread has ended but not yet its other threads."""
        if server.process.poll() is None and identity_of(server.process.pid) is not None:
            return False
        try:
            server.process.wait(_MAX_END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise MemoryServerStartError(
                f"the former memory server of this node was killed but its process has not ended: {error}"
            ) from error
        return True

    def _record_of(self, server: RunningServer) -> MemoryServerRecord:
        life = identity_of(server.process.pid)
        if life is None:
            raise MemoryServerStartError("a memory server of this node ended right after its start; read its log")
        settings = server.settings
        return MemoryServerRecord(settings.host, settings.port, str(life), admin_password=settings.password)

    def reap(self) -> None:
        """Reaps the server if it has exited."""
        if self._server is not None:
            self._server.process.poll()

    def stop(self) -> None:
        """Kills the server; it has nothing to write to disk."""
        if self._server is not None and self._server.process.poll() is None:
            self._server.kill()


def find_free_port() -> int:
    """Returns a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


# ---- node process ----------------------------------------------------------------------------------------------------

_LAST_LINE_BYTES = 4096
"""Size of the end of a log in which its last line is searched."""
_STOP_SECONDS = 2.0
"""Grace period of agents when the whole node ends; short, because the run has then ended."""


@dataclass(slots=True)
class _WorkerProcess:
    """A worker whose agent runs."""

    record: WorkerRecord
    process: subprocess.Popen[bytes]
    """The agent's process."""
    log: Path
    """The agent's log file."""
    kill_at: float | None = None
    """Monotonic time at which it gets SIGKILL; None: it was not asked to end."""


class Node:
    """Starts, reaps and ends the node's processes in one loop.

    Single-threaded, because agents die with the thread that forked them.
    """

    def __init__(self, folder: RunFolder, name: str, memory_bytes: int | None, servers: int = 1) -> None:
        self._folder = folder
        self._name = name
        self._life = str(this_process())
        self._workers: dict[str, _WorkerProcess] = {}
        memory_per_server = (memory_bytes or DEFAULT_MEMORY_BYTES) // servers
        self._servers = [
            MemoryServerProcess(
                folder.server_log_folder(name, index), folder.server_socket(name, index), memory_per_server
            )
            for index in range(servers)
        ]
        self._writes = PendingWrites()
        self._stopping_until: float | None = None
        # signal handlers only wake the poll loop by this pipe; the loop does the work
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restart_server = False

    def run(self) -> int:
        """Runs the node until SIGTERM and the end of its agents; returns the exit code."""
        self._listen_to_signals()
        watch = FolderWatch([self._folder.workers_folder])
        self._write_node_record()
        self._start_server()
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._sync_processes()
        try:
            while not self._has_stopped():
                poll.poll(self._poll_timeout_milliseconds())
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                watch.read_changes()
                if self._restart_server:
                    self._restart_server = False
                    self._start_server()
                self._sync_processes()
        finally:
            watch.close()
            for server in self._servers:
                server.stop()
        return 0

    # ---- events ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._on_sigterm())
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_restart_server", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `surefoot local` handles Ctrl-C and then ends this node

    def _on_sigterm(self) -> None:
        if self._stopping_until is None:
            self._stopping_until = time.monotonic() + _STOP_SECONDS

    def _has_stopped(self) -> bool:
        return self._stopping_until is not None and not self._workers

    def _poll_timeout_milliseconds(self) -> int | None:
        deadlines = [w.kill_at for w in self._workers.values() if w.kill_at is not None]
        if (retry_at := self._writes.retry_at_seconds) is not None:
            deadlines.append(retry_at)
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1) if deadlines else None

    def _sync_processes(self) -> None:
        """Starts, ends and reaps processes so that they match the run folder; safe to repeat."""
        self._reap_processes()
        self._writes.write_pending()
        for path in sorted(self._folder.workers_folder.glob("*.json")):
            content = read_json(path)
            if content is None:
                continue  # deleted since the folder was listed
            record = parse_record(WorkerRecord, content)
            if record.node == self._name and record.node_life == self._life:
                self._run_once(record)
        if self._stopping_until is not None:
            for running in self._workers.values():
                self._end_agent(running, max(0.0, self._stopping_until - time.monotonic()))
        now = time.monotonic()
        for running in self._workers.values():
            if running.kill_at is not None and now >= running.kill_at:
                running.process.kill()
                running.kill_at = now + 1.0  # sent again if the kernel takes long to end it

    def _run_once(self, record: WorkerRecord) -> None:
        """Starts a worker's agent once, or ends it if a deletion is requested."""
        running = self._workers.get(record.uid)
        content = read_json(self._folder.worker_deletion_file(record.name))
        deletion = (
            parse_record(DeletionRequest, content) if content is not None and content["uid"] == record.uid else None
        )
        if deletion is not None:
            if running is None:
                self._remove_worker_files(record)
            else:
                self._end_agent(running, 0.0 if deletion.force else record.grace_seconds)
            return
        state = self._writes.read(self._folder.worker_state_file(record.name))
        if running is None and self._stopping_until is None and (state is None or state["uid"] != record.uid):
            self._start_agent(record)

    # ---- actions --------------------------------------------------------------------------------------------------

    def _start_agent(self, record: WorkerRecord) -> None:
        log = self._folder.logs_folder / f"worker-{record.index}-{record.attempt}" / "agent.log"
        environment = {**os.environ, **record.environment}
        environment |= {
            "SUREFOOT_NODE": self._name,
            "SUREFOOT_MEMORY_SOCKET": self._folder.server_socket_pattern(self._name),
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
                    preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  # single-threaded: no lock can be taken at the fork
                )
        except Exception as error:  # noqa: BLE001  # an error of one worker's start must not end the node
            text = f"the agent could not be started: {error or type(error).__name__}"
            self._write_state(record, WorkerState(record.uid, "Failed", message=text, start_blocker=True))
            return
        self._workers[record.uid] = _WorkerProcess(record, process, log)
        life = identity_of(process.pid)
        self._write_state(record, WorkerState(record.uid, "Running", life=str(life) if life else None))

    def _end_agent(self, running: _WorkerProcess, grace_seconds: float) -> None:
        kill_at = time.monotonic() + grace_seconds
        if running.kill_at is None:
            running.process.terminate()
            running.kill_at = kill_at
        running.kill_at = min(running.kill_at, kill_at)

    def _reap_processes(self) -> None:
        """Reaps ended processes and records workers' ends; also reaps orphans of ended agents, as their subreaper."""
        for running in list(self._workers.values()):
            code = running.process.poll()
            if code is None:
                continue
            record = running.record
            del self._workers[record.uid]
            message = "" if code == 0 else last_log_line(running.log) if code > 0 else f"killed by signal {-code}"
            self._write_state(record, WorkerState(record.uid, "Failed" if code else "Succeeded", None, code, message))
        for server in self._servers:
            server.reap()
        reap_orphans({w.process.pid for w in self._workers.values()} | {server.pid or 0 for server in self._servers})

    def _write_state(self, record: WorkerRecord, state: WorkerState) -> None:
        self._writes.write_or_retry(self._folder.worker_state_file(record.name), record_to_json(state))

    def _remove_worker_files(self, record: WorkerRecord) -> None:
        name = record.name
        for path in (
            self._folder.worker_file(name),
            self._folder.worker_state_file(name),
            self._folder.worker_deletion_file(name),
        ):
            self._writes.remove_file(path)

    def _start_server(self) -> None:
        try:
            for server in self._servers:
                server.start()
            self._write_node_record()
        except MemoryServerStartError as error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has
            self._write_node_record(str(error))

    def _write_node_record(self, message: str = "") -> None:
        records = [server.newest_record for server in self._servers if server.newest_record is not None]
        first_record, *more_records = records if len(records) == len(self._servers) else (None,)
        record = NodeRecord(
            self._name,
            self._life,
            domain=self._name,
            server=first_record,
            message=message,
            more_servers=tuple(more_records),
        )
        self._writes.write_or_retry(self._folder.node_file(self._name), record_to_json(record))


def last_log_line(log: Path) -> str:
    """Returns a log's last line, which usually has the reason of an agent's failure; empty: there is none."""
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
    parser.add_argument("--parent", type=int, required=True, help="ID of the process with whose end this node ends")
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--servers", type=int, default=1, help="number of memory servers that share the memory")
    args = parser.parse_args()
    die_with_parent(args.parent)
    become_subreaper()
    return Node(RunFolder(args.run_folder), args.name, args.memory_bytes, args.servers).run()


if __name__ == "__main__":
    sys.exit(main())
