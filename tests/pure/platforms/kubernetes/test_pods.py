"""Tests of `platforms.kubernetes.pods`."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes import api_objects, pods
from surefoot_operator.platforms.kubernetes.pods import PodSettings, build_purge_pod
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.policy.core.actions import CreateWorker

# ---- pods ------------------------------------------------------------------------------------------------------------
# A worker's pod: the template whole, and beside it what the agent needs.

ENVIRONMENT = WorkerEnvironment({"SUREFOOT_WORKER_INDEX": "2"}, {"SUREFOOT_MEMORY_PASSWORD": "a-password"})
SPEC: dict[str, Any] = {
    "serviceAccountName": "train",
    "priorityClassName": "high",
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "initContainers": [{"name": "fetch", "image": "a"}, {"name": "proxy", "image": "p", "restartPolicy": "Always"}],
    "securityContext": {"runAsNonRoot": True, "fsGroup": 7},
    "runtimeClassName": "nvidia",
    "schedulerName": "gangs",
    "nodeSelector": {"gpu": "yes"},
    "imagePullSecrets": [{"name": "registry"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "volumes": [{"name": "data", "emptyDir": {}}],
    "terminationGracePeriodSeconds": 7,
    "containers": [
        {"name": "sidecar", "image": "b"},
        {
            "name": "trainer",
            "image": "c",
            "command": ["python", "train.py"],
            "args": ["--fast"],
            "env": [{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}],
            "resources": {"limits": {"nvidia.com/gpu": 8}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "securityContext": {"readOnlyRootFilesystem": True},
            "ports": [{"name": "debug", "containerPort": 5678}],
        },
        {"name": "logger", "image": "d", "ports": [{"containerPort": 80}]},
    ],
}


def parsed(spec: dict[str, Any], **fields: Any) -> TrainingJob:
    return parse_job(
        {
            "apiVersion": "surefoot.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "gpt", "namespace": "team", "uid": "u"},
            "spec": {
                "template": {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}, "spec": spec},
                **fields,
            },
        }
    )


def made(
    spec: dict[str, Any] = SPEC,
    avoid: tuple[str, ...] = (),
    told: WorkerEnvironment = ENVIRONMENT,
    **fields: Any,
) -> dict[str, Any]:
    job = parsed(spec, **fields)
    before = copy.deepcopy(job.spec.template.raw)
    found = pods.build_pod(job, CreateWorker(2, 5, avoid), told, pods.PodSettings())
    assert job.spec.template.raw == before, "the job itself was written into"
    return found


def trainer(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")


def environment(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [entry["name"] for entry in trainer(pod)["env"]]
    assert len(names) == len(set(names))
    return {entry["name"]: entry for entry in trainer(pod)["env"]}


def test_it_is_named_labelled_and_owned_and_waits_for_nobody_at_its_end() -> None:
    pod = made()
    metadata = pod["metadata"]
    secrets = {
        e["valueFrom"]["secretKeyRef"]["name"] for e in trainer(pod)["env"] if "secretKeyRef" in e.get("valueFrom", {})
    }
    (secret,) = (name for name in secrets if name.startswith("gpt-worker-"))
    assert (metadata["name"], metadata["namespace"]) == ("gpt-worker-2-5", "team")
    assert metadata["labels"] == {
        "a": "b",
        "surefoot.dev/job-name": "gpt",
        "surefoot.dev/job-uid": "u",
        "surefoot.dev/part": "worker",
        "surefoot.dev/worker-index": "2",
        "surefoot.dev/attempt": "5",
        "surefoot.dev/secret": secret.removeprefix("gpt-worker-"),
        "app.kubernetes.io/managed-by": "surefoot-operator",
    }
    assert metadata["annotations"] == {"c": "d"}
    assert metadata["ownerReferences"][0]["uid"] == "u"
    assert "finalizers" not in metadata


def test_the_template_is_respected_whole() -> None:
    spec = made()["spec"]
    for name in set(SPEC) - {"containers", "initContainers", "volumes", "affinity"}:
        assert spec[name] == SPEC[name], name
    said = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    assert spec["initContainers"] == [{**said, **one} for one in SPEC["initContainers"]], "its last words are told"
    assert [c["name"] for c in spec["containers"]] == ["sidecar", "trainer", "logger"]
    assert spec["containers"][2] == SPEC["containers"][2]
    assert spec["terminationGracePeriodSeconds"] == 7
    assert spec["containers"][0] == SPEC["containers"][0]
    assert spec["affinity"]["nodeAffinity"] == SPEC["affinity"]["nodeAffinity"]
    assert SPEC["volumes"][0] in spec["volumes"]
    assert spec["restartPolicy"] == "Never"
    for name in ("image", "args", "resources", "securityContext", "ports"):
        assert trainer(made())[name] == SPEC["containers"][1][name]


def test_the_agent_stands_in_front_of_the_command_with_what_it_needs() -> None:
    pod = made()
    assert trainer(pod)["command"] == ["surefoot-agent", "--", "python", "train.py"]
    told = environment(pod)
    assert told["SUREFOOT_WORKER_INDEX"]["value"] == "2"
    assert told["SUREFOOT_TERMINATION_GRACE_SECONDS"]["value"] == "7"
    assert told["SUREFOOT_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert told["SUREFOOT_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in trainer(pod)["volumeMounts"]}
    assert mounts[told["SUREFOOT_RUN_FOLDER"]["value"]]["emptyDir"] == {"medium": "Memory"}
    assert mounts[told["SUREFOOT_SCRATCH_FOLDER"]["value"]]["emptyDir"] == {}, "logs must not use up the memory"
    folder, _, _ = told["SUREFOOT_TOKEN_FILE"]["value"].rpartition("/")
    (source,) = mounts[folder]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "surefoot"


def test_its_metrics_have_a_named_port_beside_the_templates_own() -> None:
    told = replace(ENVIRONMENT, plain={**ENVIRONMENT.plain, "SUREFOOT_METRICS_PORT": "9464"})
    debug = {"name": "debug", "containerPort": 5678}
    assert trainer(made(told=told))["ports"] == [debug, {"name": "sf-metrics", "containerPort": 9464}]
    own = copy.deepcopy(SPEC)
    own["containers"][0]["ports"] = [{"name": "sf-metrics", "containerPort": 1}]
    assert trainer(made(own, told=told))["ports"] == [debug]


def test_its_name_in_dns_is_that_of_its_place_below_the_jobs_service() -> None:
    spec = made()["spec"]
    assert (spec["hostname"], spec["subdomain"]) == ("worker-2", "gpt-workers")
    for own in ({"hostNetwork": True}, {"hostname": "mine"}, {"subdomain": "mine"}):
        spec = made({**SPEC, **own})["spec"]
        assert {name: spec[name] for name in ("hostname", "subdomain") if name in spec} == {
            name: value for name, value in own.items() if name != "hostNetwork"
        }


def test_the_jobs_service_names_its_workers_and_nobody_else() -> None:
    found = pods.build_service(parsed(SPEC))
    assert (found["metadata"]["name"], found["spec"]["clusterIP"]) == ("gpt-workers", "None")
    assert found["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert found["spec"]["selector"].items() <= made()["metadata"]["labels"].items()


def test_a_worker_sees_its_nodes_socket_where_the_installation_has_one() -> None:
    assert "SUREFOOT_MEMORY_SOCKET" not in environment(made())
    assert all("hostPath" not in volume for volume in made()["spec"]["volumes"])
    pod = pods.build_pod(
        parsed(SPEC), CreateWorker(2, 1, ()), ENVIRONMENT, pods.PodSettings(socket_folder="/run/of-nodes")
    )
    folder, _, _ = environment(pod)["SUREFOOT_MEMORY_SOCKET"]["value"].rpartition("/")
    [mount] = [mount for mount in trainer(pod)["volumeMounts"] if mount["mountPath"] == folder]
    assert mount["readOnly"], "a worker must not put another socket there"
    [volume] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert volume["hostPath"] == {"path": "/run/of-nodes", "type": "DirectoryOrCreate"}


def test_staging_memory_is_bounded_by_the_trainers_memory_limit() -> None:
    limited = copy.deepcopy(SPEC)
    limited["containers"][1]["resources"]["limits"]["memory"] = "8Gi"
    volumes = {volume["name"]: volume for volume in made(limited)["spec"]["volumes"]}
    assert volumes["surefoot-run"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_a_grace_period_of_null_is_that_of_kubernetes() -> None:
    told = environment(made({**SPEC, "terminationGracePeriodSeconds": None}))
    assert told["SUREFOOT_TERMINATION_GRACE_SECONDS"]["value"] == "30"


def test_secrets_are_named_and_never_said() -> None:
    persistent = {"uri": "s3://bucket/prefix", "secretRef": "keys"}
    pod = made(checkpoint={"persistent": persistent})
    assert "a-password" not in str(pod)
    told = environment(pod)
    name = told["SUREFOOT_MEMORY_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"]
    assert name.startswith("gpt-worker-")
    assert told["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "keys"
    assert told["AWS_ACCESS_KEY_ID"]["value"] == "mine"  # the template's own word


def test_equal_secrets_are_one_object_and_others_are_another() -> None:
    job = parse_job(
        {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "gpt", "uid": "u"}}
        | {"spec": {"template": {"spec": SPEC}}}
    )
    first = pods.build_secret(job, ENVIRONMENT)
    assert pods.build_secret(job, replace(ENVIRONMENT, plain={})) == first
    assert (
        pods.build_secret(job, replace(ENVIRONMENT, secret={"A": "b"}))["metadata"]["name"] != first["metadata"]["name"]
    )
    assert first["stringData"] == {"SUREFOOT_MEMORY_PASSWORD": "a-password"}


def test_workers_of_a_job_share_no_node_whatever_copies_are_spread_over() -> None:
    """Eight workers in two racks must be placed: the label that copies are spread over binds no worker."""
    spread = {"memory": {"topologyKey": "topology.kubernetes.io/zone"}}
    (term,) = made(checkpoint=spread)["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"] == {"matchLabels": {"surefoot.dev/job-uid": "u"}}


@pytest.mark.parametrize(
    "own",
    [
        {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
        {"topologySpreadConstraints": [{"maxSkew": 1}]},
    ],
)
def test_a_template_that_says_how_pods_are_spread_is_left_alone(own: dict[str, Any]) -> None:
    spec = made({**SPEC, **own})["spec"]
    assert {name: spec[name] for name in own} == own


def test_nodes_to_avoid_are_a_wish_beside_the_templates_own() -> None:
    place = made(avoid=("n1",))["spec"]["affinity"]["nodeAffinity"]
    (wish,) = place["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["preference"]["matchExpressions"][0]["values"] == ["n1"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" in place


# ---- purging ---------------------------------------------------------------------------------------------------------
# The pod that deletes persistent data: who it is is the job's, what it does is not.

ENVIRONMENT_PURGING = WorkerEnvironment(
    {"SUREFOOT_JOB_UID": "u", "SUREFOOT_PERSISTENT_URI": "s3://b/p", "SUREFOOT_WORKER_INDEX": "0"},
    {"SUREFOOT_MEMORY_PASSWORD": "a-password"},
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


def made_purging(settings: PodSettings | None = None) -> dict[str, Any]:
    return build_purge_pod(parse_job(DOCUMENT), 2, ENVIRONMENT_PURGING, settings or PodSettings())


def test_it_is_the_jobs_own_identity_and_image_and_none_of_its_training() -> None:
    spec = made_purging()["spec"]
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
    (container,) = made_purging()["spec"]["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}  # and none of the training's accelerators
    job = copy.deepcopy(DOCUMENT)
    job["spec"]["template"]["spec"]["containers"][1]["resources"]["requests"] = {"ephemeral-storage": "100Gi"}
    (container,) = build_purge_pod(parse_job(job), 2, ENVIRONMENT_PURGING, PodSettings())["spec"]["containers"]
    assert container["resources"]["limits"]["ephemeral-storage"] == "1Gi"


def test_it_knows_the_job_and_its_tier_and_no_other_secret() -> None:
    (container,) = made_purging()["spec"]["containers"]
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
    pod = made_purging(PodSettings(purge_image="runtime:1"))
    assert pod["spec"]["containers"][0]["image"] == "runtime:1"
    assert pod["metadata"]["name"] == "gpt-delete-2"
    assert api_objects.role_of(pod) == api_objects.PURGE
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_how_it_goes_is_read_from_its_pod() -> None:
    pod = made_purging()
    assert (observations.observe_purge(pod) or pod).phase == "Unknown"
    ended = {"terminated": {"exitCode": 1, "message": '{"problem": "AccessDenied"}\n'}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "delete", "state": ended}]}
    found = observations.observe_purge(pod)
    assert found is not None
    assert (found.attempt, found.phase, found.message) == (2, "Failed", '{"problem": "AccessDenied"}')
