"""Starts the warm process, asks it to fork, reports its children's exits.

One zygote is one life: when it dies, its children die with it, and `starter` decides about another.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.errors import SurefootError
from surefoot.launcher.child_process import Child
from surefoot.launcher.command import LaunchProgram

PACKET_BYTES = 1 << 20
_FORK_SECONDS = 5.0
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class PairWords:
    """What one side of an all-reduce must know.

    `store`: the partner's host:port; empty: it is here.
    """

    host: str
    name: str
    store: str


class ZygoteClient:
    """`on_change` is called when it became warm or died."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.warm = False
        self.dead = False
        self._on_change = on_change
        self._numbers = itertools.count()
        self._forking: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

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
        self._line = ours
        ours.send(json.dumps(asdict(program or LaunchProgram(()))).encode())
        asyncio.get_running_loop().add_reader(ours, self._hear)

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

    async def fork_pair(self, output: int, told_fd: int, words: PairWords) -> Child:
        """Forks one side of an all-reduce, told into `told_fd`."""
        return await self._fork({"kind": "pair", **asdict(words)}, (output, told_fd))

    async def close(self) -> None:
        """Ends the process and, through the kernel, every child it still has."""
        self._lost()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _fork(self, body: dict[str, Any], fds: tuple[int, ...]) -> Child:
        if self._line is None or not self.warm:
            raise CannotFork("the warm process is not there")
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forking[number] = answer
        try:
            socket.send_fds(self._line, [json.dumps({**body, "id": number}).encode()], fds)
            pid = await asyncio.wait_for(answer, _FORK_SECONDS)
        except (OSError, TimeoutError) as error:
            raise CannotFork(f"the warm process did not fork: {error!r}") from error
        finally:
            self._forking.pop(number, None)
        return self._children[pid]

    def _hear(self) -> None:
        assert self._line is not None
        while True:
            try:
                packet = self._line.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._lost()
                return
            self._take(json.loads(packet))

    def _take(self, body: dict[str, Any]) -> None:
        match body["said"]:
            case "ready":
                self.warm = True
                for failure in body["failed"]:
                    _log.warning("warming up: %s (the program will show the error itself)", failure)
                _log.info("warm after %.2f s", body["seconds"])
                self._on_change()
            case "forked":
                # kept here and not by the asker, because the exit may be the next packet
                self._children[body["pid"]] = Child(body["pid"], self._forget, lambda: not self.dead)
                self._answer(body["id"], lambda future: future.set_result(body["pid"]))
            case "refused":
                self._answer(body["id"], lambda future: future.set_exception(CannotFork(body["why"])))
            case "exited":
                child = self._children.get(body["pid"])
                if child is not None:
                    child.has_code(body["code"])

    def _answer(self, number: int, give: Callable[[asyncio.Future[int]], None]) -> None:
        future = self._forking.get(number)
        if future is not None and not future.done():
            give(future)

    def _forget(self, pid: int) -> None:
        # left for one turn of the loop: the asker of a fork may not have picked it up yet
        asyncio.get_running_loop().call_later(_FORK_SECONDS, self._children.pop, pid, None)

    def _lost(self) -> None:
        if self._line is None:
            return
        asyncio.get_running_loop().remove_reader(self._line)
        with contextlib.suppress(OSError):
            self._line.close()
        self._line = None
        self.warm = False
        self.dead = True
        if self._process is not None:
            self._process.poll()
        for future in self._forking.values():
            if not future.done():
                future.set_exception(CannotFork("the warm process died"))
        self._on_change()
