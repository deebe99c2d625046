"""A real agent with a scripted coordinator and real forked gloo trainers."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from support.fakes.fake_coordinator import (
    DEADLINE,
    AgentProcess,
    FakeCoordinator,
    all_gone,
    assignment,
    descendants,
    lives,
    start_agent,
)
from surefoot.linux_process import parent_of
from surefoot.protocol.messages import (
    Barrier,
    BarrierReached,
    BarrierReply,
    Finished,
    Heartbeat,
    HelloRejected,
    Shutdown,
    StopTrainers,
    TrainerFailure,
    TrainersStopped,
)

TRAINER = str(Path(__file__).parents[1] / "support" / "programs" / "gloo_trainer.py")
Starting = Callable[..., Awaitable[AgentProcess]]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    server = FakeCoordinator()
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def start(coordinator: FakeCoordinator, tmp_path: Path) -> AsyncIterator[Starting]:
    """Starts agents that are gone, with everything below them, when the test ends."""
    agents: list[AgentProcess] = []

    async def one(index: int, *command: str, **environment: str) -> AgentProcess:
        agent = await start_agent(coordinator, tmp_path, index, command, **environment)
        agents.append(agent)
        return agent

    yield one
    await end_all(agents)


async def end_all(agents: list[AgentProcess]) -> None:
    below = set().union(*(descendants(agent.pid) for agent in agents))
    for agent in agents:
        await agent.end()
    assert await all_gone(below), f"processes outlived their agent: {[p for p in below if lives(p)]}"


@dataclass
class Crew:
    """Two warm agents that live through many epochs, as agents do. Each test begins a new one."""

    coordinator: FakeCoordinator
    agents: list[AgentProcess]
    faults: Path
    epoch: int = 0

    async def begin(self, *indexes: int, local_ranks: int = 1, **orders: object) -> int:
        """Commits the next epoch to these agents and waits for its first step; `orders` are for its trainers."""
        self.epoch += 1
        (self.faults / str(self.epoch)).write_text(json.dumps(orders))
        await self.coordinator.warm(*indexes)
        await self.coordinator.launch(self.epoch, *indexes, local_ranks=local_ranks)
        await self.coordinator.stepping(self.epoch, *indexes)
        return self.epoch

    async def exited(self, index: int) -> TrainerFailure:
        return await self.coordinator.until(index, TrainerFailure, lambda m: m.generation == self.epoch)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def crew(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    server = FakeCoordinator()
    await server.start()
    began = time.monotonic()
    command = ("python", TRAINER, "100000", "0.01")
    # worker 0 finds a hang first, always: two timers of one length would run out in either order
    agents = [
        await start_agent(
            server, folder, index, command, FAULTS=str(folder), SUREFOOT_STEP_TIMEOUT_SECONDS=str(4 + 2 * index)
        )
        for index in (0, 1)
    ]
    await server.warm(0, 1)
    print(f"both agents warm after {time.monotonic() - began:.2f} s")
    yield Crew(server, agents, folder)
    await end_all(agents)
    await server.stop()


def pids(agent: AgentProcess, epoch: int, rank: int) -> list[int]:
    return [int(p) for p in re.findall(r"pid (\d+) rank", agent.log(epoch, rank))]


async def test_trainers_start_step_and_finish(crew: Crew) -> None:
    began = time.monotonic()
    epoch = await crew.begin(0, 1, steps=20)
    print(f"from the commit to the first step at world 2: {time.monotonic() - began:.2f} s")
    for index in (0, 1):
        finished = await crew.coordinator.until(index, Finished, lambda m: m.generation == epoch)
        assert (finished.exit_code, finished.steps) == (0, 20)
    log = crew.agents[0].log(epoch, 0)
    assert f"rank 0 of 2 epoch {epoch} argv ['100000', '0.01']" in log
    assert f"main __main__ folder {Path(TRAINER).parent}" in log
    forwarded = (crew.faults / "agent-0.log").read_text
    await until_true(lambda: f"[rank 0] main __main__ folder {Path(TRAINER).parent}" in forwarded())


async def test_a_killed_trainer_ends_the_worker_s_world_and_names_the_cause(crew: Crew) -> None:
    epoch = await crew.begin(0, 1, local_ranks=2)
    victim, survivor = pids(crew.agents[0], epoch, 1)[0], pids(crew.agents[0], epoch, 0)[0]
    os.kill(victim, signal.SIGKILL)
    exited = await crew.exited(0)
    assert (exited.rank, exited.code, exited.cause, exited.is_secondary) == (1, -9, "killed by SIGKILL", False)
    assert await all_gone({victim, survivor})
    echo = await crew.exited(1)
    assert echo.is_secondary, echo


async def test_stop_reaps_and_the_next_epoch_starts_at_once(crew: Crew) -> None:
    epoch = await crew.begin(0, 1)
    old = {pids(agent, epoch, rank)[0] for rank, agent in enumerate(crew.agents)}
    began = time.monotonic()
    for index in (0, 1):
        await crew.coordinator.say(index, StopTrainers(epoch + 1, "a test"))
    for index in (0, 1):
        await crew.coordinator.until(index, TrainersStopped, lambda m: m.generation == epoch + 1)
    stopped = time.monotonic()
    assert not any(lives(pid) for pid in old)
    epoch = await crew.begin(1, 0)
    print(f"stopped in {stopped - began:.3f} s, first step of the next epoch after {time.monotonic() - stopped:.2f} s")
    assert f"epoch {epoch}" in crew.agents[1].log(epoch, 0)


async def test_trainers_never_notice_that_the_coordinator_was_away(crew: Crew) -> None:
    epoch = await crew.begin(0, 1)
    step = await crew.coordinator.stepping(epoch, 0, 1)
    hellos = [len(crew.coordinator.agents[index].hellos) for index in (0, 1)]
    await crew.coordinator.stop()
    await crew.coordinator.start()
    await crew.coordinator.stepping(epoch, 0, 1, beyond=step + 50)
    for index, agent in enumerate(crew.agents):
        (hello,) = crew.coordinator.agents[index].hellos[hellos[index] :]
        assert (hello.generation, hello.stopped, hello.is_warm) == (epoch, epoch, True)
        # the returned coordinator says everything again: nothing may start a second time
        await crew.coordinator.say(index, assignment(epoch, index, 2))
        assert len(pids(agent, epoch, index)) == 1
    before = await crew.coordinator.stepping(epoch, 0, 1, beyond=step + 60)
    await crew.coordinator.stepping(epoch, 0, 1, beyond=before)
    assert all(len(pids(agent, epoch, index)) == 1 for index, agent in enumerate(crew.agents))


async def test_an_exception_is_named_and_echoes_are_not(crew: Crew) -> None:
    await crew.begin(0, local_ranks=3, fault="raise", rank=1)
    exited = await crew.exited(0)
    assert (exited.rank, exited.is_secondary, exited.cause) == (1, False, "ValueError: the data is bad")
    assert exited.step in (3, 4)


async def test_an_exit_code_is_kept(crew: Crew) -> None:
    await crew.begin(0, fault="exit", rank=0)
    exited = await crew.exited(0)
    assert (exited.code, exited.cause) == (7, "exit code 7")


async def test_a_rank_that_hangs_is_found_by_its_missing_steps(crew: Crew) -> None:
    await crew.begin(0, local_ranks=2, fault="hang", rank=1)
    exited = await crew.exited(0)
    assert (exited.rank, exited.step) == (1, 4)
    assert exited.cause.startswith("hang: no step for 4 s")
    waiting, asleep, *collectives = exited.detail.splitlines()
    assert asleep.startswith("rank 1: in main (programs/gloo_trainer.py:")
    assert waiting.startswith("rank 0: in ")
    assert [line.partition(", called")[0] for line in collectives] == [
        "rank 0: waits in all_reduce #6 of default_pg (Float[1])",
        "rank 1: in no collective, the last: all_reduce #5 of default_pg (Float[1])",
    ]


async def test_where_the_ranks_of_the_other_workers_stand_is_said_too(crew: Crew) -> None:
    epoch = await crew.begin(0, 1, fault="hang", rank=1)
    assert (await crew.exited(0)).detail.startswith("rank 0: in ")
    await crew.coordinator.say(1, StopTrainers(epoch + 1, "worker 0 says that nobody makes a step"))
    assert (await crew.exited(1)).detail.startswith("rank 1: in main (programs/gloo_trainer.py:")


async def test_a_planned_change_holds_every_rank_at_one_step(crew: Crew) -> None:
    epoch = await crew.begin(0, local_ranks=2)
    coordinator = crew.coordinator
    await coordinator.say(0, Barrier(epoch, 1, "proposed"))
    early = await coordinator.until(0, BarrierReply, lambda m: (m.generation, m.step) == (epoch, 1))
    assert not early.accepted
    await coordinator.say(0, Barrier(epoch, 1, "cancelled"))
    beat = coordinator.last(0, Heartbeat)
    assert beat is not None
    ahead = beat.progress.step + 100
    await coordinator.say(0, Barrier(epoch, ahead, "proposed"))
    assert (await coordinator.until(0, BarrierReply, lambda m: (m.generation, m.step) == (epoch, ahead))).accepted
    await coordinator.say(0, Barrier(epoch, ahead, "bound"))
    assert (await coordinator.until(0, BarrierReached, lambda m: m.generation == epoch)).step == ahead
    await coordinator.until(0, Heartbeat, lambda b: (b.generation, b.progress.step) == (epoch, ahead))
    await coordinator.say(0, Barrier(epoch, 0, "cancelled"))
    await coordinator.stepping(epoch, 0, beyond=ahead)


async def test_a_broken_line_is_opened_again_by_the_same_incarnation(crew: Crew) -> None:
    heard = crew.coordinator.agents[1]
    count = len(heard.hellos)
    assert heard.line is not None
    await heard.line.close()
    await crew.coordinator.when(lambda: len(heard.hellos) > count or None)
    assert heard.hellos[-1].incarnation == heard.hellos[0].incarnation


async def until_true(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not look():  # noqa: ASYNC110  # a file does not announce its growth
            await asyncio.sleep(0.05)


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


async def test_an_import_error_is_the_cause(coordinator: FakeCoordinator, start: Starting, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_anywhere\n")
    await start(0, "python", str(script))
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    exited = await coordinator.until(0, TrainerFailure)
    assert exited.cause == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert (exited.code, exited.is_secondary, exited.step) == (1, False, 0)


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
    await coordinator.say(0, Shutdown("complete", 0))
    assert await agent.ended() == 0
    assert agent.log(1, 0) == "ran __main__ somejob ['--x', '1'] 0\n"


async def test_any_command_starts_cold(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE in epoch $SUREFOOT_GENERATION $SUREFOOT_TOKEN"')
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.until(0, Finished)
    assert agent.log(1, 0) == "rank 0 of 1 in epoch 1 \n"


async def test_a_command_that_does_not_exist_is_named(coordinator: FakeCoordinator, start: Starting) -> None:
    await start(0, "no-such-program-here")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    exited = await coordinator.until(0, TrainerFailure)
    assert "'no-such-program-here' cannot be started: No such file or directory" in exited.cause


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


async def test_sigterm_lets_trainers_come_to_a_halt_that_is_named_now(
    coordinator: FakeCoordinator, start: Starting
) -> None:
    agent = await start(0, "python", TRAINER, "100000", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.stepping(1, 0)
    os.kill(agent.pid, signal.SIGTERM)
    ahead = 50
    while True:  # an offer that comes too late is refused
        ahead *= 2
        await coordinator.say(0, Barrier(1, ahead, "proposed"))
        if (await coordinator.until(0, BarrierReply, lambda m: m.step == ahead)).accepted:  # noqa: B023
            break
        await coordinator.say(0, Barrier(1, ahead, "cancelled"))
    await coordinator.say(0, Barrier(1, ahead, "bound"))
    assert (await coordinator.until(0, BarrierReached)).step == ahead
    await coordinator.say(0, StopTrainers(2, "worker 0 is being deleted"))
    await coordinator.until(0, TrainersStopped, lambda m: m.generation == 2)
    assert await agent.ended() == 128 + signal.SIGTERM


async def test_a_refusal_for_good_ends_the_agent_with_its_reason(coordinator: FakeCoordinator, start: Starting) -> None:
    coordinator.refuse = HelloRejected("worker 0 was replaced by attempt 1", retry=False)
    agent = await start(0, "python", TRAINER, "1", "0")
    assert await agent.ended() == 1
    assert "worker 0 was replaced by attempt 1" in (agent.folder / "agent-0.log").read_text()


async def test_a_dead_zygote_is_started_again(coordinator: FakeCoordinator, start: Starting) -> None:
    agent = await start(0, "python", TRAINER, "100000", "0.01")
    await coordinator.warm(0)
    await coordinator.launch(1, 0)
    await coordinator.stepping(1, 0)
    (zygote,) = [
        pid for pid in descendants(agent.pid) if b"import fork_server" in _words(pid) and parent_of(pid) == agent.pid
    ]
    os.kill(zygote, signal.SIGKILL)
    assert (await coordinator.until(0, TrainerFailure)).code == -9
    await coordinator.until(0, Heartbeat, lambda b: not b.is_warm and b.generation == 1)
    await coordinator.warm(0)
    await coordinator.say(0, StopTrainers(2, "a test"))
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
