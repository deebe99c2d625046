"""Imports the frameworks once and forks trainers and stores from this warm process.

Run as `python -m surefoot.launcher.fork_server SOCKET_FD PARENT_PID`; the first message names the program to import for.
Messages go over a SEQPACKET socketpair to `ForkServerClient`: one JSON object per packet, with file descriptors. The
server reaps its children and reports their exit codes. To stay safe to fork, it never initialises CUDA, never runs a
backward pass and never has a second thread.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.ipc import stacks
from surefoot.launcher.job_program import LaunchProgram, run_program
from surefoot.launcher.tcp_store import serve_store
from surefoot.linux_process import die_with_parent

# ---- preload ---------------------------------------------------------------------------------------------------------
# Imports the frameworks and the script's imports into the fork server. Parsing is pure. An import that fails here is only
# logged: the script will raise the same error itself.

FRAMEWORKS = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",  # the first fully_shard imports it: half a second
    "numpy",
    "surefoot.checkpointer",
    "surefoot.ipc.agent_client",
)


@dataclass(frozen=True, slots=True)
class Preloaded:
    """Result of the imports."""

    seconds: float
    """Time that the imports took."""
    failed: tuple[str, ...]
    """`module: error` of each failed import."""


def top_level_imports(source: str) -> tuple[str, ...]:
    """Lists the program's imports at module level, in order; `a.b:c` means that c may be a submodule of a.b."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in (None, "__future__"):
            names += [f"{node.module}:{alias.name}" for alias in node.names]
    return tuple(dict.fromkeys(names))


def program_source(script: str | None, module: str | None) -> Path | None:
    """Returns the program's source file; None if it is not found (starting the program will raise the error)."""
    if script is not None:
        return Path(script)
    if module is None:
        return None
    for name in (f"{module}.__main__", module):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def preload_modules(source: Path | None) -> Preloaded:
    """Imports the frameworks and the program's own imports."""
    start_seconds = time.monotonic()
    failed: list[str] = []
    imports: list[str] = list(FRAMEWORKS)
    if source is not None:
        try:
            imports += top_level_imports(source.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            failed.append(f"{source}: {error}")
    failed += _import_all(imports)
    return Preloaded(time.monotonic() - start_seconds, tuple(failed))


def _import_all(imports: Iterable[str]) -> list[str]:
    failed: list[str] = []
    for entry in imports:
        module, _, attribute = entry.partition(":")
        try:
            loaded = sys.modules.get(module) or importlib.import_module(module)
            if attribute and attribute != "*" and not hasattr(loaded, attribute) and hasattr(loaded, "__path__"):
                importlib.import_module(f"{module}.{attribute}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # a module may raise anything, SystemExit included
            failed.append(f"{entry}: {type(error).__name__}: {error}")
    return failed


# ---- fork server -----------------------------------------------------------------------------------------------------

PACKET_BYTES = 1 << 20
"""Largest packet: a request is mostly the environment of a trainer."""


FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that may run during a fork: jemalloc locks and resets its own around a fork.

pyarrow starts it, and so do pandas, datasets and transformers' Trainer, whose imports take longest of all."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Describes the trainer or store that a child process becomes."""

    body: dict[str, Any]
    fds: tuple[int, ...]
    parent: int


class _ForkServer:
    """Forks on request and reports exits; `serve` returns a request only in a new child process."""

    def __init__(self, line: socket.socket) -> None:
        self._socket = line
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> _Request | None:
        # the handler does nothing; the wake-up pipe turns the signal into something to select on
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
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
        other_threads = _other_threads()
        if other_threads:
            reason = f"{len(other_threads) + 1} threads run in the fork server: an import of the program started them"
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

    def _detach_from_loop(self) -> None:
        """Detaches the child from the parent's event loop."""
        signal.set_wakeup_fd(-1)
        for signal_number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _other_threads() -> list[str]:
    """Lists the names of threads that a forked child would lack."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if int(thread) != os.getpid():
                names.append(
                    Path(f"/proc/self/task/{thread}/comm").read_text(encoding="ascii", errors="replace").strip()
                )
    return [name for name in names if name not in FORK_SAFE_THREADS]


def _run_request(request: _Request) -> None:
    """Turns a forked child into the requested trainer or store; does not return."""
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
    os.environ.clear()
    os.environ.update(order["environment"])
    _reseed_and_reset_threads()
    stacks.install_stack_handler(os.environ.get("SUREFOOT_STACK_DUMP_FILE"))
    program = order["program"]
    run_program(LaunchProgram(tuple(program["arguments"]), program["script"], program["module"]))


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


def _preload_without_gc(source: Path | None) -> Preloaded:
    """Imports without Python's garbage collector, which took a fifth of the imports' time and frees nothing there.

    It is stopped by its threshold, so that a module that disables or configures the collector keeps its setting.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        return preload_modules(source)
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    die_with_parent(int(sys.argv[2]))
    # the agent handles Ctrl-C and the process group's SIGTERM, and ends this process by closing the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = json.loads(connection.recv(PACKET_BYTES))
    script, module = program["script"], program["module"]
    sys.path[0] = os.path.dirname(os.path.abspath(script)) if script else os.getcwd()
    sys.argv = [script or module or ""]
    preloaded = _preload_without_gc(program_source(script, module))
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"event": "ready", **asdict(preloaded)}).encode())
    request = _ForkServer(connection).serve()
    if request is not None:
        _run_request(request)


if __name__ == "__main__":
    main()
