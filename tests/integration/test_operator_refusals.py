"""A whole operator on an API server that refuses: what is on the job, in /readyz and among the metrics, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from support.servers.memory_api import MemoryApi, Refusal, Target, served
from surefoot_operator.controller import cluster_operator
from surefoot_operator.controller.cluster_operator import ClusterOperator
from surefoot_operator.controller.cluster_settings import ClusterSettings
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.rejected_calls import RejectedCalls

GROUP = "surefoot.dev"
NODES = Refusal(
    403, "Forbidden", 'nodes is forbidden: User "operator" cannot list resource "nodes" at the cluster scope'
)
OLD_CRD = Refusal(
    422,
    "Invalid",
    f'"" is invalid: patch: Invalid value: "{"x" * 5000}": strict decoding error: unknown field "status.serial"',
)
QUOTA = Refusal(403, "Forbidden", 'pods "gpt-worker-0-1" is forbidden: exceeded quota: team, requested: pods=1')


class Stand:
    """The operator under test, and what people see of it."""

    def __init__(self, server: MemoryApi, operator: ClusterOperator) -> None:
        self.server, self.operator = server, operator

    async def read(self, path: str) -> tuple[int, str]:
        probes = self.operator._health_endpoints
        port = probes.metrics_port if path == "/metrics" else probes.port
        url = f"http://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def reads(self, path: str, code: int, text: str) -> None:
        """Waits until the probe answers so."""
        found: tuple[int, str] = 0, ""
        try:
            async with asyncio.timeout(30):
                while found[0] != code or text not in found[1]:
                    await asyncio.sleep(0.05)
                    found = await self.read(path)
        except TimeoutError:
            raise AssertionError(f"{path} answers {found}, and not {code} with {text!r}") from None

    async def reads_without(self, text: str) -> None:
        """Waits until the metrics say this no more: an answer may be a second old."""
        async with asyncio.timeout(30):
            while text in (await self.read("/metrics"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.objects[GROUP, "trainingjobs", "team", "gpt"].get("status", {})
        return found

    def accepted(self) -> dict[str, Any]:
        """The job's condition."""
        return next((one for one in self.status.get("conditions", []) if one["type"] == "ApiAccepted"), {})

    def events(self) -> list[str]:
        return [one["message"] for one in self.server.all("events") if one["reason"] == "ApiCallRejected"]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(30):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{what}: {self.status}, {self.events()}") from None


def refusing(refusal: Refusal, *wanted: tuple[str, str, str]) -> Callable[[Target], Refusal | None]:
    """`wanted`: method, plural, subresource."""
    return lambda target: refusal if (target.method, target.plural, target.part) in wanted else None


@pytest.fixture
async def server_and_client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[MemoryApi, Any]]:
    monkeypatch.setattr(cluster_operator, "REJECTED_CALLS_INTERVAL_SECONDS", 0.05)
    async with served() as (server, client):
        server.put("", "nodes", {"metadata": {"name": "n1"}, "spec": {}, "status": {}})
        container = {"name": "trainer", "image": "x", "command": ["python", "t.py"]}
        spec = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
        kind = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "TrainingJob"}
        server.put(GROUP, "trainingjobs", {**kind, "metadata": {"name": "gpt", "namespace": "team"}, "spec": spec})
        yield server, client


@pytest.fixture
async def begin(server_and_client: tuple[MemoryApi, Any]) -> AsyncIterator[Callable[[], Stand]]:
    server, client = server_and_client
    ended, running = asyncio.Event(), list[asyncio.Task[None]]()

    def begun() -> Stand:
        settings = ClusterSettings(
            "surefoot-system",
            "op-0",
            "op-0",
            "ws://127.0.0.1/v1/agents",
            coordinator_port=0,
            metrics_port=0,
            probe_port=0,
            node_reports=False,
        )
        operator = ClusterOperator(Api(client, rejected_calls=RejectedCalls(0.3)), settings)
        running.append(asyncio.create_task(operator.run(ended)))
        return Stand(server, operator)

    yield begun
    ended.set()
    await asyncio.gather(*running)


METRIC = 'surefoot_api_refused_calls{{cause="{}",resource="{}",verb="{}"}} 1.0'


async def test_a_view_that_is_forbidden_from_the_start_is_said_everywhere_and_restarts_nobody(
    server_and_client: tuple[MemoryApi, Any], begin: Callable[[], Stand]
) -> None:
    server, _ = server_and_client
    server.refuse = refusing(NODES, ("GET", "nodes", ""))
    stand = begin()
    await stand.until(stand.events, "an event on the job")
    assert all(text.startswith(NODES.message) for text in stand.events())
    await stand.until(lambda: stand.accepted().get("status") == "False", "a condition on the job")
    assert stand.accepted()["message"].startswith(NODES.message)
    assert stand.status["message"].endswith("Surefoot plans nothing for this job")
    await stand.reads("/readyz", 503, NODES.message)
    await stand.reads("/metrics", 200, METRIC.format("forbidden", "nodes", "watch"))
    assert await stand.read("/healthz") == (200, "ok\n")
    assert (
        stand.operator._cache.seconds_since_answer()["nodes"] < 10
    )  # it is answered, and no restart would change the answer
    server.refuse = lambda target: None
    await stand.until(lambda: stand.accepted().get("status") == "True", "the condition turns")
    await stand.reads("/readyz", 200, "ok")
    await stand.reads_without(METRIC.format("forbidden", "nodes", "watch"))
    await stand.until(lambda: server.all("pods"), "the job is planned")


async def test_a_status_that_is_refused_is_an_event_and_names_the_crd(
    server_and_client: tuple[MemoryApi, Any], begin: Callable[[], Stand], caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = server_and_client
    server.refuse = refusing(OLD_CRD, ("PATCH", "trainingjobs", "status"))
    stand = begin()
    await stand.until(stand.events, "an event on the job")
    (text,) = stand.events()
    assert text.startswith(
        '"" is invalid: patch: Invalid value: "…": strict decoding error: unknown field "status.serial"'
    )
    assert "if the CustomResourceDefinition in the cluster is older than this operator" in text
    await stand.reads("/readyz", 503, "unknown field")
    await stand.reads("/metrics", 200, METRIC.format("invalid", "trainingjobs/status", "patch"))
    (line, *_) = [r.getMessage() for r in caplog.records if "reconcile failed" in r.getMessage()]
    assert line.startswith('"" is invalid')
    assert len(line) < 800
    server.refuse = lambda target: None
    await stand.until(lambda: stand.status.get("phase"), "the status is written")
    await stand.reads("/readyz", 200, "ok")


async def test_a_pod_that_a_quota_refuses_is_said_of_its_job_and_makes_no_operator_unready(
    server_and_client: tuple[MemoryApi, Any], begin: Callable[[], Stand]
) -> None:
    server, _ = server_and_client
    server.refuse = refusing(QUOTA, ("POST", "pods", ""))
    stand = begin()
    await stand.until(stand.events, "an event on the job")
    assert stand.events()[0].startswith(QUOTA.message)
    await stand.until(lambda: stand.accepted().get("status") == "False", "a condition on the job")
    await stand.reads("/readyz", 200, f"ok\nrejected: {QUOTA.message}")
    await stand.reads("/metrics", 200, METRIC.format("quota", "pods", "create"))
    server.refuse = lambda target: None
    await stand.until(lambda: stand.accepted().get("status") == "True", "the condition turns")
