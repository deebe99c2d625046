"""A lease is renewed although every connection of the jobs' client is taken, against a real HTTP server."""

from __future__ import annotations

import asyncio

from aiohttp import web

from support.servers.api_stand_in import answered_by

POOL = 100
SECONDS = 60.0


async def test_calls_apart_wait_for_no_connection_of_others() -> None:
    taken, let_go = asyncio.Semaphore(0), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if "slow" in request.query:
            taken.release()
            await let_go.wait()
        return web.json_response({"metadata": {"name": "lease"}})

    async with answered_by("/lease", answer) as api, asyncio.timeout(SECONDS):
        assert api._client.configuration.connection_pool_maxsize == POOL
        apart = api.with_own_connections()
        slow = [asyncio.create_task(api.get("/lease", {"slow": "1"})) for _ in range(POOL)]
        for _ in range(POOL):
            await taken.acquire()
        behind = asyncio.create_task(api.get("/lease"))
        assert (await apart.get("/lease"))["metadata"]["name"] == "lease"
        assert not behind.done()
        let_go.set()
        await asyncio.gather(behind, *slow)
        await apart.close()
