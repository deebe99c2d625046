"""A job behind real Kueue, whose plain pods its workers are: admitted one by one, and preempted one by one.

Kueue's manager runs on the host, built from the Go module proxy; workers sleep. What a training does when one of its pods is deleted is
tried in test_scenario_drained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster import pods
from cluster.api import Api
from cluster.engine import Engine
from cluster.kueue import QUEUES, Kueue
from cluster.operator_process import SECONDS, Operator
from cluster.processes import wait
from support.servers.kubernetes_cluster import a_cluster, install_crd

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

NAMESPACE = "surefoot-queues"
JOB = f"/apis/surefoot.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs/queued"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
QUEUE = {"kueue.x-k8s.io/queue-name": "research"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    made = Api(engine.facts().kubeconfig)
    install_crd(made)
    if made.answers(CORE):  # left by a run that was killed
        made.call("DELETE", CORE)
    assert wait(lambda: not made.answers(CORE), SECONDS)
    made.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    assert wait(lambda: made.answers(f"{CORE}/serviceaccounts/default"), SECONDS)
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
    made.create(CLASSES, {**urgent, "value": 1000})
    yield made
    made.call("DELETE", f"{CLASSES}/urgent")
    made.call("DELETE", CORE)
    assert wait(lambda: not made.answers(CORE), SECONDS)


@pytest.fixture(scope="module")
def kueue(engine: Engine, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Room for two workers in its queue."""
    made = Kueue(engine, api, tmp_path_factory.mktemp("kueue"), NAMESPACE)
    try:
        made.start()
        made.queue("research", {"cpu": "20m"})
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def operator(engine: Engine, kueue: Kueue, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    variables = {"SUREFOOT_AGENT_COMMAND": "env"}
    made = Operator("queues", engine, tmp_path_factory.mktemp("operator"), NAMESPACE, variables=variables).start()
    made.says("leading")
    yield made
    made.kill()


def sleeping(engine: Engine, name: str) -> dict[str, Any]:
    """Of a pod that sleeps in a container of this name, and asks for a half of the queue."""
    spec: dict[str, Any] = pods.host_pod("unused", ["sleep", "600"], host_prefix=engine.facts().host_prefix)["spec"]
    spec["containers"][0] |= {"name": name, "env": pods.host_environment(), "resources": {"requests": {"cpu": "10m"}}}
    return spec


def urgent(engine: Engine) -> dict[str, Any]:
    """Somebody's pod that goes first."""
    spec = {**sleeping(engine, "main"), "priorityClassName": "urgent"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent", "labels": QUEUE}, "spec": spec}


def workers(api: Api) -> dict[str, str]:
    """Pod -> its node, empty while it has none; those that end are left out."""
    found = api.call("GET", f"{CORE}/pods?labelSelector=surefoot.dev/part=worker")["items"]
    live = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in live}


def placed(api: Api) -> int:
    return sum(bool(node) for node in workers(api).values())


def told(api: Api) -> str:
    found = api.call("GET", JOB).get("status", {}).get("conditions", [])
    return str(next((one["message"] for one in found if one["type"] == "PodsScheduled"), ""))


def story(api: Api) -> str:
    """What was said of pods, in order."""
    found = sorted(
        api.call("GET", f"{CORE}/events")["items"], key=lambda one: str(one["metadata"]["creationTimestamp"])
    )
    return "\n".join(f"{one['involvedObject']['name']}: {one['reason']}: {one['message']}" for one in found)


def test_workers_are_admitted_one_by_one_and_what_waits_is_told(
    engine: Engine, api: Api, kueue: Kueue, operator: Operator
) -> None:
    template = {"metadata": {"labels": QUEUE}, "spec": sleeping(engine, "trainer")}
    # workers of one node too: it is the queue that has no room for the third
    template["spec"]["topologySpreadConstraints"] = [
        {"maxSkew": 3, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ]
    body = {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "queued", "namespace": NAMESPACE},
        "spec": {"replicas": 3, "elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}, "template": template},
    }
    api.call("POST", JOB.rpartition("/")[0], body)
    assert wait(lambda: len(workers(api)) == 3 and placed(api) == 2, SECONDS), kueue.words()
    assert wait(lambda: "scheduling gates" in told(api), SECONDS), told(api)
    found = api.call("GET", f"{QUEUES}/namespaces/{NAMESPACE}/workloads")["items"]
    assert len(found) == 3, "one a worker"


def test_a_preemption_takes_a_worker_and_gives_its_place_back(
    engine: Engine, api: Api, kueue: Kueue, operator: Operator
) -> None:
    before = {name for name, node in workers(api).items() if node}
    api.call("POST", f"{CORE}/pods", urgent(engine))
    assert wait(lambda: bool(api.call("GET", f"{CORE}/pods/urgent")["spec"].get("nodeName")), SECONDS), kueue.words()
    assert wait(lambda: placed(api) == 1 and len(workers(api)) == 3, SECONDS), kueue.words()
    left = {name for name, node in workers(api).items() if node}
    assert left < before, f"the other one stays where it is: {story(api)}"
    assert api.call("GET", JOB)["status"]["phase"] not in ("Failed", "Complete")
    api.call("DELETE", f"{CORE}/pods/urgent")
    assert wait(lambda: placed(api) == 2, SECONDS), kueue.words()
    assert left < {name for name, node in workers(api).items() if node}, story(api)


def test_a_suspended_job_leaves_the_queue(api: Api, kueue: Kueue, operator: Operator) -> None:
    api.merge(JOB, {"spec": {"suspend": True}})
    assert wait(lambda: not api.call("GET", f"{CORE}/pods")["items"], SECONDS), kueue.words()
    queue = f"{QUEUES}/namespaces/{NAMESPACE}/localqueues/research"
    assert wait(lambda: api.call("GET", queue)["status"].get("admittedWorkloads", 0) == 0, SECONDS), kueue.words()
    api.call("DELETE", JOB)
    assert wait(lambda: not api.answers(JOB), SECONDS), operator.text()
