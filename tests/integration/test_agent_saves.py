"""What trainers stage reaches real holders, whatever becomes of the trainers; and what else an agent does with saves."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes.fake_coordinator import (
    DEADLINE,
    AgentProcess,
    FakeCoordinator,
    all_gone,
    assignment,
    descendants,
    start_agent,
)
from support.servers import redis_server
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave
from surefoot.protocol.messages import (
    Assign,
    DeletePersistent,
    DeleteReply,
    Finished,
    Heartbeat,
    ListAllServers,
    ListPersistent,
    MemoryServers,
    Notice,
    PersistentPage,
    RepairReply,
    RepairSave,
    Shutdown,
    StopTrainers,
    StoreReady,
    TrainerFailure,
    TrainersStopped,
    UploadReply,
    UploadSave,
)

SAVER = str(Path(__file__).parents[1] / "support" / "programs" / "saving_trainer.py")
JOB = "job-1"
ACCOUNT = Credentials("job-1-user", "a password")
ENVIRONMENT = {"SUREFOOT_MEMORY_USER": ACCOUNT.user, "SUREFOOT_MEMORY_PASSWORD": ACCOUNT.password}


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[tuple[MemoryServerEndpoint, ...]]:
    """Two real holders, provisioned for the job at epoch 1."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with redis_server.running(tmp_path / "a") as first, redis_server.running(tmp_path / "b") as second:
        endpoints = (redis_server.endpoint(first, "node-a"), redis_server.endpoint(second, "node-b"))
        for endpoint in endpoints:
            seal(endpoint, 1)
        yield endpoints


def seal(endpoint: MemoryServerEndpoint, epoch: int) -> None:
    MemoryServerAdmin(endpoint.host, endpoint.port, redis_server.ADMIN_PASSWORD).provision(JOB, ACCOUNT, epoch)


def saves_on(endpoint: MemoryServerEndpoint) -> set[RankSave]:
    client = MemoryServerClient(endpoint, JOB, ACCOUNT)
    try:
        return {m.save for m in client.read_index().manifests}
    finally:
        client.close()


async def drained(coordinator: FakeCoordinator, endpoint: MemoryServerEndpoint) -> set[RankSave]:
    """What is on the holder once something is, and the agent has nothing on its way."""
    async with asyncio.timeout(DEADLINE):
        while True:
            found, beat = saves_on(endpoint), coordinator.last(0, Heartbeat)
            if found and beat is not None and beat.pending == ():
                return found
            await asyncio.sleep(0.02)  # a holder does not announce what it has


def saving(assign: Assign, holders: tuple[MemoryServerEndpoint, ...], replicas: int = 2) -> Assign:
    targets = tuple(h.instance for h in holders[:replicas])
    return replace(assign, servers=holders, targets=targets, replicas=replicas)


async def launch(
    coordinator: FakeCoordinator,
    epoch: int,
    holders: tuple[MemoryServerEndpoint, ...],
    ranks: int = 2,
    replicas: int = 2,
) -> None:
    assign = saving(assignment(epoch, 0, 1, local_ranks=ranks), holders, replicas)
    await coordinator.say(0, assign)
    ready = await coordinator.until(0, StoreReady, lambda m: m.generation == epoch)
    await coordinator.say(0, replace(assign, store=ready.address))


async def end(agent: AgentProcess) -> None:
    below = descendants(agent.pid)
    await agent.end()
    assert await all_gone(below)


async def test_saves_of_dead_trainers_are_drained_and_their_memory_is_used_again(
    coordinator: FakeCoordinator, tmp_path: Path, holders: tuple[MemoryServerEndpoint, ...]
) -> None:
    agent = await start_agent(coordinator, tmp_path, 0, ("python", SAVER, "10", "die"), **ENVIRONMENT)
    try:
        await coordinator.warm(0)
        await launch(coordinator, 1, holders)
        assert (await coordinator.until(0, TrainerFailure)).cause == "killed by SIGKILL"
        first = {RankSave(1, 11, rank) for rank in (0, 1)}
        # one rank may be killed before it staged, so that the worker never says "saved"; the other has died by itself
        assert await drained(coordinator, holders[0]) <= first
        await coordinator.say(0, StopTrainers(2, "a test"))
        await coordinator.until(0, TrainersStopped, lambda m: m.generation == 2)
        for endpoint in holders:
            seal(endpoint, 2)
        await launch(coordinator, 2, holders, ranks=1)
        done = Checkpoint(2, 12)
        # the slot is freed after the last copy is told, and the step is told after the save was handed over
        await coordinator.until(
            0, Heartbeat, lambda b: b.saved == done and b.copies == 2 and b.pending == () and b.progress.step == 12
        )
        for endpoint in holders:
            assert RankSave(2, 12, 0) in saves_on(endpoint)
        slot, slots = re.findall(r"slot (\d) of (\d)", agent.log(2, 0))[0]
        assert (slot, slots) == ("0", "2")
        ledger = [json.loads(t) for t in (tmp_path / "ledger" / "worker-0-0.jsonl").read_text().splitlines()]
        assert {"generation": 2, "step": 12, "rank": 0, "loss": 1.0, "samples": [[0, 8]]}.items() <= ledger[-1].items()
    finally:
        await end(agent)


