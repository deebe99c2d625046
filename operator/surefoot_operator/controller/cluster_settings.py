"""Reads the cluster operator's settings from environment and command line.

Called by `__main__` only. All other modules get the frozen value, or a part of it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from surefoot import __version__
from surefoot.logs import FORMATS, VARIABLE
from surefoot_operator.api.spec import GANG_SCHEDULERS, Gang
from surefoot_operator.controller.leader.election_rules import MAX_SHARDS
from surefoot_operator.coordinator.agent_server import AGENTS_PATH
from surefoot_operator.errors import OperatorError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TAINT_EFFECTS = ("", "PreferNoSchedule", "NoSchedule", "NoExecute")
_MAX_PORT = 65535


class InvalidSetting(OperatorError):
    """A variable or flag has an invalid value; the message names it, its value and the allowed ones."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(f"{name} is {value!r}; {allowed}")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of one process, each read from a `SUREFOOT_` variable."""

    namespace: str
    """Namespace of the operator itself, its lease and its secrets."""
    pod_name: str
    """Name of this operator's pod, which gets the leader's label."""
    identity: str
    """Distinguishes the replicas: the pod's name, so that a restarted container knows its own lease at once."""
    coordinator_url: str
    """Address that agents connect to. `wss` is served with TLS, `ws` (for development only) without."""
    kubeconfig: Path | None = None
    """Set only by a flag; None: the API server of the pod that this process runs in."""
    watch_namespace: str = ""
    """Namespace whose jobs are managed; empty: all. So two operators can share a cluster."""
    lease_name: str = "surefoot-operator"
    """Name of shard 0's lease; the leases of other shards append their number."""
    shards: int = 1
    """Number of parts that the jobs are spread over, each led by one replica."""
    coordinator_port: int = 8443
    """Port that agents connect to. 0: any free one."""
    metrics_port: int = 8080
    """Port of /metrics, plain HTTP. 0: any free one."""
    probe_port: int = 8081
    """Port of /healthz and /readyz, plain HTTP. 0: any free one."""
    admission_port: int = 9443
    """Port of the admission webhooks, HTTPS with the coordinator's certificate. 0: any free one."""
    admission_webhooks: str = ""
    """Name of the ValidatingWebhookConfiguration that gets our CA certificate; empty: no webhook is served."""
    tls_secret: str = "surefoot-coordinator-tls"
    """Secret with the coordinator's ca.crt, tls.crt and tls.key; created if it does not exist."""
    keys_secret: str = "surefoot-keys"
    """Secret with `root`, which the jobs' passwords for the memory tier derive from; created if it does not exist."""
    memory_admin_secret: str = "surefoot-memory-admin"
    """Secret with the operator's `password` for all memory servers; created if it does not exist."""
    memory_daemonset: str = "surefoot-memory"
    """Name of the memory tier's DaemonSet."""
    memory_tls: bool = False
    """Whether memory servers use TLS."""
    memory_tls_secret: str = "surefoot-memory-tls"
    """Secret with the memory servers' ca.crt, tls.crt and tls.key, used with TLS; created if it does not exist."""
    memory_socket_folder: str = ""
    """Folder on each node with its memory server's Unix socket; empty: workers connect over TCP only."""
    agent_command: tuple[str, ...] = ("surefoot-agent", "--")
    """Command that starts the agent, put in front of the trainer's command."""
    runtime_image: str = ""
    """Image of the pod that deletes a job's persistent checkpoints; empty: the job's own trainer image."""
    gang_schedulers: tuple[Gang, ...] = ()
    """Gang schedulers whose pod groups are watched and created."""
    node_reports: bool = True
    """Whether nodes that agents found unhealthy get a condition."""
    node_taint: str = ""
    """Effect of the taint that accompanies the condition; empty: no taint."""
    log_level: str = "INFO"
    """Lowest level that the operator logs."""
    log_format: str = "text"
    """Log format of the operator, and of the agents of the workers that it creates."""


