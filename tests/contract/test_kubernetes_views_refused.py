"""A cluster that may not be seen: what a start says, what keeps a running operator from planning, and that it recovers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from support.servers.memory_api import Refusal, Target, served
from surefoot_operator.errors import PlatformError, ReadForbidden
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.views import cluster_cache as cache_module
from surefoot_operator.platforms.kubernetes.views import watched_objects
from surefoot_operator.platforms.kubernetes.views.cluster_cache import ClusterCache

FORBIDDEN = Refusal(403, "Forbidden", "it is forbidden: no right to list it")
ABSENT = Refusal(404, "NotFound", "the server could not find the requested resource")


def refusing(plural: str, refusal: Refusal) -> Callable[[Target], Refusal | None]:
    return lambda target: refusal if target.plural == plural else None


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("plural", "refusal", "asks"),
    [("trainingjobs", ABSENT, True), ("trainingjobs", FORBIDDEN, False), ("pods", FORBIDDEN, False)],
)
async def test_a_start_that_cannot_go_on_begins_with_the_servers_sentence(
    plural: str, refusal: Refusal, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SYNC_TIMEOUT_SECONDS", 0.5)
    async with served() as (server, client):
        server.refuse = refusing(plural, refusal)
        cache = ClusterCache(Api(client))
        with pytest.raises(PlatformError) as caught:
            await cache.start()
        assert str(caught.value).startswith(refusal.message)
        assert plural in str(caught.value)
        assert ("install the CustomResourceDefinition" in str(caught.value)) is asks


@pytest.mark.parametrize("plural", ["nodes", "leases"])
async def test_a_start_without_nodes_begins_and_plans_nothing_until_they_are_shown(plural: str) -> None:
    async with served() as (server, client):
        server.refuse = refusing(plural, FORBIDDEN)
        cache = ClusterCache(Api(client))
        await cache.start()
        try:
            assert not cache.is_complete
            with pytest.raises(ReadForbidden, match=f"^{FORBIDDEN.message}.*without this watch Surefoot plans nothing"):
                cache.check_fresh()
            server.refuse = lambda target: None
            await until(lambda: cache.is_complete)
            cache.check_fresh()
        finally:
            await cache.close()


async def test_a_right_that_is_taken_later_ends_planning_and_counts_as_an_answer() -> None:
    async with served() as (server, client):
        cache = ClusterCache(Api(client))
        await cache.start()
        try:
            cache.check_fresh()
            server.refuse = refusing("nodes", FORBIDDEN)
            await until(lambda: cache.nodes.rejection)
            cache.check_fresh()  # what was seen a moment ago still holds
            cache.nodes.last_contact_seconds -= watched_objects.MAX_AGE_SECONDS
            with pytest.raises(ReadForbidden, match=f"^{FORBIDDEN.message}"):
                cache.check_fresh()
            assert (
                cache.seconds_since_answer()["nodes"] < watched_objects.MAX_AGE_SECONDS
            )  # a restart would hear the same
        finally:
            await cache.close()
