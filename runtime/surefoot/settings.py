"""Reads the runtime's configuration from the environment, once, into frozen dataclasses.

The platform sets `SUREFOOT_*` for the agent, and the agent sets it for its trainers. Secrets are not in `repr`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from surefoot.errors import ConfigurationError
from surefoot.protocol.identities import LocalMemoryServers


@dataclass(frozen=True, slots=True)
class PersistentSettings:
    """Configures the persistent tier of a job."""

    uri: str
    """`file:///folder` or `s3://bucket/prefix`."""
    interval_steps: int = 100
    """Number of steps between uploads; 0: the coordinator chooses among the checkpoints in memory."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    sse: str | None = None
    bytes_per_second: float = 0.0
    """Bandwidth limit of one worker's uploads while it trains; 0: unlimited."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Holds a job's settings for every process of a worker."""

    job: str
    interval_steps: int
    replicas: int
    keep: int
    memory_user: str
    memory_password: str = field(repr=False)
    memory_call_timeout_seconds: float = 1.0
    memory_tls_ca: str = field(default="", repr=False)
    """SUREFOOT_MEMORY_TLS_CA: certificate authority (PEM) of the memory servers; empty: they do not use TLS."""
    local_server: LocalMemoryServers | None = None
    """SUREFOOT_NODE and SUREFOOT_MEMORY_SOCKET: Unix socket of this node's memory server; None: use TCP."""
    persistent: PersistentSettings | None = None
    memory_bytes_per_second: float = 0.0
    """Bandwidth limit of one worker's copies to other nodes while it trains; 0: unlimited."""
    good_after_steps: int = 0
    """Number of later steps without a loss anomaly that make a checkpoint known good; 0: this is not tracked."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Configures one agent: its worker, node, coordinator and folders."""

    job: JobSettings
    index: int
    """Index of the worker."""
    attempt: int
    """Number of earlier pods of the worker with this index."""
    node: str
    coordinator_url: str
    token: str = field(repr=False)
    local_ranks: int = 1
    run_folder: str = ""
    """Folder for Unix sockets and the addresses of metrics servers; on a cluster it is in memory."""
    heartbeat_seconds: float = 0.5
    step_timeout_seconds: float = 600.0
    termination_grace_seconds: float = 30.0
    host: str = "127.0.0.1"
    """Address at which other workers reach this one's TCP store."""
    token_file: str = ""
    """SUREFOOT_TOKEN_FILE: file with the token, read again for each connection; empty: use `token`."""
    coordinator_ca: str = ""
    """SUREFOOT_COORDINATOR_CA: certificate (PEM) of the only authority that the agent trusts for the coordinator."""
    metrics_port: int | None = None
    """SUREFOOT_METRICS_PORT: port of this worker's metrics. None: they are not served; 0: any free port, whose address
    is written to `metrics/worker-INDEX-ATTEMPT.json` in the run folder."""
    scratch_folder: str = ""
    """SUREFOOT_SCRATCH_FOLDER, by default the run folder: folder for data that grows. It has the ranks' logs
    (`logs/worker-INDEX-ATTEMPT/epoch-E/rank-R.log`), step ledgers, and home and cache folders if the image has none."""
    pre_join_check: str = "Disabled"
    """SUREFOOT_PRE_JOIN_CHECK: Disabled, Warn or Enforce, from `healthPolicy.preJoinCheck`."""
    warm_imports: str = "auto"
    """SUREFOOT_WARM_IMPORTS: auto or none, from `warmImports`."""
    job_name: str = ""
    """SUREFOOT_JOB_NAME and SUREFOOT_JOB_NAMESPACE: labels of this worker's metrics."""
    job_namespace: str = ""
    coordinator_fallback_url: str = ""
    """SUREFOOT_COORDINATOR_FALLBACK_URL: URL to try if `coordinator_url` does not answer; empty: there is none."""


