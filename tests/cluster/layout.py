"""Every name, address and path of the cluster, in one place. Pure: it touches nothing.

With another folder in SUREFOOT_CLUSTER_FOLDER a cluster of kind stands beside one of network namespaces: neither knows
the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.environ.get("SUREFOOT_CLUSTER_FOLDER", "/var/lib/surefoot-cluster"))
STATE_FILE = ROOT / "state.json"
LOGS = ROOT / "logs"
SECRETS = ROOT / "secrets"
RUNS = ROOT / "runs"  # what trainings write down: the one folder that pods may write, and that outlives their nodes
AUDIT_LOG = LOGS / "audit.jsonl"
KUBECONFIG = ROOT / "kubeconfig"
CACHE = Path.home() / ".cache" / "surefoot"
_KEY = ROOT.name.removeprefix("surefoot-")
COMMAND_LOCK = CACHE / f"{_KEY}.lock"  # outside the cluster's folder, so that `down` can remove that whole
USE_LOCK = CACHE / f"{_KEY}.use"
PROJECT = Path(__file__).resolve().parents[2]

BRIDGE = "sf-bridge"
HOST_ADDRESS = "10.213.0.1"
NODE_NETWORK_BITS = 24
POD_NETWORK = "10.214.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
API_PORT = 6443
ETCD_PORT, ETCD_PEER_PORT = 22379, 22380
S3_PORT = 7070
API_URL = f"https://{HOST_ADDRESS}:{API_PORT}"

PAUSE_IMAGE = "surefoot.test/pause:1"
HOST_IMAGE = "surefoot.test/host:1"


@dataclass(frozen=True)
class Node:
    """One worker: a network namespace, a PID and a mount namespace, and what runs in them."""

    index: int

    @property
    def name(self) -> str:
        """As Kubernetes knows it."""
        return f"node-{self.index}"

    @property
    def namespace(self) -> str:
        """Its network namespace; its link on the host bears the same name."""
        return f"sf-node-{self.index}"

    @property
    def zone(self) -> str:
        """Its failure domain: each node is its own."""
        return f"zone-{self.index}"

    @property
    def address(self) -> str:
        """On the bridge."""
        return f"10.213.0.{10 + self.index}"

    @property
    def pod_network(self) -> str:
        """Addresses its pods get."""
        return f"10.214.{self.index}.0/24"

    @property
    def folder(self) -> Path:
        """What its disk would hold."""
        return ROOT / self.name


def nodes(count: int) -> list[Node]:
    """Nodes 1 to count."""
    return [Node(index) for index in range(1, count + 1)]
