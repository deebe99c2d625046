"""The memory tier's DaemonSet: which revision is the newest, which pods are of it, and deleting exactly one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from surefoot_operator.api.topology_levels import HOSTNAME
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness
from surefoot_operator.policy.maintenance.memory_tier_rollout import MemoryServerPod

OWNED = [{"uid": "ds-1"}]


class Server:
    """An API server that knows one DaemonSet."""

    def __init__(self, generation: int = 3, observed: int = 3) -> None:
        self.deleted: list[tuple[str, dict[str, Any]]] = []
        self.refusal: ApiError | None = None
        self.daemon_set = {
            "metadata": {"uid": "ds-1", "generation": generation},
            "spec": {"selector": {"matchLabels": {"app": "memory", "part": "tier"}}},
            "status": {"observedGeneration": observed, "desiredNumberScheduled": 2},
        }

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        if path.endswith("/daemonsets/surefoot-memory"):
            return self.daemon_set
        assert query == {"labelSelector": "app=memory,part=tier"}
        return {"items": [revision("aaa", 9), revision("bbb", 10), revision("zzz", 99, owner="somebody else's")]}

    async def delete(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        self.deleted.append((path, options))
        if self.refusal is not None:
            raise self.refusal
        return {}


def revision(name: str, number: int, owner: str = "ds-1") -> dict[str, Any]:
    labels = {"controller-revision-hash": name}
    return {"metadata": {"labels": labels, "ownerReferences": [{"uid": owner}]}, "revision": number}


def newest(server: Server) -> memory_tier_pods.NewestRevision | None:
    api: Any = server
    return asyncio.run(memory_tier_pods.read_newest_revision(api, "surefoot-system", "surefoot-memory"))


def test_the_newest_revision_is_the_highest_of_its_own() -> None:
    assert newest(Server()) == memory_tier_pods.NewestRevision("ds-1", "bbb", 2)


def test_a_template_that_nobody_looked_at_yet_has_no_revision() -> None:
    assert newest(Server(generation=4)) is None


def test_no_daemon_set_is_no_error_and_a_refusal_is_one() -> None:
    server = Server()
    server.refusal = ApiError("GET x", 404, "NotFound", "")
    assert newest(server) is None
    server.refusal = ApiError("GET x", 403, "Forbidden", "")
    with pytest.raises(ApiError):
        newest(server)


def test_pods_are_the_daemon_set_s_own_with_node_and_domain() -> None:
    def pod(name: str, node: str | None, owner: str = "ds-1", **status: Any) -> dict[str, Any]:
        labels = {"controller-revision-hash": "bbb"}
        metadata = {"name": name, "uid": f"u-{name}", "labels": labels, "ownerReferences": [{"uid": owner}]}
        return {"metadata": metadata, "spec": {"nodeName": node}, "status": status}

    def node(name: str, host: str, ready: str) -> dict[str, Any]:
        condition = {"type": "Ready", "status": ready}
        return {
            "metadata": {"name": name, "labels": {HOSTNAME: host}},
            "spec": {},
            "status": {"conditions": [condition]},
        }

    ready = [{"type": "Ready", "status": "True"}]
    found = memory_tier_pods.observe_server_pods(
        [
            pod("a", "n1", conditions=ready),
            pod("b", "n2"),
            pod("c", None),
            pod("d", "n1", owner="another"),
        ],
        "ds-1",
        [node("n1", "h1", "True"), node("n2", "h2", "Unknown")],
        KubeletLiveness(),
    )
    assert found == (
        MemoryServerPod("a", "u-a", "n1", "h1", "bbb", ready=True),
        MemoryServerPod("b", "u-b", "n2", "h2", "bbb", ready=False, node_ready=False),
        MemoryServerPod("c", "u-c", "", "", "bbb", ready=False),
    )


@pytest.mark.parametrize("code", [None, 404, 409])
def test_exactly_this_pod_is_deleted_or_it_is_gone_already(code: int | None) -> None:
    server = Server()
    server.refusal = None if code is None else ApiError("DELETE x", code, "", "")
    api: Any = server
    asyncio.run(
        memory_tier_pods.restart_pod(api, "surefoot-system", MemoryServerPod("a", "u-a", "n1", "z1", "old", ready=True))
    )
    ((path, options),) = server.deleted
    assert path == "/api/v1/namespaces/surefoot-system/pods/a"
    assert options["preconditions"] == {"uid": "u-a"}


def test_the_api_has_these_calls() -> None:
    assert all(hasattr(Api, name) for name in ("get", "delete"))
