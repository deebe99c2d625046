"""Makes a program's imports once and forks trainers and stores from this warm process.

`starter` starts it; the first message names the program to import for, and the environment that all its ranks share.
Messages go over a SEQPACKET socketpair to `ForkServerClient`: one JSON object per packet, with file descriptors. The
server reaps its children and reports their exit codes. To stay safe to fork, it never initialises CUDA, never runs a
backward pass and never has a second thread. An import that a rank would see otherwise is not kept: the server reports
it and ends, and its next start makes the imports before that one only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import stat
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from surefoot.ipc import stacks
from surefoot.launcher.import_observer import (
    ImportObserver,
    early_reader,
    installed_folders,
    is_installed,
    local_folders,
    other_threads,
)
from surefoot.launcher.job_program import LaunchProgram, prepare_program, run_program
from surefoot.launcher.tcp_store import serve_store
from surefoot.launcher.warm_imports import (
    FRAMEWORKS,
    ImportPlan,
    Warmed,
    changed_variable,
    import_program,
    plan_imports,
    program_source,
    remaining_code,
    warm_up,
)
from surefoot.linux_process import die_with_parent

# ---- imports in advance ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the imports; exactly as its fields, it is reported to the agent."""

    event: str
    """`ready`, or `not_kept`: this process is of no more use, and the next makes `made_count` imports only."""
    made_count: int = 0
    stops_at: str = ""
    """The import that was not kept, or where and why imports in advance end."""
    cannot_fork: str = ""
    """Why no trainer may be forked; stores may."""
    position: int = 0
    """Number of the source's statements that were executed."""


def warm_program(program: LaunchProgram, observer: ImportObserver, limit: int) -> Outcome:
    """Makes the program's imports in advance, the first `limit` at most."""
    plan = plan_imports(program)
    observer.start()
    try:
        result = import_program(plan, observer, limit)
        if not result.problem and "torch" in sys.modules and limit > len(plan.statements):
            result = _import_frameworks(program, observer, limit, plan)
    finally:
        observer.stop()
    if result.problem:
        return Outcome("not_kept", result.made_count, result.problem)
    stops_at = plan.stops_at if limit >= len(plan.statements) else ""
    return Outcome("ready", result.made_count, stops_at, position=plan.position_after(result.made_count))


def _import_frameworks(program: LaunchProgram, observer: ImportObserver, limit: int, plan: ImportPlan) -> Warmed:
    made_count = len(plan.statements)
    observer.recent_reads.clear()
    frameworks = [f"import {name}" for name in FRAMEWORKS][: limit - made_count]
    result = warm_up(frameworks, observer, {}, plan.module)
    source = program_source(program)
    problem = changed_variable(source, frozenset(observer.recent_reads)) if source else ""
    if problem:
        return Warmed(made_count, f"modules of torch for later use: {problem}")
    return Warmed(made_count + result.made_count, result.problem)


def replaced_module(startup_modules: frozenset[str]) -> str | None:
    """Returns a module of the program's own folders that this server has from the standard library; else None.

    The program would get its own, as `queue.py` next to a script replaces the standard one.
    """
    folders = installed_folders()
    own_folders = local_folders(folders)
    names = {name.partition(".")[0] for name in set(sys.modules) - startup_modules - set(sys.builtin_module_names)}
    for name in sorted(names - {"__main__"}):
        if importlib.machinery.FrozenImporter.find_spec(name) is not None:
            continue
        spec = importlib.machinery.PathFinder.find_spec(name, own_folders)
        if spec is not None and spec.origin is not None and not is_installed(spec.origin, folders):
            return f"{spec.origin} replaces the module {name}, which the fork server has imported already"
    return None


def import_in_advance(program: LaunchProgram, observer: ImportObserver, limit: int, startup: frozenset[str]) -> Outcome:
    """Makes the imports for a program, or only those that a store needs if trainers cannot be forked."""
    cannot_fork = ""
    if program.script or program.module:
        prepare_program(program)
        if reader := early_reader(startup):
            cannot_fork = f"{reader} runs when the interpreter starts and may read the variables of a rank"
        cannot_fork = cannot_fork or replaced_module(startup) or ""
        if not cannot_fork:
            return warm_program(program, observer, limit)
    for name in FRAMEWORKS:
        with contextlib.suppress(ImportError):  # then a store or a program raises the error itself
            importlib.import_module(name)
    return Outcome("ready", 0, "", cannot_fork)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Makes imports without Python's garbage collector, which took a fifth of their time and frees nothing there.

    It is stopped by its threshold, so that a module that disables or configures the collector keeps its setting.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)


