"""The whole operator over real Redis and real lines, with a fabric that will not make the replacement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from support.fakes.fake_agent import until
from support.fakes.fake_node import Town, document
from surefoot_operator.controller.credentials.derived_secrets import load_or_create_secrets
from surefoot_operator.controller.local_operator import LocalOperator
from surefoot_operator.errors import PlatformError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.local.platform import LocalPlatform
from surefoot_operator.policy.core.actions import CreateWorker
from surefoot_operator.settings import MemorySettings, OperatorSettings


class UnkindFabric(LocalPlatform):
    """Makes workers until it is told how not to."""

    unkind = ""
    asked = 0

    async def create_worker(self, worker: CreateWorker, environment: WorkerEnvironment) -> None:
        self.asked += bool(self.unkind)
        if self.unkind == "refuses":
            raise PlatformError("the API server refused to POST pods: 403 Forbidden: exceeded quota")
        if self.unkind == "hangs":
            await asyncio.Event().wait()
        await super().create_worker(worker, environment)


def committed(town: Town, size: int) -> bool:
    world = town.status.membership
    return world is not None and world.state == "Committed" and world.world_size == size


Living = Callable[[], Awaitable[tuple[Town, UnkindFabric, LocalOperator]]]


@pytest.fixture
async def living(tmp_path: Path) -> AsyncIterator[Living]:
    town = Town(tmp_path / "run", document(), None)
    operators: list[LocalOperator] = []

    async def begin() -> tuple[Town, UnkindFabric, LocalOperator]:
        await town.__aenter__()
        for number in range(3):
            town.start(f"node-{number}")
        fabric = UnkindFabric(town.folder.root)
        settings = OperatorSettings(memory=MemorySettings(probe_interval_seconds=0.1, read_interval_seconds=0.2))
        operator = LocalOperator(fabric, load_or_create_secrets(town.folder.root), settings)
        operators.append(operator)
        await operator.start()
        return town, fabric, operator

    yield begin
    for operator in operators:
        await operator.stop()
    await town.__aexit__()


@pytest.mark.parametrize("unkind", ["refuses", "hangs"])
async def test_survivors_train_on_and_old_saves_are_dropped_though_no_replacement_is_made(
    living: Living, unkind: str
) -> None:
    town, fabric, operator = await living()
    await until(lambda: committed(town, 3) and town.status.had_checkpoint, "three workers are the world, and saved")
    fabric.unkind = unkind
    await town.kill("node-2")
    await until(lambda: committed(town, 2), "two workers are the world")
    await until(lambda: fabric.asked > 0, "the replacement was asked for")
    begun = max(t.step for t in town.trainees if t.running)
    await until(lambda: min(t.step for t in town.trainees if t.running) > begun + 40, "forty more steps")
    memory = operator._memory
    assert memory is not None

    def few() -> bool:
        steps = {m.save.step for h in memory.observed_servers() for m in h.entries if h.state == "Ready"}
        return bool(steps) and min(steps) > begun and len(steps) <= 8

    await until(few, "only the newest checkpoints are kept")
    if unkind == "refuses":
        why = next(c.message for c in town.status.conditions if c.type == "PodsScheduled")
        assert why.endswith("was rejected: the API server refused to POST pods: 403 Forbidden: exceeded quota")
        fabric.unkind = ""
        town.start("node-2")
        await until(lambda: committed(town, 3), "it is made once it is allowed")
