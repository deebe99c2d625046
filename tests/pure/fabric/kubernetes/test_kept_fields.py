"""What is kept of an API object: all that is read of it, and nothing that grows with its template or with who wrote it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from surefoot_operator.memory.connection_pool import TierAccess
from surefoot_operator.platforms.kubernetes import api_objects, node_conditions
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods, observations, watched_objects
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.platforms.kubernetes.views.observations import Heard

Object = dict[str, Any]
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
WRITERS = [{"manager": "kwok", "fieldsV1": {"f:status": {f"f:{n}": {} for n in range(100)}}}]


def pod(variables: int = 100, **status: Any) -> Object:
    own = {
        api_objects.WORKER_INDEX: "1",
        api_objects.ATTEMPT: "3",
        api_objects.PART: api_objects.WORKER,
        **api_objects.job_labels("gpt", "u"),
    }
    metadata = {
        "name": "p", "namespace": "team", "uid": "x", "resourceVersion": "7", "managedFields": WRITERS,
        "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [api_objects.owner("gpt", "u")],
        "labels": {**own, "team": "ours", "controller-revision-hash": "r1"},
        "annotations": {api_objects.HOLDER_TLS: "true", "note": "long"},
    }  # fmt: skip
    ports = [{"name": api_objects.HOLDER_CONTAINER, "containerPort": 6380}]
    environment = [{"name": f"V{n}", "value": "text"} for n in range(variables)]
    containers = [{"name": "trainer", "env": environment, "ports": ports}, {"name": "companion"}]
    state = {"name": "trainer", "containerID": "c1", "state": RUNNING, "image": "i", "imageID": "sha", "lastState": {}}
    found = {"phase": "Running", "podIP": "10.0.0.1", "hostIP": "10.1.0.1", "containerStatuses": [state], **status}
    return {"metadata": metadata, "spec": {"nodeName": "n1", "containers": containers}, "status": found}


SAID = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "Evicted", "message": "drained"}
WAITING = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
ENDED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "what it said"}}
PODS = [
    pod(),
    pod(conditions=[{"type": "Ready", "status": "True", "lastProbeTime": "x"}]),
    pod(phase="Pending", containerStatuses=[{"name": "trainer", "state": WAITING}]),
    pod(phase="Pending", conditions=[SAID], containerStatuses=[]),
    pod(phase="Failed", conditions=[EVICTED], reason="Evicted", message="gone"),
    pod(phase="Failed", containerStatuses=[{"name": "trainer", "state": ENDED}]),
    pod(phase="Failed", containerStatuses=[], initContainerStatuses=[{"name": "first", "state": ENDED}]),
    {"metadata": {**pod()["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}, "spec": {"containers": []}},
]


@pytest.mark.parametrize("found", PODS)
def test_of_a_workers_pod_everything_that_is_read_is_kept(found: Object) -> None:
    kept, job = watched_objects.trim_worker_pod(found), api_objects.JobIdentity("team", "gpt", "u")
    for read in (
        observations.observe_worker,
        observations.observe_purge,
        observations.node_of,
        api_objects.part_of,
        api_objects.job_of,
    ):
        assert cast(Any, read)(kept) == cast(Any, read)(found)
    assert api_objects.is_of(kept, job)
    assert kept["metadata"].get("deletionTimestamp") == found["metadata"].get("deletionTimestamp")


@pytest.mark.parametrize("found", PODS)
def test_of_a_holders_pod_everything_that_is_read_is_kept(found: Object) -> None:
    kept, access = watched_objects.trim_server_pod(found), TierAccess(password="p", authority="a")
    assert observations.observe_servers(kept, False, "d", access) == observations.observe_servers(
        found, False, "d", access
    )
    assert observations.server_plan_fields(kept) == observations.server_plan_fields(found)
    read = [memory_tier_pods.observe_server_pods([one], "u", [], Heard()) for one in (kept, found)]
    assert read[0] == read[1] != ()


def node(images: int = 100, **other: Any) -> Object:
    metadata = {
        "name": "n1", "uid": "node-n1", "resourceVersion": "7", "managedFields": WRITERS,
        "labels": {api_objects.HOSTNAME: "n1", "rack": "r2", "state": "broken"}, "annotations": {"note": "long"},
    }  # fmt: skip
    conditions = [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "posting", "lastHeartbeatTime": "x"},
        {"type": node_conditions.CONDITION, "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "t"},
    ]
    status = {"conditions": conditions, "images": [{"names": [str(n)]} for n in range(images)], **other}
    return {"metadata": metadata, "spec": {"podCIDR": "c", "taints": [{"key": "k", "effect": "e"}]}, "status": status}


@pytest.mark.parametrize(
    "found",
    [
        node(),
        node(conditions=[{"type": "Ready", "status": "False", "message": "runtime is down"}]),
        node(conditions=[]),
        {**node(), "spec": {"unschedulable": True}},
        {"metadata": {"name": "n1", "uid": "u", "resourceVersion": "7"}, "spec": {}},
    ],
)
def test_of_a_node_everything_that_is_read_is_kept(found: Object) -> None:
    kept = watched_objects.trim_node(found)
    for read in (observations.plan_fields, observations.is_left, observations.is_contradicted):
        assert cast(Any, read)(kept) == cast(Any, read)(found)
    for heard in (Heard(), Heard(silent=frozenset(("n1",))), Heard(renewed=frozenset(("n1",)))):
        assert observations.observe_node(kept, heard, "rack") == observations.observe_node(found, heard, "rack")
    for report in (None, node_conditions.NodeReport("Slow", "it is slow", 9.0)):
        written = node_conditions.node_writes(found, report, "NoSchedule", 1.0)
        assert node_conditions.node_writes(kept, report, "NoSchedule", 1.0) == written


def parts(found: Any) -> int:
    """Mappings, lists and values in all."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return 1 + sum(map(parts, inner))


def test_what_is_kept_does_not_grow_with_templates_images_and_writers() -> None:
    cache = ClusterCache(cast(Api, None))
    for feed, made, most in ((cache.workers, pod, 40), (cache.holders, pod, 50), (cache.nodes, node, 35)):
        sizes = set()
        for event, many in (("ADDED", 10), ("MODIFIED", 1000)):
            feed.items.clear()
            feed._event(event, cast(Any, made)(many))
            (kept,) = feed.items.values()
            sizes.add(parts(kept))
            assert parts(kept) <= most
        assert len(sizes) == 1
        feed.items.clear()
        feed.learn({**cast(Any, made)(1000)})
        assert {parts(one) for one in feed.items.values()} <= sizes


def test_a_job_is_kept_whole_but_for_who_wrote_what() -> None:
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "resourceVersion": "7", "annotations": {"a": "b"}}
    found = {"metadata": {**metadata, "managedFields": WRITERS}, "spec": {"replicas": 2}, "status": {"step": 1}}
    assert watched_objects.trim_managed_fields(found) == {
        "metadata": metadata,
        "spec": {"replicas": 2},
        "status": {"step": 1},
    }