async def test_a_world_that_was_overtaken_is_refused_and_its_slots_are_freed(
    coordinator: FakeCoordinator, tmp_path: Path, holders: tuple[MemoryServerEndpoint, ...]
) -> None:
    for endpoint in holders:
        seal(endpoint, 9)
    agent = await start_agent(coordinator, tmp_path, 0, ("python", SAVER, "10", "stay"), **ENVIRONMENT)
    try:
        await coordinator.warm(0)
        await launch(coordinator, 1, holders, ranks=1)
        assert (await coordinator.until(0, Finished)).exit_code == 0
        assert "drained" in agent.log(1, 0), "a refusal frees the slot: the training goes on"
        assert all(saves_on(endpoint) == set() for endpoint in holders)
        beat = await coordinator.until(0, Heartbeat, lambda b: b.pending == () and b.progress.step == 11)
        assert beat.saved is None
    finally:
        await end(agent)


async def test_a_holder_that_is_away_costs_a_copy_and_no_trainer(
    coordinator: FakeCoordinator, tmp_path: Path, holders: tuple[MemoryServerEndpoint, ...]
) -> None:
    away = MemoryServerEndpoint(MemoryServerInstance("node-c", "gone"), "127.0.0.1", 1, "node-c")
    agent = await start_agent(coordinator, tmp_path, 0, ("python", SAVER, "10", "stay"), **ENVIRONMENT)
    try:
        await coordinator.warm(0)
        await launch(coordinator, 1, (holders[0], away), ranks=1)
        assert (await coordinator.until(0, Notice)).reason == "SaveUnderReplicated"
        assert (await coordinator.until(0, Finished)).exit_code == 0
        assert saves_on(holders[0]) == {RankSave(1, 11, 0)}
        await coordinator.until(0, Heartbeat, lambda b: b.saved == Checkpoint(1, 11) and b.copies == 1)
    finally:
        await end(agent)


async def test_sigterm_writes_what_is_staged_before_the_agent_goes(
    coordinator: FakeCoordinator, tmp_path: Path, holders: tuple[MemoryServerEndpoint, ...]
) -> None:
    agent = await start_agent(coordinator, tmp_path, 0, ("python", SAVER, "10", "die"), **ENVIRONMENT)
    try:
        await coordinator.warm(0)
        await launch(coordinator, 1, holders, ranks=1)
        await coordinator.until(0, Heartbeat, lambda b: bool(b.pending) or b.saved is not None)
        os.kill(agent.pid, signal.SIGTERM)
        assert await agent.ended() == 128 + signal.SIGTERM
        assert all(saves_on(endpoint) == {RankSave(1, 11, 0)} for endpoint in holders)
    finally:
        await end(agent)


async def test_an_agent_repairs_promotes_lists_and_drops_as_it_is_told(
    coordinator: FakeCoordinator, tmp_path: Path, holders: tuple[MemoryServerEndpoint, ...]
) -> None:
    first, second = holders
    save = RankSave(1, 11, 0)
    uri = (tmp_path / "persistent").as_uri()
    agent = await start_agent(
        coordinator, tmp_path, 0, ("python", SAVER, "10", "stay"), SUREFOOT_PERSISTENT_URI=uri, **ENVIRONMENT
    )
    try:
        await coordinator.warm(0)
        await launch(coordinator, 1, holders, ranks=1, replicas=1)
        await coordinator.until(0, Finished)
        assert (saves_on(first), saves_on(second)) == ({save}, set())
        # of the second it was not told but by the request
        await coordinator.say(0, MemoryServers(1, (first,), (first.instance,), 1, is_partial=True))
        await coordinator.say(0, RepairSave(5, 1, save, first.instance, second.instance, (first, second)))
        assert (await coordinator.until(0, RepairReply)) == RepairReply(5, None)
        assert saves_on(second) == {save}
        nothing = (replace(second, instance=MemoryServerInstance("node-e", "e" * 40)),)
        await coordinator.say(0, MemoryServers(1, nothing, (), 1, is_partial=True))
        await coordinator.say(0, UploadSave(1, (save,), round=1))
        assert await coordinator.until(0, ListAllServers) == ListAllServers(1)
        failed = await coordinator.until(0, UploadReply)
        assert failed.error is not None
        assert failed.unreadable is False
        await coordinator.say(0, MemoryServers(1, holders, (first.instance,), 1))
        await coordinator.say(0, UploadSave(1, (save,)))
        persisted = await coordinator.until(0, UploadReply, lambda m: m.error is None)
        assert (persisted.save, persisted.error) == (save, None)
        assert persisted.bytes > 0
        await coordinator.say(0, ListPersistent(6))
        listing = await coordinator.until(0, PersistentPage)
        assert (listing.request, listing.error, len(listing.manifests), len(listing.layouts)) == (6, None, 1, 1)
        await coordinator.say(0, DeletePersistent(7, (save.checkpoint,)))
        assert (await coordinator.until(0, DeleteReply)) == DeleteReply(7, None)
        await coordinator.say(0, ListPersistent(8))
        assert (await coordinator.until(0, PersistentPage, lambda m: m.request == 8)).manifests == ()
        unknown = MemoryServerInstance("node-x", "nobody")
        await coordinator.say(0, RepairSave(9, 1, save, first.instance, unknown))
        failed = await coordinator.until(0, RepairReply, lambda m: m.request == 9)
        assert failed.error is not None
        assert "node-x" in failed.error
        await coordinator.say(0, Shutdown("complete", 0))
        assert await agent.ended() == 0
    finally:
        await end(agent)
