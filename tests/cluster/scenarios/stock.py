"""What Kubernetes does by itself when a node crashes: a plain Deployment with nothing of ours, default tolerations, default times."""

from __future__ import annotations

import time
from typing import Any

from cluster import pods
from cluster.api import Api
from cluster.engine import Engine
from cluster.processes import wait

NAME = "stock"
NAMESPACE = "/api/v1/namespaces/default/pods?labelSelector=app%3Dstock"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
SECONDS = 600.0


def node_crash(engine: Engine) -> dict[str, Any]:
    """Seconds from the crash until the node is NotReady, until a second pod exists, and until it runs."""
    api = Api(engine.facts().kubeconfig)
    api.create(DEPLOYMENTS, _deployment(engine))
    try:
        assert wait(lambda: len(_running(api)) == 1, 60.0), "the Deployment's pod does not run"
        (first,) = _running(api)
        node = first["spec"]["nodeName"]
        at = time.time()
        engine.crash(node, silently=True)
        found: dict[str, float] = {}

        def over() -> bool:
            others = [p for p in _pods(api) if p["metadata"]["uid"] != first["metadata"]["uid"]]
            seen = {
                "node_not_ready": not api.ready_nodes().get(node, True),
                "replacement_exists": bool(others),
                "replacement_runs": any(p["status"].get("phase") == "Running" for p in others),
            }
            for name, so in seen.items():
                if so:
                    found.setdefault(f"{name}_seconds", round(time.time() - at, 2))
            return "replacement_runs_seconds" in found

        assert wait(over, SECONDS), f"no replacement runs after {SECONDS:g} s: {found}"
        return found
    finally:
        engine.up(len(engine.facts().node_names))
        api.call("DELETE", f"{DEPLOYMENTS}/{NAME}")


def _deployment(engine: Engine) -> dict[str, Any]:
    pod = pods.host_pod(NAME, ["sleep", "infinity"], host_prefix=engine.facts().host_prefix)
    spec = {**pod["spec"], "restartPolicy": "Always"}
    template = {"metadata": {"labels": {"app": NAME}}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": NAME}}, "template": template},
    }


def _pods(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.call("GET", NAMESPACE)["items"]
    return found


def _running(api: Api) -> list[dict[str, Any]]:
    return [pod for pod in _pods(api) if pod["status"].get("phase") == "Running"]
