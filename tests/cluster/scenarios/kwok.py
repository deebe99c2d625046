"""Nodes that exist in the API server alone: kwok says that they are Ready, and that the pods on them run.

https://kwok.sigs.k8s.io: what an operator has to do with an API server is real, at sizes that no machine holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError

from cluster import binaries, layout, processes
from cluster.api import Api
from cluster.engine import Facts

LABEL = {"surefoot.test/simulated": "true"}
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
ANNOTATION = ("kwok.x-k8s.io/node", "fake")
READY_SECONDS = 120.0
PODS_OF_A_NODE = 110

ON_THEM: dict[str, Any] = {
    "nodeSelector": LABEL,
    "tolerations": [{"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"}],
}
"""What pods must say to run there, and nowhere else."""


def simulated_job(name: str, space: str, workers: int) -> dict[str, Any]:
    """A job of fixed size on such nodes, which waits for its agents for a day."""
    container = {"name": "trainer", "image": "registry.invalid/trainer:1", "command": ["true"]}
    spec = {
        "replicas": workers,
        "runPolicy": {"schedulingDeadlineSeconds": 86400},
        "template": {"spec": {**ON_THEM, "containers": [container]}},
    }
    metadata = {"name": name, "namespace": space}
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


@contextmanager
def simulated_nodes(facts: Facts, count: int) -> Iterator[list[str]]:
    """So many nodes that are Ready, by name; gone at the end."""
    api = Api(facts.kubeconfig)
    names = [f"simulated-{number:04d}" for number in range(count)]
    started = processes.spawn(_command(facts), layout.LOGS / "kwok.log")
    try:
        for name in names:
            api.create("/api/v1/nodes", _node(name))
        api.wait_ready(names, READY_SECONDS)
        yield names
    finally:
        for name in names:
            _delete(api, f"/api/v1/nodes/{name}")
        processes.end([started], grace_seconds=5.0)


def _command(facts: Facts) -> list[str]:
    told = ["--manage-all-nodes=false", f"--manage-nodes-with-annotation-selector={'='.join(ANNOTATION)}"]
    told += ["--cidr=10.99.0.1/16", "--node-ip=10.98.0.1", *(f"--config={file}" for file in binaries.kwok_stages())]
    return [str(binaries.kwok()), f"--kubeconfig={facts.kubeconfig}", *told]


def _node(name: str) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "1Ti", "pods": str(PODS_OF_A_NODE)}
    labels = {**LABEL, "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": dict([ANNOTATION])},
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": room, "capacity": room},
    }


def _delete(api: Api, path: str) -> None:
    try:
        api.call("DELETE", path)
    except HTTPError as error:
        if error.code != 404:
            raise
