"""Starts trainers and stores: forked warm where possible, else by exec.

The warm process is restarted when it dies, a few times; after that every start is a cold one. Both are counted.
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
from surefoot.launcher.job_program import LaunchProgram, forkable

_log = logging.getLogger(__name__)


# ---- client of the fork server ---------------------------------------------------------------------------------------
# Starts the warm process, asks it to fork, reports its children's exits. One zygote is one life: when it dies, its
# children die with it, and `starter` decides about another.

PACKET_BYTES = 1 << 20
_FORK_SECONDS = 5.0


class CannotFork(SurefootError):
    """The warm process is away or must not fork.

    A cold start is the way.
    """


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A trainer to be. `output` is the descriptor of its log."""

    program: LaunchProgram
    environment: Mapping[str, str]
    folder: str
    output: int


class ForkServerClient:
    """`on_change` is called when it became warm or died."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.warm = False
        self.dead = False
        self._on_change = on_change
        self._numbers = itertools.count()
        self._forking: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int:
        """0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self, program: LaunchProgram | None, environment: Mapping[str, str], output: int) -> None:
        """Starts the process; it gets warm in the background."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "surefoot.launcher.fork_server", str(theirs.fileno()), str(os.getpid())],
                env={**environment, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        ours.setblocking(False)
        self._socket = ours
        ours.send(json.dumps(asdict(program or LaunchProgram(()))).encode())
        asyncio.get_running_loop().add_reader(ours, self._read_packets)

    async def fork_trainer(self, request: ForkRequest) -> Child:
        """A new trainer; CannotFork if this is no place to fork from."""
        body = {
            "kind": "trainer",
            "program": asdict(request.program),
            "environment": dict(request.environment),
            "folder": request.folder,
        }
        return await self._fork(body, (request.output,))

    async def fork_store(self, output: int, port_fd: int, host: str) -> Child:
        """Forks the epoch's store, which listens on `host` alone.

        It writes its port into `port_fd`.
        """
        return await self._fork({"kind": "store", "host": host}, (output, port_fd))

    async def close(self) -> None:
        """Ends the process and, through the kernel, every child it still has."""
        self._lost()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _fork(self, order: dict[str, Any], fds: tuple[int, ...]) -> Child:
        if self._socket is None or not self.warm:
            raise CannotFork("the warm process is not there")
        request_id = next(self._numbers)
        pid_future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forking[request_id] = pid_future
        try:
            socket.send_fds(self._socket, [json.dumps({**order, "id": request_id}).encode()], fds)
            pid = await asyncio.wait_for(pid_future, _FORK_SECONDS)
        except (OSError, TimeoutError) as error:
            raise CannotFork(f"the warm process did not fork: {error!r}") from error
        finally:
            self._forking.pop(request_id, None)
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
                self._lost()
                return
            self._take(json.loads(packet))

    def _take(self, message: dict[str, Any]) -> None:
        match message["said"]:
            case "ready":
                self.warm = True
                for failure in message["failed"]:
                    _log.warning("warming up: %s (the program will show the error itself)", failure)
                _log.info("warm after %.2f s", message["seconds"])
                self._on_change()
            case "forked":
                # kept here and not by the asker, because the exit may be the next packet
                self._children[message["pid"]] = Child(message["pid"], self._forget, lambda: not self.dead)
                self._answer(message["id"], lambda future: future.set_result(message["pid"]))
            case "refused":
                self._answer(message["id"], lambda future: future.set_exception(CannotFork(message["why"])))
            case "exited":
                child = self._children.get(message["pid"])
                if child is not None:
                    child.has_code(message["code"])

    def _answer(self, request_id: int, resolve: Callable[[asyncio.Future[int]], None]) -> None:
        future = self._forking.get(request_id)
        if future is not None and not future.done():
            resolve(future)

    def _forget(self, pid: int) -> None:
        # left for one turn of the loop: the asker of a fork may not have picked it up yet
        asyncio.get_running_loop().call_later(_FORK_SECONDS, self._children.pop, pid, None)

    def _lost(self) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        with contextlib.suppress(OSError):
            self._socket.close()
        self._socket = None
        self.warm = False
        self.dead = True
        if self._process is not None:
            self._process.poll()
        for future in self._forking.values():
            if not future.done():
                future.set_exception(CannotFork("the warm process died"))
        self._on_change()


# ---- starter ---------------------------------------------------------------------------------------------------------

_FORK_SERVER_LIVES = 4
_STORE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class HostedStore:
    """The epoch's store and where it answers."""

    child: Child
    port: int


