"""Runs one Redis server of a node.

Called by `node_process`. `surefoot.holder.server_process` chooses the program and its configuration.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from functools import partial
from pathlib import Path

from surefoot.errors import ConfigurationError, TierError
from surefoot.holder.server_process import HolderServer, ServerSettings, find_program, start
from surefoot.linux_process import die_with_parent, identity_of
from surefoot_operator.platforms.local.run_records import HolderRecord

DEFAULT_MEMORY_BYTES = 2 * 1024**3
_FILL_BYTES = 128 * 1024**2
"""Touched before use: enough that small jobs meet no slow first save, little enough that nodes start in a moment."""
_TRIES = 5
_END_SECONDS = 5.0
"""How long the kernel may take to end a killed server with much memory."""
_HOST = "127.0.0.1"


class HolderStartError(Exception):
    """Redis could not be started on this node."""


class HolderProcess:
    """Runs at most one server at a time.

    Not thread-safe: owned by the node's loop.
    """

    def __init__(self, folder: Path, socket_path: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._socket_path = socket_path
        self._memory_bytes = memory_bytes
        self._server: HolderServer | None = None
        self.record: HolderRecord | None = None
        """The newest life of it, also after its end: who reads it asks whether that life still is."""

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.process.pid

    def start(self) -> None:
        """Starts the server unless it runs. Raises HolderStartError."""
        if self._server is not None and not self._has_ended(self._server):
            return
        try:
            program = find_program()
        except ConfigurationError as error:
            raise HolderStartError(str(error)) from error
        last: Exception | None = None
        for _ in range(_TRIES):  # another process may take the port between our look and Redis' bind
            settings = ServerSettings(
                port=free_port(),
                memory_bytes=self._memory_bytes,
                folder=self._folder,
                host=_HOST,
                password=secrets.token_hex(16),
                socket=self._socket_path,
                fill_bytes=min(_FILL_BYTES, self._memory_bytes // 2),
            )
            try:
                self._server = start(settings, program, os.environ, partial(die_with_parent, os.getpid()))
            except TierError as error:
                last = error
                continue
            self.record = self._record_of(self._server)
            return
        raise HolderStartError(f"the memory tier of this node did not start in {_TRIES} tries: {last}")

    def _has_ended(self, server: HolderServer) -> bool:
        """Also one whose first thread is dead while others still are being ended: it can be reaped in a moment."""
        if server.process.poll() is None and identity_of(server.process.pid) is not None:
            return False
        try:
            server.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise HolderStartError(f"the former server of this node was killed and has not ended: {error}") from error
        return True

    def _record_of(self, server: HolderServer) -> HolderRecord:
        life = identity_of(server.process.pid)
        if life is None:
            raise HolderStartError("the memory tier of this node ended right after it had answered")
        settings = server.settings
        return HolderRecord(settings.host, settings.port, str(life), admin_password=settings.password)

    def collect(self) -> None:
        """Reaps the server if it has exited."""
        if self._server is not None:
            self._server.process.poll()

    def stop(self) -> None:
        """Kills the server; it has nothing to write to disk."""
        if self._server is not None and self._server.process.poll() is None:
            self._server.kill()


def free_port() -> int:
    """Finds a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
