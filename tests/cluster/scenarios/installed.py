"""The chart on the test cluster: installed as a user installs it, and who of it runs where. Touches helm and the API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

from cluster import layout
from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import run, wait
from cluster.values import Values, merged, values
from support.machine_speed import scaled
from surefoot_operator.controller.leader.election_rules import leader_label, lease_name

NAMESPACE = "surefoot-system"
RELEASE = "surefoot"
CHART = layout.PROJECT / "charts" / "surefoot"
READY_SECONDS = scaled(120.0)
ROUND = "surefoot.test/round"
"""Annotation by which pods of one release are told from those of another."""

Object = dict[str, Any]


class Installed:
    """The release. `up` may be called on one that stands: it is upgraded to what the checkout has."""

    def __init__(self, engine: Engine, watch_namespace: str = "") -> None:
        self.engine = engine
        self.facts = engine.facts()
        self.api = Api(self.facts.kubeconfig)
        self._only_namespace = watch_namespace

    def up(self, changes: Values | None = None) -> None:
        """Installs or upgrades, and waits until an operator leads and every node has a holder."""
        file = layout.RUNS / "values.json"
        mine = {"operator": {"watchNamespace": self._only_namespace}}
        file.write_text(json.dumps(values(self.facts, merged(mine, changes or {}))))
        if not self.is_there():
            self.down()  # what an install that failed has left
        # other tests may have put the jobs' kind there by themselves
        told = ["--create-namespace", "--take-ownership", "--force-conflicts", "--values", str(file)]
        self.helm("upgrade", "--install", RELEASE, str(CHART), *told)
        self.wait_ready()

    def is_there(self) -> bool:
        return RELEASE in self.helm("list", "--deployed", "--short").split()

    def down(self) -> None:
        """The jobs' kind stays, as for any user."""
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Until one leads and every node has a holder that is Ready."""

        def ready() -> bool:
            return self._count() == len(self.facts.node_names) and self.leader() is not None

        if not wait(lambda: answered(ready), seconds):
            raise AssertionError(
                f"the chart is not ready after {seconds:g} s:\n{self.kubectl('get', 'pods', '-owide')}"
            )

    def _count(self) -> int:
        nodes = [pod["spec"].get("nodeName") for pod in self.pods("memory-tier") if is_ready(pod)]
        return len(set(nodes))

    def pods(self, part: str, ending: bool = False) -> list[Object]:
        """Pods of the operator or of the memory tier; `ending`: with those that are being deleted."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=surefoot.dev/part%3D{part}"
        found: list[Object] = self.api.call("GET", path)["items"]
        return [pod for pod in found if ending or "deletionTimestamp" not in pod["metadata"]]

    def rounds(self) -> set[str | None]:
        """The marks that pods of the operator and the memory tier bear."""
        found = [*self.pods("operator"), *self.pods("memory-tier")]
        return {pod["metadata"].get("annotations", {}).get(ROUND) for pod in found}

    def nodes(self) -> list[Object]:
        found: list[Object] = self.api.call("GET", "/api/v1/nodes")["items"]
        return found

    def leader(self) -> Object | None:
        """The operator's pod that bears the leader's label and is Ready."""
        for pod in self.pods("operator"):
            if pod["metadata"]["labels"].get("surefoot.dev/leader") == "true" and is_ready(pod):
                return pod
        return None

    def leaders(self, shards: int) -> list[str]:
        """Of each shard the pod that bears its label and is Ready; empty: none."""
        ready = [pod["metadata"] for pod in self.pods("operator") if is_ready(pod)]
        return [
            next((pod["name"] for pod in ready if pod["labels"].get(leader_label(shard)) == "true"), "")
            for shard in range(shards)
        ]

    def terms(self, shards: int) -> list[int]:
        """Of each shard how often its lease changed hands."""
        names = [lease_name("surefoot-operator", shard) for shard in range(shards)]
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        return [int(self.api.call("GET", f"{path}/{name}")["spec"]["leaseTransitions"]) for name in names]

    def leading_node(self) -> str:
        """Where it runs; waits while nobody leads."""
        found: list[str] = []

        def led() -> bool:
            pod = self.leader()
            found[:] = [] if pod is None else [str(pod["spec"]["nodeName"])]
            return bool(found)

        assert wait(lambda: answered(led), READY_SECONDS), "no operator leads"
        return found[0]

    def kill_leader(self) -> str:
        """SIGKILL to its process; its name."""
        pod = self.leader()
        assert pod is not None, "no operator leads"
        name = str(pod["metadata"]["name"])
        self.engine.kill_container(NAMESPACE, name)
        return name

    def holder(self, node: str) -> Object:
        """The memory tier's pod on a node."""
        return next(pod for pod in self.pods("memory-tier") if pod["spec"].get("nodeName") == node)

    def kill_holder(self, node: str, server: str = "redis") -> None:
        """SIGKILL to one Redis of that node."""
        self.engine.kill_container(NAMESPACE, str(self.holder(node)["metadata"]["name"]), server)

    def take_memory_away(self) -> None:
        """No node may run a holder: the DaemonSet's controller deletes them all, and no kubelet starts them again."""
        self._select({"surefoot.test/no-such": "node"})
        assert wait(lambda: answered(lambda: not self.pods("memory-tier")), READY_SECONDS)

    def bring_memory_back(self) -> None:
        """Every node may again; returns when each has one that is Ready."""
        self._select({"surefoot.test/no-such": None})
        self.wait_ready()

    def _select(self, selector: dict[str, str | None]) -> None:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/surefoot-memory"
        self.api.merge(path, {"spec": {"template": {"spec": {"nodeSelector": selector}}}})

    def helm(self, *arguments: str) -> str:
        program = self.facts.programs[1] / "helm"
        told = ["--kubeconfig", str(self.facts.kubeconfig), "--namespace", NAMESPACE]
        return run(str(program), *arguments, *told, seconds=120.0)

    def kubectl(self, *arguments: str, namespace: str = NAMESPACE, given: str = "") -> str:
        """What it said, also when it failed; `given` is its standard input."""
        program = self.facts.programs[0] / "kubectl"
        told = ["--kubeconfig", str(self.facts.kubeconfig), "--namespace", namespace]
        done = subprocess.run(
            [str(program), *told, *arguments], check=False, capture_output=True, text=True, timeout=60.0, input=given
        )
        return done.stdout + done.stderr

    def log_of_operators(self) -> str:
        """What they said last, for a test that failed."""
        return self.kubectl("logs", "--selector=surefoot.dev/part=operator", "--prefix", "--tail=60")


def is_ready(found: Object) -> bool:
    """A pod, or a node."""
    conditions = found.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def answered(condition: Callable[[], object]) -> bool:
    """The condition, or False while the API server is away."""
    try:
        return bool(condition())
    except OSError:  # the server is away at this moment
        return False
