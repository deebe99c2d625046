"""PodGroups as coscheduling reads them, and the label by which it finds a pod's group."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from surefoot_operator.api.parse import parse_job
from surefoot_operator.job_snapshot import PodGroup
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, pod_groups, pods
from surefoot_operator.policy.core.actions import CreateWorker

ME = api_objects.JobIdentity("team", "gpt", "u")


def made(policy: dict[str, Any] | None, **template: Any) -> dict[str, Any]:
    """A worker's pod of a job with this schedulingPolicy."""
    spec = {"containers": [{"name": "trainer", "command": ["python"]}], **template.pop("spec", {})}
    body = {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "namespace": "team", "uid": "u"},
        "spec": {"template": {**template, "spec": spec}, **({"schedulingPolicy": policy} if policy else {})},
    }
    return pods.build_pod(parse_job(body), CreateWorker(0, 1), WorkerEnvironment({}, {}), pods.PodSettings())


def stored(group: PodGroup) -> dict[str, Any]:
    body = pod_groups.build_pod_group(ME, group)
    body["metadata"] |= {"uid": "g", "resourceVersion": "7"}
    return body


def test_coscheduling_finds_the_group_by_a_label() -> None:
    coscheduling = made({"gang": "Coscheduling"}, metadata={"labels": {"a": "b"}})
    assert coscheduling["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "gpt"
    assert coscheduling["metadata"]["labels"]["a"] == "b"
    assert coscheduling["metadata"]["labels"][api_objects.JOB_UID_LABEL] == "u"
    assert coscheduling["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def test_a_scheduler_that_the_template_names_stays() -> None:
    pod = made({"gang": "Coscheduling"}, spec={"schedulerName": "default-scheduler"})
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert "schedulerName" not in made(None)["spec"]


@pytest.mark.parametrize(
    ("group", "spec"),
    [
        (PodGroup("Coscheduling", 1), {"minMember": 1}),
        (PodGroup("Coscheduling", 3, 20), {"minMember": 3, "scheduleTimeoutSeconds": 20}),
    ],
)
def test_a_group_says_what_its_scheduler_reads_and_belongs_to_the_job(group: PodGroup, spec: dict[str, Any]) -> None:
    version = "scheduling.x-k8s.io/v1alpha1"
    body = pod_groups.build_pod_group(ME, group)
    assert (body["apiVersion"], body["kind"], body["spec"]) == (version, "PodGroup", spec)
    assert api_objects.is_controlled_by(body, ME)
    assert api_objects.job_uid_label_of(body) == "u"
    assert pod_groups.pod_group_path(group.gang, "team", "gpt") == f"/apis/{version}/namespaces/team/podgroups/gpt"
    assert pod_groups.observe_pod_group(group.gang, stored(group)).group == group


def test_a_change_tests_the_version_that_was_read_and_leaves_what_is_not_ours() -> None:
    old = stored(PodGroup("Coscheduling", 1, 60))
    old["metadata"]["labels"]["theirs"] = "x"
    old["spec"]["minTaskMember"] = {"worker": 1}
    changed = pod_groups.build_pod_group_patch(old, pod_groups.build_pod_group(ME, PodGroup("Coscheduling", 2)))
    assert changed == [
        {"op": "test", "path": "/metadata/uid", "value": "g"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {
            "op": "add",
            "path": "/spec",
            "value": {"minMember": 2, "scheduleTimeoutSeconds": 60, "minTaskMember": {"worker": 1}},
        },
    ]
    old["metadata"]["labels"] = None  # somebody took our labels off: no watch would see it any more
    assert (
        pod_groups.build_pod_group_patch(old, pod_groups.build_pod_group(ME, PodGroup("Coscheduling", 1)))[-1]["path"]
        == "/metadata/labels"
    )


def test_a_scheduler_that_only_writes_its_status_is_no_news() -> None:
    first = stored(PodGroup("Coscheduling", 1))
    later = {**copy.deepcopy(first), "status": {"phase": "Scheduling", "scheduled": 1}}
    later["metadata"]["resourceVersion"] = "8"
    assert pod_groups.plan_fields(first) == pod_groups.plan_fields(later)
    later["spec"]["minMember"] = 5
    assert pod_groups.plan_fields(first) != pod_groups.plan_fields(later)
