"""A job's PodGroup on a real API server, read by the real coscheduling plugin in a kube-scheduler of its own beside the default one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from cluster import binaries, pods
from cluster.api import Api
from cluster.engine import Engine
from cluster.operator_process import SECONDS, Operator
from cluster.processes import wait
from support.servers.kubernetes_cluster import a_cluster, install_crd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMESPACE = "surefoot-gang"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP_CRD = f"{CRDS}/podgroups.scheduling.x-k8s.io"
JOB = f"/apis/surefoot.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs/gang"
GROUP = f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{NAMESPACE}/podgroups/gang"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
NODES = 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(NODES)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    made = Api(engine.facts().kubeconfig)
    install_crd(made)
    path = f"/api/v1/namespaces/{NAMESPACE}"
    _gone(made, path)
    _gone(made, GROUP_CRD)
    made.call("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    assert wait(lambda: made.answers(f"{CORE}/serviceaccounts/default"), SECONDS)
    for name in engine.facts().node_names[NODES:]:
        made.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
    yield made
    for name in engine.facts().node_names[NODES:]:
        made.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})
    _gone(made, path)
    _gone(made, GROUP_CRD)


def _gone(api: Api, path: str) -> None:
    if api.answers(path):
        api.call("DELETE", path)
    assert wait(lambda: not api.answers(path), SECONDS), path


@pytest.fixture(scope="module")
def operator(engine: Engine, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Started before the cluster serves any PodGroup."""
    variables = {"SUREFOOT_GANG_SCHEDULERS": "Coscheduling", "SUREFOOT_AGENT_COMMAND": "env"}
    made = Operator("gang", engine, tmp_path_factory.mktemp("gang"), NAMESPACE, variables=variables).start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def scheduler(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], None]]:
    """Starts the kube-scheduler that has the plugin, once it is called."""
    folder = tmp_path_factory.mktemp("scheduler")
    gang = {"enabled": [{"name": "Coscheduling"}]}
    sort = {**gang, "disabled": [{"name": "*"}]}
    profile = {
        "schedulerName": "scheduler-plugins-scheduler",
        "plugins": {"multiPoint": gang, "queueSort": sort},
        "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 5}}],
    }
    body = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(engine.facts().kubeconfig)},
        "profiles": [profile],
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 2,
    }
    (folder / "config.json").write_text(json.dumps(body))
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        if not running:
            command = [str(binaries.gang_scheduler()), f"--config={folder / 'config.json'}", "--secure-port=0"]
            with (folder / "log").open("wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))

    yield start
    for process in running:
        process.kill()
        process.wait(10.0)


def document(engine: Engine, **spec: Any) -> dict[str, Any]:
    """A job whose workers sleep, each on a node of its own."""
    pod = pods.host_pod("unused", ["sleep", "600"], host_prefix=engine.facts().host_prefix)["spec"]
    container = {**pod["containers"][0], "name": "trainer", "env": pods.host_environment()}
    template = {"spec": {**pod, "containers": [container]}}
    return {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gang", "namespace": NAMESPACE},
        "spec": {"replicas": 3, "schedulingPolicy": {"gang": "Coscheduling"}, "template": template, **spec},
    }


def workers(api: Api) -> dict[str, str]:
    """Pod -> its node, empty while it has none; those that end are left out."""
    found = api.call("GET", f"{CORE}/pods?labelSelector=surefoot.dev/part=worker")["items"]
    live = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in live}


def placed(api: Api) -> int:
    return sum(bool(node) for node in workers(api).values())


def condition(api: Api, kind: str = "PodsScheduled") -> dict[str, Any]:
    found = api.call("GET", JOB).get("status", {}).get("conditions", [])
    return next((one for one in found if one["type"] == kind), {})


def group(api: Api) -> dict[str, Any]:
    return api.found(GROUP)


def events(api: Api, reason: str) -> list[str]:
    return [one["message"] for one in api.call("GET", f"{CORE}/events")["items"] if one["reason"] == reason]


def test_without_its_api_a_job_says_so_and_begins_once_it_is_served(
    engine: Engine, api: Api, operator: Operator
) -> None:
    operator.says("leading")
    api.call("POST", JOB.rpartition("/")[0], document(engine))
    assert wait(lambda: condition(api).get("reason") == "PodGroupCreationFailed", SECONDS), operator.text()
    assert "install its CustomResourceDefinition" in condition(api)["message"]
    assert workers(api) == {}
    assert wait(lambda: len(events(api, "PodGroupCreationFailed")) == 1, SECONDS), operator.text()
    crd = yaml.safe_load(binaries.pod_group_crd().read_text(encoding="utf-8"))
    api.create(CRDS, crd)
    assert wait(lambda: len(workers(api)) == 3, SECONDS), operator.text()
    found = group(api)
    assert found["spec"] == {"minMember": 3}
    assert found["metadata"]["ownerReferences"][0]["uid"] == api.call("GET", JOB)["metadata"]["uid"]
    assert len(events(api, "PodGroupCreationFailed")) == 1


def test_a_whole_world_is_placed_or_none_of_it(api: Api, operator: Operator, scheduler: Callable[[], None]) -> None:
    scheduler()
    words = ("podGroup", "PodGroup", "sibling", "rejection")  # whichever step of the plugin it was that said no
    assert wait(lambda: any(word in condition(api)["message"] for word in words), SECONDS), condition(api)
    assert condition(api)["reason"] == "Unschedulable"
    assert placed(api) == 0  # two of three nodes are there: one by one, two would have been taken
    api.merge(JOB, {"spec": {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 3}}})
    assert wait(lambda: group(api)["spec"] == {"minMember": 2}, SECONDS), operator.text()
    assert wait(lambda: placed(api) == 2, SECONDS), condition(api)
    assert len(workers(api)) == 3


def test_a_replacement_is_not_held_back_by_the_group(api: Api, operator: Operator) -> None:
    before = workers(api)
    gone = next(name for name, node in before.items() if node)
    api.call("DELETE", f"{CORE}/pods/{gone}")
    assert wait(lambda: gone not in workers(api) and placed(api) == 2, SECONDS), operator.text()
    assert wait(lambda: len(workers(api)) == 3, SECONDS), operator.text()


def test_a_group_that_somebody_deletes_or_edits_is_mended(api: Api, operator: Operator) -> None:
    first = group(api)["metadata"]["uid"]
    api.call("DELETE", GROUP)
    assert wait(lambda: group(api).get("metadata", {}).get("uid", first) != first, SECONDS), operator.text()
    api.merge(GROUP, {"spec": {"minMember": 7}})
    assert wait(lambda: group(api)["spec"] == {"minMember": 2}, SECONDS), operator.text()


def test_a_policy_is_changed_while_the_job_is_suspended_and_its_group_goes(api: Api, operator: Operator) -> None:
    with pytest.raises(OSError, match="422"):
        api.merge(JOB, {"spec": {"schedulingPolicy": None}})
    api.merge(JOB, {"spec": {"suspend": True}})
    assert wait(lambda: not workers(api) and not group(api), SECONDS), operator.text()
    api.merge(JOB, {"spec": {"schedulingPolicy": None}})
    api.merge(JOB, {"spec": {"suspend": False}})
    assert wait(lambda: placed(api) == 2, SECONDS), operator.text()
    assert not group(api)
    api.call("DELETE", JOB)
    assert wait(lambda: not api.answers(JOB), SECONDS), operator.text()
