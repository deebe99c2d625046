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
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from surefoot.linux_process import (
    become_subreaper,
    die_with_parent,
    identity_of,
    own_identity,
    reap_orphans,
)
from surefoot_operator.platforms.local.folder_watch import FolderWatch
from surefoot_operator.platforms.local.holder_process import DEFAULT_MEMORY_BYTES, HolderProcess, HolderStartError
from surefoot_operator.platforms.local.pending_writes import PendingWrites
from surefoot_operator.platforms.local.run_folder import RunFolder, read_json
from surefoot_operator.platforms.local.run_records import (
    Deletion,
    NodeRecord,
    WorkerRecord,
    WorkerState,
    from_json,
    to_json,
)

_LAST_WORDS_BYTES = 4096
_LEAVING_SECONDS = 2.0
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
        self._life = str(own_identity())
        self._workers: dict[str, _WorkerProcess] = {}
        part = (memory_bytes or DEFAULT_MEMORY_BYTES) // servers
        self._holders = [
            HolderProcess(folder.holder_log(name, number), folder.holder_socket(name, number), part)
            for number in range(servers)
        ]
        self._writes = PendingWrites()
        self._leaving_until: float | None = None
        # wakes the poll below; signals may arrive at any point, their work is done in the loop
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restart_holder = False

    def run(self) -> int:
        """Runs until SIGTERM; returns the exit code."""
        self._listen_to_signals()
        watch = FolderWatch([self._folder.workers])
        self._announce()
        self._start_holder()
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self._look()
        try:
            while not self._has_left():
                poll.poll(self._wait_milliseconds())
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                watch.read()
                if self._restart_holder:
                    self._restart_holder = False
                    self._start_holder()
                self._look()
        finally:
            watch.close()
            for holder in self._holders:
                holder.stop()
        return 0

    # ---- what happened --------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_restart_holder", True))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the machine's to answer

    def _leave(self) -> None:
        if self._leaving_until is None:
            self._leaving_until = time.monotonic() + _LEAVING_SECONDS

    def _has_left(self) -> bool:
        return self._leaving_until is not None and not self._workers

    def _wait_milliseconds(self) -> int | None:
        ends = [w.kill_at for w in self._workers.values() if w.kill_at is not None]
        if (retry_at := self._writes.retry_at) is not None:
            ends.append(retry_at)
        return max(0, int((min(ends) - time.monotonic()) * 1000) + 1) if ends else None

    def _look(self) -> None:
        """Brings what runs in line with what the run folder says; repeating it changes nothing."""
        self._reap()
        self._writes.flush()
        for path in sorted(self._folder.workers.glob("*.json")):
            body = read_json(path)
            if body is None:
                continue  # deleted meanwhile
            record = from_json(WorkerRecord, body)
            if record.node == self._name and record.node_life == self._life:
                self._tend(record)
        if self._leaving_until is not None:
            for running in self._workers.values():
                self._end(running, max(0.0, self._leaving_until - time.monotonic()))
        now = time.monotonic()
        for running in self._workers.values():
            if running.kill_at is not None and now >= running.kill_at:
                running.process.kill()
                running.kill_at = now + 1.0  # asked again, should it be in the kernel's hands for long

    def _tend(self, record: WorkerRecord) -> None:
        running = self._workers.get(record.uid)
        body = read_json(self._folder.worker_deletion(record.name))
        deletion = from_json(Deletion, body) if body is not None and body["uid"] == record.uid else None
        if deletion is not None:
            if running is None:
                self._forget(record)
            else:
                self._end(running, 0.0 if deletion.force else record.grace_seconds)
            return
        state = self._writes.read(self._folder.worker_state(record.name))
        if running is None and self._leaving_until is None and (state is None or state["uid"] != record.uid):
            self._start(record)

    # ---- what is done about it ------------------------------------------------------------------------------------

    def _start(self, record: WorkerRecord) -> None:
        log = self._folder.logs / f"worker-{record.index}-{record.attempt}" / "agent.log"
        environment = {**os.environ, **record.environment}
        environment |= {
            "SUREFOOT_NODE": self._name,
            "SUREFOOT_HOLDER_SOCKET": self._folder.holder_sockets(self._name),
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
            self._say(record, WorkerState(record.uid, "Failed", message=text, unstarted=True))
            return
        self._workers[record.uid] = _WorkerProcess(record, process, log)
        life = identity_of(process.pid)
        self._say(record, WorkerState(record.uid, "Running", life=str(life) if life else None))

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
            message = "" if code == 0 else last_words(running.log) if code > 0 else f"killed by signal {-code}"
            self._say(record, WorkerState(record.uid, "Failed" if code else "Succeeded", None, code, message))
        for holder in self._holders:
            holder.collect()
        reap_orphans({w.process.pid for w in self._workers.values()} | {holder.pid or 0 for holder in self._holders})

    def _say(self, record: WorkerRecord, state: WorkerState) -> None:
        self._writes.write(self._folder.worker_state(record.name), to_json(state))

    def _forget(self, record: WorkerRecord) -> None:
        name = record.name
        for path in (
            self._folder.worker(name),
            self._folder.worker_state(name),
            self._folder.worker_deletion(name),
        ):
            self._writes.drop(path)

    def _start_holder(self) -> None:
        try:
            for holder in self._holders:
                holder.start()
            self._announce()
        except HolderStartError as error:
            print(error, file=sys.stderr, flush=True)  # noqa: T201  # this log is all a node has
            self._announce(str(error))

    def _announce(self, message: str = "") -> None:
        started = [holder.record for holder in self._holders if holder.record is not None]
        first, *more = started if len(started) == len(self._holders) else (None,)
        record = NodeRecord(
            self._name, self._life, domain=self._name, holder=first, message=message, more_holders=tuple(more)
        )
        self._writes.write(self._folder.node(self._name), to_json(record))


def last_words(log: Path) -> str:
    """Reads a log's last line, which usually says why its agent ended."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_WORDS_BYTES))
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
