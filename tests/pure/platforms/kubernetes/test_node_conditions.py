"""Tests of `platforms.kubernetes.node_conditions`."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.memory.connection_pool import MemoryTierCredentials
from surefoot_operator.platforms.kubernetes import api_objects, node_conditions
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_writes import format_time
from surefoot_operator.platforms.kubernetes.node_conditions import (
    CONDITION_TYPE,
    UNHEALTHY_KEY,
    NodeReport,
    build_node_patches,
    collect_reports,
)
from surefoot_operator.platforms.kubernetes.views import memory_tier_pods, observations, watched_objects
from surefoot_operator.platforms.kubernetes.views import observations as node_objects
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness

# ---- kept fields -----------------------------------------------------------------------------------------------------
# What is kept of an API object: all that is read of it, and nothing that grows with its template or with who wrote it.

Object = dict[str, Any]
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
WRITERS = [{"manager": "kwok", "fieldsV1": {"f:status": {f"f:{n}": {} for n in range(100)}}}]


def pod(variables: int = 100, **status: Any) -> Object:
    own = {
        api_objects.WORKER_INDEX_LABEL: "1",
        api_objects.ATTEMPT_LABEL: "3",
        api_objects.PART_LABEL: api_objects.WORKER,
        **api_objects.job_labels("gpt", "u"),
    }
    metadata = {
        "name": "p", "namespace": "team", "uid": "x", "resourceVersion": "7", "managedFields": WRITERS,
        "creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [api_objects.owner_reference("gpt", "u")],
        "labels": {**own, "team": "ours", "controller-revision-hash": "r1"},
        "annotations": {api_objects.MEMORY_SERVER_TLS: "true", "note": "long"},
    }  # fmt: skip
    ports = [{"name": api_objects.MEMORY_SERVER_CONTAINER, "containerPort": 6380}]
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
        api_objects.role_of,
        api_objects.job_uid_label_of,
    ):
        assert cast(Any, read)(kept) == cast(Any, read)(found)
    assert api_objects.is_controlled_by(kept, job)
    assert kept["metadata"].get("deletionTimestamp") == found["metadata"].get("deletionTimestamp")


@pytest.mark.parametrize("found", PODS)
def test_of_a_holders_pod_everything_that_is_read_is_kept(found: Object) -> None:
    kept, access = watched_objects.trim_server_pod(found), MemoryTierCredentials(password="p", authority="a")
    assert observations.observe_servers(kept, False, "d", access) == observations.observe_servers(
        found, False, "d", access
    )
    assert observations.server_plan_fields(kept) == observations.server_plan_fields(found)
    read = [memory_tier_pods.observe_server_pods([one], "u", [], KubeletLiveness()) for one in (kept, found)]
    assert read[0] == read[1] != ()


def node(images: int = 100, **other: Any) -> Object:
    metadata = {
        "name": "n1", "uid": "node-n1", "resourceVersion": "7", "managedFields": WRITERS,
        "labels": {api_objects.HOSTNAME_LABEL: "n1", "rack": "r2", "state": "broken"}, "annotations": {"note": "long"},
    }  # fmt: skip
    conditions = [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "posting", "lastHeartbeatTime": "x"},
        {
            "type": node_conditions.CONDITION_TYPE,
            "status": "True",
            "reason": "R",
            "message": "m",
            "lastTransitionTime": "t",
        },
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
    for read in (
        observations.node_plan_fields,
        observations.is_cordoned_or_evacuated,
        observations.lease_outweighs_conditions,
    ):
        assert cast(Any, read)(kept) == cast(Any, read)(found)
    for heard in (
        KubeletLiveness(),
        KubeletLiveness(silent=frozenset(("n1",))),
        KubeletLiveness(renewed=frozenset(("n1",))),
    ):
        assert observations.observe_node(kept, heard, "rack") == observations.observe_node(found, heard, "rack")
    for report in (None, node_conditions.NodeReport("Slow", "it is slow", 9.0)):
        written = node_conditions.build_node_patches(found, report, "NoSchedule", 1.0)
        assert node_conditions.build_node_patches(kept, report, "NoSchedule", 1.0) == written


def parts(found: Any) -> int:
    """Mappings, lists and values in all."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return 1 + sum(map(parts, inner))


