"""Plain torchrun with `--rdzv-backend=surefoot`: under an agent, and standing alone before a coordinator."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.fakes.fake_coordinator import FakeCoordinator, all_gone, descendants, lives, start_agent
from surefoot.protocol.messages import Exited, Finished, Retire, Stop, Stopped

PLAIN = str(Path(__file__).parents[1] / "support" / "programs" / "plain_trainer.py")
WORDS = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=surefoot", "--max-restarts=3")


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator()
    await server.start()
    yield server
    await server.stop()


@dataclass
class Standing:
    process: asyncio.subprocess.Process
    log: Path

    def ranks(self) -> list[str]:
        return re.findall(r"rank \d of \d", self.log.read_text())


async def standing(coordinator: FakeCoordinator, folder: Path, index: int, *program: str) -> Standing:
    endpoint = coordinator.url.removeprefix("ws://").partition("/")[0]
    log = folder / f"torchrun-{index}.log"
    words = (*WORDS, f"--rdzv-endpoint={endpoint}", "--rdzv-id=job-1", f"--rdzv-conf=index={index}")
    environment = {**os.environ, "SUREFOOT_TOKEN": "t", "SUREFOOT_HOST": "127.0.0.1"}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        process = await asyncio.create_subprocess_exec(
            *words, "--nproc-per-node=1", *program, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    finally:
        os.close(output)
    return Standing(process, log)


async def until_ranks(who: Standing, count: int) -> None:
    async with asyncio.timeout(60):
        while len(who.ranks()) < count:  # noqa: ASYNC110  # a file does not announce its growth
            await asyncio.sleep(0.05)


async def test_standing_alone_each_epoch_is_a_round(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    both = [await standing(coordinator, tmp_path, i, PLAIN, "2000", "0.01") for i in (0, 1)]
    try:
        await coordinator.warm(0, 1)
        assert coordinator.agents[0].hellos[0].token == "t"
        await coordinator.launch(1, 0, 1)
        for who in both:
            await until_ranks(who, 1)
        # a newer epoch: torchrun stops its workers and comes back for another round
        for index in (0, 1):
            await coordinator.say(index, Stop(2, "a test"))
        for index in (0, 1):
            await coordinator.until(index, Stopped, lambda m: m.epoch == 2)
        await coordinator.launch(2, 1, 0)
        for who in both:
            await until_ranks(who, 2)
        assert (both[0].ranks()[-1], both[1].ranks()[-1]) == ("rank 1 of 2", "rank 0 of 2")
        # a worker that dies: torchrun's own restart waits until the coordinator opens a round
        (worker,) = descendants(both[0].process.pid)
        os.kill(worker, signal.SIGKILL)
        exited = await coordinator.until(0, Exited)
        assert (exited.epoch, exited.secondary) == (2, False)
        for index in (0, 1):
            await coordinator.say(index, Retire("that is all", 0))
        for who in both:
            await asyncio.wait_for(who.process.wait(), 60)
    finally:
        below = set().union(*(descendants(who.process.pid) for who in both))
        for who in both:
            if who.process.returncode is None:
                who.process.kill()
                await who.process.wait()
        for pid in below:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


async def test_standing_alone_the_end_is_said(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    who = await standing(coordinator, tmp_path, 0, PLAIN, "3", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    assert (await coordinator.until(0, Finished)).epoch == 1
    assert await asyncio.wait_for(who.process.wait(), 60) == 0
    assert "done" in who.log.read_text()


async def test_under_an_agent_torchrun_gets_the_agent_s_epoch(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    agent = await start_agent(coordinator, tmp_path, 0, (*WORDS, "--nproc-per-node=2", PLAIN, "100000", "0.01"))
    try:
        await coordinator.warm(0)
        await coordinator.launch(1, 0)
        async with asyncio.timeout(60):
            while len(re.findall(r"rank \d of 2", agent.log(1, 0))) < 2:  # noqa: ASYNC110  # a file does not announce its growth
                await asyncio.sleep(0.05)
        workers = {int(pid) for pid in re.findall(r"pid (\d+) rank", agent.log(1, 0))}
        await coordinator.say(0, Stop(2, "a test"))
        await coordinator.until(0, Stopped, lambda m: m.epoch == 2)
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
        exited = await coordinator.until(0, Exited)
        assert (exited.code, exited.secondary) == (1, False)
        assert "epoch 1 had its round" in agent.log(1, 0)
    finally:
        await agent.end()
