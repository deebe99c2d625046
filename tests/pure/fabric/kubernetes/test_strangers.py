"""A pod that bears a job's labels and is not the job's: it is no worker, and keeps nobody from looking after the job."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.platform import KubernetesFabric
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache

OWNER = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "name": "gpt", "uid": "u", "controller": True}
WORKER = {api_objects.WORKER_INDEX: "0", api_objects.ATTEMPT: "7"}


def pod(
    name: str, namespace: str = "team", owner: dict[str, Any] | None = OWNER, marks: Any = WORKER
) -> Any:  # never written to
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "resourceVersion": "5"}
    owners = [owner] if owner is not None else []
    marked = {**metadata, "labels": {api_objects.JOB_UID: "u", **marks}, "ownerReferences": owners}
    return {"metadata": marked, "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]}, "status": {}}


def workers(*pods: Any) -> list[str]:
    cache = ClusterCache(FakeApi().api)
    for one in pods:
        cache.workers._event("ADDED", one)
    fabric = KubernetesFabric(cache, "team", "gpt", "u")
    return [seen.name for seen in (*fabric._workers(fabric._pods()), *fabric._workers(fabric._pods()))]


@pytest.mark.parametrize(
    "stranger",
    [
        pod("x", namespace="evil"),
        pod("x", owner=None),
        pod("x", owner={**OWNER, "uid": "another"}),
        pod("x", owner={**OWNER, "controller": False}),
        pod("x", owner=None, marks={}),
        pod("x", namespace="evil", marks={}),
        pod("x", owner={"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "gpt", "uid": "u", "controller": True}),
    ],
)
def test_a_stranger_is_left_out_and_told_of_once(stranger: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert workers(pod("true"), stranger) == ["true", "true"]
    namespace = stranger["metadata"]["namespace"]
    assert [record.getMessage() for record in caplog.records] == [
        f"pod {namespace}/x has labels of job team/gpt but another controller: ignoring it"
    ]
