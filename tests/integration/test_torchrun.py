"""torchrun with `--rdzv-backend=surefoot`: under an agent, and refused without one."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fakes.fake_coordinator import FakeCoordinator, all_gone, descendants, lives, start_agent
from surefoot.protocol.messages import StopTrainers, TrainerFailure, TrainersStopped

PLAIN = str(Path(__file__).parents[1] / "support" / "programs" / "plain_trainer.py")
WORDS = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=surefoot", "--max-restarts=3")


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator()
    await server.start()
    yield server
    await server.stop()


def test_without_an_agent_it_is_refused_with_what_works_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SUREFOOT_GENERATION"}
    words = (*WORDS, "--rdzv-endpoint=127.0.0.1:1", "--nproc-per-node=1", PLAIN, "1", "0.01")
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "use --standalone or --rdzv-backend=c10d here" in ended.stderr


async def test_under_an_agent_torchrun_gets_the_agent_s_epoch(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    agent = await start_agent(coordinator, tmp_path, 0, (*WORDS, "--nproc-per-node=2", PLAIN, "100000", "0.01"))
    try:
        await coordinator.warm(0)
        await coordinator.launch(1, 0)
        async with asyncio.timeout(60):
            while len(re.findall(r"rank \d of 2", agent.log(1, 0))) < 2:  # noqa: ASYNC110  # a file does not announce its growth
                await asyncio.sleep(0.05)
        workers = {int(pid) for pid in re.findall(r"pid (\d+) rank", agent.log(1, 0))}
        await coordinator.say(0, StopTrainers(2, "a test"))
        await coordinator.until(0, TrainersStopped, lambda m: m.generation == 2)
        assert not any(lives(pid) for pid in workers), "stopped means that torchrun's workers are dead too"
    finally:
        below = descendants(agent.pid)
        await agent.end()
        assert await all_gone(below)


async def test_under_an_agent_a_second_round_is_refused_by_name(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    failing = tmp_path / "fails.py"
    failing.write_text("raise SystemExit(3)\n")
    agent = await start_agent(coordinator, tmp_path, 0, (*WORDS, "--nproc-per-node=1", str(failing)))
    try:
        await coordinator.warm(0)
        await coordinator.launch(1, 0)
        exited = await coordinator.until(0, TrainerFailure)
        assert (exited.code, exited.is_secondary) == (1, False)
        assert "generation 1 already had its rendezvous" in agent.log(1, 0)
    finally:
        await agent.end()