class _Output:
    """The text that imports print, which every trainer prints as if it had made them."""

    def __init__(self) -> None:
        # the agent's log file; a terminal or a pipe cannot be read back
        self._is_file = stat.S_ISREG(os.fstat(1).st_mode)
        self._start_bytes = self._size_bytes()

    def _size_bytes(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fstat(1).st_size if self._is_file else 0

    def read(self) -> bytes:
        if self._size_bytes() == self._start_bytes:
            return b""
        with open("/proc/self/fd/1", "rb") as file:
            file.seek(self._start_bytes)
            return file.read()


# ---- fork server -----------------------------------------------------------------------------------------------------

PACKET_BYTES = 1 << 20
"""Largest packet: a request is mostly the environment of a trainer."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Describes the trainer or store that a child process becomes."""

    body: dict[str, Any]
    fds: tuple[int, ...]
    parent: int


class _ForkServer:
    """Forks on request and reports exits; `serve` returns a request only in a new child process."""

    def __init__(self, line: socket.socket, program: LaunchProgram, observer: ImportObserver, cannot_fork: str) -> None:
        self._socket = line
        self._program, self._observer, self._cannot_fork = program, observer, cannot_fork
        self._own_signals = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
        self._handlers = {number: signal.getsignal(number) for number in self._own_signals}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> _Request | None:
        # the handler does nothing; the wake-up pipe turns the signal into something to select on
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # the agent handles Ctrl-C and the process group's SIGTERM, and ends this process by closing the socket
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._own_signals)
        self._wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._socket.fileno(), self._wake_read], [], [])
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._report_exits()
            if self._socket.fileno() in ready:
                packet, fds, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 4)
                if not packet:  # the agent is gone
                    return None
                child = self._fork(json.loads(packet), tuple(fds))
                if child is not None:
                    return child

    def _fork(self, order: dict[str, Any], fds: tuple[int, ...]) -> _Request | None:
        parent = os.getpid()
        if reason := self._reason_against(order):
            self._send({"event": "rejected", "id": order["id"], "reason": reason})
        else:
            sys.stdout.flush()  # else the child would write the buffered output again
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._detach_from_loop()
                return _Request(order, fds, parent)
            self._send({"event": "forked", "id": order["id"], "pid": pid})
        for fd in fds:
            os.close(fd)
        return None

    def _reason_against(self, order: dict[str, Any]) -> str:
        """Returns why this request must not be forked; empty if it may be."""
        if threads := other_threads():
            return f"{len(threads) + 1} threads run in the fork server: an import of the program started them"
        if order["kind"] == "store":
            return ""
        if self._cannot_fork:
            return self._cannot_fork
        has_program = bool(self._program.script or self._program.module)
        if has_program and os.path.realpath(order["folder"]) != os.getcwd():
            return f"the program starts in {order['folder']}, and its imports were made in {os.getcwd()}"
        return self._observer.difference(order["environment"]) if has_program else ""

    def _detach_from_loop(self) -> None:
        """Detaches the child from the parent's event loop, and gives it the signal handlers that the imports left."""
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            if handler is not None:  # else a handler of C code, which this server replaced
                signal.signal(number, handler)
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _report_exits(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"event": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, body: dict[str, Any]) -> None:
        self._socket.send(json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class _Warm:
    """Imports that this process has made in advance for a program."""

    program: LaunchProgram
    observer: ImportObserver
    output: bytes
    """Text that the imports have printed."""
    position: int
    """Number of the source's statements that were executed."""
    own_finders: tuple[Any, ...]
    """Finders that must list their folders again in a trainer."""


def _run_request(request: _Request, warm: _Warm) -> NoReturn:
    """Turns a forked child into the requested trainer or store."""
    die_with_parent(request.parent)
    order = request.body
    output = request.fds[0]
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are text wrappers in this process
    if order["kind"] == "store":
        serve_store(request.fds[1], order["host"])
    os.chdir(order["folder"])
    warm.observer.apply(order["environment"])
    _reseed_and_reset_threads()
    stacks.install_stack_handler(os.environ.get("SUREFOOT_STACK_DUMP_FILE"))
    program = _program_of(order["program"])
    is_warm = program == warm.program
    if not is_warm:
        prepare_program(program)
    for finder in warm.own_finders:
        finder.invalidate_caches()
    os.write(1, warm.output)
    run_program(program, (lambda: _remaining(warm.position)) if is_warm and warm.position else None)


def _own_finders() -> tuple[Any, ...]:
    """Returns the finders of modules in the program's own folders, where files may still appear after the imports.

    They are chosen before the fork and by the text of their paths: torch has a thousand folders.
    """
    folders = installed_folders()
    own_folders = tuple(local_folders(folders))
    finders = sys.path_importer_cache.items()
    return tuple(f for path, f in finders if f and path.startswith(own_folders) and not path.startswith(folders))


def _remaining(position: int) -> types.CodeType:
    path = str(sys.modules["__main__"].__file__)
    with open(path, "rb") as file:
        return remaining_code(file.read(), path, position)


def _reseed_and_reset_threads() -> None:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # else all ranks of all generations would share the fork server's random state
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None:
        # also without OMP_NUM_THREADS: torch recreates its thread pool at the first use after a fork, and two threads
        # that use it at once crash the process ("Invalid thread pool!")
        is_set = threads.isdigit() and int(threads) > 0
        torch.set_num_threads(int(threads) if is_set else torch.get_num_threads())


def _program_of(body: dict[str, Any]) -> LaunchProgram:
    return LaunchProgram(tuple(body["arguments"]), body["script"], body["module"], tuple(body["command"]))


def main(startup_modules: frozenset[str]) -> NoReturn:
    """Runs the fork server until the agent closes the socket; `startup_modules` are those that any program starts with."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    die_with_parent(int(sys.argv[2]))
    # not ignored: a module may read or set these handlers
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    start = json.loads(connection.recv(PACKET_BYTES))
    program, observer = _program_of(start["program"]), ImportObserver(start["environment"])
    start_seconds, output = time.monotonic(), _Output()
    with without_collector():
        outcome = import_in_advance(program, observer, start["limit"], startup_modules)
    output_text, finders = output.read(), _own_finders()
    gc.collect()
    gc.freeze()
    server = _ForkServer(connection, program, observer, outcome.cannot_fork)
    connection.send(json.dumps({**asdict(outcome), "seconds": time.monotonic() - start_seconds}).encode())
    if outcome.event == "ready":
        request = server.serve()
        if request is not None:
            _run_request(request, _Warm(program, observer, output_text, outcome.position, finders))
    os._exit(0)  # exit handlers of imported modules belong to the trainers
