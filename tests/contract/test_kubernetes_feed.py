"""A watch under everything that ends one, against a real HTTP server that plays the API server's part to the letter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable
from surefoot_operator.platforms.kubernetes.views import watched_objects
from surefoot_operator.platforms.kubernetes.views.watched_objects import WatchedObjects

SECONDS = 60.0
Object = dict[str, Any]


def pod(name: str, version: int, uid: str = "") -> Object:
    return {"metadata": {"name": name, "namespace": "n", "uid": uid or name, "resourceVersion": str(version)}}


class Server:
    """Lists `pods` at `version`; each watch gets the next of `watches`: events, then its end (None: stays open)."""

    def __init__(self) -> None:
        self.pods: list[Object] = []
        self.page = 0
        """How many of them a page has; 0: all."""
        self.between: Callable[[], None] = lambda: None
        """Called when the last page is asked for."""
        self.version = 10
        self.watches: asyncio.Queue[list[Object | None]] = asyncio.Queue()
        self.asked: list[dict[str, str]] = []
        self.refuses = 0
        """With which code; 0: it answers."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if self.refuses:
            return web.Response(status=self.refuses, text="404 page not found")
        if "watch" not in request.query:
            begin = int(request.query.get("continue", 0))
            end = begin + (self.page or len(self.pods))
            metadata = {"resourceVersion": str(self.version)}
            if end < len(self.pods):
                metadata["continue"] = str(end)
            else:
                self.between()
            return web.json_response({"metadata": metadata, "items": self.pods[begin:end]})
        events = await self.watches.get()
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            if event is None:
                await asyncio.Event().wait()
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    def lists(self) -> int:
        return sum("watch" not in asked for asked in self.asked)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    application = web.Application()
    application.router.add_get("/api/v1/pods", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made = Api(ApiClient(Configuration(host=f"http://{host}:{port}")), 2.0)
    yield made
    await made.close()
    await runner.cleanup()


@pytest.fixture
async def feed(api: Api) -> AsyncIterator[WatchedObjects]:
    made = WatchedObjects(api, "/api/v1/pods", "app=x", lambda _old, _new: None)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 -- two sides' plain values are waited for
            await asyncio.sleep(0.01)


async def test_a_feed_lists_then_follows_and_selects_on_the_server(server: Server, feed: WatchedObjects) -> None:
    server.pods = [pod("a", 3), pod("b", 4)]
    events = [
        {"type": "MODIFIED", "object": pod("a", 11)},
        {"type": "DELETED", "object": pod("b", 12)},
        {"type": "ADDED", "object": pod("c", 13)},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}},
    ]
    server.watches.put_nowait([*events])
    server.watches.put_nowait([None])
    await until(lambda: len(server.asked) == 3)
    assert {key[1]: item["metadata"]["resourceVersion"] for key, item in feed.items.items()} == {"a": "11", "c": "13"}
    assert server.lists() == 1
    assert [asked.get("resourceVersion") for asked in server.asked] == [None, "10", "20"]
    assert all(asked["labelSelector"] == "app=x" for asked in server.asked)
    assert feed.is_synced


async def test_a_watch_that_fell_behind_is_listed_anew(server: Server, feed: WatchedObjects) -> None:
    server.pods = [pod("a", 3)]
    server.watches.put_nowait([{"type": "ERROR", "object": {"code": 410, "message": "too old"}}])
    await until(lambda: ("n", "a") in feed.items)
    server.pods, server.version = [pod("b", 30)], 30
    server.watches.put_nowait([{"type": "ERROR", "object": {"code": 410, "message": "too old"}}])
    server.watches.put_nowait([None])
    await until(lambda: ("n", "b") in feed.items)
    assert list(feed.items) == [("n", "b")]


async def test_a_feed_knows_since_when_it_hears_without_a_break(server: Server, feed: WatchedObjects) -> None:
    server.pods = [pod("a", 3)]
    server.watches.put_nowait([{"type": "MODIFIED", "object": pod("a", 11)}])
    server.watches.put_nowait([{"type": "MODIFIED", "object": pod("a", 12)}])
    await until(lambda: feed.items.get(("n", "a"), {}).get("metadata", {}).get("resourceVersion") == "12")
    whole = feed.contact_since_seconds
    assert whole < feed.last_contact_seconds, "a watch that the server ended in order is no break"
    server.watches.put_nowait([{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}])
    server.watches.put_nowait([None])
    await until(lambda: feed.contact_since_seconds > whole)
    assert whole < feed.contact_since_seconds <= feed.last_contact_seconds


