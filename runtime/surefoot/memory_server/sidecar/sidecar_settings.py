"""Reads the companion's configuration from its environment, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.errors import ConfigurationError

MAX_SERVERS = 8
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Configures one companion.

    The password stays in its file and is read at each connection.
    """

    port: int = 9465
    """SUREFOOT_SIDECAR_PORT: /metrics, /readyz and /healthz over plain HTTP, on every address. 0: any free one."""
    redis_host: str = "127.0.0.1"
    """SUREFOOT_SIDECAR_REDIS_HOST."""
    redis_port: int = 6379
    """SUREFOOT_SIDECAR_REDIS_PORT: of server 0; server n answers at that port + n."""
    servers: int = 1
    """SUREFOOT_SIDECAR_SERVERS: Redis servers beside this companion, 1 to 8."""
    password_file: str = ""
    """SUREFOOT_MEMORY_PASSWORD_FILE: the administrator's; empty: the server has none."""
    tls_folder: str = ""
    """SUREFOOT_MEMORY_TLS_FOLDER: ca.crt, tls.crt and tls.key of a server that speaks TLS; empty: it does not."""
    prefault_ratio: float = 0.9
    """SUREFOOT_SIDECAR_PREFAULT_RATIO: how much of maxmemory is touched before the server is ready; 0: nothing."""
    prefault_timeout_seconds: float = 10.0
    """SUREFOOT_SIDECAR_PREFAULT_TIMEOUT_SECONDS: how long the operator leaves a server alone that is being filled. Then jobs
    come first, and filling ends early."""
    poll_seconds: float = 0.5
    """SUREFOOT_SIDECAR_POLL_SECONDS: how often the server is asked."""
    call_timeout_seconds: float = 5.0
    """SUREFOOT_SIDECAR_CALL_TIMEOUT_SECONDS: longest wait for one answer."""


def sidecar_settings(environment: Mapping[str, str] = os.environ) -> SidecarSettings:
    """Reads CompanionSettings; raises ConfigurationError that names the variable."""
    default = SidecarSettings()
    share = _number(environment, "SUREFOOT_SIDECAR_PREFAULT_RATIO", default.prefault_ratio)
    if not 0.0 <= share <= 1.0:
        raise ConfigurationError(f"SUREFOOT_SIDECAR_PREFAULT_RATIO is {share}: a share from 0 to 1 is allowed")
    redis_port = _port(environment, "SUREFOOT_SIDECAR_REDIS_PORT", default.redis_port)
    return SidecarSettings(
        port=_port(environment, "SUREFOOT_SIDECAR_PORT", default.port),
        redis_host=environment.get("SUREFOOT_SIDECAR_REDIS_HOST", default.redis_host),
        redis_port=redis_port,
        servers=_servers(environment, redis_port, default.servers),
        password_file=environment.get("SUREFOOT_MEMORY_PASSWORD_FILE", ""),
        tls_folder=environment.get("SUREFOOT_MEMORY_TLS_FOLDER", ""),
        prefault_ratio=share,
        prefault_timeout_seconds=_seconds(
            environment, "SUREFOOT_SIDECAR_PREFAULT_TIMEOUT_SECONDS", default.prefault_timeout_seconds
        ),
        poll_seconds=_seconds(environment, "SUREFOOT_SIDECAR_POLL_SECONDS", default.poll_seconds),
        call_timeout_seconds=_seconds(
            environment, "SUREFOOT_SIDECAR_CALL_TIMEOUT_SECONDS", default.call_timeout_seconds
        ),
    )


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or int(text) > _MAX_PORT:
        raise ConfigurationError(f"{name} is {text!r}: a port from 0 to {_MAX_PORT} is allowed")
    return int(text)


def _servers(environment: Mapping[str, str], first_port: int, default: int) -> int:
    name = "SUREFOOT_SIDECAR_SERVERS"
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_SERVERS:
        raise ConfigurationError(f"{name} is {text!r}: a whole number from 1 to {MAX_SERVERS} is allowed")
    if first_port + int(text) - 1 > _MAX_PORT:
        raise ConfigurationError(f"{name} is {text}: from port {first_port} on there are not so many")
    return int(text)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    found = _number(environment, name, default)
    if not 0.0 < found < float("inf"):
        raise ConfigurationError(f"{name} is {found}: seconds above 0 are allowed")
    return found


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} is {text!r}: a number is allowed") from error
