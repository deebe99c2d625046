"""A job that waits in a queue still waits in it after its conversion: queueing systems read pods, not TrainingJobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.foreign_jobs import hyperpod_job, job_set, one, pytorch_job, runtime, train_job

QUEUE = {"kueue.x-k8s.io/queue-name": "gpu-queue", "kueue.x-k8s.io/priority-class": "high"}
KINDS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "PyTorchJob": lambda: [pytorch_job()],
    "TrainJob": lambda: [train_job(), runtime()],
    "JobSet": lambda: [job_set()],
    "HyperPodPyTorchJob": lambda: [hyperpod_job()],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_queue_of_a_job_is_the_queue_of_its_pods(kind: str) -> None:
    documents = KINDS[kind]()
    documents[0]["metadata"]["labels"] = {**QUEUE, "team": "research"}
    conversion, job = one(*documents)
    pod_labels = conversion.job["spec"]["template"]["metadata"]["labels"]
    assert QUEUE.items() <= pod_labels.items()
    assert conversion.job["metadata"]["labels"] == {"team": "research"}
    assert job.spec.scheduling_policy is None
    sources = {note.path: note.text for note in conversion.used_fields}
    name = "kueue.x-k8s.io/queue-name"
    assert sources[f"metadata.labels[{name}]"] == f"spec.template.metadata.labels[{name}]"


@pytest.mark.parametrize("label", ["kai.scheduler/queue", "runai/queue", "yunikorn.apache.org/queue"])
def test_labels_of_other_queueing_systems_reach_the_pods(label: str) -> None:
    source = pytorch_job()
    source["metadata"]["labels"] = {label: "research"}
    conversion, _ = one(source)
    assert conversion.job["spec"]["template"]["metadata"]["labels"][label] == "research"


def test_an_annotation_that_names_a_queue_reaches_the_pods() -> None:
    source = pytorch_job()
    source["metadata"]["annotations"] = {"scheduling.volcano.sh/queue-name": "research"}
    conversion, _ = one(source)
    pod_annotations = conversion.job["spec"]["template"]["metadata"]["annotations"]
    assert pod_annotations["scheduling.volcano.sh/queue-name"] == "research"


def test_a_queue_that_the_pods_name_already_is_kept() -> None:
    source = pytorch_job()
    source["metadata"]["labels"] = dict(QUEUE)
    for role in ("Master", "Worker"):
        template = source["spec"]["pytorchReplicaSpecs"][role]["template"]
        template.setdefault("metadata", {})["labels"] = {"kueue.x-k8s.io/queue-name": "pods-own"}
    conversion, _ = one(source)
    assert conversion.job["spec"]["template"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "pods-own"


@pytest.mark.parametrize("on_pods", [False, True], ids=["label of the job", "label of the pods"])
def test_a_job_of_kueue_is_no_gang(on_pods: bool) -> None:
    source = pytorch_job()
    source["spec"]["runPolicy"]["schedulingPolicy"] = {"queue": "gpu-queue"}
    if on_pods:
        for role in ("Master", "Worker"):
            template = source["spec"]["pytorchReplicaSpecs"][role]["template"]
            template.setdefault("metadata", {})["labels"] = dict(QUEUE)
    else:
        source["metadata"]["labels"] = dict(QUEUE)
    conversion, _ = one(source)
    assert "schedulingPolicy" not in conversion.job["spec"]
    assert any(note.path.endswith("schedulingPolicy.queue") for note in conversion.skipped_fields)


def test_a_suspension_that_kueue_would_end_is_left_out() -> None:
    """No part of Kueue unsuspends a TrainingJob, so it would never begin."""
    source = pytorch_job()
    source["metadata"]["labels"] = dict(QUEUE)
    source["spec"]["runPolicy"]["suspend"] = True
    conversion, job = one(source)
    assert not job.spec.suspend
    assert any(note.path == "suspend" and "Kueue" in note.text for note in conversion.skipped_fields)


def test_a_suspension_without_a_queue_is_kept() -> None:
    source = pytorch_job()
    source["spec"]["runPolicy"]["suspend"] = True
    _, job = one(source)
    assert job.spec.suspend
