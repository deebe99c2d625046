"""Agents that are not who they say they are: pods that present another worker's name to the coordinator."""

from __future__ import annotations

import copy
import time
from typing import Any

from cluster.scenarios.installed import Installed
from cluster.scenarios.job import Job

Object = dict[str, Any]

SECONDS = 60.0
FORGED = "not-a-token"


def impostor(job: Job, namespace: str, name: str) -> Object:
    """A pod like the one of worker 0, with the same claims, but a token of its own."""
    original = copy.deepcopy(job.pod_of(0))
    spec = original["spec"]
    spec.pop("nodeName", None)
    spec["volumes"] = [v for v in spec["volumes"] if not v["name"].startswith("kube-api-access")]
    for container in spec["containers"]:
        container["volumeMounts"] = [
            m for m in container["volumeMounts"] if not m["name"].startswith("kube-api-access")
        ]
    spec.pop("affinity", None)
    spec.pop("topologySpreadConstraints", None)
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def with_forged_token(pod: Object) -> Object:
    """No token of the API server's at all."""
    for container in pod["spec"]["containers"]:
        container["env"] = [e for e in container["env"] if e["name"] != "SUREFOOT_TOKEN_FILE"]
        container["env"].append({"name": "SUREFOOT_TOKEN", "value": FORGED})
    return pod


def said_by(installed: Installed, pod: Object) -> str:
    """Runs it until it has ended; its last words."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    path = f"/api/v1/namespaces/{namespace}/pods"
    installed.api.call("POST", path, pod)
    try:
        deadline = time.monotonic() + SECONDS
        while (phase := installed.api.call("GET", f"{path}/{name}")["status"]["phase"]) not in ("Failed", "Succeeded"):
            text = installed.kubectl("logs", name, "--container=trainer", "--tail=20", namespace=namespace)
            assert time.monotonic() < deadline, f"the impostor is {phase}:\n{text}"
            time.sleep(0.2)
        assert phase == "Failed"
        text = installed.kubectl("logs", name, "--container=trainer", "--tail=20", namespace=namespace)
        lines = [line for line in text.splitlines() if "refuse" in line.lower() or "token" in line.lower()]
        assert lines, f"it was not told why:\n{text}"
        return lines[-1]
    finally:
        installed.api.call("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