def job_settings(environment: Mapping[str, str] = os.environ) -> JobSettings:
    """Reads JobSettings; raises ConfigurationError that names the variable."""
    persistent = None
    if environment.get("SUREFOOT_PERSISTENT_URI"):
        persistent = PersistentSettings(
            uri=environment["SUREFOOT_PERSISTENT_URI"],
            interval_steps=_read_integer(environment, "SUREFOOT_PERSISTENT_INTERVAL_STEPS", 100),
            keep=_read_integer(environment, "SUREFOOT_PERSISTENT_KEEP", 3),
            endpoint=environment.get("SUREFOOT_PERSISTENT_ENDPOINT"),
            region=environment.get("SUREFOOT_PERSISTENT_REGION"),
            access_key=environment.get("AWS_ACCESS_KEY_ID"),
            secret_key=environment.get("AWS_SECRET_ACCESS_KEY"),
            ca_bundle=environment.get("SUREFOOT_PERSISTENT_CA_BUNDLE"),
            sse=environment.get("SUREFOOT_PERSISTENT_SSE"),
            bytes_per_second=_read_number(environment, "SUREFOOT_PERSISTENT_BANDWIDTH", 0.0),
        )
    return JobSettings(
        job=_read_text(environment, "SUREFOOT_JOB_UID"),
        interval_steps=_read_integer(environment, "SUREFOOT_MEMORY_INTERVAL_STEPS", 10),
        replicas=_read_integer(environment, "SUREFOOT_MEMORY_REPLICAS", 2),
        keep=_read_integer(environment, "SUREFOOT_MEMORY_KEEP", 2),
        memory_user=environment.get("SUREFOOT_MEMORY_USER", ""),
        memory_password=environment.get("SUREFOOT_MEMORY_PASSWORD", ""),
        memory_call_timeout_seconds=_read_number(environment, "SUREFOOT_MEMORY_CALL_TIMEOUT_SECONDS", 1.0),
        memory_tls_ca=environment.get("SUREFOOT_MEMORY_TLS_CA", ""),
        local_server=_local_server(environment),
        persistent=persistent,
        memory_bytes_per_second=_read_number(environment, "SUREFOOT_MEMORY_BANDWIDTH", 0.0),
        good_after_steps=_read_integer(environment, "SUREFOOT_GOOD_AFTER_STEPS", 0),
    )


def persistent_settings_at(settings: JobSettings, uri: str) -> PersistentSettings:
    """Configures a persistent tier at another URI, with the endpoint and account of this job's own tier if it has one."""
    return PersistentSettings(uri) if settings.persistent is None else replace(settings.persistent, uri=uri)


def agent_settings(environment: Mapping[str, str] = os.environ) -> AgentSettings:
    """Reads AgentSettings; raises ConfigurationError that names the variable."""
    return AgentSettings(
        job=job_settings(environment),
        index=_read_integer(environment, "SUREFOOT_WORKER_INDEX"),
        attempt=_read_integer(environment, "SUREFOOT_WORKER_ATTEMPT"),
        node=_read_text(environment, "SUREFOOT_NODE"),
        coordinator_url=_read_text(environment, "SUREFOOT_COORDINATOR_URL"),
        token=environment.get("SUREFOOT_TOKEN", ""),
        local_ranks=_read_integer(environment, "SUREFOOT_LOCAL_RANKS", 1),
        run_folder=_read_text(environment, "SUREFOOT_RUN_FOLDER"),
        heartbeat_seconds=_read_number(environment, "SUREFOOT_HEARTBEAT_SECONDS", 0.5),
        step_timeout_seconds=_read_number(environment, "SUREFOOT_STEP_TIMEOUT_SECONDS", 600.0),
        termination_grace_seconds=_read_number(environment, "SUREFOOT_TERMINATION_GRACE_SECONDS", 30.0),
        host=environment.get("SUREFOOT_HOST", "127.0.0.1"),
        token_file=environment.get("SUREFOOT_TOKEN_FILE", ""),
        coordinator_ca=environment.get("SUREFOOT_COORDINATOR_CA", ""),
        metrics_port=_read_integer(environment, "SUREFOOT_METRICS_PORT")
        if environment.get("SUREFOOT_METRICS_PORT")
        else None,
        scratch_folder=environment.get("SUREFOOT_SCRATCH_FOLDER") or _read_text(environment, "SUREFOOT_RUN_FOLDER"),
        pre_join_check=environment.get("SUREFOOT_PRE_JOIN_CHECK", "Disabled"),
        warm_imports=environment.get("SUREFOOT_WARM_IMPORTS", "auto"),
        job_name=environment.get("SUREFOOT_JOB_NAME", ""),
        job_namespace=environment.get("SUREFOOT_JOB_NAMESPACE", ""),
        coordinator_fallback_url=environment.get("SUREFOOT_COORDINATOR_FALLBACK_URL", ""),
    )


