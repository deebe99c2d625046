"""A job whose runner is followed by another on one server: no agent hangs on a channel that nobody reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from support.fakes.fake_agent import FakeAgent, hello
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Hello, HelloRejected, Welcome
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import AgentServer
from surefoot_operator.settings import CoordinatorSettings


class Stand:
    """A server that leads, and looks at tokens for as long as a test wants."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.server = AgentServer(CoordinatorSettings(), self._look)

    def channel(self) -> AgentChannel:
        """Another one, which serves the job from now on."""
        made = AgentChannel("job-1", 0.5, time.time, lambda _: None)
        made.set_expected_workers([WorkerId(0, 1)])
        self.server.add_channel("job-1", made)
        return made

    async def _look(self, _: Hello) -> HelloRejected | None:
        self.asked.set()
        await self.answer.wait()
        return None


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    made = Stand()
    made.server.set_leading(True)
    await made.server.start()
    yield made
    await made.server.close()


async def test_a_job_handed_over_while_a_token_is_looked_at_is_asked_for_again(stand: Stand) -> None:
    first = stand.channel()
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await stand.asked.wait()
        second = stand.channel()
        stand.answer.set()
        assert (await agent.heard(HelloRejected)).retry
        await agent.ended()
    assert first.connections == second.connections == ()


async def test_who_served_a_job_before_turns_away_its_own_agents_alone(stand: Stand) -> None:
    stand.answer.set()
    first = stand.channel()
    async with FakeAgent(stand.server.url, hello(0)) as older:
        await older.heard(Welcome)
        second = stand.channel()
        stand.server.remove_channel("job-1", first)
        await older.ended()
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        stand.server.remove_channel("job-1", second)
        await agent.ended()
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        assert "does not serve job job-1" in (await agent.heard(HelloRejected)).reason
