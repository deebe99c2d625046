"""A real agent with a scripted coordinator and real forked gloo trainers."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from support.fake_coordinator import (
    AgentProcess,
    FakeCoordinator,
    all_gone,
    descendants,
    lives,
    start_agent,
)
from surefoot.protocol.messages import (
    Exited,
    Finished,
    Heartbeat,
    Held,
    Hold,
    HoldAnswer,
    Refused,
    Retire,
    Stop,
    Stopped,
)

TRAINER = str(Path(__file__).parents[1] / "support" / "gloo_trainer.py")
Starting = Callable[..., Awaitable[AgentProcess]]


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def start(coordinator: FakeCoordinator, tmp_path: Path) -> AsyncIterator[Starting]:
    """Starts agents that are gone, with everything below them, when the test ends."""
    agents: list[AgentProcess] = []

    async def one(index: int, *command: str, **environment: str) -> AgentProcess:
        agent = await start_agent(coordinator, tmp_path, index, command, **environment)
        agents.append(agent)
        return agent

    yield one
    below = set().union(*(descendants(agent.pid) for agent in agents))
    for agent in agents:
        await agent.end()
    assert await all_gone(below), f"processes outlived their agent: {[p for p in below if lives(p)]}"


def pids(agent: AgentProcess, epoch: int, rank: int) -> list[int]:
    return [int(p) for p in re.findall(r"pid (\d+) rank", agent.log(epoch, rank))]


async def test_trainers_start_step_and_finish(coordinator: FakeCoordinator, start: Starting) -> None:
    agents = [await start(i, "python", TRAINER, "20", "0.01") for i in (0, 1)]
    began = time.monotonic()
    await coordinator.warm(0, 1)
    warm = time.monotonic()
    await coordinator.launch(1, 0, 1)
    await coordinator.stepping(1, 0, 1)
    print(f"zygote warm after {warm - began:.2f} s, commit to first step at world 2 {time.monotonic() - warm:.2f} s")
    for index in (0, 1):
        finished = await coordinator.until(index, Finished)
        assert (finished.epoch, finished.exit_code, finished.steps) == (1, 0, 20)
    log = agents[0].log(1, 0)
    assert "rank 0 of 2 epoch 1 argv ['20', '0.01']" in log
    assert f"main __main__ folder {Path(TRAINER).parent}" in log
    for index, agent in enumerate(agents):
        await coordinator.say(index, Retire("complete", 0))
        assert await agent.ended() == 0


async def test_a_killed_trainer_ends_the_worker_s_world_and_names_the_cause(
    coordinator: FakeCoordinator, start: Starting
) -> None:
    agents = [await start(i, "python", TRAINER, "100000", "0.01") for i in (0, 1)]
    await coordinator.warm(0, 1)
    await coordinator.launch(1, 0, 1, local_ranks=2)
    await coordinator.stepping(1, 0, 1)
    victim, survivor = pids(agents[0], 1, 1)[0], pids(agents[0], 1, 0)[0]
    os.kill(victim, signal.SIGKILL)
    exited = await coordinator.until(0, Exited)
    assert (exited.rank, exited.code, exited.cause, exited.secondary) == (1, -9, "killed by SIGKILL", False)
    assert await all_gone({victim, survivor})
    echo = await coordinator.until(1, Exited)
    assert echo.secondary, echo


async def test_stop_reaps_and_the_next_epoch_starts_at_once(coordinator: FakeCoordinator, start: Starting) -> None:
    agents = [await start(i, "python", TRAINER, "100000", "0.01") for i in (0, 1)]
    await coordinator.warm(0, 1)
    await coordinator.launch(1, 0, 1)
    await coordinator.stepping(1, 0, 1)
    old = {pids(agent, 1, rank)[0] for rank, agent in enumerate(agents)}
    began = time.monotonic()
    for index in (0, 1):
        await coordinator.say(index, Stop(2, "a test"))
    for index in (0, 1):
        await coordinator.until(index, Stopped, lambda m: m.epoch == 2)
    stopped = time.monotonic()
    assert not any(lives(pid) for pid in old)
    await coordinator.launch(2, 1, 0)
    await coordinator.stepping(2, 0, 1)
    print(f"stopped in {stopped - began:.3f} s, first step of the next epoch after {time.monotonic() - stopped:.2f} s")
    assert "epoch 2" in agents[1].log(2, 0)


async def test_trainers_never_notice_that_the_coordinator_was_away(
    coordinator: FakeCoordinator, start: Starting
) -> None:
    agents = [await start(i, "python", TRAINER, "100000", "0.01") for i in (0, 1)]
    await coordinator.warm(0, 1)
    assigns = await coordinator.launch(1, 0, 1)
    step = await coordinator.stepping(1, 0, 1)
    await coordinator.stop()
    coordinator.agents.clear()
    await coordinator.start()
    await coordinator.stepping(1, 0, 1, beyond=step + 20)
    for index, agent in enumerate(agents):
        hello = coordinator.agents[index].hellos[0]
        assert (hello.epoch, hello.stopped, hello.warm) == (1, 1, True)
        # the returned coordinator says everything again: nothing may start a second time
        await coordinator.say(index, assigns[index])
        assert len(pids(agent, 1, index)) == 1
    before = await coordinator.stepping(1, 0, 1, beyond=step + 40)
    await coordinator.stepping(1, 0, 1, beyond=before)
    assert all(len(pids(agent, 1, index)) == 1 for index, agent in enumerate(agents))


async def test_nothing_outlives_a_killed_agent(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "python", TRAINER, "100000", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0, local_ranks=2)
    await coordinator.stepping(1, 0)
    below = descendants(agent.pid)
    assert len(below) >= 4, "the zygote, the store and two trainers"
    assert {os.getpgid(pid) for pid in below} == {os.getpgid(agent.pid)}
    await agent.end()
    assert await all_gone(below)


async def test_an_exception_is_named_and_echoes_are_not(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "python", TRAINER, "100000", "0.01", "raise", "1")
    await coordinator.warm(0)
    await coordinator.launch(1, 0, local_ranks=3)
    exited = await coordinator.until(0, Exited)
    assert (exited.rank, exited.secondary, exited.cause) == (1, False, "ValueError: the data is bad")
    assert exited.step in (3, 4)


async def test_an_exit_code_is_kept(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "python", TRAINER, "100000", "0.01", "exit", "0")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    exited = await coordinator.until(0, Exited)
    assert (exited.code, exited.cause) == (7, "exit code 7")


async def test_an_import_error_is_the_cause(coordinator: FakeCoordinator, start: Starting, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_anywhere\n")
    await start(0, "python", str(script))
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    exited = await coordinator.until(0, Exited)
    assert exited.cause == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert (exited.code, exited.secondary, exited.step) == (1, False, 0)


async def test_a_rank_that_hangs_is_found_by_its_missing_steps(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "python", TRAINER, "100000", "0.01", "hang", "1", SUREFOOT_STEP_TIMEOUT_SECONDS="1")
    await coordinator.warm(0)
    await coordinator.launch(1, 0, local_ranks=2)
    exited = await coordinator.until(0, Exited)
    assert (exited.rank, exited.step) == (1, 4)
    assert exited.cause.startswith("hang: no step for 1 s")


async def test_a_module_runs_like_python_m(coordinator: FakeCoordinator, start: Starting, tmp_path: Path) -> None:
    package = tmp_path / "somejob"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import os, sys\nprint('ran', __name__, __package__, sys.argv[1:], os.environ['RANK'])\n"
    )
    agent = await start(0, "python", "-m", "somejob.train", "--x", "1", PYTHONPATH=str(tmp_path))
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    finished = await coordinator.until(0, Finished)
    assert finished.steps == 0
    assert agent.log(1, 0) == "ran __main__ somejob ['--x', '1'] 0\n"


async def test_any_command_starts_cold(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE in epoch $SUREFOOT_EPOCH $SUREFOOT_TOKEN"')
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.until(0, Finished)
    assert agent.log(1, 0) == "rank 0 of 1 in epoch 1 \n"


async def test_a_command_that_does_not_exist_is_named(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "no-such-program-here")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    exited = await coordinator.until(0, Exited)
    assert "'no-such-program-here' cannot be started: No such file or directory" in exited.cause


async def test_a_planned_change_holds_every_rank_at_one_step(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "python", TRAINER, "100000", "0.02")
    await coordinator.warm(0)
    await coordinator.launch(1, 0, local_ranks=2)
    step = await coordinator.stepping(1, 0)
    await coordinator.say(0, Hold(1, 1, "propose"))
    assert not (await coordinator.until(0, HoldAnswer, lambda m: m.step == 1)).accepted
    await coordinator.say(0, Hold(1, 1, "cancel"))
    beat = coordinator.last(0, Heartbeat)
    ahead = (beat.step if beat else step) + 100
    await coordinator.say(0, Hold(1, ahead, "propose"))
    assert (await coordinator.until(0, HoldAnswer, lambda m: m.step == ahead)).accepted
    await coordinator.say(0, Hold(1, ahead, "bind"))
    assert (await coordinator.until(0, Held)).step == ahead
    await coordinator.until(0, Heartbeat, lambda b: b.step == ahead)
    await coordinator.say(0, Hold(1, 0, "cancel"))
    await coordinator.stepping(1, 0, beyond=ahead)


async def test_sigterm_ends_everything_and_says_so(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "python", TRAINER, "100000", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.stepping(1, 0)
    below = descendants(agent.pid)
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.ended() == 128 + signal.SIGTERM
    assert await all_gone(below)
    assert not list(agent.folder.glob("*.sock"))


async def test_a_refusal_for_good_ends_the_agent_with_its_reason(coordinator: FakeCoordinator, start: Starting) -> None:
    coordinator.refuse = Refused("worker 0 was replaced by attempt 1", retry=False)
    agent = await start(0, "python", TRAINER, "1", "0")
    assert await agent.ended() == 1
    assert "worker 0 was replaced by attempt 1" in (agent.folder / "agent-0.log").read_text()


async def test_a_dead_zygote_is_started_again(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "python", TRAINER, "100000", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.stepping(1, 0)
    (zygote,) = [pid for pid in descendants(agent.pid) if b"agent.zygote" in _words(pid) and _parent(pid) == agent.pid]
    os.kill(zygote, signal.SIGKILL)
    assert (await coordinator.until(0, Exited)).code == -9
    await coordinator.until(0, Heartbeat, lambda b: not b.warm and b.epoch == 1)
    await coordinator.warm(0)
    await coordinator.say(0, Stop(2, "a test"))
    await coordinator.launch(2, 0)
    await coordinator.stepping(2, 0)


async def test_the_agent_itself_never_imports_torch(
    coordinator: FakeCoordinator, start: Starting, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    # imported at every start of this interpreter: only the warm process and what it forks may have torch
    (blocked / "sitecustomize.py").write_text(
        "import sys\nif 'surefoot.agent' in sys.orig_argv:\n    sys.modules['torch'] = None\n"
    )
    await start(0, "python", TRAINER, "3", "0.01", PYTHONPATH=str(blocked))
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    assert (await coordinator.until(0, Finished)).steps == 3


def _words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_silence_on_the_line_is_answered_by_coming_back(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "python", TRAINER, "1", "0")
    await coordinator.warm(0)
    line = coordinator.agents[0].line
    assert line is not None
    await line.close()
    await coordinator.when(lambda: len(coordinator.agents[0].hellos) > 1 or None)
    first, second = coordinator.agents[0].hellos[:2]
    assert first.incarnation == second.incarnation
    await asyncio.sleep(0)
