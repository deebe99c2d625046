"""Serves the agent's Unix socket, one connection per local rank.

A trainer first sends Attach; the connection of a trainer of another generation is closed. Messages are then passed on
in order. Staging memory is shared by sending its file descriptor. Runs on the agent's event loop.
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
from surefoot.linux_process import short_socket_path
from surefoot.protocol.timeouts import Backoff
from surefoot.task_set import TaskSet, log_failure_to

_READ_BYTES = 1 << 18
"""Bytes per read."""
_MAX_QUEUED_MESSAGES = 1024
"""Messages that wait for a trainer before it is disconnected."""
_ATTACH_SECONDS = 10.0
"""Time limit for a trainer's Attach."""
_ACCEPT_BACKOFF = Backoff(0.05, 2.0)
"""Waits between failed attempts to accept a connection."""
_log = logging.getLogger(__name__)

Admit = Callable[[line.Attach], line.Attached | str]
"""Decides about a trainer's Attach: returns its generation's description, or the reason why it is rejected."""


class TrainerConnection:
    """The agent's connection to one attached trainer."""

    def __init__(self, connection: socket.socket, attach: line.Attach) -> None:
        self._socket = connection
        self._outbox: asyncio.Queue[tuple[line.ToTrainer, int | None]] = asyncio.Queue(_MAX_QUEUED_MESSAGES)
        self.rank = attach.rank
        self.generation = attach.generation

    def send(self, message: line.ToTrainer, fd: int | None = None) -> None:
        """Queues a message; a trainer that leaves 1,024 unread is disconnected.

        Keeps a duplicate of `fd` until it is sent, since the caller may close it before.
        """
        duplicate = os.dup(fd) if fd is not None else None
        try:
            self._outbox.put_nowait((message, duplicate))
        except asyncio.QueueFull:
            _close(duplicate)
            _log.error(
                "rank %d does not read its agent's messages: its connection is closed, and it can no longer save",
                self.rank,
                extra={"rank": self.rank, "generation": self.generation},
            )
            self.disconnect_now()

    def disconnect_now(self) -> None:
        """Shuts the connection down without waiting; both ends then see its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def send_queued(self) -> None:
        """Sends queued messages until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            message, fd = await self._outbox.get()
            data = add_frame(line.encode(message))
            if fd is not None:
                # the first byte carries the descriptor, the rest is sent as usual
                try:
                    await _wait_writable(self._socket)
                    sent = socket.send_fds(self._socket, [data[:1]], [fd])
                finally:
                    _close(fd)
                data = data[sent:]
            await loop.sock_sendall(self._socket, data)

    def drop_queued(self) -> None:
        """Drops the queued messages and closes their descriptors."""
        while not self._outbox.empty():
            _close(self._outbox.get_nowait()[1])


class TrainerServer:
    """Accepts trainers while the agent lives, and passes their messages to a callback."""

    def __init__(
        self, path: Path, admit: Admit, on_message: Callable[[TrainerConnection, line.FromTrainer], None]
    ) -> None:
        self._path = path
        self._admit, self._on_message = admit, on_message
        self._trainers: set[TrainerConnection] = set()
        self._tasks = TaskSet(log_failure_to(_log))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def start(self) -> None:
        """Binds the socket and starts to accept trainers."""
        self._path.unlink(missing_ok=True)  # a killed agent of this worker may have left it
        old_umask = os.umask(0o177)  # the socket must never be accessible to other users, not even for a moment
        try:
            with short_socket_path(self._path) as name:
                self._listener.bind(name)
        finally:
            os.umask(old_umask)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._tasks.start(self._accept_trainers(), "accepting trainers")

    def send(self, generation: int, rank: int | None, message: line.ToTrainer) -> None:
        """Sends a message to one attached rank of a generation, or to all of its ranks if `rank` is None."""
        for trainer in tuple(self._trainers):
            if trainer.generation == generation and rank in (None, trainer.rank):
                trainer.send(message)

    def attached_ranks(self, generation: int) -> frozenset[int]:
        """Returns the ranks of a generation that are connected."""
        return frozenset(trainer.rank for trainer in self._trainers if trainer.generation == generation)

    async def close(self) -> None:
        """Closes all connections and removes the socket."""
        await self._tasks.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    async def _accept_trainers(self) -> None:
        """Accepts connections until cancelled.

        Continues after errors: a process that ran out of descriptors gets some back, but a listener that has stopped
        would lock out every later trainer.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                metrics.fallbacks.labels(kind="accept_failed").inc()
                if not failures:
                    _log.warning("cannot accept a trainer's connection, trying again: %s", error)
                failures += 1
                await asyncio.sleep(_ACCEPT_BACKOFF.wait_seconds(failures, random.random()))
                continue
            failures = 0
            self._tasks.start(self._serve_trainer(connection), "serving a trainer")

    async def _serve_trainer(self, connection: socket.socket) -> None:
        """Serves one connection, and logs how it ended."""
        connection.setblocking(False)
        with connection:
            try:
                await self._exchange_messages(connection)
            except (OSError, ProtocolError, TimeoutError) as error:
                _log.info("the connection of a trainer to this agent ended: %r", error)

    async def _exchange_messages(self, connection: socket.socket) -> None:
        """Admits the trainer, then passes on its messages until the connection ends."""
        frames = FrameDecoder()
        async with asyncio.timeout(_ATTACH_SECONDS):
            first_messages = await _read_messages(connection, frames)
        if not first_messages:
            return
        # one read may bring further messages after Attach: they are handled below
        attach = line.decode(first_messages[0])
        if not isinstance(attach, line.Attach):
            raise ProtocolError(f"the first message of a trainer is {type(attach).__name__}, not Attach")
        reply = self._admit(attach)
        if isinstance(reply, str):
            _log.warning("a trainer is rejected and its connection closed: %s", reply)
            return
        trainer = TrainerConnection(connection, attach)
        trainer.send(reply)
        self._trainers.add(trainer)
        # sending is a task of its own, so that a trainer that reads slowly does not block the reading of its messages
        pump = asyncio.create_task(trainer.send_queued())
        try:
            messages = first_messages[1:]
            while True:
                for text in messages:
                    self._on_message(trainer, _decode_from_trainer(text))
                messages = await _read_messages(connection, frames)
                if not messages:
                    return
        finally:
            self._trainers.discard(trainer)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            trainer.drop_queued()


def _close(fd: int | None) -> None:
    """Closes a descriptor, if there is one."""
    if fd is not None:
        os.close(fd)


def _decode_from_trainer(text: bytes) -> line.FromTrainer:
    """Decodes a message; raises ProtocolError if no trainer sends this type."""
    message = line.decode(text)
    if not isinstance(message, line.FromTrainer):
        raise ProtocolError(f"received {type(message).__name__} from a trainer, which only an agent sends")
    return message


async def _read_messages(connection: socket.socket, frames: FrameDecoder) -> list[bytes]:
    """Reads at least one message; returns none at the end of the connection."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(connection, _READ_BYTES)
        if not data:
            return []
        messages = frames.add_bytes(data)
        if messages:
            return messages


async def _wait_writable(connection: socket.socket) -> None:
    """Waits until the socket can take more bytes."""
    loop = asyncio.get_running_loop()
    is_writable: asyncio.Future[None] = loop.create_future()

    def writable() -> None:
        if not is_writable.done():
            is_writable.set_result(None)

    loop.add_writer(connection, writable)
    try:
        await is_writable
    finally:
        loop.remove_writer(connection)