def job_environment(settings: JobSettings) -> dict[str, str]:
    """Builds the variables that a platform sets for a worker; the inverse of `job_settings`.

    They include secrets, so never log them. `local_server` is not among them: it is set per node.
    """
    values: dict[str, str | None] = {
        "SUREFOOT_JOB_UID": settings.job,
        "SUREFOOT_MEMORY_INTERVAL_STEPS": str(settings.interval_steps),
        "SUREFOOT_MEMORY_REPLICAS": str(settings.replicas),
        "SUREFOOT_MEMORY_KEEP": str(settings.keep),
        "SUREFOOT_MEMORY_USER": settings.memory_user,
        "SUREFOOT_MEMORY_PASSWORD": settings.memory_password,
        "SUREFOOT_MEMORY_CALL_TIMEOUT_SECONDS": str(settings.memory_call_timeout_seconds),
        "SUREFOOT_MEMORY_TLS_CA": settings.memory_tls_ca or None,
        "SUREFOOT_MEMORY_BANDWIDTH": str(settings.memory_bytes_per_second)
        if settings.memory_bytes_per_second
        else None,
        "SUREFOOT_GOOD_AFTER_STEPS": str(settings.good_after_steps) if settings.good_after_steps else None,
    }
    if settings.persistent is not None:
        persistent = settings.persistent
        values |= {
            "SUREFOOT_PERSISTENT_URI": persistent.uri,
            "SUREFOOT_PERSISTENT_INTERVAL_STEPS": str(persistent.interval_steps),
            "SUREFOOT_PERSISTENT_KEEP": str(persistent.keep),
            "SUREFOOT_PERSISTENT_ENDPOINT": persistent.endpoint,
            "SUREFOOT_PERSISTENT_REGION": persistent.region,
            "AWS_ACCESS_KEY_ID": persistent.access_key,
            "AWS_SECRET_ACCESS_KEY": persistent.secret_key,
            "SUREFOOT_PERSISTENT_CA_BUNDLE": persistent.ca_bundle,
            "SUREFOOT_PERSISTENT_SSE": persistent.sse,
            "SUREFOOT_PERSISTENT_BANDWIDTH": str(persistent.bytes_per_second) if persistent.bytes_per_second else None,
        }
    return {name: value for name, value in values.items() if value is not None}


def _local_server(environment: Mapping[str, str]) -> LocalMemoryServers | None:
    node, path = environment.get("SUREFOOT_NODE"), environment.get("SUREFOOT_MEMORY_SOCKET")
    return LocalMemoryServers(node, path) if node and path else None


def _read_text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise ConfigurationError(
            f"{name} is not set: Surefoot sets it for every worker; run the job with `surefoot local` or on a cluster"
        )
    return value


def _read_integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(_read_text(environment, name))
    except ValueError as error:
        raise ConfigurationError(f"{name} is {value!r}: a whole number is allowed") from error


def _read_number(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name, str(default))
    try:
        return float(value)
    except ValueError as error:
        raise ConfigurationError(f"{name} is {value!r}: a number is allowed") from error
