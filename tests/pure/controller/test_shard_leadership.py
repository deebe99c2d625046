"""Sick nodes are told of while this replica leads; where that is refused, once, and the operator goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surefoot_operator.controller.shard_leadership import NodeReporter
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.api_writes import format_time

NOW = 1_000_000.0
NODE = {
    "metadata": {"name": "n0", "uid": "u", "resourceVersion": "7"},
    "spec": {},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}
JOB = {
    "metadata": {"namespace": "ns", "name": "gpt"},
    "status": {"unhealthyNodes": [{"name": "n0", "reason": "GpuLost: x", "untilTime": format_time(NOW + 100)}]},
}


class FakeApi:
    """Takes merges, or refuses them."""

    def __init__(self) -> None:
        self.merged: list[tuple[str, Any]] = []
        self.error: PlatformError | None = None

    async def merge(self, path: str, body: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.merged.append((path, body))
        return {}


def reporter(api: FakeApi, taint: str = "", **jobs: Any) -> NodeReporter:
    cache = SimpleNamespace(nodes=SimpleNamespace(items={"n0": NODE}), jobs=SimpleNamespace(items=jobs))
    return NodeReporter(api, cache, taint, lambda: NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("taint", "paths"),
    [("", ["/api/v1/nodes/n0/status"]), ("NoSchedule", ["/api/v1/nodes/n0", "/api/v1/nodes/n0/status"])],
)
async def test_status_is_written_and_the_node_itself_only_for_a_taint(taint: str, paths: list[str]) -> None:
    api = FakeApi()
    await reporter(api, taint, gpt=JOB).reconcile_once()
    assert [path for path, _ in api.merged] == paths


async def test_without_a_sick_node_nothing_is_written() -> None:
    api = FakeApi()
    await reporter(api).reconcile_once()
    assert api.merged == []


async def test_a_node_that_is_gone_or_changed_meanwhile_is_passed_over_and_any_other_refusal_is_raised() -> None:
    api = FakeApi()
    for code in (404, 409):
        api.error = ApiError("PATCH n0", code, "", "")
        await reporter(api, "NoSchedule", gpt=JOB).reconcile_once()
    api.error = ApiError("PATCH n0", 403, "Forbidden", "")
    with pytest.raises(ApiError):
        await reporter(api, gpt=JOB).reconcile_once()
