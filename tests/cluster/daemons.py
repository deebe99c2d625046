"""What runs on the host: etcd, API server, controller manager, scheduler, DNS, S3. Any of them may be killed and started again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import binaries, credentials, layout
from cluster.api import Api
from cluster.errors import ClusterError
from cluster.processes import end, spawn, wait
from cluster.state import State
from support.servers import s3_server

START_SECONDS = 90.0
DNS_FOLDER = layout.ROOT / "dns"
S3_FOLDER = layout.ROOT / "s3"


@dataclass(frozen=True)
class Daemon:
    """A command line and what it wants in its environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def start(state: State, name: str) -> None:
    """Starts one of them unless it runs."""
    if state.is_alive(name):
        return
    maker = DAEMONS.get(name)
    if maker is None:
        raise ClusterError(f"there is no daemon {name}; there are {', '.join(DAEMONS)}")
    daemon = maker()
    layout.LOGS.mkdir(parents=True, exist_ok=True)
    state.record(name, spawn(daemon.command, layout.LOGS / f"{name}.log", daemon.environment))


def kill(state: State, name: str) -> None:
    """SIGKILL, as an accident would."""
    if name not in DAEMONS:
        raise ClusterError(f"there is no daemon {name}; there are {', '.join(DAEMONS)}")
    if state.is_alive(name):
        end([state.processes[name]])


def wait_api(state: State) -> Api:
    """Until the API server is ready; fails at once, with its last words, where it has ended."""
    name = "kube-apiserver"

    def ready() -> bool:
        return credentials.CERTIFICATE.exists() and Api(layout.KUBECONFIG).answers()

    wait(lambda: ready() or not state.is_alive(name), START_SECONDS)
    if not state.is_alive(name):
        raise ClusterError(f"the API server has ended; its last words: {_last_words(name)}")
    if not ready():
        words = _last_words(name)
        raise ClusterError(f"the API server is not ready after {START_SECONDS:.0f} s; its last words: {words}")
    return Api(layout.KUBECONFIG)


def wait_s3() -> None:
    """Until the S3 server answers; makes the bucket unless it is there."""
    s3_server.make_bucket(s3_url(), START_SECONDS)


def s3_url() -> str:
    """As pods and the host reach it."""
    return f"http://{layout.HOST_ADDRESS}:{layout.S3_PORT}"


def allow_dns(api: Api) -> None:
    """What CoreDNS may read."""
    group = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    path = f"/apis/{group}/v1"
    meta = {"apiVersion": f"{group}/v1", "metadata": {"name": credentials.DNS_USER}}
    api.create(f"{path}/clusterroles", {**meta, "kind": "ClusterRole", "rules": rules})
    binding = {
        **meta,
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": credentials.DNS_USER},
        "subjects": [{"apiGroup": group, "kind": "User", "name": credentials.DNS_USER}],
    }
    api.create(f"{path}/clusterrolebindings", binding)


def _etcd() -> Daemon:
    client, peer = (f"http://127.0.0.1:{port}" for port in (layout.ETCD_PORT, layout.ETCD_PEER_PORT))
    return Daemon(
        [
            "etcd",
            f"--data-dir={layout.ROOT / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]
    )


def _api_server() -> Daemon:
    key = credentials.SERVICE_ACCOUNT_KEY
    return Daemon(
        [
            _kubernetes("kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{layout.ETCD_PORT}",
            f"--bind-address={layout.HOST_ADDRESS}",
            f"--advertise-address={layout.HOST_ADDRESS}",
            f"--secure-port={layout.API_PORT}",
            f"--service-cluster-ip-range={layout.SERVICE_NETWORK}",
            f"--cert-dir={layout.SECRETS}",
            f"--token-auth-file={credentials.TOKENS}",
            "--authorization-mode=Node,RBAC",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--allow-privileged",
            "--enable-aggregator-routing",  # Services are translated on the nodes, not on the host
            "--kubelet-preferred-address-types=InternalIP",  # node names mean nothing to the host
            "--profiling=false",
            f"--audit-policy-file={_audit_policy()}",
            f"--audit-log-path={layout.AUDIT_LOG}",
        ]
    )


def _audit_policy() -> Path:
    """Every call of a service account outside kube-system, without bodies: what an operator costs the API server is counted there."""
    path = layout.ROOT / "audit.json"
    theirs = ["system:serviceaccounts:kube-system"]
    rules = [{"level": "None", "userGroups": theirs}, {"level": "Metadata", "userGroups": ["system:serviceaccounts"]}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
    path.write_text(json.dumps({**policy, "rules": [*rules, {"level": "None"}]}))
    return path


def _controller_manager() -> Daemon:
    # node-monitor-grace-period and its kin stay stock: what stock Kubernetes does is measured beside
    return Daemon(
        [
            _kubernetes("kube-controller-manager"),
            f"--kubeconfig={credentials.kubeconfig('kube-controller-manager')}",
            "--allocate-node-cidrs=false",
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={credentials.SERVICE_ACCOUNT_KEY}",
            f"--root-ca-file={credentials.CERTIFICATE}",
            "--secure-port=0",
        ]
    )


def _scheduler() -> Daemon:
    return Daemon(
        [
            _kubernetes("kube-scheduler"),
            f"--kubeconfig={credentials.kubeconfig('kube-scheduler')}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
    )


def _dns() -> Daemon:
    DNS_FOLDER.mkdir(exist_ok=True)
    corefile = DNS_FOLDER / "Corefile"
    corefile.write_text(
        ".:53 {\n"
        f"  bind {layout.HOST_ADDRESS}\n"
        "  errors\n"
        f"  kubernetes {layout.CLUSTER_DOMAIN} in-addr.arpa {{\n"
        f"    kubeconfig {credentials.kubeconfig('coredns')}\n"
        "    ttl 1\n"
        "  }\n"
        "}\n"
    )
    return Daemon([str(binaries.coredns()), "-conf", str(corefile)])


def _s3() -> Daemon:
    program = s3_server.versitygw()
    if program is None:
        raise ClusterError("the cluster's S3 server is versitygw, built with Go: install Go 1.25 or newer")
    S3_FOLDER.mkdir(exist_ok=True)
    address = f"{layout.HOST_ADDRESS}:{layout.S3_PORT}"
    return Daemon(s3_server.command(program, S3_FOLDER, address), s3_server.environment(S3_FOLDER))


def _kubernetes(name: str) -> str:
    return str(binaries.kubernetes_folder() / name)


DAEMONS: dict[str, Callable[[], Daemon]] = {
    "etcd": _etcd,
    "kube-apiserver": _api_server,
    "kube-controller-manager": _controller_manager,
    "kube-scheduler": _scheduler,
    "coredns": _dns,
    "s3": _s3,
}


def _last_words(name: str) -> str:
    """What a cluster that is taken away leaves to whoever reads why."""
    lines = log(name).read_text(errors="replace").splitlines() if log(name).exists() else []
    return " | ".join(line[-300:] for line in lines[-3:])


def log(name: str) -> Path:
    """What it says goes here."""
    return layout.LOGS / f"{name}.log"
