"""A pod's log as it streams from a real HTTP server: parts as they come, refusals, cuts and silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from support.servers.api_stand_in import answered_by
from surefoot_operator.platforms.kubernetes.api_client import Api
from surefoot_operator.platforms.kubernetes.api_objects import ApiError, ApiUnreachable

PATH = "/api/v1/namespaces/n/pods/p/log"


class LogServer:
    """Streams `parts`: bytes, an event that is waited for, or None, which cuts the connection."""

    def __init__(self) -> None:
        self.parts: list[bytes | asyncio.Event | None] = []
        self.status = 200
        self.asked: dict[str, str] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked = dict(request.query)
        if self.status != 200:
            return web.json_response({"reason": "Forbidden", "message": "no pods/log"}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for part in self.parts:
            if part is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                await response.write(part)
        return response


@pytest.fixture
async def served() -> AsyncIterator[tuple[LogServer, Api]]:
    server = LogServer()
    async with answered_by(PATH, server.answer) as api:
        yield server, api


async def test_parts_come_before_the_stream_ends(served: tuple[LogServer, Api]) -> None:
    server, api = served
    more = asyncio.Event()
    server.parts = [b"one\n", more, "zwei ü\n".encode()]
    found = b""
    async with asyncio.timeout(30):
        async for part in api.stream_text(PATH, {"follow": "true", "tailLines": 5}, 20.0):
            found += part
            if found == b"one\n":
                more.set()  # an answer that is gathered first would never come here
    assert found == "one\nzwei ü\n".encode()
    assert server.asked == {"follow": "true", "tailLines": "5"}


async def test_a_refusal_is_one(served: tuple[LogServer, Api]) -> None:
    server, api = served
    server.status = 403
    with pytest.raises(ApiError, match="no pods/log"):
        _ = [part async for part in api.stream_text(PATH, {}, 20.0)]


async def test_a_cut_and_a_silence_are_said_as_such(served: tuple[LogServer, Api]) -> None:
    server, api = served
    server.parts = [b"one\n", None]
    with pytest.raises(ApiUnreachable):
        _ = [part async for part in api.stream_text(PATH, {}, 20.0)]
    never = asyncio.Event()
    server.parts = [b"one\n", never]
    found: list[bytes] = []

    async def read() -> None:
        async for part in api.stream_text(PATH, {}, 0.2):
            found.append(part)

    async with asyncio.timeout(30):
        with pytest.raises(ApiUnreachable):
            await read()
    never.set()
    assert found == [b"one\n"]
