"""Imports everything once, stays single-threaded, and forks trainers and stores.

`python -m surefoot.launcher.fork_server SOCKET_FD PARENT_PID`; its first message is the program to warm up for. It talks
with `client` over a SEQPACKET socketpair: one JSON object a packet, file descriptors beside it. It reaps its
children and reports their exit codes. It never initialises CUDA, never runs a backward, never holds a second thread.
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
# Imports the frameworks and the script's imports into the warm process. Parsing is pure. An import that fails here is
# only noted: the script will show the error itself, in its own words.

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
    seconds: float
    failed: tuple[str, ...]
    """`module: error`, one an import that did not work."""


def top_level_imports(source: str) -> tuple[str, ...]:
    """Lists modules that the program imports unconditionally, in order.

    `a.b:c` where c may be a submodule of a.b.
    """
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in (None, "__future__"):
            names += [f"{node.module}:{alias.name}" for alias in node.names]
    return tuple(dict.fromkeys(names))


def program_source(script: str | None, module: str | None) -> Path | None:
    """The file whose imports matter; None if it cannot be found (starting it will say why)."""
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


def preload(source: Path | None) -> Preloaded:
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
"""Largest request: mostly the environment of a trainer."""


FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads that a fork may leave behind: jemalloc locks and resets its own around one. pyarrow begins it, and with it pandas,
datasets and transformers' Trainer, whose imports take longest of all."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What a child is to become."""

    body: dict[str, Any]
    fds: tuple[int, ...]
    parent: int


class _ForkServer:
    """The parent's loop: fork on request, report exits. `serve` returns a request only in a new child."""

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
            reason = f"{len(other_threads) + 1} threads run in the warm process: an import of the program started them"
            self._send({"said": "refused", "id": order["id"], "why": reason})
        else:
            sys.stdout.flush()  # else a child would write it a second time
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._leave()
                return _Request(order, fds, parent)
            self._send({"said": "forked", "id": order["id"], "pid": pid})
        for fd in fds:
            os.close(fd)
        return None

    def _leave(self) -> None:
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
            self._send({"said": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, body: dict[str, Any]) -> None:
        self._socket.send(json.dumps(body).encode())


def _other_threads() -> list[str]:
    """The names of other threads that a child would miss."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if int(thread) != os.getpid():
                names.append(
                    Path(f"/proc/self/task/{thread}/comm").read_text(encoding="ascii", errors="replace").strip()
                )
    return [name for name in names if name not in FORK_SAFE_THREADS]


def _become(request: _Request) -> None:
    """Turns a fresh child into what was asked for; does not return."""
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
    stacks.install(os.environ.get("SUREFOOT_STACK_DUMP_FILE"))
    program = order["program"]
    run_program(LaunchProgram(tuple(program["arguments"]), program["script"], program["module"]))


def _reseed_and_reset_threads() -> None:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # else all ranks of all epochs would share the zygote's state
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None:
        # also where nothing was said: torch makes its pool anew where a fork first asks for it, and two threads that
        # ask at once end the process ("Invalid thread pool!")
        is_set = threads.isdigit() and int(threads) > 0
        torch.set_num_threads(int(threads) if is_set else torch.get_num_threads())


def _preload_uncollected(source: Path | None) -> Preloaded:
    """Keeps Python's collector out of imports, a fifth of whose time it took.

    What an import makes stays. By the threshold: a module that turns the collector off, or sets it, is to have its way.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        return preload(source)
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*thresholds)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    die_with_parent(int(sys.argv[2]))
    # Ctrl-C and a group's SIGTERM are the agent's business; it ends us by closing the line
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = json.loads(connection.recv(PACKET_BYTES))
    script, module = program["script"], program["module"]
    sys.path[0] = os.path.dirname(os.path.abspath(script)) if script else os.getcwd()
    sys.argv = [script or module or ""]
    preloaded = _preload_uncollected(program_source(script, module))
    gc.collect()
    gc.freeze()
    connection.send(json.dumps({"said": "ready", **asdict(preloaded)}).encode())
    request = _ForkServer(connection).serve()
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
