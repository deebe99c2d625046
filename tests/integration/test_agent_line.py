"""How a real agent finds its coordinator: verified, with the token of the moment, again and again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fakes.fake_coordinator import DEADLINE, AgentProcess, FakeCoordinator, all_gone, descendants, start_agent
from support.servers.certificates import Authority, authority
from surefoot.protocol.messages import HelloRejected, Shutdown

COMMAND = ("sh", "-c", "true")


@pytest.fixture
def trusted() -> Authority:
    return authority("surefoot test")


@pytest.fixture
async def coordinator(trusted: Authority, tmp_path: Path) -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator(trusted.sign("127.0.0.1").server(tmp_path))
    await server.start()
    yield server
    await server.stop()


async def end(agent: AgentProcess) -> None:
    below = descendants(agent.pid)
    await agent.end()
    assert await all_gone(below)


def own_log(folder: Path) -> str:
    return (folder / "agent-0.log").read_text()


async def test_an_agent_shows_the_token_of_the_moment_and_comes_back(
    coordinator: FakeCoordinator, trusted: Authority, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    told = {"SUREFOOT_COORDINATOR_CA": trusted.pem, "SUREFOOT_TOKEN_FILE": str(token)}
    agent = await start_agent(coordinator, tmp_path / "run", 0, COMMAND, **told)
    try:
        await coordinator.when(lambda: coordinator.agents.get(0))
        token.write_text("second\n")
        await coordinator.stop()
        coordinator.refuse = HelloRejected("this operator does not lead: ask again", retry=True)
        await coordinator.start()
        coordinator.refuse = None
        await coordinator.when(lambda: len(coordinator.agents[0].hellos) > 1 or None)
        assert [hello.token for hello in coordinator.agents[0].hellos] == ["first", "second"]
        await coordinator.when(lambda: coordinator.agents[0].line)
        await coordinator.say(0, Shutdown("complete", 7))
        assert await agent.ended() == 7
    finally:
        await end(agent)


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_coordinator_that_proves_nothing_hears_no_token(wrong: str, trusted: Authority, tmp_path: Path) -> None:
    signer = authority("somebody else") if wrong == "authority" else trusted
    name = "127.0.0.1" if wrong == "authority" else "another.example"
    server = FakeCoordinator(signer.sign(name).server(tmp_path))
    await server.start()
    agent = await start_agent(server, tmp_path / "run", 0, COMMAND, SUREFOOT_COORDINATOR_CA=trusted.pem)
    try:
        async with asyncio.timeout(DEADLINE):
            while "certificate verify failed" not in own_log(tmp_path / "run"):  # noqa: ASYNC110  # files announce nothing
                await asyncio.sleep(0.02)
        assert server.agents == {}
    finally:
        await end(agent)
        await server.stop()


async def test_an_agent_without_its_token_s_file_says_so_and_ends(
    coordinator: FakeCoordinator, trusted: Authority, tmp_path: Path
) -> None:
    told = {"SUREFOOT_COORDINATOR_CA": trusted.pem, "SUREFOOT_TOKEN_FILE": str(tmp_path / "none")}
    agent = await start_agent(coordinator, tmp_path / "run", 0, COMMAND, **told)
    assert await agent.ended() == 2
    assert "SUREFOOT_TOKEN_FILE" in own_log(tmp_path / "run")
