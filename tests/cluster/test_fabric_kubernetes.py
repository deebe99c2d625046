"""The Kubernetes fabric under the suite of every fabric, on a real cluster of two nodes, and what it alone must do.

Workers are sleeping pods behind a real agent that nobody answers; holders are sleeping pods of a DaemonSet.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from cluster import layout, pods
from cluster.api import Api as PlainApi
from cluster.engine import Engine
from cluster.processes import wait
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.interface import Platform
from surefoot_operator.platforms.kubernetes.api_client import Api, connect_to_api_server
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache
from surefoot_operator.platforms.kubernetes.views.observations import MAX_LEASE_AGE_SECONDS
from surefoot_operator.policy.core.actions import CreateWorker, Event

pytest.register_assert_rewrite("support.fabric_suite")

from support.fabric_suite import *  # noqa: E402, F403 -- its tests are collected here
from support.fabric_suite import DOCUMENT, ENVIRONMENT, running, until  # noqa: E402
from support.machine_speed import scaled  # noqa: E402
from support.servers.kubernetes_cluster import a_cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = "/apis/surefoot.dev/v1alpha1/namespaces/default/trainingjobs"
PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
SECRETS = "/api/v1/namespaces/default/secrets"
QUOTAS = "/api/v1/namespaces/default/resourcequotas"
SERVICE = "/api/v1/namespaces/default/services/contract-workers"
DAEMON_SETS = "/apis/apps/v1/namespaces/default/daemonsets"
HOLDER = {"surefoot.dev/part": "memory-tier"}
READY_SECONDS = scaled(60.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    for found in a_cluster(2):
        api = PlainApi(found.facts().kubeconfig)
        others = found.facts().node_names[2:]
        for name in others:  # the suite's cluster has two nodes; more are as if they were not there
            api.merge(f"{NODES}/{name}", {"spec": {"unschedulable": True}})
        try:
            yield found
        finally:
            for name in others:
                api.merge(f"{NODES}/{name}", {"spec": {"unschedulable": None}})


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Iterator[PlainApi]:
    """The API server without our client, with the CRD and a DaemonSet of holders."""
    api = PlainApi(engine.facts().kubeconfig)
    api.create(CRDS, yaml.safe_load((layout.PROJECT / "manifests" / "crd.yaml").read_text(encoding="utf-8")))
    assert wait(lambda: api.answers(JOBS), READY_SECONDS)
    template = pods.host_pod("holder", ["sleep", "infinity"], host_prefix=engine.facts().host_prefix)
    template["metadata"]["labels"] = HOLDER
    template["spec"]["restartPolicy"] = "Always"
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": engine.facts().node_names[:2]}
    terms = [{"matchExpressions": [here]}]
    template["spec"]["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    spec = {
        "selector": {"matchLabels": HOLDER},
        "template": {"metadata": template["metadata"], "spec": template["spec"]},
    }
    api.create(
        DAEMON_SETS, {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "holders"}, "spec": spec}
    )
    yield api
    api.call("DELETE", f"{DAEMON_SETS}/holders")


def document(engine: Engine) -> dict[str, Any]:
    """The suite's job with the host's programs instead of an image."""
    body = copy.deepcopy(DOCUMENT)
    spec = body["spec"]["template"]["spec"]
    spec["volumes"], mounts = pods.host_mounts(engine.facts().host_prefix)
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    host = {"image": layout.HOST_IMAGE, "volumeMounts": mounts, "env": [{"name": "PATH", "value": path}]}
    spec["containers"][0].update(host)
    return body


class KubernetesLab:
    """The Kubernetes fabric with a job of its own."""

    moment_seconds = 5.0
    node_seconds = MAX_LEASE_AGE_SECONDS + 20.0
    tells_death = False

    def __init__(self, engine: Engine, plain: PlainApi, api: Api) -> None:
        self.engine, self.plain, self.api = engine, plain, api
        first, second = engine.facts().node_names[:2]
        self.nodes = (first, second)
        self.cache = ClusterCache(api, server_namespace="default")
        self.fabric: Platform
        self.uid = ""
        self._hurt: set[str] = set()

    async def open(self) -> None:
        made = self.plain.call("POST", JOBS, document(self.engine))
        self.uid = made["metadata"]["uid"]
        await self.cache.start()
        self.fabric = KubernetesPlatform(self.cache, "default", "contract", self.uid)

    def free(self, count: int) -> None:
        return None

    def kill_node(self, name: str) -> None:
        self._hurt.add(name)
        self.engine.crash(name)

    def return_node(self, name: str) -> None:
        self.engine.return_node(name)

    def freeze_node(self, name: str) -> None:
        self._hurt.add(name)
        self.engine.freeze(name)

    def kill_agent(self, name: str) -> None:
        found = [p for p in self.cache.workers.items.values() if p["spec"].get("nodeName") == name]
        self.engine.kill_container("default", found[0]["metadata"]["name"], "trainer")

    def kill_holder(self, name: str) -> None:
        self._hurt.add(name)
        found = [p for p in self.cache.servers.items.values() if p["spec"].get("nodeName") == name]
        self.engine.kill_container("default", found[0]["metadata"]["name"])

    def return_holder(self, name: str) -> None:
        """Its kubelet does that."""

    async def close(self) -> None:
        await self.fabric.close()
        await self.cache.close()
        await self.api.close()
        await asyncio.to_thread(self._restore)

    def _restore(self) -> None:
        for name in self._hurt:
            self.engine.return_node(name)
            self._delete(
                f"surefoot.dev/part=memory-tier&fieldSelector=spec.nodeName={name}"
            )  # else its restarts back off
        self.plain.call("DELETE", f"{JOBS}/contract")
        assert wait(lambda: self._are_gone(f"surefoot.dev/job-uid={self.uid}"), READY_SECONDS)
        assert wait(lambda: not self.plain.answers(f"{JOBS}/contract"), READY_SECONDS)
        # collected some time after its owner, if at all where it was made beside the deletion: the next job of that
        # name would find it somebody else's
        try:
            self.plain.call("DELETE", SERVICE)
        except HTTPError as error:
            if error.code != 404:  # the collector was quicker
                raise

    def _are_gone(self, query: str) -> bool:
        try:
            self._delete(query)
            return not self.plain.call("GET", f"{PODS}?labelSelector={query}")["items"]
        except OSError:  # hundreds at once take longer than a call may
            return False

    def _delete(self, query: str) -> None:
        self.plain.call("DELETE", f"{PODS}?labelSelector={query}&gracePeriodSeconds=0")


@pytest.fixture
async def lab(engine: Engine, plain: PlainApi) -> AsyncIterator[KubernetesLab]:
    made = KubernetesLab(engine, plain, await connect_to_api_server(engine.facts().kubeconfig))
    await made.open()
    try:
        await until(
            made.fabric,
            lambda seen: (
                [h.running for h in seen.servers] == [n.ready for n in seen.nodes if n.schedulable] == [True, True]
            ),
        )
        yield made
    finally:
        await made.close()


# ---- what only this fabric can promise ------------------------------------------------------------------------------


async def test_what_a_worker_must_not_show_stands_in_a_secret_of_the_job(lab: KubernetesLab) -> None:
    found = await running(lab)
    pod = lab.plain.call("GET", f"{PODS}/{found.name}")
    assert "a-password" not in str(pod)
    assert "a-token" not in str(pod)
    assert found.name == "contract-worker-0-1"
    assert "finalizers" not in pod["metadata"]
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (lab.uid, True)
    environment = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    name = environment["SUREFOOT_MEMORY_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"]
    secret = lab.plain.call("GET", f"/api/v1/namespaces/default/secrets/{name}")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == lab.uid


async def test_a_pod_of_that_name_that_is_somebody_elses_is_left_alone(lab: KubernetesLab) -> None:
    body = pods.host_pod("contract-worker-0-1", ["sleep", "600"], host_prefix=lab.engine.facts().host_prefix)
    lab.plain.create(PODS, body)
    try:
        with pytest.raises(PlatformError, match="does not belong to job"):
            await lab.fabric.create_worker(CreateWorker(0, 1), ENVIRONMENT)
    finally:
        lab.plain.call("DELETE", f"{PODS}/contract-worker-0-1?gracePeriodSeconds=0")


async def test_a_quota_that_the_jobs_own_secret_used_up_keeps_no_worker_of_the_next_leader_away(
    lab: KubernetesLab,
) -> None:
    await running(lab)
    there = lab.plain.call("GET", SECRETS)["items"]
    owners = {owner["uid"]: one for one in there for owner in one["metadata"].get("ownerReferences", ())}
    ours = owners[lab.uid]
    full = {"count/secrets": "0"}  # as many as there are would be one too many once a former job's is collected
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": full}}
    lab.plain.create(QUOTAS, body)
    try:
        known = lambda: lab.plain.call("GET", f"{QUOTAS}/full").get("status", {}).get("hard")  # noqa: E731
        assert await asyncio.to_thread(wait, lambda: known() == full, READY_SECONDS)
        again = {name: ours[name] for name in ("immutable", "type")} | {"apiVersion": "v1", "kind": "Secret"}
        with pytest.raises(HTTPError) as refused:  # and not that the name is taken
            lab.plain.call("POST", SECRETS, {**again, "metadata": {"name": ours["metadata"]["name"]}})
        assert refused.value.code == 403
        leader = KubernetesPlatform(lab.cache, "default", "contract", lab.uid)
        await leader.create_worker(CreateWorker(1, 1), ENVIRONMENT)
        await leader.close()
        assert lab.plain.answers(f"{PODS}/contract-worker-1-1")
    finally:
        lab.plain.call("DELETE", f"{QUOTAS}/full")


async def test_an_event_told_twice_stands_once(lab: KubernetesLab) -> None:
    told = [Event("GenerationClaimed", "epoch 2 was claimed: worker 1 is lost", warning=True)]
    await lab.fabric.record_events(told)
    await lab.fabric.record_events(told)
    selector = f"involvedObject.uid={lab.uid},reason=GenerationClaimed"
    items = lab.plain.call("GET", f"/api/v1/namespaces/default/events?fieldSelector={selector}")["items"]
    assert [(item["type"], item["message"]) for item in items] == [("Warning", told[0].message)]


async def test_people_and_autoscalers_see_workers_and_the_age_of_the_checkpoint(lab: KubernetesLab) -> None:
    await running(lab)
    await lab.fabric.patch_status(JobStatus("Running", membership=Membership(1, "Committed"), step=3), JobStatus())
    scale = lab.plain.call("GET", f"{JOBS}/contract/scale")["status"]
    assert scale == {"replicas": 1, "selector": f"surefoot.dev/job-uid={lab.uid}"}
    assert lab.plain.call("GET", f"{JOBS}/contract")["status"]["ready"] == "1/2"


async def test_an_api_server_that_is_killed_costs_nothing_but_time(lab: KubernetesLab) -> None:
    found = await running(lab)
    lab.engine.kill_daemon("kube-apiserver")
    try:
        with pytest.raises(PlatformError, match="API server did not answer"):
            await lab.fabric.create_worker(CreateWorker(1, 1), ENVIRONMENT)
        assert [w.uid for w in (await lab.fabric.observe()).workers] == [found.uid]
    finally:
        await asyncio.to_thread(lab.engine.start_daemon, "kube-apiserver")
    await running(lab, 1)


async def test_three_hundred_pods_are_asked_for_side_by_side(lab: KubernetesLab) -> None:
    """With a selector that no node matches: what is shown is the asking. How long it takes, `python -m bench cluster` says."""
    job = lab.plain.call("GET", f"{JOBS}/contract")
    job["spec"]["suspend"] = True
    job = lab.plain.call("PUT", f"{JOBS}/contract", job)
    job["spec"]["suspend"] = False
    job["spec"]["template"]["spec"]["nodeSelector"] = {"surefoot.test/no-such": "node"}
    lab.plain.call("PUT", f"{JOBS}/contract", job)
    await until(lab.fabric, lambda seen: seen.job.metadata_generation == 3)
    await asyncio.gather(*(lab.fabric.create_worker(CreateWorker(n, 1), ENVIRONMENT) for n in range(300)))
    assert len((await lab.fabric.observe()).workers) == 300
