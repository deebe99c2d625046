"""Serves the agent's Unix socket, one connection per local rank.

A trainer says first who it is; one of another epoch is refused by closing its line. Messages go to `hear` in order;
memory is given by passing its descriptor. Runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from surefoot import metrics
from surefoot.errors import ProtocolError
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.trainer_messages import FrameDecoder, add_frame
from surefoot.linux_process import reachable
from surefoot.protocol.timeouts import Backoff
from surefoot.task_set import TaskSet, logged

_READ_BYTES = 1 << 18
_QUEUE = 1024
_ATTACH_SECONDS = 10.0
_ACCEPT_WAITS = Backoff(0.05, 2.0)
_log = logging.getLogger(__name__)

Admit = Callable[[line.Attach], line.Attached | str]
"""The answer to a trainer's first word: its epoch, or why it is refused."""


class TrainerConnection:
    """Keeps the agent's connection to one attached trainer."""

    def __init__(self, connection: socket.socket, attach: line.Attach) -> None:
        self._socket = connection
        self._outbox: asyncio.Queue[tuple[line.ToTrainer, int | None]] = asyncio.Queue(_QUEUE)
        self.rank = attach.rank
        self.generation = attach.generation

    def send(self, message: line.ToTrainer, fd: int | None = None) -> None:
        """Queues a message; a trainer that reads none of 1,000 is disconnected.

        Of `fd` a duplicate is kept until it is sent, for the memory may be given up meanwhile.
        """
        kept = os.dup(fd) if fd is not None else None
        try:
            self._outbox.put_nowait((message, kept))
        except asyncio.QueueFull:
            _close(kept)
            _log.error(
                "rank %d reads no messages from its agent: its connection is closed, it saves no more",
                self.rank,
                extra={"rank": self.rank, "generation": self.generation},
            )
            self.disconnect_now()

    def disconnect_now(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def pump(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message, fd = await self._outbox.get()
            data = add_frame(line.encode(message))
            if fd is not None:
                # one byte carries the descriptor; the rest follows in its time
                try:
                    await _wait_writable(self._socket)
                    sent = socket.send_fds(self._socket, [data[:1]], [fd])
                finally:
                    _close(fd)
                data = data[sent:]
            await loop.sock_sendall(self._socket, data)

    def forget(self) -> None:
        """Drops queued messages and closes their descriptors."""
        while not self._outbox.empty():
            _close(self._outbox.get_nowait()[1])


class TrainerServer:
    """Listens while the agent lives; `hear` gets messages after Attach."""

    def __init__(self, path: Path, admit: Admit, hear: Callable[[TrainerConnection, line.FromTrainer], None]) -> None:
        self._path = path
        self._admit, self._on_message = admit, hear
        self._trainers: set[TrainerConnection] = set()
        self._tasks = TaskSet(logged(_log))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def start(self) -> None:
        self._path.unlink(missing_ok=True)  # a killed agent of this worker left it
        before = os.umask(0o177)  # nobody else's from its first moment on
        try:
            with reachable(self._path) as name:
                self._listener.bind(name)
        finally:
            os.umask(before)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._tasks.start(self._accept(), "accepting trainers")

    def send(self, epoch: int, rank: int | None, message: line.ToTrainer) -> None:
        """Sends to one attached rank of this epoch, or to all (None)."""
        for trainer in tuple(self._trainers):
            if trainer.generation == epoch and rank in (None, trainer.rank):
                trainer.send(message)

    def attached(self, epoch: int) -> frozenset[int]:
        """Ranks of this epoch that are on the line."""
        return frozenset(trainer.rank for trainer in self._trainers if trainer.generation == epoch)

    async def close(self) -> None:
        await self._tasks.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        """Accepts until cancelled. A process without descriptors left gets them back; a listener that stopped accepting
        does not."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                metrics.fallbacks.labels(what="accept_failed").inc()
                if not failures:
                    _log.warning("a trainer could not be accepted, trying again: %s", error)
                failures += 1
                await asyncio.sleep(_ACCEPT_WAITS.seconds(failures, random.random()))
                continue
            failures = 0
            self._tasks.start(self._serve(connection), "serving a trainer")

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with connection:
            try:
                await self._converse(connection)
            except (OSError, ProtocolError, TimeoutError) as error:
                _log.info("a trainer's connection to this agent ended: %r", error)

    async def _converse(self, connection: socket.socket) -> None:
        unframer = FrameDecoder()
        async with asyncio.timeout(_ATTACH_SECONDS):
            first = await _read(connection, unframer)
        if not first:
            return
        attach = line.decode(first[0])
        if not isinstance(attach, line.Attach):
            raise ProtocolError(f"a trainer began with {type(attach).__name__}, not Attach")
        answer = self._admit(attach)
        if isinstance(answer, str):
            _log.warning("a trainer is refused: %s", answer)
            return
        trainer = TrainerConnection(connection, attach)
        trainer.send(answer)
        self._trainers.add(trainer)
        pump = asyncio.create_task(trainer.pump())
        try:
            messages = first[1:]
            while True:
                for text in messages:
                    self._on_message(trainer, _from_trainer(text))
                messages = await _read(connection, unframer)
                if not messages:
                    return
        finally:
            self._trainers.discard(trainer)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            trainer.forget()


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _from_trainer(text: bytes) -> line.FromTrainer:
    message = line.decode(text)
    if not isinstance(message, line.FromTrainer):
        raise ProtocolError(f"a trainer does not say {type(message).__name__}")
    return message


async def _read(connection: socket.socket, unframer: FrameDecoder) -> list[bytes]:
    """Reads messages, at least one; none at the connection's end."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(connection, _READ_BYTES)
        if not data:
            return []
        messages = unframer.feed(data)
        if messages:
            return messages


async def _wait_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def writable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(connection, writable)
    try:
        await ready
    finally:
        loop.remove_writer(connection)
