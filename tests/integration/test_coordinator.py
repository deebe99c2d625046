"""The agents' server with real WebSocket clients: who is let in, what they hear, how lines end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from support.fakes.fake_agent import FakeAgent, hello, until
from surefoot.agent.coordinator_client import CoordinatorClient, first_address
from surefoot.protocol.identities import Checkpoint, WorkerId
from surefoot.protocol.messages import (
    Assign,
    Heartbeat,
    Hello,
    HelloRejected,
    Notice,
    StopTrainers,
    StoreReady,
    TrainersStopped,
    Welcome,
)
from surefoot.protocol.progress import Progress
from surefoot.protocol.wire import VERSION
from surefoot_operator.api.status import JobStatus, Member, Membership
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_server import (
    AgentServer,
    Authenticator,
    ShardDirectory,
    create_token_authenticator,
)
from surefoot_operator.coordinator.desired_messages import derive_desired_state
from surefoot_operator.coordinator.sessions import list_observed_sessions
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.settings import CoordinatorSettings

MEMBERS = (Member(0, 1, "i0-1", "node-0"), Member(1, 1, "i1-1", "node-1"))
WORLD = Membership(generation=2, state="Committed", parent=Checkpoint(1, 40), world_size=2, members=MEMBERS)
STATUS = JobStatus(membership=WORLD)
DEFAULT = CoordinatorSettings()


class Stand:
    """A running server with one channel, as the controller builds it."""

    def __init__(self, settings: CoordinatorSettings, authenticate: Authenticator, referrals: ShardDirectory) -> None:
        self.server = AgentServer(settings, authenticate, shard_directory=referrals)
        self.wakes: list[bool] = []
        self.token = "t2"
        self.channel = AgentChannel("job-1", 0.5, time.time, self.wakes.append)

    def seen(self, index: int = 0) -> ObservedSession:
        return next(s for s in list_observed_sessions(self.channel.sessions) if s.index == index)

    def stands(self, status: JobStatus) -> None:
        self.channel.apply_desired_state(derive_desired_state(status, UsableMemoryServers(), 2, self.token))


async def _expected(given: Hello) -> HelloRejected | None:
    return await create_token_authenticator(lambda job, index, attempt: f"token-{index}-{attempt}")(given)


Standing = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def standing() -> AsyncIterator[Standing]:
    stands: list[Stand] = []

    async def build(
        settings: CoordinatorSettings = DEFAULT,
        authenticate: Authenticator = _expected,
        referrals: ShardDirectory = ShardDirectory(),  # noqa: B008  frozen
    ) -> Stand:
        stand = Stand(settings, authenticate, referrals)
        stand.server.add_channel("job-1", stand.channel)
        stand.server.set_leading(True)
        await stand.server.start()
        stands.append(stand)
        stand.channel.set_expected_workers([WorkerId(0, 1), WorkerId(1, 1), WorkerId(2, 1)])
        return stand

    yield build
    for stand in stands:
        await stand.server.close()


@asynccontextmanager
async def refused(stand: Stand, greeting: Hello | None) -> AsyncIterator[HelloRejected]:
    async with FakeAgent(stand.server.url, greeting) as agent:
        word = await agent.heard(HelloRejected)
        await agent.ended()
        yield word


async def test_an_agent_is_welcomed_and_told_its_place_and_the_store_once_it_is_known(standing: Standing) -> None:
    stand = await standing()
    stand.stands(STATUS)
    async with FakeAgent(stand.server.url, hello(0)) as first, FakeAgent(stand.server.url, hello(1)) as second:
        assert (await first.heard(Welcome)).heartbeat_seconds == 0.5
        assert (await first.heard(Assign)).hosts_store
        assert (await second.heard(Assign)).store is None
        await first.say(StoreReady(2, "127.0.0.1:9"))
        assert (await second.heard(Assign, lambda a: a.store is not None)).store == "127.0.0.1:9"
        stand.stands(replace(STATUS, membership=replace(WORLD, generation=3, state="Claimed", reason="why")))
        assert await second.heard(StopTrainers) == StopTrainers(3, "why")
        await second.say(TrainersStopped(3))
        await until(lambda: stand.seen(1).stopped == 3, "worker 1 stopped")


async def test_a_broken_line_is_noticed(standing: Standing) -> None:
    stand = await standing()
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        agent.cut()
        await until(lambda: not stand.seen().connected, "the line is known to be broken")
        assert stand.wakes[-1]


async def test_an_agent_that_returns_goes_on_with_its_facts_and_hears_the_same_word(standing: Standing) -> None:
    stand = await standing()
    stand.stands(STATUS)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        before = await agent.heard(Assign)
        await agent.say(Heartbeat(generation=2, stopped=2, is_warm=True, progress=Progress(55, restored=True)))
        await until(lambda: stand.seen().progress.step == 55, "step 55 is known")
    await until(lambda: not stand.seen().connected, "the line is known to be broken")
    async with FakeAgent(stand.server.url, hello(0, generation=2, stopped=2)) as agent:
        assert await agent.heard(Assign) == before
        assert (stand.seen().progress.step, stand.seen().progress.restored) == (55, True)
        assert not [m for m in agent.said if isinstance(m, StopTrainers)]


async def test_a_coordinator_that_returns_adopts_members_as_they_are(standing: Standing) -> None:
    stand = await standing()
    stand.stands(STATUS)
    async with (
        FakeAgent(stand.server.url, hello(0, generation=2, stopped=2, store="127.0.0.1:9")) as first,
        FakeAgent(stand.server.url, hello(1, generation=2, stopped=2)) as second,
    ):
        assert (await second.heard(Assign, lambda a: a.store is not None)).generation == 2
        assert (await first.heard(Assign)).store == "127.0.0.1:9"
        assert not [m for m in (*first.said, *second.said) if isinstance(m, StopTrainers)]


async def test_a_newer_line_of_a_worker_takes_the_place_of_the_older(standing: Standing) -> None:
    stand = await standing()
    async with FakeAgent(stand.server.url, hello(0)) as old:
        await old.heard(Welcome)
        async with FakeAgent(stand.server.url, hello(0)) as new:
            await new.heard(Welcome)
            await old.ended()
            await new.say(Notice("Here", "still"))
            await until(lambda: bool(stand.channel.sessions.notices), "the newer line is heard")
            assert stand.seen().connected


async def test_whoever_does_not_belong_is_refused_by_name(standing: Standing) -> None:
    stand = await standing()
    async with refused(stand, hello(job="job-2")) as word:
        assert "does not serve job job-2" in word.reason
        assert not word.retry
    async with refused(stand, hello(7)) as word:
        assert "worker 7" in word.reason
    async with refused(stand, hello(0, token="guess")) as word:
        assert "token" in word.reason
        assert "guess" not in word.reason
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        async with refused(stand, hello(1, incarnation="i0-1")) as word:
            assert "incarnation i0-1 is already worker 0" in word.reason


async def test_an_operator_that_does_not_lead_asks_to_come_again_and_cuts_its_lines(standing: Standing) -> None:
    stand = await standing(CoordinatorSettings(lead_wait_seconds=0.2))
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        stand.server.set_leading(False)
        await agent.ended()
    async with refused(stand, hello(0)) as word:
        assert word.retry


async def test_who_comes_to_one_that_stands_by_is_welcomed_the_moment_it_leads(standing: Standing) -> None:
    stand = await standing(CoordinatorSettings(lead_wait_seconds=60.0, hello_timeout_seconds=60.0))
    stand.server.set_leading(False)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        stand.server.set_leading(True)
        await agent.heard(Welcome)


async def test_who_is_asked_to_come_again_is_on_the_way_here(standing: Standing) -> None:
    async def later(_: Hello) -> HelloRejected | None:
        return HelloRejected("ask again", retry=True)

    stand = await standing(DEFAULT, later)
    before = stand.channel.sessions.last_retry_later_seconds
    async with refused(stand, hello(0)):
        pass
    assert stand.channel.sessions.last_retry_later_seconds > before


async def test_a_connection_without_a_hello_is_closed(standing: Standing) -> None:
    stand = await standing(CoordinatorSettings(hello_timeout_seconds=0.2))
    async with refused(stand, None) as word:
        assert "no hello" in word.reason
        assert word.retry


async def test_an_authenticator_that_does_not_answer_means_try_again(standing: Standing) -> None:
    async def never(_: Hello) -> HelloRejected | None:
        await asyncio.Event().wait()
        return None

    stand = await standing(CoordinatorSettings(hello_timeout_seconds=0.2), never)
    async with refused(stand, hello(0)) as word:
        assert word.retry


async def test_a_message_that_cannot_be_read_ends_the_line_but_not_the_worker(standing: Standing) -> None:
    stand = await standing()
    for text in ("{", '{"v":1,"type":"Heartbeet"}', '{"v":1,"type":"Stop","generation":9,"reason":"me"}'):
        async with FakeAgent(stand.server.url, hello(0)) as agent:
            await agent.heard(Welcome)
            await agent.say_text(text)
            await agent.ended()
            assert not [m for m in agent.said if isinstance(m, HelloRejected)]
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)


async def test_a_first_message_that_is_no_hello_or_of_a_foreign_version_is_refused(standing: Standing) -> None:
    stand = await standing()
    async with FakeAgent(stand.server.url, None) as agent:
        await agent.say(TrainersStopped(1))
        assert "Stopped, not Hello" in (await agent.heard(HelloRejected)).reason
    async with FakeAgent(stand.server.url, None) as agent:
        await agent.say_text(json.dumps({"v": 99, "type": "Hello"}))
        assert "has protocol version 99" in (await agent.heard(HelloRejected)).reason


async def test_an_agent_that_does_not_take_its_messages_is_cut_and_others_are_not_delayed(standing: Standing) -> None:
    stand = await standing(CoordinatorSettings(max_queued_messages=8))
    stand.token = "x" * 300_000
    async with aiohttp.ClientSession() as session:
        deaf = await session.ws_connect(stand.server.url, max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=0.2))
        connection = deaf._response.connection
        assert connection is not None
        assert connection.transport is not None
        await deaf.send_str(f'{{"v":{VERSION},"type":"Hello",' + json.dumps(_plain(hello(0)))[1:])
        await until(lambda: bool(list_observed_sessions(stand.channel.sessions)), "the deaf one is connected")
        connection.transport.pause_reading()
        async with FakeAgent(stand.server.url, hello(1)) as other:
            for epoch in range(3, 500):
                stand.stands(replace(STATUS, membership=replace(WORLD, generation=epoch)))
                await other.heard(Assign, lambda a, epoch=epoch: a.generation == epoch)  # type: ignore[misc]  # a default binds it
                if not stand.seen(0).connected:
                    break
            assert not stand.seen(0).connected
            assert stand.seen(1).connected
        await deaf.close()


def _plain(greeting: Hello) -> dict[str, object]:
    return {name: getattr(greeting, name) for name in greeting.__dataclass_fields__}


async def test_too_many_lines_are_turned_away(standing: Standing) -> None:
    stand = await standing(CoordinatorSettings(max_agents=1))
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        async with refused(stand, hello(1)) as word:
            assert word.retry
            assert "raise `max_agents`" in word.reason


async def test_steps_alone_do_not_ask_for_a_plan_at_once(standing: Standing) -> None:
    stand = await standing()
    stand.stands(STATUS)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        await agent.say(Heartbeat(generation=2, stopped=2, is_warm=True, progress=Progress(41)))
        await until(lambda: stand.seen().progress.step == 41, "first step")
        stand.wakes.clear()
        await agent.say(Heartbeat(generation=2, stopped=2, is_warm=True, progress=Progress(42)))
        await until(lambda: stand.seen().progress.step == 42, "second step")
        await agent.say(Notice("Something", "happened"))
        await until(lambda: len(stand.wakes) == 2, "two messages")
        assert stand.wakes == [False, True]


async def test_closing_ends_every_line_and_the_port_can_be_taken_again(standing: Standing) -> None:
    stand = await standing()
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)
        await stand.server.close()
        await agent.ended()
    again = await standing(CoordinatorSettings(port=stand.server.port))
    assert again.server.port == stand.server.port


async def test_thirty_two_agents_all_hear_a_claim(standing: Standing) -> None:
    stand = await standing()
    workers = [WorkerId(n, 1) for n in range(32)]
    stand.channel.set_expected_workers(workers)
    agents = [FakeAgent(stand.server.url, hello(n)) for n in range(32)]
    try:
        for agent in agents:
            await agent.__aenter__()
        await asyncio.gather(*(agent.heard(Welcome) for agent in agents))
        stand.stands(replace(STATUS, membership=replace(WORLD, state="Claimed", reason="r")))
        await asyncio.gather(*(agent.heard(StopTrainers) for agent in agents))
    finally:
        for agent in agents:
            await agent.leave()


# ---- shards ---------------------------------------------------------------------------------------------------------


async def test_an_agent_of_another_shard_is_told_where_its_job_is_led(standing: Standing) -> None:
    """Whatever its pod was told: the number of shards may have changed since."""
    address = "ws://localhost:1/v1/agents"
    stand = await standing(
        CoordinatorSettings(lead_wait_seconds=0.2), referrals=ShardDirectory(lambda _: 1, lambda _: address)
    )
    async with refused(stand, hello(0)) as word:
        assert (word.retry, word.address) == (True, address)
    stand.server.set_leading(True, 1)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Welcome)  # by whatever name it came: its shard is led here too
        stand.server.set_leading(False, 0)
        stand.server.set_leading(False, 1)
        await agent.ended()


async def test_an_agent_that_is_at_its_shards_address_waits_there_for_a_leader(standing: Standing) -> None:
    here = ShardDirectory(lambda _: 1, lambda _: "ws://127.0.0.1:1/v1/agents")
    stand = await standing(CoordinatorSettings(lead_wait_seconds=60.0, hello_timeout_seconds=60.0), referrals=here)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        stand.server.set_leading(True, 1)
        await agent.heard(Welcome)


async def test_who_leads_another_shard_no_more_keeps_the_agents_of_this_one(standing: Standing) -> None:
    stand = await standing()
    stand.server.set_leading(True, 1)
    stand.stands(STATUS)
    async with FakeAgent(stand.server.url, hello(0)) as agent:
        await agent.heard(Assign)
        stand.server.set_leading(False, 1)
        stand.stands(replace(STATUS, membership=replace(WORLD, generation=3, state="Claimed", reason="why")))
        assert await agent.heard(StopTrainers) == StopTrainers(3, "why")


async def test_a_real_line_follows_to_where_its_job_is_led_and_home_again(standing: Standing) -> None:
    """From a former address to its shard's, and on when that one does not lead it any more."""
    leads = await standing()
    refers = await standing(
        referrals=ShardDirectory(lambda _: 1, lambda _: leads.server.url.replace("127.0.0.1", "localhost"))
    )
    heard: list[object] = []
    line = CoordinatorClient(
        first_address(refers.server.url), lambda: hello(0), lambda: Heartbeat(0, 0, True), heard.append
    )
    running = asyncio.create_task(line.run())
    try:
        await until(lambda: bool(leads.channel.connections), "it has found its leader")
        refers.server.set_leading(True, 1)
        await leads.server.close()
        await until(lambda: bool(refers.channel.connections), "it came home")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
