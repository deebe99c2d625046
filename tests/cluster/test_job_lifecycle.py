"""What the Kubernetes fabric makes and ends beside pods, on a real API server: names in DNS, jobs held and let go."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import layout, pods
from cluster.api import Api as PlainApi
from cluster.engine import Engine
from cluster.processes import wait
from support.fabric_suite import until
from support.machine_speed import scaled
from support.servers.kubernetes_cluster import a_cluster
from surefoot_operator.api.spec import FINALIZER
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes.api_client import connect_to_api_server
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.pods import PodSettings
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.policy.core.actions import CreateWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMESPACE = "lifecycle"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = f"/apis/surefoot.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
READY_SECONDS = scaled(60.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(2)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Iterator[PlainApi]:
    api = PlainApi(engine.facts().kubeconfig)
    api.create(CRDS, yaml.safe_load((layout.PROJECT / "manifests" / "crd.yaml").read_text(encoding="utf-8")))
    assert wait(lambda: api.answers(JOBS), READY_SECONDS)
    api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    assert wait(lambda: api.answers(f"{CORE}/serviceaccounts/default"), READY_SECONDS)
    yield api
    api.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}")
    assert wait(lambda: not api.answers(f"/api/v1/namespaces/{NAMESPACE}"), 2 * READY_SECONDS)


def document(engine: Engine, command: list[str], uri: str) -> dict[str, Any]:
    """A job that no operator looks after, with the host's programs and a folder of its own at /kept."""
    volumes, mounts = pods.host_mounts(engine.facts().host_prefix)
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    trainer = {
        "name": "trainer",
        "image": layout.HOST_IMAGE,
        "command": command,
        "env": [{"name": "PATH", "value": path}],
        "volumeMounts": [*mounts, {"name": "kept", "mountPath": "/kept"}],
    }
    spec = {
        "terminationGracePeriodSeconds": 0,
        "volumes": [*volumes, {"name": "kept", "emptyDir": {}}],
        "containers": [trainer],
    }
    return {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "lived"},
        "spec": {
            "managedBy": "example.org/this-test",
            "checkpoint": {"persistent": {"uri": uri, "onJobDeletion": "Delete"}},
            "template": {"spec": spec},
        },
    }


class Lab:
    """One job and its fabric."""

    def __init__(self, engine: Engine, plain: PlainApi) -> None:
        self.engine, self.plain = engine, plain
        self.uid = ""
        self.fabric: KubernetesPlatform

    async def open(self, command: list[str], uri: str = "file:///kept") -> KubernetesPlatform:
        made = self.plain.call("POST", JOBS, document(self.engine, command, uri))
        self.uid = made["metadata"]["uid"]
        self._api = await connect_to_api_server(self.engine.facts().kubeconfig)
        self._cache = ClusterCache(self._api, server_namespace=NAMESPACE)
        await self._cache.start()
        # nothing stands in front of the command: what is tried here is no agent's
        settings = PodSettings(agent=("env",))
        self.fabric = KubernetesPlatform(self._cache, NAMESPACE, "lived", self.uid, settings=settings)
        return self.fabric

    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plain.call("GET", f"{JOBS}/lived")
        return found

    def is_gone(self) -> bool:
        return not self.plain.answers(f"{JOBS}/lived")

    def log(self, pod: str) -> str:
        return str(self.plain.call("GET", f"{CORE}/pods/{pod}/log"))

    async def close(self) -> None:
        await self.fabric.close()
        await self._cache.close()
        await self._api.close()
        if not self.is_gone():
            self.plain.merge(f"{JOBS}/lived", {"metadata": {"finalizers": None}})
            self.plain.call("DELETE", f"{JOBS}/lived")
        assert wait(self.is_gone, READY_SECONDS)
        assert wait(lambda: not self.plain.call("GET", f"{CORE}/pods")["items"], READY_SECONDS)


@pytest.fixture
async def lab(engine: Engine, plain: PlainApi) -> AsyncIterator[Lab]:
    made = Lab(engine, plain)
    yield made
    await made.close()


def environment(uid: str, uri: str = "file:///kept") -> WorkerEnvironment:
    return WorkerEnvironment({"SUREFOOT_JOB_UID": uid, "SUREFOOT_PERSISTENT_URI": uri}, {"SUREFOOT_TOKEN": "t"})


async def test_a_worker_is_found_by_the_name_of_its_place(lab: Lab) -> None:
    ask = "getent hosts worker-0.lived-workers.lifecycle.svc.cluster.local && hostname && sleep 600"
    fabric = await lab.open(["sh", "-c", f"until {ask}; do sleep 0.2; done"])
    await fabric.create_worker(CreateWorker(0, 1), environment(lab.uid))
    await until(fabric, lambda seen: [w.phase for w in seen.workers] == ["Running"], READY_SECONDS)
    pod = lab.plain.call("GET", f"{CORE}/pods/lived-worker-0-1")
    address = pod["status"]["podIP"]
    assert wait(lambda: address in lab.log("lived-worker-0-1"), READY_SECONDS)
    assert "worker-0" in lab.log("lived-worker-0-1").splitlines()[-1]


async def test_a_job_that_is_held_goes_once_its_data_is_deleted(lab: Lab) -> None:
    fabric = await lab.open(["sleep", "600"])
    await fabric.set_finalizer(True)
    assert lab.job()["metadata"]["finalizers"] == [FINALIZER]
    lab.plain.call("DELETE", f"{JOBS}/lived")
    await until(fabric, lambda seen: seen.job.deleted and seen.job.has_finalizer)
    await fabric.start_purge(1, environment(lab.uid))
    seen = await until(fabric, lambda seen: seen.purges and seen.purges[0].phase == "Succeeded", READY_SECONDS)
    assert seen.workers == ()
    assert not lab.is_gone()
    await fabric.set_finalizer(False)
    assert wait(lab.is_gone, READY_SECONDS)


async def test_a_deletion_that_fails_says_why(lab: Lab) -> None:
    fabric = await lab.open(["sleep", "600"], "file:///usr/nowhere")
    await fabric.start_purge(1, environment(lab.uid, "file:///usr/nowhere"))
    seen = await until(fabric, lambda seen: seen.purges and seen.purges[0].phase == "Failed", READY_SECONDS)
    assert "folder /usr/nowhere, opening it: Read-only file system" in seen.purges[0].message


async def test_a_job_whose_time_is_up_is_deleted_with_all_that_it_owns(lab: Lab) -> None:
    fabric = await lab.open(["sleep", "600"])
    await fabric.create_worker(CreateWorker(0, 1), environment(lab.uid))
    await fabric.delete_job()
    await fabric.delete_job()
    assert wait(lab.is_gone, READY_SECONDS)
    for kind in ("pods", "services", "secrets"):
        assert wait(lambda: not _of_the_job(lab, kind), READY_SECONDS), kind  # noqa: B023 -- called before it moves on


def _of_the_job(lab: Lab, kind: str) -> list[Any]:
    found: list[Any] = lab.plain.call("GET", f"{CORE}/{kind}?labelSelector=surefoot.dev/job-uid={lab.uid}")["items"]
    return found