def read_cluster_settings(
    environment: Mapping[str, str], arguments: Sequence[str], pod_namespace: str = "", identity_suffix: str = ""
) -> ClusterSettings:
    """Reads flags, then variables, then defaults. Raises InvalidSetting.

    Args:
        environment: The process' environment variables.
        arguments: The command line without the program's name.
        pod_namespace: Namespace from the pod's service-account files; empty outside a pod.
        life: Random suffix of the identity, used outside a pod, where two processes may have the same name.
    """
    args = _build_parser().parse_args(arguments)
    variables = {name: text for name, text in environment.items() if name.startswith("SUREFOOT_") and text}
    flags = {name: text for name, text in vars(args).items() if text is not None and name != "kubeconfig"}
    variables |= {f"SUREFOOT_{name.upper()}": text for name, text in flags.items()}

    def text(field: str, default: str) -> str:
        return variables.get(f"SUREFOOT_{field.upper()}", default)

    namespace = text("namespace", pod_namespace or "surefoot-system")
    port = _parse_port("SUREFOOT_COORDINATOR_PORT", text("coordinator_port", "8443"))
    url = text("coordinator_url", f"wss://surefoot-coordinator.{namespace}.svc:{port}{AGENTS_PATH}")
    if urlsplit(url).scheme not in ("ws", "wss") or not urlsplit(url).hostname:
        raise InvalidSetting("SUREFOOT_COORDINATOR_URL", url, "it must have the form wss://HOST:PORT/v1/agents")
    pod_name = text("pod_name", environment.get("HOSTNAME", "surefoot-operator"))
    return ClusterSettings(
        namespace=namespace,
        pod_name=pod_name,
        identity=f"{pod_name}-{identity_suffix}" if args.kubeconfig is not None and identity_suffix else pod_name,
        coordinator_url=url,
        kubeconfig=args.kubeconfig,
        watch_namespace=text("watch_namespace", ""),
        lease_name=text("lease_name", "surefoot-operator"),
        shards=_parse_shard_count("SUREFOOT_SHARDS", text("shards", "1")),
        coordinator_port=port,
        metrics_port=_parse_port("SUREFOOT_METRICS_PORT", text("metrics_port", "8080")),
        probe_port=_parse_port("SUREFOOT_PROBE_PORT", text("probe_port", "8081")),
        admission_port=_parse_port("SUREFOOT_ADMISSION_PORT", text("admission_port", "9443")),
        admission_webhooks=text("admission_webhooks", ""),
        tls_secret=text("tls_secret", "surefoot-coordinator-tls"),
        keys_secret=text("keys_secret", "surefoot-keys"),
        memory_admin_secret=text("memory_admin_secret", "surefoot-memory-admin"),
        memory_daemonset=text("memory_daemonset", "surefoot-memory"),
        memory_tls=_parse_flag("SUREFOOT_MEMORY_TLS", text("memory_tls", "0")),
        memory_tls_secret=text("memory_tls_secret", "surefoot-memory-tls"),
        memory_socket_folder=_parse_folder("SUREFOOT_MEMORY_SOCKET_FOLDER", text("memory_socket_folder", "")),
        agent_command=_parse_command("SUREFOOT_AGENT_COMMAND", text("agent_command", "surefoot-agent --")),
        runtime_image=text("runtime_image", ""),
        gang_schedulers=_parse_gang_schedulers("SUREFOOT_GANG_SCHEDULERS", text("gang_schedulers", "")),
        node_reports=_parse_flag("SUREFOOT_NODE_REPORTS", text("node_reports", "1")),
        node_taint=_parse_choice("SUREFOOT_NODE_TAINT", text("node_taint", ""), TAINT_EFFECTS),
        log_level=_parse_log_level("SUREFOOT_LOG_LEVEL", text("log_level", "INFO")),
        log_format=_parse_choice(VARIABLE, text("log_format", "text"), FORMATS),
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot-operator",
        description="The Surefoot operator. Outside a pod it needs --kubeconfig, inside one no flag.",
    )
    parser.add_argument("--version", action="version", version=f"surefoot-operator {__version__}")
    parser.add_argument("--kubeconfig", type=Path, help="use the API server of this file instead of the pod's")
    parser.add_argument("--namespace", help="namespace of the operator's lease and secrets (default surefoot-system)")
    parser.add_argument("--watch-namespace", help="manage the jobs of one namespace only (default all)")
    parser.add_argument("--pod-name", help="this operator's identity in the lease (default the host's name)")
    parser.add_argument("--shards", help=f"number of parts that jobs are spread over, 1 to {MAX_SHARDS} (default 1)")
    parser.add_argument("--coordinator-url", help="address that agents connect to, as wss://HOST:PORT/v1/agents")
    parser.add_argument("--coordinator-port", help="port that agents connect to (default 8443; 0: any free one)")
    parser.add_argument("--metrics-port", help="port of /metrics (default 8080; 0: any free one)")
    parser.add_argument("--probe-port", help="port of /healthz and /readyz (default 8081; 0: any free one)")
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING or ERROR (default INFO)")
    parser.add_argument("--log-format", help="text or json (default text)")
    return parser


def _parse_port(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > _MAX_PORT:
        raise InvalidSetting(name, text, "it must be a port from 0 to 65535")
    return int(text)


def _parse_shard_count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MAX_SHARDS:
        raise InvalidSetting(name, text, f"it must be a number from 1 to {MAX_SHARDS}")
    return int(text)


def _parse_flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidSetting(name, text, "it must be 0 or 1")
    return text == "1"


def _parse_gang_schedulers(name: str, text: str) -> tuple[Gang, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in GANG_SCHEDULERS:
            raise InvalidSetting(
                name, text, f"it must be a comma-separated list of some of {', '.join(GANG_SCHEDULERS)}"
            )
    return tuple(gang for gang in GANG_SCHEDULERS if gang in words)


def _parse_folder(name: str, text: str) -> str:
    if text and not text.startswith("/"):
        raise InvalidSetting(name, text, "it must be an absolute path, starting with /")
    return text


def _parse_command(name: str, text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidSetting(name, text, f"it must be a command line: {error}") from error
    if not words:
        raise InvalidSetting(name, text, "it must be a command line")
    return words


def _parse_log_level(name: str, text: str) -> str:
    return _parse_choice(name, text.upper(), _LOG_LEVELS)


def _parse_choice(name: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise InvalidSetting(name, text, f"it must be one of {', '.join(allowed)}")
    return text
