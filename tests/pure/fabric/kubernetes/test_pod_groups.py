"""PodGroups as the two schedulers read them, and the marks by which they find a pod's group."""

from __future__ import annotations

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
    return pods.pod(parse_job(body), CreateWorker(0, 1), WorkerEnvironment({}, {}), pods.PodSettings())


def stored(group: PodGroup, **status: Any) -> dict[str, Any]:
    body = pod_groups.body(ME, group)
    body["metadata"] |= {"uid": "g", "resourceVersion": "7"}
    return {**body, "status": status}


def test_volcano_finds_the_group_by_an_annotation_and_coscheduling_by_a_label() -> None:
    volcano = made({"gang": "Volcano"}, metadata={"annotations": {"a": "b"}})
    assert volcano["metadata"]["annotations"] == {"a": "b", "scheduling.k8s.io/group-name": "gpt"}
    assert volcano["spec"]["schedulerName"] == "volcano"
    coscheduling = made({"gang": "Coscheduling"}, metadata={"labels": {"a": "b"}})
    assert coscheduling["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "gpt"
    assert coscheduling["metadata"]["labels"]["a"] == "b"
    assert coscheduling["metadata"]["labels"][api_objects.JOB_UID] == "u"
    assert coscheduling["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def test_a_scheduler_that_the_template_names_stays() -> None:
    pod = made({"gang": "Coscheduling"}, spec={"schedulerName": "default-scheduler"})
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert "schedulerName" not in made(None)["spec"]


@pytest.mark.parametrize(
    ("group", "version", "spec"),
    [
        (
            PodGroup("Volcano", 2, "research", "high"),
            "scheduling.volcano.sh/v1beta1",
            {"minMember": 2, "queue": "research", "priorityClassName": "high"},
        ),
        (PodGroup("Volcano", 1), "scheduling.volcano.sh/v1beta1", {"minMember": 1}),
        (
            PodGroup("Coscheduling", 3, schedule_timeout_seconds=20),
            "scheduling.x-k8s.io/v1alpha1",
            {"minMember": 3, "scheduleTimeoutSeconds": 20},
        ),
    ],
)
def test_a_group_says_what_its_scheduler_reads_and_belongs_to_the_job(
    group: PodGroup, version: str, spec: dict[str, Any]
) -> None:
    body = pod_groups.body(ME, group)
    assert (body["apiVersion"], body["kind"], body["spec"]) == (version, "PodGroup", spec)
    assert api_objects.is_of(body, ME)
    assert api_objects.job_of(body) == "u"
    assert pod_groups.path(group.gang, "team", "gpt") == f"/apis/{version}/namespaces/team/podgroups/gpt"
    assert pod_groups.seen(group.gang, stored(group)).group == group


def test_a_change_tests_the_version_that_was_read_and_leaves_what_is_not_ours() -> None:
    old = stored(PodGroup("Volcano", 1, "a"))
    old["metadata"]["labels"]["theirs"] = "x"
    old["spec"]["minTaskMember"] = {"worker": 1}
    changed = pod_groups.operations(old, pod_groups.body(ME, PodGroup("Volcano", 2)))
    assert changed == [
        {"op": "test", "path": "/metadata/uid", "value": "g"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
        {"op": "add", "path": "/spec", "value": {"minMember": 2, "queue": "a", "minTaskMember": {"worker": 1}}},
    ]
    old["metadata"]["labels"] = None  # somebody took our labels off: no watch would see it any more
    assert pod_groups.operations(old, pod_groups.body(ME, PodGroup("Volcano", 1)))[-1]["path"] == "/metadata/labels"


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (None, ""),
        (
            [
                {
                    "type": "Unschedulable",
                    "status": "True",
                    "lastTransitionTime": "2026-01-01T00:00:02Z",
                    "message": "no",
                }
            ],
            "no",
        ),
        (
            [
                {
                    "type": "Unschedulable",
                    "status": "True",
                    "lastTransitionTime": "2026-01-01T00:00:01Z",
                    "message": "no",
                },
                {"type": "Scheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:02Z"},
            ],
            "",
        ),
    ],
)
def test_only_the_last_word_of_a_scheduler_counts(conditions: Any, message: str) -> None:
    found = stored(PodGroup("Volcano", 1), conditions=conditions)
    assert pod_groups.seen("Volcano", found).message == message


def test_a_scheduler_that_looked_again_and_says_the_same_is_no_news() -> None:
    told = {"type": "Unschedulable", "status": "True", "message": "no"}
    first = stored(PodGroup("Volcano", 1), conditions=[{**told, "lastTransitionTime": "2026-01-01T00:00:01Z"}])
    later = stored(PodGroup("Volcano", 1), conditions=[{**told, "lastTransitionTime": "2026-01-01T00:00:02Z"}])
    later["metadata"]["resourceVersion"] = "8"
    assert pod_groups.marks(first) == pod_groups.marks(later)
    later["spec"]["minMember"] = 5
    assert pod_groups.marks(first) != pod_groups.marks(later)
