"""Nothing of another system's job goes without a word."""

from __future__ import annotations

from typing import Any

import pytest

from support.foreign_jobs import ALL, hyperpod_job, job_set, one, pod, pytorch_job, runtime, train_job
from surefoot_operator.convert.job_draft import rendered

CLAIMS = [{"templates": [{"metadata": {"name": "data"}, "spec": {}}], "retentionPolicy": {"whenDeleted": "Retain"}}]


def mounting(volume: str) -> dict[str, Any]:
    container = {"name": "node", "command": ["torchrun", "a.py"], "volumeMounts": [{"name": volume, "mountPath": "/d"}]}
    return {"spec": {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {}}]}}


def test_claims_that_another_controller_made_are_named_and_so_are_the_mounts_that_miss_them() -> None:
    job = job_set()
    job["spec"]["volumeClaimPolicies"] = CLAIMS
    job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"] = mounting("data")
    found, _ = one(job)
    text = rendered(found)
    assert "spec.volumeClaimPolicies: make the claims, and name them in spec.template.spec.volumes" in text
    assert any(told.startswith("spec.template.spec.volumes lacks data,") for told in found.to_do)
    job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"] = mounting("scratch")
    assert not any("lacks" in told for told in one(job)[0].to_do)


@pytest.mark.parametrize("path", [(), ("replicaSpecs", 0)])
def test_claims_of_a_hyperpod_job_are_named_wherever_they_stand(path: tuple[Any, ...]) -> None:
    job = hyperpod_job()
    at = job["spec"]
    for key in path:
        at = at[key]
    at["volumeClaimPolicies"] = CLAIMS
    text = "spec.replicaSpecs[0].volumeClaimPolicies" if path else "spec.volumeClaimPolicies"
    assert {note.text for note in one(job)[0].left if note.path == text} == {
        "make the claims, and name them in spec.template.spec.volumes"
    }


def test_what_a_runtime_says_and_nobody_reads_is_named() -> None:
    other = runtime()
    other["spec"]["podGroupPolicy"] = {"volcano": {"networkTopology": {"mode": "hard"}}, "other": {"a": 1}}
    other["spec"]["mlPolicy"]["mpi"] = {"mpiImplementation": "OpenMPI"}
    inner = other["spec"]["template"]["spec"]
    inner["volumeClaimPolicies"] = CLAIMS
    inner["replicatedJobs"].insert(0, {"name": "dataset-initializer", "template": {}})
    left = {note.path: note.text for note in one(train_job(), other)[0].left}
    for path in (
        "torch:.spec.podGroupPolicy.volcano",
        "torch:.spec.podGroupPolicy.other.a",
        "torch:.spec.mlPolicy.mpi.mpiImplementation",
        "torch:.spec.template.spec.volumeClaimPolicies",
        "torch:.spec.template.spec.replicatedJobs[0]",
    ):
        assert path in left


def test_what_only_the_pods_template_or_the_server_had_is_named() -> None:
    job = pytorch_job()
    job["metadata"] |= {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}, "generation": 3}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "OnFailure"
    for role in ("Master", "Worker"):
        template = {**pod(), "metadata": {"name": "pod", "labels": {"a": "b"}}}
        job["spec"]["pytorchReplicaSpecs"][role]["template"] = template
    found, _ = one(job)
    left, root = {note.path for note in found.left}, "spec.pytorchReplicaSpecs"
    assert {
        "status",
        "metadata.uid",
        "metadata.generation",
        "metadata.annotations[kubectl.kubernetes.io/last-applied-configuration]",
        f"{root}.Worker.restartPolicy",
        f"{root}.Master.template.metadata.name",
        f"{root}.Master.template.spec.containers[1].name",
        f"{root}.Master.template.spec.restartPolicy",
    } <= left
    taken = {note.path: note.text for note in found.taken}
    assert taken[f"{root}.Master.restartPolicy"] == "spec.failurePolicy.rules"


TOLD_BY_THE_TITLE = ("apiVersion", "kind")
KEPT_AS_IT_IS = ("metadata.name", "metadata.namespace", "metadata.labels.a")


def leaves(tree: Any, path: str = "") -> list[str]:
    """Each value's own path."""
    if isinstance(tree, dict):
        return [one for key, value in tree.items() for one in leaves(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list) and any(isinstance(one, dict | list) for one in tree):
        return [one for place, value in enumerate(tree) for one in leaves(value, f"{path}[{place}]")]
    return [path]


@pytest.mark.parametrize("make", ALL)
def test_each_value_of_a_job_is_taken_over_or_left_with_a_word(make: Any) -> None:
    found, _ = one(make())
    told = [note.path for note in (*found.taken, *found.left)]
    silent = [
        leaf
        for leaf in leaves(make())
        if leaf not in (*TOLD_BY_THE_TITLE, *KEPT_AS_IT_IS)
        and not any(leaf == path or leaf.startswith((f"{path}.", f"{path}[")) for path in told)
    ]
    assert silent == []