class Starter:
    """Owns the warm process.

    `on_warm` hears whether a start can be made at once.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, on_warm: Callable[[bool], None]
    ) -> None:
        self._command = tuple(command)
        self._environment = environment
        self._program: LaunchProgram | None = forkable(command, environment)
        self._log_path = log_path
        self._on_warm = on_warm
        self._lives = 0
        self._fork_server = ForkServerClient(self._changed)
        self._closing = False
        self._cold_children: set[int] = set()
        if self._program is None:
            _log.info("%s is not a program of this interpreter: trainers start cold", " ".join(command))

    def own_pids(self) -> set[int]:
        """Pids of the agent's own children."""
        return self._cold_children | ({self._fork_server.pid} if self._fork_server.pid else set())

    def start(self) -> None:
        self._lives += 1
        self._fork_server = ForkServerClient(self._changed)
        with self._log_path.open("ab") as output:
            self._fork_server.start(self._program, self._environment, output.fileno())

    async def start_trainer(self, environment: Mapping[str, str], folder: str, output: int) -> Child:
        """Starts one trainer, forked if possible, else by exec."""
        if self._program is not None:
            try:
                return await self._fork_server.fork_trainer(ForkRequest(self._program, environment, folder, output))
            except CannotFork as error:
                metrics.fallbacks.labels("cold_start").inc()
                _log.warning("cold start: %s", error)
        return self._cold(
            [str(os.getpid()), *self._command], "surefoot.launcher.job_program", environment, folder, output
        )

    async def start_store(self, host: str) -> HostedStore:
        """Starts a store on a free port of `host` alone.

        Raises:
            SurefootError: It does not come up.
        """
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            with self._log_path.open("ab") as output:
                child = await self._store_child(output.fileno(), write_fd, host)
        finally:
            os.close(write_fd)
        try:
            return HostedStore(child, await asyncio.wait_for(_read_port(read_fd), _STORE_SECONDS))
        except (ValueError, TimeoutError) as error:
            child.kill()
            raise SurefootError(
                f"the store's process gave no port; {self._log_path} says why (is torch installed?)"
            ) from error
        finally:
            os.close(read_fd)

    async def close(self) -> None:
        self._closing = True
        await self._fork_server.close()

    async def _store_child(self, output: int, port_fd: int, host: str) -> Child:
        try:
            return await self._fork_server.fork_store(output, port_fd, host)
        except CannotFork as error:
            metrics.fallbacks.labels("cold_store").inc()
            _log.warning("cold start of the store: %s", error)
        arguments = [str(port_fd), str(os.getpid()), host]
        return self._cold(arguments, "surefoot.launcher.tcp_store", self._environment, os.getcwd(), output, (port_fd,))

    def _cold(
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

    def _changed(self) -> None:
        if self._closing:
            return
        if not self._fork_server.dead:
            self._on_warm(self._fork_server.warm)
            return
        if self._lives < _FORK_SERVER_LIVES:
            metrics.fallbacks.labels("zygote_restart").inc()
            _log.warning("the warm process died; another one warms up (its words are in %s)", self._log_path)
            self._on_warm(False)
            self.start()
        else:
            _log.error("the warm process died %d times: trainers start cold from now on", self._lives)
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
