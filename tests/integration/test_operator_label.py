"""The leader's label, with an API server in memory: on one's own pod, off all others, whatever gets in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fakes.fake_api import FakeApi, silent
from surefoot_operator.controller.leader import leader_election
from surefoot_operator.controller.leader.leader_election import LEADER_LABEL, LeaderLabel
from surefoot_operator.platforms.kubernetes.api_objects import ApiError

PODS = "/api/v1/namespaces/system/pods"


def pod(server: FakeApi, name: str, leads: bool = False) -> None:
    labels: dict[str, Any] = {"surefoot.dev/part": "operator", **({LEADER_LABEL: "true"} if leads else {})}
    server.keep(f"{PODS}/{name}", {"metadata": {"name": name, "labels": labels}})


def leaders(server: FakeApi) -> set[str]:
    return {
        body["metadata"]["name"]
        for body in server.objects.values()
        if body["metadata"]["labels"].get(LEADER_LABEL) == "true"
    }


@pytest.fixture
def server() -> FakeApi:
    made = FakeApi()
    pod(made, "a", leads=True)
    pod(made, "b")
    pod(made, "c")
    return made


async def test_a_new_leader_takes_the_label_off_the_old_one_after_it_has_its_own(server: FakeApi) -> None:
    await LeaderLabel(server.api, "system", "b").update_labels()
    assert leaders(server) == {"b"}
    assert [path for verb, path in server.asked if verb == "PATCH"] == [f"{PODS}/b", f"{PODS}/a"]
    server.asked.clear()
    await LeaderLabel(server.api, "system", "b").update_labels()
    assert [verb for verb, _ in server.asked] == ["GET"]


async def test_a_pod_that_ends_meanwhile_is_no_obstacle(server: FakeApi) -> None:
    def gone(verb: str, path: str) -> None:
        if (verb, path) == ("PATCH", f"{PODS}/a"):
            raise ApiError(f"{verb} {path}", 404, "NotFound", "gone")

    server.before = gone
    await LeaderLabel(server.api, "system", "b").update_labels()
    assert "b" in leaders(server)


async def test_what_fails_is_tried_again(server: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_election, "LABEL_RETRY_SECONDS", 0.01)
    left = iter([True, True])

    def twice(verb: str, path: str) -> None:
        if next(left, False):
            silent(verb, path)

    server.before = twice
    holding = asyncio.create_task(LeaderLabel(server.api, "system", "b").run())
    async with asyncio.timeout(60):
        while leaders(server) != {"b"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_who_leaves_in_peace_takes_its_own_off(server: FakeApi) -> None:
    label = LeaderLabel(server.api, "system", "a")
    await label.remove()
    await label.remove()
    assert leaders(server) == set()
    await LeaderLabel(server.api, "system", "on-a-desk").remove()


async def test_on_a_desk_there_is_no_pod_to_mark(server: FakeApi) -> None:
    await LeaderLabel(server.api, "system", "on-a-desk").update_labels()
    assert leaders(server) == set()