def test_what_is_kept_does_not_grow_with_templates_images_and_writers() -> None:
    cache = ClusterCache(cast(Api, None))
    for feed, made, most in ((cache.workers, pod, 40), (cache.servers, pod, 50), (cache.nodes, node, 35)):
        sizes = set()
        for event, many in (("ADDED", 10), ("MODIFIED", 1000)):
            feed.items.clear()
            feed._apply_event(event, cast(Any, made)(many))
            (kept,) = feed.items.values()
            sizes.add(parts(kept))
            assert parts(kept) <= most
        assert len(sizes) == 1
        feed.items.clear()
        feed.apply_write_result({**cast(Any, made)(1000)})
        assert {parts(one) for one in feed.items.values()} <= sizes


def test_a_job_is_kept_whole_but_for_who_wrote_what() -> None:
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "resourceVersion": "7", "annotations": {"a": "b"}}
    found = {"metadata": {**metadata, "managedFields": WRITERS}, "spec": {"replicas": 2}, "status": {"step": 1}}
    assert watched_objects.trim_managed_fields(found) == {
        "metadata": metadata,
        "spec": {"replicas": 2},
        "status": {"step": 1},
    }


# ---- node reports ----------------------------------------------------------------------------------------------------
# What is written on nodes that jobs found sick: by whom, for how long, for how many at once, and nothing without need.

NOW = 1_000_000.0
REPORT = NodeReport("GpuLost", "GPU 0 is lost; found by an agent of job ns/gpt", NOW + 100)


def node_node_reports(
    name: str = "n0", condition: dict[str, Any] | None = None, taints: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}, *([{"type": CONDITION_TYPE, **condition}] if condition else [])]
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": "7"},
        "spec": {"taints": taints or []},
        "status": {"conditions": conditions},
    }


def job(name: str, **sick: tuple[str, float]) -> dict[str, Any]:
    entries = [{"name": n, "reason": reason, "untilTime": format_time(until)} for n, (reason, until) in sick.items()]
    return {"metadata": {"namespace": "ns", "name": name}, "status": {"unhealthyNodes": entries}}


