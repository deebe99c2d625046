"""The embedded kopf against an API server in memory: what wakes us, what it never tells, and that it writes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import kmock
import kopf
import pytest

from support.machine_speed import scaled
from surefoot.protocol.timeouts import Backoff
from surefoot_operator.controller import kopf_trigger as wakening
from surefoot_operator.controller.kopf_trigger import KopfTrigger

JOBS = kmock.resource("surefoot.dev/v1alpha1/trainingjobs")
PATH = "/apis/surefoot.dev/v1alpha1/namespaces/team/trainingjobs"
SECONDS = scaled(60.0)


def job(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"apiVersion": "surefoot.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": {}}


class Stand:
    """A wakening on a server, and how often it woke us."""

    def __init__(self, server: Any) -> None:
        self.server, self.woken = server, 0
        server.resources["surefoot.dev/v1alpha1/trainingjobs"] = server.ResourceInfo(
            kind="TrainingJob", singular="trainingjob", namespaced=True, verbs={"list", "watch", "get"}
        )
        # kopf waits until it has found these, though it is told to watch none of them
        for known in ("v1/namespaces", "v1/events", "apiextensions.k8s.io/v1/customresourcedefinitions"):
            server.resources[known] = server.ResourceInfo(namespaced=known == "v1/events", verbs={"list", "watch"})
        self.wakening = KopfTrigger(self._login, self._heard)

    async def _login(self) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=str(self.server.url))

    def _heard(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.woken += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 -- another thread's doing is waited for
                await asyncio.sleep(0.02)

    def watches(self) -> int:
        return len(self.server[kmock.action.WATCH])

    async def call(self, method: str, path: str, body: Any = None) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.server.url}{path}", json=body) as response,
        ):
            assert response.status == 200


@pytest.fixture
async def stand(kmock: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    monkeypatch.setattr(wakening, "_BACKOFF", Backoff(0.05, 0.1))
    made = Stand(kmock)
    yield made
    begin = time.monotonic()
    await made.wakening.close()
    assert made.wakening.end == ""
    assert time.monotonic() - begin < SECONDS


async def test_jobs_that_are_there_come_and_go_wake_us(stand: Stand) -> None:
    stand.server.objects[JOBS, "team", "old"] = job("old")
    stand.wakening.start()
    await stand.until(lambda: stand.woken >= 1)
    await stand.until(lambda: stand.watches() >= 1)
    before = stand.woken
    await stand.call("POST", PATH, job("new"))
    await stand.until(lambda: stand.woken > before)
    before = stand.woken
    await stand.call("DELETE", f"{PATH}/new")
    await stand.until(lambda: stand.woken > before)


async def test_its_user_needs_no_name(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it is a number that no password file knows."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr("getpass.getuser", nameless)
    stand.server.objects[JOBS, "team", "old"] = job("old")
    stand.wakening.start()
    await stand.until(lambda: stand.woken >= 1)


async def test_it_writes_nothing_and_watches_nothing_but_jobs(stand: Stand) -> None:
    stand.server.objects[JOBS, "team", "old"] = job("old")
    stand.wakening.start()
    await stand.until(lambda: stand.woken >= 1 and stand.watches() >= 1)
    assert {str(request.method).upper().rsplit(".", 1)[-1] for request in stand.server} == {"GET"}
    watched = {request.resource.plural for request in stand.server[kmock.action.WATCH]}
    assert watched == {"trainingjobs"}
    query = stand.server[kmock.action.WATCH][0].params
    assert query["timeoutSeconds"] == "60"
    assert stand.server[kmock.action.LIST, JOBS][0].params["limit"] == "500"


async def test_a_deletion_in_a_gap_is_never_told(stand: Stand) -> None:
    """Why nothing is decided from what kopf says: after 410 it lists anew, and compares with nothing."""
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    lists = iter([[job("a"), job("b")], [job("b")]])
    last = [job("b")]
    stand.server[kmock.action.LIST, JOBS] << (
        lambda request: {"metadata": {"resourceVersion": "1"}, "items": next(lists, last)}
    )
    heard: list[tuple[str | None, str]] = []
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=str(stand.server.url))

    @kopf.on.event("surefoot.dev", "v1alpha1", "trainingjobs", registry=registry)
    async def handler(type: str | None, name: str, **_: Any) -> None:  # noqa: A002 -- kopf's own word
        heard.append((type, name))

    ended, ready = threading.Event(), threading.Event()
    stand.server[kmock.action.WATCH, JOBS] << (gone,)
    thread = threading.Thread(
        target=lambda: asyncio.run(
            kopf.operator(
                registry=registry,
                settings=wakening.kopf_settings(),
                standalone=True,
                clusterwide=True,
                stop_flag=ended,
                ready_flag=ready,
            )
        )
    )
    thread.start()
    try:
        await stand.until(lambda: [name for _, name in heard].count("b") >= 2)
    finally:
        ended.set()
        await asyncio.to_thread(thread.join, SECONDS)
    assert (None, "a") in heard
    assert all(kind is None for kind, _ in heard)


async def test_kopf_that_ends_by_itself_is_begun_anew(stand: Stand) -> None:
    """Any other error in a watch is fatal to it, by its own word."""
    stand.server.objects[JOBS, "team", "old"] = job("old")
    bad = {"type": "ERROR", "object": {"code": 500, "message": "etcd has a bad day"}}
    stand.server[kmock.action.WATCH, JOBS] << (bad,)
    stand.wakening.start()
    await stand.until(lambda: len(stand.server[kmock.action.LIST]) >= 2)
    assert stand.wakening.end == ""


async def test_a_server_that_is_away_is_no_end(stand: Stand) -> None:
    async def nowhere() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server="http://127.0.0.1:1")

    away = KopfTrigger(nowhere, lambda: None)
    away.start()
    await asyncio.sleep(0.5)  # nothing announces that it goes on
    assert away.end == ""
    await away.close()
