"""Whom an event of the cluster wakes: those whom it concerns, and nobody where no plan would read what changed.

Each kubelet writes its node's and its pods' status again and again: at a thousand jobs each such write was compared a
thousand times.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from support.fakes.fake_api import FakeApi
from surefoot_operator.api.spec import ROLLBACK
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.platform import KubernetesFabric
from surefoot_operator.platforms.kubernetes.views import cluster_cache as caching
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache

JOBS = 20


def node(version: int, **other: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": str(version)}
    metadata = {"name": "n0", "uid": "node-n0", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": other, "status": {"conditions": [condition]}}


def holder(version: int, ready: str = "True", **other: Any) -> dict[str, Any]:
    server = {"name": "redis", "containerID": "c1", "state": {"running": {}}, **other}
    status = {
        "podIP": "10.0.0.1", "phase": "Running", "containerStatuses": [server],
        "conditions": [{"type": "Ready", "status": ready, "lastProbeTime": str(version)}],
    }  # fmt: skip
    port = {"name": api_objects.HOLDER_CONTAINER, "containerPort": 6379}
    spec = {"nodeName": "n0", "containers": [{"name": "redis", "ports": [port]}, {"name": "companion"}]}
    return {"metadata": {"name": "h", "namespace": "s", "uid": "h", "resourceVersion": str(version)}, "spec": spec, "status": status}  # fmt: skip


def worker(job: str, version: int) -> dict[str, Any]:
    metadata = {"name": f"w-{job}", "namespace": "d", "uid": f"w-{job}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {api_objects.JOB_UID: job}}, "spec": {}, "status": {}}


class Cluster:
    def __init__(self) -> None:
        self.cache = ClusterCache(FakeApi().api)
        self.fabrics = [KubernetesFabric(self.cache, "d", f"job-{n}", f"uid-{n}") for n in range(JOBS)]

    def woken(self) -> list[int]:
        """Who was woken since the last question."""
        found = [n for n, fabric in enumerate(self.fabrics) if fabric._changed.is_set()]
        for fabric in self.fabrics:
            fabric._changed.clear()
        return found


EVERYBODY = list(range(JOBS))


def test_a_kubelets_heartbeat_wakes_nobody_and_is_compared_once(monkeypatch: Any) -> None:
    compared = []
    marks = caching.observations.plan_fields
    monkeypatch.setitem(cast(Any, caching._READ), "nodes", lambda one: compared.append(one) or marks(one))
    cluster = Cluster()
    cluster.cache.nodes._event("ADDED", node(1))
    assert cluster.woken() == EVERYBODY
    cluster.cache.nodes._event("MODIFIED", node(2))
    assert cluster.woken() == []
    assert len(compared) == 2
    cluster.cache.nodes._event("MODIFIED", node(3, unschedulable=True))
    assert cluster.woken() == EVERYBODY


def test_a_holders_pod_wakes_whoever_reads_what_changed_of_it() -> None:
    cluster = Cluster()
    cluster.cache.holders._event("ADDED", holder(1))
    assert cluster.woken() == EVERYBODY
    cluster.cache.holders._event("MODIFIED", holder(2, restartCount=0))
    assert cluster.woken() == []
    for version, changed in enumerate((holder(3, "False"), holder(4), holder(5, containerID="c2")), 3):
        changed["metadata"]["resourceVersion"] = str(version)
        cluster.cache.holders._event("MODIFIED", changed)
        assert cluster.woken() == EVERYBODY
    cluster.cache.holders._event("DELETED", holder(6))
    assert cluster.woken() == EVERYBODY


def test_a_pod_and_a_job_wake_their_own_reconciler_alone() -> None:
    cluster = Cluster()
    cluster.cache.workers._event("ADDED", worker("uid-7", 1))
    assert cluster.woken() == [7]
    cluster.cache.workers._event(
        "MODIFIED", worker("uid-8", 2) | {"metadata": worker("uid-8", 2)["metadata"] | {"name": "w-uid-7"}}
    )
    assert cluster.woken() == [7, 8], "one that changes hands concerns both"
    cluster.cache.jobs._event(
        "ADDED", {"metadata": {"name": "job-3", "namespace": "d", "uid": "uid-3", "resourceVersion": "3"}}
    )
    assert cluster.woken() == [3]


def test_what_a_person_asks_beside_the_spec_wakes_as_well() -> None:
    """An annotation makes no new generation."""
    cluster = Cluster()
    metadata = {"name": "job-3", "namespace": "d", "uid": "uid-3", "resourceVersion": "3", "generation": 1}
    cluster.cache.jobs._event("ADDED", {"metadata": metadata})
    cluster.woken()
    cluster.cache.jobs._event("MODIFIED", {"metadata": {**metadata, "resourceVersion": "4"}, "status": {"step": 1}})
    assert cluster.woken() == []
    asked = {**metadata, "resourceVersion": "5", "annotations": {ROLLBACK: "1/30"}}
    cluster.cache.jobs._event("MODIFIED", {"metadata": asked})
    assert cluster.woken() == [3]


def test_nobody_is_listened_for_once_he_is_gone() -> None:
    cluster = Cluster()
    asyncio.run(cluster.fabrics[0].close())
    cluster.woken()
    cluster.cache.nodes._event("ADDED", node(1))
    assert cluster.woken() == EVERYBODY[1:]
    assert ("pods", "uid-0") not in cluster.cache._listeners
