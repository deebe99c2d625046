"""The agents' port against connections that do not say who they are, or say too much: others are heard all the same."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import aiohttp
import pytest

from support.fakes.fake_agent import FakeAgent, hello, until
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import FromAgent, Heartbeat, Hello, HelloRejected, Notice, PersistentPage, Welcome
from surefoot.protocol.progress import Progress
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.settings import CoordinatorSettings

Starting = Callable[[CoordinatorSettings], Awaitable[AgentServer]]


async def _anybody(_: Hello) -> HelloRejected | None:
    return None


@pytest.fixture
async def starting() -> AsyncIterator[Starting]:
    started: list[AgentServer] = []

    async def start(settings: CoordinatorSettings) -> AgentServer:
        server = AgentServer(settings, _anybody)
        channel = AgentChannel("job-1", 0.5, time.time, lambda _: None)
        channel.set_expected_workers([WorkerId(n, 1) for n in range(4)])
        server.add_channel("job-1", channel)
        server.set_leading(True)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.close()


async def test_a_hello_of_megabytes_is_cut_before_it_is_read_and_fills_no_log(
    starting: Starting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = await starting(CoordinatorSettings())
    big = '{"v":2,"type":"Hello","job":[' + "1," * 4_000_000 + "1]}"
    async with aiohttp.ClientSession() as session, session.ws_connect(server.url) as line:
        with suppress(ConnectionError, aiohttp.ClientError):
            await line.send_str(big)
        assert (await line.receive(timeout=30)).type is not aiohttp.WSMsgType.TEXT
    async with FakeAgent(server.url, hello(0)) as agent:
        await agent.heard(Welcome)
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


async def test_what_a_refused_hello_said_is_repeated_shortly_only(
    starting: Starting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "surefoot_operator")
    server = await starting(CoordinatorSettings())
    for greeting in (hello(0, job="j" * 50_000), hello(0, incarnation="i" * 50_000), hello(10**400)):
        async with FakeAgent(server.url, greeting) as agent:
            assert len((await agent.heard(HelloRejected)).reason) < 300
    async with FakeAgent(server.url, None) as agent:
        await agent.say_text('{"v":2,"type":"Hello","job":["' + "x" * 50_000 + '"]}')
        assert len((await agent.heard(HelloRejected)).reason) < 300
    assert max(len(record.getMessage()) for record in caplog.records) < 300


async def test_strangers_that_say_nothing_shut_no_agent_out(starting: Starting) -> None:
    server = await starting(CoordinatorSettings(max_agents=2, max_unauthenticated=6, max_unauthenticated_per_address=8))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        mute = [await session.ws_connect(server.url) for _ in range(6)]
        for n in range(2):
            agent = await stack.enter_async_context(FakeAgent(server.url, hello(n), address="127.0.0.2"))
            await agent.heard(Welcome)
        # the oldest of whoever has most made room for the first; that one was let in, and needs no room any more
        assert (await mute[0].receive(timeout=30)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        assert not mute[5].closed


async def test_one_address_has_few_connections_without_a_hello(starting: Starting) -> None:
    server = await starting(CoordinatorSettings(max_unauthenticated=100, max_unauthenticated_per_address=3))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        mute = [await session.ws_connect(server.url) for _ in range(3)]
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await session.ws_connect(server.url)
        agent = await stack.enter_async_context(FakeAgent(server.url, hello(0), address="127.0.0.2"))
        await agent.heard(Welcome)
        assert not any(line.closed for line in mute)


async def test_a_connection_that_opens_no_websocket_is_ended(starting: Starting) -> None:
    server = await starting(CoordinatorSettings(hello_timeout_seconds=0.05))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(30):
        assert b"404" in await reader.readline()
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass  # cut, not closed
    writer.close()


@pytest.mark.parametrize(
    ("message", "taken"),
    [
        (PersistentPage(1, layouts={"a": "x" * 3_000_000}), True),
        (Heartbeat(1, 1, True, Progress(1, no_staging_reason="x" * 100_000)), True),
        (Heartbeat(1, 1, True, Progress(1, no_staging_reason="x" * 1_100_000)), False),
        (Notice("Said", "x" * 70_000), False),
    ],
    ids=["listing", "heartbeat", "a long heartbeat", "a long notice"],
)
async def test_later_messages_are_limited_by_their_kind(
    starting: Starting, caplog: pytest.LogCaptureFixture, message: FromAgent, taken: bool
) -> None:
    server = await starting(CoordinatorSettings())
    async with FakeAgent(server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        await agent.say(message)
        await agent.say_text("no JSON")  # ends the line, if it stands till then
        await agent.ended()
    await until(lambda: "closing the connection" in caplog.text, "the line is closed with a sentence")
    assert ("more than any valid one" in caplog.text) == (not taken)