def merged(found: dict[str, Any], report: NodeReport | None, taint: str = "") -> dict[str, Any]:
    """The node after the writes, as the API server merges them."""
    writes = build_node_patches(found, report, taint, NOW)
    conditions = {one["type"]: one for one in found["status"]["conditions"]}
    annotations = dict(found["metadata"].get("annotations") or {})
    if writes.status is not None:
        conditions |= {one["type"]: one for one in writes.status["status"]["conditions"]}
        annotations |= writes.status["metadata"]["annotations"]
    taints = found["spec"]["taints"]
    if writes.taint is not None:  # a list of taints is replaced whole, unlike conditions
        assert writes.taint["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]
        taints = writes.taint["spec"]["taints"]
    return {
        "metadata": {**found["metadata"], "annotations": {k: v for k, v in annotations.items() if v is not None}},
        "spec": {"taints": taints},
        "status": {"conditions": list(conditions.values())},
    }


def test_a_sick_node_gets_a_condition_with_reason_and_job_and_a_mark_for_repair() -> None:
    nodes = {"n0": node_node_reports()}
    reports, left_out = collect_reports([job("gpt", n0=("GpuLost: GPU 0 is lost", NOW + 100))], nodes, NOW)
    assert (reports, left_out) == ({"n0": REPORT}, [])
    told = merged(nodes["n0"], reports["n0"])
    (condition,) = (one for one in told["status"]["conditions"] if one["type"] == CONDITION_TYPE)
    assert (condition["status"], condition["reason"], condition["message"]) == ("True", "GpuLost", REPORT.message)
    assert condition["lastTransitionTime"] == format_time(NOW)
    assert told["metadata"]["annotations"] == {UNHEALTHY_KEY: f"GpuLost: {REPORT.message}"}
    assert told["spec"]["taints"] == [], "a taint only where one is wanted"
    assert node_objects.observe_node(told, KubeletLiveness(), "zone", KNOWN_SIGNALS).evacuation_reason.startswith(
        "it has the condition SurefootUnhealthy=True"
    )


@pytest.mark.parametrize("taint", ["", "NoSchedule"])
@pytest.mark.parametrize("report", [REPORT, None])
@pytest.mark.parametrize(
    "condition",
    [
        None,
        {"status": "False", "reason": "NothingFound", "message": ""},
        {"status": "True", "reason": "LinkDown", "message": "x"},
    ],
)
def test_what_was_written_is_not_written_again(condition: Any, report: NodeReport | None, taint: str) -> None:
    once = merged(node_node_reports(condition=condition), report, taint)
    again = build_node_patches(once, report, taint, NOW + 50)
    assert (again.status, again.taint) == (None, None)


def test_a_node_of_which_nothing_is_found_any_more_is_taken_back_and_one_that_never_was_is_not_touched() -> None:
    assert build_node_patches(node_node_reports(), None, "NoSchedule", NOW) == build_node_patches(
        node_node_reports(), None, "", NOW
    )
    assert build_node_patches(node_node_reports(), None, "NoSchedule", NOW).status is None
    sick = merged(node_node_reports(), REPORT, "NoSchedule")
    assert sick["spec"]["taints"] == [{"key": UNHEALTHY_KEY, "value": "GpuLost", "effect": "NoSchedule"}]
    well = merged(sick, None, "NoSchedule")
    assert well["spec"]["taints"] == []
    assert well["metadata"]["annotations"] == {}
    assert node_objects.observe_node(well, KubeletLiveness(), "zone", KNOWN_SIGNALS).evacuation_reason == ""


def test_taints_of_others_and_without_a_wish_are_left_alone() -> None:
    other = {"key": "gpu", "effect": "NoSchedule"}
    sick = merged(node_node_reports(taints=[other]), REPORT, "NoSchedule")
    assert sick["spec"]["taints"][0] == other
    assert merged(sick, None, "NoSchedule")["spec"]["taints"] == [other]
    marked = node_node_reports(taints=[{"key": UNHEALTHY_KEY, "effect": "NoSchedule"}])
    assert build_node_patches(marked, None, "", NOW).taint is None


def test_reports_decay_and_the_longest_of_several_jobs_counts() -> None:
    nodes = {"n0": node_node_reports()}
    jobs = [
        job("a", n0=("GpuLost: x", NOW + 10)),
        job("b", n0=("LinkDown: y", NOW + 20)),
        {"metadata": {"namespace": "ns", "name": "c"}},
    ]
    assert collect_reports(jobs, nodes, NOW)[0]["n0"].reason == "LinkDown"
    assert collect_reports(jobs, nodes, NOW + 15)[0]["n0"].reason == "LinkDown"
    assert collect_reports(jobs, nodes, NOW + 25) == ({}, [])
    assert collect_reports([job("a", n9=("GpuLost: x", NOW + 10))], nodes, NOW) == ({}, []), "a node that is gone"


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5))
def test_a_tenth_of_the_cluster_at_most_is_told_of_and_who_was_told_of_stays(size: int, sick: int, marked: int) -> None:
    nodes = {f"n{i:02}": node_node_reports(f"n{i:02}") for i in range(size)}
    found = job("gpt", **{f"n{i:02}": ("GpuLost: x", NOW + 10) for i in range(min(sick, size))})
    most = max(1, size // 10)
    before = [f"n{i:02}" for i in range(min(sick, size))][-min(marked, most) :] if marked else []
    for name in before:
        nodes[name] = merged(nodes[name], REPORT)
    reports, left_out = collect_reports([found], nodes, NOW)
    assert len(reports) <= most
    assert set(before) <= set(reports)
    assert len(reports) + len(left_out) == min(sick, size)
