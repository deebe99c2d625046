"""Reads the cluster operator's settings from environment and command line.

Called by `__main__` alone; everybody below gets the frozen value, or a part of it.
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
from surefoot_operator.controller.leader.election_rules import HIGHEST
from surefoot_operator.coordinator.agent_server import PATH
from surefoot_operator.errors import OperatorError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
TAINT_EFFECTS = ("", "PreferNoSchedule", "NoSchedule", "NoExecute")
_MAX_PORT = 65535


class InvalidSetting(OperatorError):
    """A variable or flag is not allowed: its name, value, what is."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        super().__init__(f"{name} is {value!r}; {allowed}")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of one process, each read from a `SUREFOOT_` variable."""

    namespace: str
    """Of the operator itself, its lease and its secrets."""
    pod_name: str
    """Its pod, for the leader's label."""
    identity: str
    """Among the replicas. The pod's name: a container that restarts knows its own lease, and need not wait for it."""
    coordinator_url: str
    """Given to agents. `wss` is served over TLS, `ws` (for development only) without."""
    kubeconfig: Path | None = None
    """Only a flag; None: the API server of the pod that this runs in."""
    watch_namespace: str = ""
    """Only jobs of this namespace are managed; empty: all. So two operators can share a cluster."""
    lease_name: str = "surefoot-operator"
    """Of shard 0; those of others have their number behind it."""
    shards: int = 1
    """Parts that the jobs are spread over, each led by one replica."""
    coordinator_port: int = 8443
    """0: any free one."""
    metrics_port: int = 8080
    """Plain HTTP: /metrics. 0: any free one."""
    probe_port: int = 8081
    """Plain HTTP: /healthz and /readyz. 0: any free one."""
    admission_port: int = 9443
    """Admission webhooks over HTTPS, with the coordinator's certificate. 0: any free one."""
    admission_webhooks: str = ""
    """The ValidatingWebhookConfiguration that is to trust us; empty: no webhook is served."""
    tls_secret: str = "surefoot-coordinator-tls"
    """ca.crt, tls.crt, tls.key; made if it is not there."""
    keys_secret: str = "surefoot-keys"
    """root: what the jobs' passwords on the memory tier follow from; made if it is not there."""
    memory_admin_secret: str = "surefoot-memory-admin"
    """password: the operator's own on every holder; made if it is not there."""
    memory_daemonset: str = "surefoot-memory"
    memory_tls: bool = False
    """Whether holders are to speak TLS."""
    memory_tls_secret: str = "surefoot-memory-tls"
    """ca.crt, tls.crt, tls.key of the holders, if they are to; made if it is not there."""
    memory_socket_folder: str = ""
    """Folder of each node in which its holder has a Unix socket; empty: workers are given none."""
    agent_command: tuple[str, ...] = ("surefoot-agent", "--")
    """Put in front of the trainer's command."""
    runtime_image: str = ""
    """Of the pod that deletes a job's persistent checkpoints; empty: the job's own trainer image."""
    gang_schedulers: tuple[Gang, ...] = ()
    """Whose pod groups are watched and made."""
    node_reports: bool = True
    """Whether nodes that agents found sick get a condition."""
    node_taint: str = ""
    """Effect of the taint that goes with it; empty: none."""
    log_level: str = "INFO"
    log_format: str = "text"
    """Of the operator, and of the agents of workers that it makes."""


