"""Starts trainers and stores: forked from the fork server where possible, else by exec (cold).

A fork server that dies is restarted a few times; after that every start is cold. Both are counted in
`surefoot_fallbacks_total`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot import metrics
from surefoot.errors import SurefootError
from surefoot.launcher.child_process import Child, OwnChild
from surefoot.launcher.import_observer import FORK_SAFETY
from surefoot.launcher.job_program import LaunchProgram, parse_forkable_program

_log = logging.getLogger(__name__)


# ---- client of the fork server ---------------------------------------------------------------------------------------
# Starts the fork server, requests forks, reports its children's exits. A client belongs to one server process: when that
# dies, its children die with it, and `Starter` decides whether to start another.

PACKET_BYTES = 1 << 20
_FORK_SECONDS = 5.0
_ALL_IMPORTS = 1_000_000

_SERVER_SOURCE = """import sys
startup_modules = frozenset(sys.modules)
folder = [] if sys.flags.safe_path else [sys.path.pop(0)]
from surefoot.launcher import fork_server
sys.path[:0] = folder
fork_server.main(startup_modules)
"""
"""Keeps the program's own folder from being searched for the modules that the fork server needs."""


class CannotFork(SurefootError):
    """The fork server is not running or must not fork; the caller starts the process cold."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Describes the trainer to fork; `output` is the descriptor of its log file."""

    program: LaunchProgram
    environment: Mapping[str, str]
    folder: str
    output: int


