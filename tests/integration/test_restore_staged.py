"""A trainer that starts where its predecessor saved reads from the agent's staging memory, verified, else from holders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.servers import redis_server
from surefoot import Checkpointer
from surefoot.agent.staging_memory import StagingMemory, StagingWatcher
from surefoot.ipc import trainer_messages as line
from surefoot.ipc.memfd import SLOTS
from surefoot.ipc.trainer_server import TrainerConnection, TrainerServer
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, RankSave
from surefoot.protocol.messages import MemoryServers
from surefoot.restore.fetch import Fetch
from surefoot.settings import JobSettings

JOB = "staged"
STEP = 3
ACCOUNT = redis_server.account("staged-user", "a password")


class Agent:
    """The agent's staging memory and line on a loop of its own; `restored` is what trainers reported."""

    def __init__(self, socket: Path, endpoints: tuple[MemoryServerEndpoint, ...]) -> None:
        self._endpoints = endpoints
        self.restored: list[line.RestoreDone] = []
        self.local = 0
        """Whose trainer it is that attaches."""
        self.job = JobSettings(JOB, STEP, 2, 2, ACCOUNT.user, ACCOUNT.password)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._start(socket))

    async def _start(self, socket: Path) -> None:
        watcher = StagingWatcher(self._freed, lambda: None, lambda *_: None)
        self.staging = StagingMemory("me", self.job, watcher)
        self.staging.retarget(MemoryServers(1, self._endpoints, tuple(e.instance for e in self._endpoints), 2))
        self._line = TrainerServer(socket, self._admit, self._hear)
        self._line.start()

    def close(self) -> None:
        self._do(self._line.close())
        self._do(self.staging.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def spoil(self) -> None:
        """Somebody began to write into the slot of local rank 0 and died."""
        seat = self.staging._arenas[0]
        slot = next(iter(seat.last_staged))
        seat.file.memory[slot * seat.file.slot_bytes + 70_000] ^= 1

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)  # type: ignore[arg-type]  # coroutines of ours

    def _admit(self, attach: line.Attach) -> line.Attached:
        parent = Checkpoint(1, STEP) if attach.generation > 1 else None
        lineage: tuple[tuple[int, Checkpoint | None, int], ...] = ((1, None, 1),)
        if parent is not None:
            lineage = (*lineage, (attach.generation, parent, 1))
        return line.Attached(JOB, attach.generation, 1, 0, "me", parent, lineage, self._endpoints, 2, STEP, None, 0)

    def _hear(self, trainer: TrainerConnection, message: line.FromTrainer) -> None:
        self._trainer = trainer
        match message:
            case line.Staged():
                self.staging.stage(self.local, RankSave(trainer.generation, message.step, 0), 1, message)
            case line.RequestArena(slot_bytes=slot_bytes):
                self._task = asyncio.ensure_future(self._give(trainer, slot_bytes))
            case line.FindStagedSaves(checkpoint=checkpoint):
                for here, fd in self.staging.reusable_saves(self.local, checkpoint):
                    trainer.send(here, fd)
            case line.RestoreDone():
                self.restored.append(message)

    async def _give(self, trainer: TrainerConnection, slot_bytes: int) -> None:
        given = await self.staging.grant_arena(self.local, slot_bytes)
        message = line.ArenaGranted(SLOTS, given.file.slot_bytes, given.seconds, given.busy)
        trainer.send(message, given.file.fd)

    def _freed(self, local: int, slot: int, step: int, ok: bool) -> None:
        self._trainer.send(line.SlotFreed(slot, step, ok))


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[list[RunningServer]]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with redis_server.running(tmp_path / "a") as first, redis_server.running(tmp_path / "b") as second:
        for server in (first, second):
            admin = redis_server.admin_of(server)
            admin.provision(JOB, ACCOUNT, 1)
            admin.close()
        yield [first, second]


@pytest.fixture
def agent(tmp_path: Path, holders: list[RunningServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    socket = tmp_path / "agent.sock"
    monkeypatch.setenv("SUREFOOT_AGENT_SOCKET", str(socket))
    monkeypatch.setenv("SUREFOOT_JOB_UID", JOB)
    monkeypatch.setenv("SUREFOOT_MEMORY_USER", ACCOUNT.user)
    monkeypatch.setenv("SUREFOOT_MEMORY_PASSWORD", ACCOUNT.password)
    monkeypatch.setenv("RANK", "0")
    made = Agent(socket, tuple(redis_server.endpoint(s, f"node-{n}") for n, s in enumerate(holders)))
    yield made
    made.close()


@contextmanager
def trainer(epoch: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Checkpointer, torch.nn.Module]]:
    monkeypatch.setenv("SUREFOOT_GENERATION", str(epoch))
    torch.manual_seed(epoch)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    checkpointer.restore()
    if epoch == 1:
        for _ in range(STEP):
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    yield checkpointer, model
    checkpointer._end(flush_seconds=10.0)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("spoiled", "source"), [(False, "staging"), (True, "memory")], ids=["as it was sealed", "written to since"]
)
def test_what_lies_in_staging_memory_is_restored_from_it_and_damage_falls_back_to_holders(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, spoiled: bool, source: str
) -> None:
    with trainer(1, monkeypatch) as (_, model):
        saved = weights(model)
    if spoiled:
        agent.spoil()
    with trainer(2, monkeypatch) as (_, model):
        assert all(torch.equal(a, b) for a, b in zip(saved, weights(model), strict=True))
    assert [done.step for done in agent.restored] == [0, STEP]
    assert agent.restored[1].source == source


def test_an_agent_that_lost_the_memory_sends_its_trainer_to_the_holders(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(1, monkeypatch) as (_, model):
        saved = weights(model)
    agent.staging._arenas[0].last_staged.clear()
    with trainer(2, monkeypatch) as (_, model):
        assert all(torch.equal(a, b) for a, b in zip(saved, weights(model), strict=True))
    assert agent.restored[1].source == "memory"


@pytest.mark.parametrize("written_while_read", [False, True], ids=["at rest", "written to while it is read"])
def test_what_lies_in_a_neighbours_staging_memory_is_restored_from_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, written_while_read: bool
) -> None:
    with trainer(1, monkeypatch) as (_, model):
        saved = weights(model)
    agent.local = 1
    check = Fetch._verify

    def check_and_spoil(*arguments: Any) -> None:
        check(*arguments)
        if written_while_read:
            agent.spoil()

    monkeypatch.setattr(Fetch, "_verify", check_and_spoil)
    with trainer(2, monkeypatch) as (_, model):
        assert all(torch.equal(a, b) for a, b in zip(saved, weights(model), strict=True))
    assert agent.restored[1].source == "staging"