def cluster_settings(
    environment: Mapping[str, str], arguments: Sequence[str], pod_namespace: str = "", life: str = ""
) -> ClusterSettings:
    """Reads flags, then variables, then defaults. Raises BadSetting.

    `pod_namespace`: from the pod's service-account files. `life`: a random suffix of the identity when run outside a
    pod, where two processes of one name may run.
    """
    chosen = _parser().parse_args(arguments)
    told = {name: text for name, text in environment.items() if name.startswith("SUREFOOT_") and text}
    given = {name: text for name, text in vars(chosen).items() if text is not None and name != "kubeconfig"}
    told |= {f"SUREFOOT_{name.upper()}": text for name, text in given.items()}

    def text(field: str, default: str) -> str:
        return told.get(f"SUREFOOT_{field.upper()}", default)

    namespace = text("namespace", pod_namespace or "surefoot-system")
    port = _port("SUREFOOT_COORDINATOR_PORT", text("coordinator_port", "8443"))
    url = text("coordinator_url", f"wss://surefoot-coordinator.{namespace}.svc:{port}{PATH}")
    if urlsplit(url).scheme not in ("ws", "wss") or not urlsplit(url).hostname:
        raise InvalidSetting("SUREFOOT_COORDINATOR_URL", url, "it has the form wss://HOST:PORT/v1/agents")
    pod_name = text("pod_name", environment.get("HOSTNAME", "surefoot-operator"))
    return ClusterSettings(
        namespace=namespace,
        pod_name=pod_name,
        identity=f"{pod_name}-{life}" if chosen.kubeconfig is not None and life else pod_name,
        coordinator_url=url,
        kubeconfig=chosen.kubeconfig,
        watch_namespace=text("watch_namespace", ""),
        lease_name=text("lease_name", "surefoot-operator"),
        shards=_shards("SUREFOOT_SHARDS", text("shards", "1")),
        coordinator_port=port,
        metrics_port=_port("SUREFOOT_METRICS_PORT", text("metrics_port", "8080")),
        probe_port=_port("SUREFOOT_PROBE_PORT", text("probe_port", "8081")),
        admission_port=_port("SUREFOOT_ADMISSION_PORT", text("admission_port", "9443")),
        admission_webhooks=text("admission_webhooks", ""),
        tls_secret=text("tls_secret", "surefoot-coordinator-tls"),
        keys_secret=text("keys_secret", "surefoot-keys"),
        memory_admin_secret=text("memory_admin_secret", "surefoot-memory-admin"),
        memory_daemonset=text("memory_daemonset", "surefoot-memory"),
        memory_tls=_flag("SUREFOOT_MEMORY_TLS", text("memory_tls", "0")),
        memory_tls_secret=text("memory_tls_secret", "surefoot-memory-tls"),
        memory_socket_folder=_folder("SUREFOOT_MEMORY_SOCKET_FOLDER", text("memory_socket_folder", "")),
        agent_command=_command("SUREFOOT_AGENT_COMMAND", text("agent_command", "surefoot-agent --")),
        runtime_image=text("runtime_image", ""),
        gang_schedulers=_gangs("SUREFOOT_GANG_SCHEDULERS", text("gang_schedulers", "")),
        node_reports=_flag("SUREFOOT_NODE_REPORTS", text("node_reports", "1")),
        node_taint=_one_of("SUREFOOT_NODE_TAINT", text("node_taint", ""), TAINT_EFFECTS),
        log_level=_level("SUREFOOT_LOG_LEVEL", text("log_level", "INFO")),
        log_format=_one_of(VARIABLE, text("log_format", "text"), FORMATS),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot-operator",
        description="The Surefoot operator. In a pod it needs no flag; outside one, --kubeconfig.",
    )
    parser.add_argument("--version", action="version", version=f"surefoot-operator {__version__}")
    parser.add_argument("--kubeconfig", type=Path, help="an API server other than the one of this pod")
    parser.add_argument("--namespace", help="namespace of the operator's lease and secrets (default surefoot-system)")
    parser.add_argument("--only-namespace", help="manage the jobs of one namespace (default all)")
    parser.add_argument("--pod-name", help="this operator's identity in the lease (default the host's name)")
    parser.add_argument("--shards", help=f"parts that jobs are spread over, 1 to {HIGHEST} (default 1)")
    parser.add_argument("--coordinator-url", help="where agents connect, as wss://HOST:PORT/v1/agents")
    parser.add_argument("--coordinator-port", help="port that agents connect to (default 8443; 0: any free one)")
    parser.add_argument("--metrics-port", help="/metrics (default 8080; 0: any free one)")
    parser.add_argument("--probe-port", help="/healthz and /readyz (default 8081; 0: any free one)")
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING or ERROR (default INFO)")
    parser.add_argument("--log-format", help="text or json (default text)")
    return parser


def _port(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > _MAX_PORT:
        raise InvalidSetting(name, text, "a port from 0 to 65535 is needed")
    return int(text)


def _shards(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= HIGHEST:
        raise InvalidSetting(name, text, f"a number from 1 to {HIGHEST} is needed")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidSetting(name, text, "0 or 1 is needed")
    return text == "1"


def _gangs(name: str, text: str) -> tuple[Gang, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in GANG_SCHEDULERS:
            raise InvalidSetting(name, text, f"some of {', '.join(GANG_SCHEDULERS)} are allowed, with commas between")
    return tuple(gang for gang in GANG_SCHEDULERS if gang in words)


def _folder(name: str, text: str) -> str:
    if text and not text.startswith("/"):
        raise InvalidSetting(name, text, "a folder's whole path is needed, from /")
    return text


def _command(name: str, text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidSetting(name, text, f"a command line is needed: {error}") from error
    if not words:
        raise InvalidSetting(name, text, "a command line is needed")
    return words


def _level(name: str, text: str) -> str:
    return _one_of(name, text.upper(), _LEVELS)


def _one_of(name: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise InvalidSetting(name, text, f"one of {', '.join(allowed)} is needed")
    return text