class ForkServerClient:
    """Runs one fork server and sends it requests; `on_change` is called when it becomes warm or dies."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.warm = False
        self.dead = False
        self._on_change = on_change
        self._request_ids = itertools.count()
        self._pid_futures: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._start_body: dict[str, Any] = {}
        self._output = -1

    @property
    def pid(self) -> int:
        """Pid of the fork server; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self, program: LaunchProgram | None, environment: Mapping[str, str], output: int) -> None:
        """Starts the fork server, which then imports in the background.

        Args:
            program: The program to import for; None: only for a store.
            environment: The variables that all trainers of this worker share.
            output: Descriptor of the fork server's log file.
        """
        self._output = os.dup(output)
        self._start_body = {
            "program": asdict(program or LaunchProgram(())),
            "environment": dict(environment),
            "limit": _ALL_IMPORTS,
        }
        self._start_process()

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER_SOURCE, str(theirs.fileno()), str(os.getpid())],
                env={**self._start_body["environment"], **FORK_SAFETY},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
        ours.setblocking(False)
        self._socket = ours
        ours.send(json.dumps(self._start_body).encode())
        asyncio.get_running_loop().add_reader(ours, self._read_packets)

    def _start_with_fewer_imports(self, count: int) -> None:
        """Replaces the server by one that makes the first `count` imports only: no import can be undone."""
        assert self._process is not None
        assert self._socket is not None
        assert count < self._start_body["limit"], "each start makes fewer imports, so that this ends"
        self._start_body["limit"] = count
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        loop.run_in_executor(None, self._process.wait)
        self._start_process()

    async def fork_trainer(self, request: ForkRequest) -> Child:
        """Forks a trainer.

        Raises:
            CannotFork: The fork server is not warm or must not fork.
        """
        body = {
            "kind": "trainer",
            "program": asdict(request.program),
            "environment": dict(request.environment),
            "folder": request.folder,
        }
        return await self._fork(body, (request.output,))

    async def fork_store(self, output: int, port_fd: int, host: str) -> Child:
        """Forks the generation's store, which listens on `host` only and writes its port into `port_fd`."""
        return await self._fork({"kind": "store", "host": host}, (output, port_fd))

    async def close(self) -> None:
        """Ends the fork server and, by their parent-death signal, its remaining children."""
        self._mark_dead()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _fork(self, order: dict[str, Any], fds: tuple[int, ...]) -> Child:
        if self._socket is None or not self.warm:
            raise CannotFork("the fork server is not running or still imports")
        request_id = next(self._request_ids)
        pid_future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pid_futures[request_id] = pid_future
        try:
            socket.send_fds(self._socket, [json.dumps({**order, "id": request_id}).encode()], fds)
            pid = await asyncio.wait_for(pid_future, _FORK_SECONDS)
        except (OSError, TimeoutError) as error:
            raise CannotFork(f"the fork server did not fork: {error!r}") from error
        finally:
            self._pid_futures.pop(request_id, None)
        return self._children[pid]

    def _read_packets(self) -> None:
        assert self._socket is not None
        while True:
            try:
                packet = self._socket.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._mark_dead()
                return
            message = json.loads(packet)
            self._handle_message(message)
            if message["event"] == "not_kept":  # the socket is another one now
                return

    def _handle_message(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "ready":
                self.warm = True
                if message["cannot_fork"]:
                    _log.warning("trainers start without the fork server: %s", message["cannot_fork"])
                _log.info(
                    "the fork server is warm after %.2f s, with %d imports of the program%s",
                    message["seconds"],
                    message["made_count"],
                    f"; each trainer continues there: {message['stops_at']}" if message["stops_at"] else "",
                )
                self._on_change()
            case "not_kept":
                _log.warning(
                    "an import is not made in advance, so that each trainer makes it and those after it: %s",
                    message["stops_at"],
                )
                self._start_with_fewer_imports(message["made_count"])
            case "forked":
                # created here and not by the caller, since the next packet may already report its exit
                self._children[message["pid"]] = Child(message["pid"], self._forget, lambda: not self.dead)
                self._resolve_fork(message["id"], lambda future: future.set_result(message["pid"]))
            case "rejected":
                self._resolve_fork(message["id"], lambda future: future.set_exception(CannotFork(message["reason"])))
            case "exited":
                child = self._children.get(message["pid"])
                if child is not None:
                    child.set_exit_code(message["code"])

    def _resolve_fork(self, request_id: int, resolve: Callable[[asyncio.Future[int]], None]) -> None:
        future = self._pid_futures.get(request_id)
        if future is not None and not future.done():
            resolve(future)

    def _forget(self, pid: int) -> None:
        # removed later: the caller of a fork may not have read it yet
        asyncio.get_running_loop().call_later(_FORK_SECONDS, self._children.pop, pid, None)

    def _mark_dead(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        with contextlib.suppress(OSError):
            self._socket.close()
        self._socket = None
        os.close(self._output)
        self.warm = False
        self.dead = True
        if self._process is not None:
            self._process.poll()
        for future in self._pid_futures.values():
            if not future.done():
                future.set_exception(CannotFork("the fork server died"))
        self._on_change()


# ---- starter ---------------------------------------------------------------------------------------------------------

_MAX_FORK_SERVER_STARTS = 4
_STORE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class HostedStore:
    """The generation's store process and its port."""

    child: Child
    port: int


class Starter:
    """Owns the fork server; `on_warm` is called with whether trainers can be started at once."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        on_warm: Callable[[bool], None],
        warm_imports: bool = True,
    ) -> None:
        self._command = tuple(command)
        self._environment = environment
        self._program = parse_forkable_program(command, environment) if warm_imports else None
        self._log_path = log_path
        self._on_warm = on_warm
        self._start_count = 0
        self._fork_server = ForkServerClient(self._on_fork_server_change)
        self._closing = False
        self._cold_children: set[int] = set()
        if not warm_imports:
            _log.info("trainers start without the fork server, as the job's warmImports requests")
        elif self._program is None:
            _log.info(
                "%s is not a Python program for this interpreter, so trainers start without the fork server",
                " ".join(command),
            )

    def own_pids(self) -> set[int]:
        """Returns the pids of the child processes that this starter created."""
        return self._cold_children | ({self._fork_server.pid} if self._fork_server.pid else set())

    def start(self) -> None:
        self._start_count += 1
        self._fork_server = ForkServerClient(self._on_fork_server_change)
        with self._log_path.open("ab") as output:
            self._fork_server.start(self._program, self._environment, output.fileno())

    async def start_trainer(self, environment: Mapping[str, str], folder: str, output: int) -> Child:
        """Starts one trainer: forked if possible, else by exec."""
        if self._program is not None:
            try:
                return await self._fork_server.fork_trainer(ForkRequest(self._program, environment, folder, output))
            except CannotFork as error:
                metrics.fallbacks.labels(kind="cold_start").inc()
                _log.warning("the trainer starts cold, which takes longer: %s", error)
        return self._start_cold(
            [str(os.getpid()), *self._command], "surefoot.launcher.job_program", environment, folder, output
        )

    async def start_store(self, host: str) -> HostedStore:
        """Starts a store on a free port of `host` only.

        Raises:
            SurefootError: The store's process did not report a port in time.
        """
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            with self._log_path.open("ab") as output:
                child = await self._start_store_process(output.fileno(), write_fd, host)
        finally:
            os.close(write_fd)
        try:
            return HostedStore(child, await asyncio.wait_for(_read_port(read_fd), _STORE_SECONDS))
        except (ValueError, TimeoutError) as error:
            child.kill()
            raise SurefootError(
                f"the store's process reported no port; see {self._log_path} for the reason (is torch installed?)"
            ) from error
        finally:
            os.close(read_fd)

    async def close(self) -> None:
        self._closing = True
        await self._fork_server.close()

    async def _start_store_process(self, output: int, port_fd: int, host: str) -> Child:
        try:
            return await self._fork_server.fork_store(output, port_fd, host)
        except CannotFork as error:
            metrics.fallbacks.labels(kind="cold_store").inc()
            _log.warning("the store starts cold, which takes longer: %s", error)
        arguments = [str(port_fd), str(os.getpid()), host]
        return self._start_cold(
            arguments, "surefoot.launcher.tcp_store", self._environment, os.getcwd(), output, (port_fd,)
        )

    def _start_cold(
        self,
        arguments: Sequence[str],
        module: str,
        environment: Mapping[str, str],
        folder: str,
        output: int,
        fds: tuple[int, ...] = (),
    ) -> Child:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=fds,
        )
        self._cold_children.add(process.pid)
        return OwnChild(process, self._cold_children.discard)

    def _on_fork_server_change(self) -> None:
        if self._closing:
            return
        if not self._fork_server.dead:
            self._on_warm(self._fork_server.warm)
            return
        if self._start_count < _MAX_FORK_SERVER_STARTS:
            metrics.fallbacks.labels(kind="fork_server_restart").inc()
            _log.warning("the fork server died and is restarted; its output is in %s", self._log_path)
            self._on_warm(False)
            self.start()
        else:
            _log.error(
                "the fork server died %d times: trainers start cold from now on; its output is in %s",
                self._start_count,
                self._log_path,
            )
            self._on_warm(True)


async def _read_port(fd: int) -> int:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(fd, ready)
    try:
        await readable
    finally:
        loop.remove_reader(fd)
    return int(os.read(fd, 32))
