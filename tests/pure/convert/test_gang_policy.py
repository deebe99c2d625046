"""Which gang scheduler another system's job is placed by, where anything says it."""

from __future__ import annotations

from typing import Any

import pytest

from support.foreign_jobs import one, pytorch_job, runtime, train_job
from surefoot_operator.api.parse import parse_job

PLACE = "spec.runPolicy.schedulingPolicy"


def kubeflow(policy: dict[str, Any], scheduler_name: str | None = None) -> dict[str, Any]:
    job = pytorch_job()
    job["spec"]["runPolicy"]["schedulingPolicy"] = policy
    for role in ("Master", "Worker"):
        if scheduler_name is not None:
            job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]["schedulerName"] = scheduler_name
    return job


@pytest.mark.parametrize(
    ("policy", "scheduler_name", "wanted", "deadline"),
    [
        ({"queue": "q"}, None, None, None),
        ({"minAvailable": 2, "priorityClass": "high", "scheduleTimeoutSeconds": 30}, "volcano", None, 30),
        (
            {"minAvailable": 2, "scheduleTimeoutSeconds": 30},
            "scheduler-plugins-scheduler",
            {"gang": "Coscheduling", "scheduleTimeoutSeconds": 30},
            None,
        ),
        ({"scheduleTimeoutSeconds": 30}, None, None, 30),
        ({"minAvailable": 4}, None, None, None),
    ],
)
def test_the_pods_scheduler_tells_whose_gang_it_is(
    policy: dict[str, Any], scheduler_name: str | None, wanted: dict[str, Any] | None, deadline: int | None
) -> None:
    found, job = one(kubeflow(policy, scheduler_name))
    assert found.job["spec"].get("schedulingPolicy") == wanted
    assert found.job["spec"]["runPolicy"].get("schedulingDeadlineSeconds") == deadline
    assert job.spec == parse_job(found.job).spec
    asked = any(told.startswith("spec.schedulingPolicy: name the gang scheduler") for told in found.to_do)
    assert asked == (wanted is None and "minAvailable" in policy)
    left = {note.path: note.text for note in found.left}
    for name in ("minAvailable", "queue"):
        assert (f"{PLACE}.{name}" in left) == (name in policy)
    priority = found.job["spec"]["template"]["spec"].get("priorityClassName")
    assert priority == policy.get("priorityClass")


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ({"coscheduling": {}}, {"gang": "Coscheduling"}),
        ({"coscheduling": {"scheduleTimeoutSeconds": 60}}, {"gang": "Coscheduling", "scheduleTimeoutSeconds": 60}),
    ],
)
def test_a_training_runtime_names_its_gang_scheduler(policy: dict[str, Any], wanted: dict[str, Any]) -> None:
    other = runtime()
    other["spec"]["podGroupPolicy"] = policy
    found, _ = one(train_job(), other)
    assert found.job["spec"]["schedulingPolicy"] == wanted
    assert not any("podGroupPolicy" in note.path for note in found.left)
