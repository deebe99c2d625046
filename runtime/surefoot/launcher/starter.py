"""Starts trainers and stores: forked warm where possible, else by exec.

The warm process is restarted when it dies, a few times; after that every start is a cold one. Both are counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot import metrics
from surefoot.errors import SurefootError
from surefoot.launcher.child_process import Child, OwnChild
from surefoot.launcher.command import LaunchProgram, forkable
from surefoot.launcher.zygote_client import CannotFork, ForkRequest, PairWords, ZygoteClient

_ZYGOTE_LIVES = 4
_STORE_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hosted:
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
        self._zygote = ZygoteClient(self._changed)
        self._closing = False
        self._cold_children: set[int] = set()
        if self._program is None:
            _log.info("%s is not a program of this interpreter: trainers start cold", " ".join(command))

    def own(self) -> set[int]:
        """Pids of the agent's own children."""
        return self._cold_children | ({self._zygote.pid} if self._zygote.pid else set())

    def start(self) -> None:
        self._lives += 1
        self._zygote = ZygoteClient(self._changed)
        with self._log_path.open("ab") as output:
            self._zygote.start(self._program, self._environment, output.fileno())

    async def trainer(self, environment: Mapping[str, str], folder: str, output: int) -> Child:
        """Starts one trainer, forked if possible, else by exec."""
        if self._program is not None:
            try:
                return await self._zygote.fork_trainer(ForkRequest(self._program, environment, folder, output))
            except CannotFork as error:
                metrics.fallbacks.labels(what="cold_start").inc()
                _log.warning("cold start: %s", error)
        return self._cold(
            [str(os.getpid()), *self._command], "surefoot.launcher.exec_command", environment, folder, output
        )

    async def store(self, host: str) -> Hosted:
        """Starts a store on a free port of `host` alone.

        Raises:
            SurefootError: It does not come up.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            with self._log_path.open("ab") as output:
                child = await self._store_child(output.fileno(), writing, host)
        finally:
            os.close(writing)
        try:
            return Hosted(child, await asyncio.wait_for(_read_port(reading), _STORE_SECONDS))
        except (ValueError, TimeoutError) as error:
            child.kill()
            raise SurefootError(
                f"the store's process gave no port; {self._log_path} says why (is torch installed?)"
            ) from error
        finally:
            os.close(reading)

    async def pair(self, words: PairWords, told_fd: int) -> Child:
        """Starts this node's part of an all-reduce with another node.

        Raises:
            CannotFork: There is no warm process: to import all of PyTorch first would take longer than a partner waits.
        """
        with self._log_path.open("ab") as output:
            return await self._zygote.fork_pair(output.fileno(), told_fd, words)

    async def close(self) -> None:
        self._closing = True
        await self._zygote.close()

    async def _store_child(self, output: int, port_fd: int, host: str) -> Child:
        try:
            return await self._zygote.fork_store(output, port_fd, host)
        except CannotFork as error:
            metrics.fallbacks.labels(what="cold_store").inc()
            _log.warning("cold start of the store: %s", error)
        words = [str(port_fd), str(os.getpid()), host]
        return self._cold(words, "surefoot.launcher.tcp_store", self._environment, os.getcwd(), output, (port_fd,))

    def _cold(
        self,
        words: Sequence[str],
        module: str,
        environment: Mapping[str, str],
        folder: str,
        output: int,
        fds: tuple[int, ...] = (),
    ) -> Child:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
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
        if not self._zygote.dead:
            self._on_warm(self._zygote.warm)
            return
        if self._lives < _ZYGOTE_LIVES:
            metrics.fallbacks.labels(what="zygote_restart").inc()
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
