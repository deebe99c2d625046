"""Reads the sidecar's configuration from its environment, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.errors import ConfigurationError

MAX_SERVERS = 8
"""Redis servers of one node."""
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Configures one sidecar. The password is not part of it: it stays in its file and is read for each connection."""

    port: int = 9465
    """SUREFOOT_SIDECAR_PORT: port of /metrics, /readyz and /healthz, plain HTTP on every address; 0: any free port."""
    redis_host: str = "127.0.0.1"
    """SUREFOOT_SIDECAR_REDIS_HOST: address of the Redis servers."""
    redis_port: int = 6379
    """SUREFOOT_SIDECAR_REDIS_PORT: port of server 0; server n has this port + n."""
    servers: int = 1
    """SUREFOOT_SIDECAR_SERVERS: number of Redis servers of the node, 1 to 8."""
    password_file: str = ""
    """SUREFOOT_MEMORY_PASSWORD_FILE: file with the administrator's password; empty: the servers have none."""
    tls_folder: str = ""
    """SUREFOOT_MEMORY_TLS_FOLDER: folder with ca.crt, tls.crt and tls.key of the servers; empty: they have no TLS."""
    prefault_ratio: float = 0.9
    """SUREFOOT_SIDECAR_PREFAULT_RATIO: ratio of maxmemory (0 to 1) to prefault before a server is ready; 0: nothing."""
    prefault_timeout_seconds: float = 10.0
    """SUREFOOT_SIDECAR_PREFAULT_TIMEOUT_SECONDS: how long the operator does not use a server that is being prefaulted. After
    that, jobs come first and end the prefaulting."""
    poll_seconds: float = 0.5
    """SUREFOOT_SIDECAR_POLL_SECONDS: time between two polls of a server."""
    call_timeout_seconds: float = 5.0
    """SUREFOOT_SIDECAR_CALL_TIMEOUT_SECONDS: time limit for one reply of a server."""


def read_sidecar_settings(environment: Mapping[str, str] = os.environ) -> SidecarSettings:
    """Reads SidecarSettings; raises ConfigurationError that names the variable."""
    default = SidecarSettings()
    ratio = _read_number(environment, "SUREFOOT_SIDECAR_PREFAULT_RATIO", default.prefault_ratio)
    if not 0.0 <= ratio <= 1.0:
        raise ConfigurationError(f"SUREFOOT_SIDECAR_PREFAULT_RATIO is {ratio}: set a number from 0 to 1")
    redis_port = _read_port(environment, "SUREFOOT_SIDECAR_REDIS_PORT", default.redis_port)
    return SidecarSettings(
        port=_read_port(environment, "SUREFOOT_SIDECAR_PORT", default.port),
        redis_host=environment.get("SUREFOOT_SIDECAR_REDIS_HOST", default.redis_host),
        redis_port=redis_port,
        servers=_read_server_count(environment, redis_port, default.servers),
        password_file=environment.get("SUREFOOT_MEMORY_PASSWORD_FILE", ""),
        tls_folder=environment.get("SUREFOOT_MEMORY_TLS_FOLDER", ""),
        prefault_ratio=ratio,
        prefault_timeout_seconds=_read_seconds(
            environment, "SUREFOOT_SIDECAR_PREFAULT_TIMEOUT_SECONDS", default.prefault_timeout_seconds
        ),
        poll_seconds=_read_seconds(environment, "SUREFOOT_SIDECAR_POLL_SECONDS", default.poll_seconds),
        call_timeout_seconds=_read_seconds(
            environment, "SUREFOOT_SIDECAR_CALL_TIMEOUT_SECONDS", default.call_timeout_seconds
        ),
    )


def _read_port(environment: Mapping[str, str], name: str, default: int) -> int:
    """Reads a port number."""
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or int(text) > _MAX_PORT:
        raise ConfigurationError(f"{name} is {text!r}: set a port from 0 to {_MAX_PORT}")
    return int(text)


def _read_server_count(environment: Mapping[str, str], first_port: int, default: int) -> int:
    """Reads the number of servers, each of which needs a port."""
    name = "SUREFOOT_SIDECAR_SERVERS"
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_SERVERS:
        raise ConfigurationError(f"{name} is {text!r}: set a whole number from 1 to {MAX_SERVERS}")
    if first_port + int(text) - 1 > _MAX_PORT:
        raise ConfigurationError(
            f"{name} is {text}: from port {first_port} on there are not that many ports; lower either"
        )
    return int(text)


def _read_seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """Reads a positive number of seconds."""
    seconds = _read_number(environment, name, default)
    if not 0.0 < seconds < float("inf"):
        raise ConfigurationError(f"{name} is {seconds}: set a number of seconds above 0")
    return seconds


def _read_number(environment: Mapping[str, str], name: str, default: float) -> float:
    """Reads a number."""
    text = environment.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} is {text!r}: set a number") from error
