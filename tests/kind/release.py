"""The chart on kind from its own images, as a user has it: a namespace that enforces restricted pods, no folder of the host."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chart import helm
from cluster.api import Api
from cluster.engine import Facts
from cluster.processes import wait

NAMESPACE = "surefoot-system"
SMALL = {"memoryTier": {"maxMemory": "256Mi", "resources": {"requests": {"cpu": "10m"}}}}
SECONDS = 180.0

Object = dict[str, Any]


@dataclass(frozen=True)
class Release:
    """One release of the chart's own name in its usual namespace."""

    facts: Facts
    folder: Path

    @property
    def api(self) -> Api:
        return Api(self.facts.kubeconfig)

    def make_namespace(self, name: str, enforce: str = "restricted") -> None:
        """Pods that are not so are refused there."""
        labels = {"pod-security.kubernetes.io/enforce": enforce, "name": name}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.api.create("/api/v1/namespaces", body)

    def up(self, chart: str, values: Object, *options: str) -> None:
        """Installs or upgrades, and waits until everything is ready."""
        file = self.folder / "values.json"
        file.write_text(json.dumps(values))
        told = ["--values", str(file), "--wait", "--timeout", f"{SECONDS:.0f}s", *options]
        self.helm("upgrade", "--install", helm.RELEASE, chart, *told)
        assert wait(lambda: len(self.ready("memory-tier")) == len(self.pods("memory-tier")) > 0, SECONDS)

    def test(self) -> str:
        return self.helm("test", helm.RELEASE, "--timeout", f"{SECONDS:.0f}s")

    def helm(self, *arguments: str) -> str:
        where = ("--kubeconfig", str(self.facts.kubeconfig), "--namespace", NAMESPACE)
        return helm.helm(*arguments, *where, seconds=SECONDS + 60)  # helm's own limit is told with what is not ready

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Its output; what it refuses is an assertion with its words."""
        command = [str(self.facts.programs[0] / "kubectl"), f"--kubeconfig={self.facts.kubeconfig}", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr or done.stdout
        return done.stdout

    def pods(self, part: str) -> list[Object]:
        """Of operator or memory tier, but for those on their way out."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=surefoot.dev/part%3D{part}"
        items: list[Object] = self.api.call("GET", path)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, part: str) -> list[Object]:
        return [
            pod
            for pod in self.pods(part)
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]
