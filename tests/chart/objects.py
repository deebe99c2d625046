"""Walks over what the chart renders: pods, containers, rules. Pure; called by the chart's tests, on a cluster too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

POD_MAKERS = ("Deployment", "DaemonSet", "Job", "StatefulSet")


def templates(rendered: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod that comes of it, named by its maker, with metadata and spec."""
    for found in rendered:
        name = f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] in POD_MAKERS:
            yield name, found["spec"]["template"]
        elif found["kind"] == "Pod":
            yield name, {"metadata": found["metadata"], "spec": found["spec"]}


def containers(template: Object) -> list[Object]:
    """Init containers too."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def ports(template: Object) -> dict[str, int]:
    """Named container ports."""
    named = [port for container in containers(template) for port in container.get("ports", [])]
    return {port["name"]: port["containerPort"] for port in named}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether an equality selector chooses these labels."""
    return selector.items() <= labels.items()


def rules(rendered: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every rule of every role, named by its role."""
    for found in rendered:
        if found["kind"] in ("Role", "ClusterRole"):
            for rule in found["rules"]:
                yield f"{found['kind']}/{found['metadata']['name']}", rule


def pods_of(rendered: list[Object], namespace: str) -> list[Object]:
    """Each template as the Pod its maker would make: what an admission check of pods can be asked about."""
    made = []
    for name, template in templates(rendered):
        kind, _, plain = name.partition("/")
        metadata = {"name": f"{kind.lower()}-{plain}", "namespace": namespace, "labels": template["metadata"]["labels"]}
        spec = {**template["spec"], "serviceAccountName": "default"}
        made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return made