async def test_what_we_wrote_is_known_at_once_and_old_news_does_not_undo_it(
    server: Server, feed: WatchedObjects
) -> None:
    server.pods = [pod("a", 3)]
    await feed.has_listed.wait()
    feed.apply_write_result(pod("a", 40))
    feed.apply_write_result(pod("new", 41))
    feed.apply_write_result(pod("ended-meanwhile", 5))
    feed.remove_deleted("n", "a", "another uid")
    assert sorted(name for _, name in feed.items) == ["a", "new"]
    feed.remove_deleted("n", "new", "new")
    server.watches.put_nowait(
        [{"type": "MODIFIED", "object": pod("a", 39)}, {"type": "MODIFIED", "object": pod("new", 42)}]
    )
    server.watches.put_nowait([None])
    await until(lambda: len(server.asked) == 3)
    assert {key[1]: item["metadata"]["resourceVersion"] for key, item in feed.items.items()} == {"a": "40"}


async def test_a_silent_watch_and_a_refusal_are_sentences(server: Server, api: Api) -> None:
    server.watches.put_nowait([None])
    with pytest.raises(ApiUnreachable, match="did not answer watch /api/v1/pods"):
        assert [event async for event in api.watch("/api/v1/pods", {}, 0.2)] == []
    with pytest.raises(ApiError, match=r"404 .*rejected GET /nowhere"):
        await api.get("/nowhere")
    assert issubclass(ApiUnreachable, PlatformError)


async def test_a_listing_keeps_what_was_learned_while_its_pages_came(server: Server, api: Api) -> None:
    said: list[tuple[str, str]] = []

    def heard(old: Object | None, new: Object | None) -> None:
        said.append((old["metadata"]["uid"] if old else "", new["metadata"]["uid"] if new else ""))

    feed = WatchedObjects(api, "/api/v1/pods", "", heard)
    server.pods, server.version = [pod("a", 1), pod("again", 2, "first"), pod("gone", 3)], 10
    await feed._list_all()
    said.clear()
    # a listing of two pages, made at version 20; behind its first our own writes were answered
    server.pods, server.version, server.page = [pod("a", 1), pod("again", 2, "first")], 20, 1

    def between() -> None:
        feed.apply_write_result(pod("new", 21))
        feed.remove_deleted("n", "again", "first")
        feed.apply_write_result(pod("again", 22, "second"))

    server.between = between
    feed._list_version = ""
    await feed._list_all()
    assert said == [("", "new"), ("first", ""), ("", "second"), ("gone", "")]
    assert {name: item["metadata"]["uid"] for (_, name), item in feed.items.items()} == {
        "a": "a",
        "new": "new",
        "again": "second",
    }
    # one that lists nothing of them again, later, ends them: they were not made behind its back
    server.pods, server.version, server.page, server.between = [pod("a", 1)], 15, 0, lambda: None
    feed._list_version = ""
    await feed._list_all()
    assert list(feed.items) == [("n", "a")], "a store that was restored has older versions, and knows best"


@pytest.mark.parametrize(
    ("code", "asks"), [(404, "CustomResourceDefinition"), (403, "give the operator the permission")]
)
async def test_a_kind_that_is_not_served_says_so_and_is_followed_once_it_is(
    server: Server, api: Api, monkeypatch: pytest.MonkeyPatch, code: int, asks: str
) -> None:
    monkeypatch.setattr(watched_objects, "NOT_SERVED_RETRY_SECONDS", 0.01)
    feed = WatchedObjects(api, "/api/v1/pods", "", lambda _old, _new: None, optional=True)
    feed.apply_write_result(pod("a", 3))  # of an answer to a write of ours
    server.refuses = code
    task = asyncio.create_task(feed.run())
    try:
        await until(lambda: bool(feed.rejection))
        assert asks in feed.rejection
        assert len(feed.items) == (0 if code == 404 else 1)
        server.pods = [pod("b", 4)]
        server.watches.put_nowait([None])
        server.refuses = 0
        await until(feed.has_listed.is_set)
        assert feed.rejection == ""
        assert [name for _, name in feed.items] == ["b"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
