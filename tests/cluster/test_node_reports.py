"""The condition of a sick node against a real API server and kubelet: it stands beside theirs, and is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.api import Api as PlainApi
from cluster.engine import Engine
from support.servers.kubernetes_cluster import a_cluster
from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS
from surefoot_operator.controller.shard_leadership import NodeReporter
from surefoot_operator.platforms.kubernetes.api_client import connect_to_api_server
from surefoot_operator.platforms.kubernetes.api_writes import format_time
from surefoot_operator.platforms.kubernetes.node_conditions import CONDITION_TYPE, UNHEALTHY_KEY
from surefoot_operator.platforms.kubernetes.views import observations
from surefoot_operator.platforms.kubernetes.views.observations import KubeletLiveness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOW = 2_000_000_000.0
REASON = "GpuLost: GPU 0 is lost"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield from a_cluster(1)


def conditions(node: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["status"] for one in node["status"]["conditions"]}


def test_a_sick_node_is_told_of_beside_its_kubelet_s_conditions_and_taken_back(engine: Engine) -> None:
    """With a taint, which is merged beside others; a kubelet's next status leaves all of it where it is."""
    plain, name = PlainApi(engine.facts().kubeconfig), engine.facts().node_names[0]
    path = f"/api/v1/nodes/{name}"
    plain.merge(path, {"spec": {"taints": [{"key": "example.com/other", "effect": "PreferNoSchedule"}]}})
    before = plain.call("GET", path)

    async def report(now: float) -> dict[str, Any]:
        api = await connect_to_api_server(engine.facts().kubeconfig)
        entry = {"name": name, "reason": REASON, "untilTime": format_time(NOW + 100)}
        job = {"metadata": {"namespace": "ns", "name": "gpt"}, "status": {"unhealthyNodes": [entry]}}
        seen = SimpleNamespace(items={name: plain.call("GET", path)})
        cache = SimpleNamespace(nodes=seen, jobs=SimpleNamespace(items={"gpt": job}))
        try:
            await NodeReporter(api, cache, "PreferNoSchedule", lambda: now).reconcile_once()  # type: ignore[arg-type]
        finally:
            await api.close()
        return plain.call("GET", path)

    told = asyncio.run(report(NOW))
    try:
        assert conditions(told) == {**conditions(before), CONDITION_TYPE: "True"}
        assert told["metadata"]["annotations"][UNHEALTHY_KEY].startswith(REASON)
        assert {one["key"] for one in told["spec"]["taints"]} == {"example.com/other", UNHEALTHY_KEY}
        signal = observations.observe_node(
            told, KubeletLiveness(), "kubernetes.io/hostname", KNOWN_SIGNALS
        ).evacuation_reason
        assert signal.startswith("it has the condition SurefootUnhealthy=True (GpuLost: GPU 0 is lost; found by")
    finally:
        well = asyncio.run(report(NOW + 200))
        plain.merge(path, {"spec": {"taints": None}})
    assert conditions(well) == {**conditions(before), CONDITION_TYPE: "False"}
    assert UNHEALTHY_KEY not in well["metadata"].get("annotations", {})
    assert well["spec"].get("taints") == before["spec"].get("taints")
    assert (
        observations.observe_node(well, KubeletLiveness(), "kubernetes.io/hostname", KNOWN_SIGNALS).evacuation_reason
        == ""
    )
