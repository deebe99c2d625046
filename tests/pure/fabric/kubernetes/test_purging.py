"""The pod that deletes persistent data: who it is is the job's, what it does is not."""

from __future__ import annotations

import copy
from typing import Any

from surefoot_operator.api.parse import parse_job
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.pods import PodSettings, purge_pod
from surefoot_operator.platforms.kubernetes.views import observations

ENVIRONMENT = WorkerEnvironment(
    {"SUREFOOT_JOB_UID": "u", "SUREFOOT_PERSISTENT_URI": "s3://b/p", "SUREFOOT_WORKER_INDEX": "0"},
    {"SUREFOOT_HOLDER_PASSWORD": "a-password"},
)
DOCUMENT: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "team", "uid": "u"},
    "spec": {
        "checkpoint": {"persistent": {"uri": "s3://b/p", "secretRef": "keys", "onJobDeletion": "Delete"}},
        "template": {
            "spec": {
                "serviceAccountName": "train",
                "imagePullSecrets": [{"name": "registry"}],
                "securityContext": {"runAsNonRoot": True},
                "nodeSelector": {"gpu": "yes"},
                "priorityClassName": "high",
                "initContainers": [{"name": "fetch", "image": "a"}],
                "volumes": [{"name": "certificates", "configMap": {"name": "c"}}],
                "containers": [
                    {"name": "sidecar", "image": "b"},
                    {
                        "name": "trainer",
                        "image": "c",
                        "command": ["python", "train.py"],
                        "args": ["--fast"],
                        "env": [{"name": "AWS_CA_BUNDLE", "value": "/c/ca.pem"}],
                        "resources": {"limits": {"nvidia.com/gpu": 8}},
                        "volumeMounts": [{"name": "certificates", "mountPath": "/c"}],
                    },
                ],
            }
        },
    },
}


def made(settings: PodSettings | None = None) -> dict[str, Any]:
    return purge_pod(parse_job(DOCUMENT), 2, ENVIRONMENT, settings or PodSettings())


def test_it_is_the_jobs_own_identity_and_image_and_none_of_its_training() -> None:
    spec = made()["spec"]
    template = DOCUMENT["spec"]["template"]["spec"]
    for name in ("serviceAccountName", "imagePullSecrets", "securityContext", "volumes"):
        assert spec[name] == template[name]
    assert not {"nodeSelector", "priorityClassName", "initContainers"} & set(spec)
    (container,) = spec["containers"]
    assert container["image"] == "c"
    assert container["volumeMounts"] == template["containers"][1]["volumeMounts"]
    assert not {"args", "ports"} & set(container)
    assert container["command"] == ["python", "-m", "surefoot.tools.delete"]
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"] < 600) == ("Never", True)


def test_a_quota_that_wants_limits_of_every_container_takes_it() -> None:
    (container,) = made()["spec"]["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}  # and none of the training's accelerators
    job = copy.deepcopy(DOCUMENT)
    job["spec"]["template"]["spec"]["containers"][1]["resources"]["requests"] = {"ephemeral-storage": "100Gi"}
    (container,) = purge_pod(parse_job(job), 2, ENVIRONMENT, PodSettings())["spec"]["containers"]
    assert container["resources"]["limits"]["ephemeral-storage"] == "1Gi"


def test_it_knows_the_job_and_its_tier_and_no_other_secret() -> None:
    (container,) = made()["spec"]["containers"]
    told = {entry["name"]: entry for entry in container["env"]}
    assert set(told) == {
        "AWS_CA_BUNDLE",
        "SUREFOOT_JOB_UID",
        "SUREFOOT_PERSISTENT_URI",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    }
    assert told["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "keys"


def test_another_image_may_be_given_and_it_is_no_worker() -> None:
    pod = made(PodSettings(purge_image="runtime:1"))
    assert pod["spec"]["containers"][0]["image"] == "runtime:1"
    assert pod["metadata"]["name"] == "gpt-delete-2"
    assert api_objects.part_of(pod) == api_objects.PURGE
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_how_it_goes_is_read_from_its_pod() -> None:
    pod = made()
    assert (observations.observe_purge(pod) or pod).phase == "Unknown"
    ended = {"terminated": {"exitCode": 1, "message": '{"problem": "AccessDenied"}\n'}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "delete", "state": ended}]}
    found = observations.observe_purge(pod)
    assert found is not None
    assert (found.attempt, found.phase, found.message) == (2, "Failed", '{"problem": "AccessDenied"}')
