"""The admission side as the API server meets it: over HTTPS, with an API server in memory that is asked for the node."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.fakes.fake_api import FakeApi, silent
from support.servers.certificates import Authority, authority
from surefoot_operator.controller import admission_webhooks
from surefoot_operator.controller.admission_webhooks import (
    ALLOWED,
    CONFIGURATIONS,
    MAX_REVIEW_BYTES,
    AdmissionRequest,
    AdmissionResponse,
    AdmissionServer,
    CaBundleUpdater,
    EvictionReviewer,
    JobReviewer,
)
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.pods import PodSettings

OWNER = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "name": "gpt", "uid": "u", "controller": True}
POD: dict[str, Any] = {
    "metadata": {"name": "gpt-0-1", "namespace": "team", "uid": "p", "ownerReferences": [OWNER]},
    "spec": {"nodeName": "n0"},
}
EVICTION = AdmissionRequest("r", "CREATE", "team", "gpt-0-1", {"kind": "Eviction"})


# ---- evictions ----------------------------------------------------------------------------------------------------


class Cluster:
    """A cordoned node with one worker, and a job that would lose something with it."""

    def __init__(self) -> None:
        self.server = FakeApi()
        self.server.objects["/api/v1/nodes/n0"] = {"metadata": {"name": "n0"}, "spec": {"unschedulable": True}}
        self.pods: dict[tuple[str, str], Any] = {("team", "gpt-0-1"): copy.deepcopy(POD)}
        self.nodes: dict[tuple[str, str], Any] = {("", "n0"): {"metadata": {}, "spec": {}}}
        self.lost = {"n0": "job team/gpt: step 40 of generation 1 has no copy on a node that stays"}
        self.reviews = EvictionReviewer(self.server.api, self.pods, self.nodes, lambda node: self.lost.get(node, ""))

    async def verdict(self, review: AdmissionRequest = EVICTION) -> AdmissionResponse:
        return await self.reviews.review_eviction(review)


async def test_an_eviction_waits_while_something_would_be_lost_and_no_longer() -> None:
    cluster = Cluster()
    refused = await cluster.verdict()
    assert (refused.allowed, refused.status_code, refused.reason) == (False, 429, "TooManyRequests")
    assert refused.message.startswith(
        "evicting gpt-0-1 from node n0 would lose data: job team/gpt: step 40 of generation 1 has no copy"
    )
    assert "kubectl delete pod gpt-0-1 does not wait" in refused.message
    cluster.lost.clear()
    assert await cluster.verdict() == ALLOWED


async def test_a_pod_that_goes_alone_goes_at_once() -> None:
    cluster = Cluster()
    node = {"metadata": {"name": "n0"}, "spec": {"taints": [{"key": "node.kubernetes.io/memory-pressure"}]}}
    cluster.server.objects["/api/v1/nodes/n0"] = node
    assert await cluster.verdict() == ALLOWED, "its node stays, and the holder on it"


@pytest.mark.parametrize("taint", ["karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"])
async def test_an_autoscaler_that_takes_a_node_away_waits_too(taint: str) -> None:
    cluster = Cluster()
    node = {"metadata": {"name": "n0"}, "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]}}
    cluster.server.objects["/api/v1/nodes/n0"] = node
    assert not (await cluster.verdict()).allowed


async def test_other_peoples_pods_are_no_concern_of_ours_and_cost_no_call() -> None:
    cluster = Cluster()
    assert await cluster.verdict(AdmissionRequest("r", "CREATE", "team", "postgres-0", {})) == ALLOWED
    cluster.pods["team", "gpt-0-1"]["metadata"]["ownerReferences"] = []
    assert await cluster.verdict() == ALLOWED, "labels prove nothing"
    cluster.pods["team", "gpt-0-1"] = POD | {"metadata": POD["metadata"] | {"deletionTimestamp": "now"}}
    assert await cluster.verdict() == ALLOWED, "it is ending anyway"
    assert cluster.server.asked == []


async def test_an_api_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_webhooks, "NODE_READ_TIMEOUT_SECONDS", 0.05)
    cluster = Cluster()
    cluster.server.reachable.clear()
    assert await cluster.verdict() == ALLOWED, "the cache knows of no cordon"
    cluster.nodes["", "n0"] = {"metadata": {"name": "n0"}, "spec": {"unschedulable": True}}
    assert not (await cluster.verdict()).allowed
    cluster.server.reachable.set()
    cluster.server.before = silent
    assert not (await cluster.verdict()).allowed


# ---- jobs ---------------------------------------------------------------------------------------------------------

PODS = "/api/v1/namespaces/team/pods"


def created(**spec: Any) -> AdmissionRequest:
    containers = [{"name": "trainer", "image": "i", "command": ["python", "train.py"]}]
    body = {"replicas": 2, "template": {"spec": {"containers": containers}}} | spec
    metadata = {"name": "gpt", "namespace": "team", "uid": "u"}
    job = {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": body}
    return AdmissionRequest("r", "CREATE", "team", "gpt", job)


async def test_a_job_whose_pods_the_server_takes_is_let_in() -> None:
    server, tried = FakeApi(), []
    server.answers[PODS] = lambda body: tried.append(body) or body
    assert await JobReviewer(server.api, PodSettings()).review_job(created()) == ALLOWED
    assert tried[0]["spec"]["containers"][0]["command"][-2:] == ["python", "train.py"]


async def test_a_job_whose_pods_the_server_refuses_for_ever_is_refused_with_its_words() -> None:
    server = FakeApi()

    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        raise ApiError(f"POST {PODS}", 400, "BadRequest", 'unknown field "spec.tolleration"')

    server.answers[PODS] = refuse
    refused = await JobReviewer(server.api, PodSettings()).review_job(created())
    assert (refused.allowed, refused.status_code) == (False, 422)
    assert "the API server would reject its pods: " in refused.message
    assert 'unknown field "spec.tolleration"' in refused.message


@pytest.mark.parametrize("code", [403, 409, 429, 500])
async def test_what_the_server_may_take_another_time_refuses_no_job(code: int) -> None:
    server = FakeApi()

    def refuse(body: dict[str, Any]) -> dict[str, Any]:
        raise ApiError(f"POST {PODS}", code, "No", "quota")

    server.answers[PODS] = refuse
    assert (await JobReviewer(server.api, PodSettings()).review_job(created())).allowed


async def test_a_server_that_does_not_answer_refuses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_webhooks, "POD_DRY_RUN_TIMEOUT_SECONDS", 0.05)
    server = FakeApi()
    server.reachable.clear()
    assert (await JobReviewer(server.api, PodSettings()).review_job(created())).allowed
    server.reachable.set()
    server.before = silent
    assert (await JobReviewer(server.api, PodSettings()).review_job(created())).allowed


async def test_no_copy_beside_the_only_one_is_a_warning() -> None:
    server = FakeApi()
    server.answers[PODS] = lambda body: body
    reviews = JobReviewer(server.api, PodSettings())
    verdict = await reviews.review_job(created(checkpoint={"memory": {"replicas": 1}}))
    assert verdict.allowed
    assert "the loss of a node loses every checkpoint" in verdict.warnings[0]
    kept = {"memory": {"replicas": 1}, "persistent": {"uri": "s3://b/p"}}
    assert (await reviews.review_job(created(checkpoint=kept))).warnings == ()


# ---- the server ---------------------------------------------------------------------------------------------------


async def _decide(review: AdmissionRequest) -> AdmissionResponse:
    if review.name == "broken":
        raise RuntimeError("a defect")
    return AdmissionResponse(review.name == "good", "no", 422, "Invalid")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    ours: Authority = authority("tests")
    server = AdmissionServer(0, ours.sign("localhost").server(tmp_path), {"/jobs": _decide})
    await server.start()
    yield f"https://localhost:{server.port}/jobs", ssl.create_default_context(cadata=ours.pem)
    await server.close()


def posted(name: str) -> dict[str, Any]:
    request = {"uid": "u-1", "operation": "CREATE", "namespace": "team", "name": name, "object": {}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def ask(served: tuple[str, ssl.SSLContext], body: bytes) -> tuple[int, str]:
    url, trust = served
    async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(body), ssl=trust) as answer:
        return answer.status, await answer.text()


async def test_reviews_are_answered_over_https(served: tuple[str, ssl.SSLContext]) -> None:
    for name, allowed in (("good", True), ("bad", False)):
        status, text = await ask(served, json.dumps(posted(name)).encode())
        response = json.loads(text)["response"]
        assert (status, response["uid"], response["allowed"]) == (200, "u-1", allowed)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"apiVersion": "admission.k8s.io/v1"}'])
async def test_what_is_no_review_is_a_bad_request(served: tuple[str, ssl.SSLContext], body: bytes) -> None:
    assert (await ask(served, body))[0] == 400


async def test_a_defect_of_ours_is_an_error_and_the_next_review_is_answered(
    served: tuple[str, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    status, text = await ask(served, json.dumps(posted("broken")).encode())
    assert (status, "a defect" in text) == (500, False)
    assert "a defect" in caplog.text
    assert (await ask(served, json.dumps(posted("good")).encode()))[0] == 200


async def test_a_body_without_end_is_cut_off(served: tuple[str, ssl.SSLContext]) -> None:
    assert (await ask(served, b" " * (MAX_REVIEW_BYTES + 1)))[0] == 413


# ---- the authority ------------------------------------------------------------------------------------------------


async def test_the_configuration_trusts_us_after_a_release_has_written_it_anew() -> None:
    server, path = FakeApi(), f"{CONFIGURATIONS}/surefoot.team"
    trust = CaBundleUpdater(server.api, "surefoot.team", lambda: "PEM")

    def release() -> None:
        webhooks = [{"name": "jobs", "clientConfig": {"service": {"name": "s"}}}]
        server.keep(path, {"metadata": {"name": "surefoot.team"}, "webhooks": webhooks})

    release()
    for _ in range(2):
        await trust.update_once()
        assert server.objects[path]["webhooks"][0]["clientConfig"]["caBundle"] == "UEVN"
        asked = len(server.asked)
        await trust.update_once()
        assert [verb for verb, _ in server.asked[asked:]] == ["GET"], "nothing is written that is there"
        release()


async def test_a_configuration_that_is_not_there_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot_operator.controller.admission_webhooks.CA_BUNDLE_RETRY_SECONDS", 0.01)
    server, thrice = FakeApi(), asyncio.Event()
    server.before = lambda verb, path: thrice.set() if len(server.asked) == 3 else None
    keeping = asyncio.create_task(CaBundleUpdater(server.api, "surefoot.team", lambda: "PEM").run())
    async with asyncio.timeout(10):
        await thrice.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_certificate_of_others_without_an_authority_is_left_to_them() -> None:
    server = FakeApi()
    await CaBundleUpdater(server.api, "surefoot.team", lambda: "").update_once()
    assert server.asked == []
