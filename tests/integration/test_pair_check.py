"""Two agents' parts of one all-reduce, with their own warm processes and gloo: what each of them answers the coordinator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from support.fakes.fake_coordinator import all_gone, descendants
from support.machine_speed import scaled
from surefoot.agent.health import pre_join_checks
from surefoot.agent.health.pre_join_checks import PairCheck
from surefoot.launcher.pair_test import CALL_SECONDS, MEETING_SECONDS
from surefoot.launcher.starter import Starter
from surefoot.protocol.messages import FromAgent, PairResult, PairStore, PairTrial

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SECONDS = scaled(60.0)


@dataclass
class Side:
    """One agent, as far as it takes part in trials."""

    starter: Starter
    check: PairCheck
    sent: list[FromAgent] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def say(self, message: FromAgent) -> None:
        self.sent.append(message)
        self.spoke.set()

    def ask(self, trial: PairTrial) -> bool:
        """Whether something new runs for it."""
        work = self.check.ask(trial)
        if work is not None:
            self.tasks.append(asyncio.create_task(work))
        return work is not None

    async def until(self, kind: type[PairStore] | type[PairResult], request: int) -> PairStore | PairResult:
        async with asyncio.timeout(SECONDS):
            while True:
                self.spoke.clear()
                for message in self.sent:
                    if isinstance(message, kind) and message.request == request:
                        return message
                await self.spoke.wait()


@dataclass
class Pair:
    host: Side
    guest: Side
    faults: Path
    requests: int = 0

    async def begin(self, store: str | None = None) -> PairTrial:
        """The coordinator's part: the guest hears of the store that the host tells of, or of another one."""
        self.requests += 1
        self.host.ask(PairTrial(self.requests, "n1"))
        told = await self.host.until(PairStore, self.requests)
        assert isinstance(told, PairStore)
        trial = PairTrial(self.requests, "n0", store or told.address)
        self.guest.ask(trial)
        return trial

    async def verdicts(self) -> tuple[PairResult, PairResult]:
        found = [await side.until(PairResult, self.requests) for side in (self.host, self.guest)]
        assert isinstance(found[0], PairResult)
        assert isinstance(found[1], PairResult)
        return found[0], found[1]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    script = folder / "program.py"
    script.write_text("import torch\n")
    sides = []
    for name in ("n0", "n1"):
        environment = {**os.environ, "SUREFOOT_NODE": name, "SUREFOOT_FAULTS_FOLDER": str(folder)}
        warm = asyncio.Event()
        starter = Starter(["python", str(script)], environment, folder / f"{name}.log", lambda _, e=warm: e.set())
        starter.start()
        side = Side(starter, PairCheck("job", "127.0.0.1", starter.pair, lambda _: None, lambda _r, _t: None))
        side.check = PairCheck(
            "job", "127.0.0.1", starter.pair, side.say, lambda r, t, s=side: s.notices.append(f"{r}: {t}")
        )
        sides.append(side)
        await asyncio.wait_for(warm.wait(), SECONDS)
    yield Pair(sides[0], sides[1], folder)
    for side in sides:
        await asyncio.gather(*side.tasks)
        await side.starter.close()


async def test_both_find_each_other_well_and_answer_again_when_asked_again(pair: Pair) -> None:
    trial = await pair.begin()
    for found in await pair.verdicts():
        assert found.verdict == "well", found
        assert found.text.endswith(" by gloo")
    assert not pair.guest.ask(trial), "a new coordinator's line says it again"
    assert pair.guest.sent[-1] == pair.guest.sent[-2]
    assert not pair.guest.notices


async def test_a_node_that_garbles_is_found_by_both(pair: Pair) -> None:
    fault = pair.faults / "garbles-n1"
    fault.touch()
    try:
        await pair.begin()
        for found in await pair.verdicts():
            assert found.verdict == "fails"
            assert "wrong sums" in found.text
    finally:
        fault.unlink()
    assert any("an all-reduce with node n0 failed: " in one for one in pair.guest.notices)


async def test_a_way_that_is_blocked_fails_within_its_time(pair: Pair) -> None:
    """Nobody listens where the guest is sent: a firewall that refuses."""
    before = len(pair.host.notices)
    began = asyncio.get_running_loop().time()
    await pair.begin(store="127.0.0.1:9")
    host, guest = await pair.verdicts()
    assert (host.verdict, guest.verdict) == ("fails", "fails")
    assert "did not come" in host.text
    assert pair.host.notices[before:] == [], "who waits in vain may have been stood up"
    assert asyncio.get_running_loop().time() - began < 3 * (MEETING_SECONDS + CALL_SECONDS)


async def test_who_stood_still_blames_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: a node that froze in one trial, and behind a broken way to another node, was taken for sick."""
    monkeypatch.setattr(pre_join_checks, "STILL_SECONDS", 0.2)
    before = [(side, side.check._child) for side in (pair.host, pair.guest)]
    await pair.begin(store="127.0.0.1:9")
    async with asyncio.timeout(SECONDS):
        while any(side.check._child is old for side, old in before):  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0.01)  # a process that is there, and not yet known to the agent, is watched by nobody
    time.sleep(1.0)  # noqa: ASYNC251  # what is tried is a process that does not run
    host, guest = await pair.verdicts()
    assert (host.verdict, guest.verdict) == ("unknown", "unknown")
    assert "this node stood still for 1 s" in guest.text


async def test_who_is_called_off_proves_nothing_and_leaves_no_process(pair: Pair) -> None:
    await pair.begin()
    pair.guest.check.stop()
    host, guest = await pair.verdicts()
    assert guest.verdict == "unknown"
    assert host.verdict in ("fails", "unknown"), "its partner died"
    await asyncio.gather(*pair.host.tasks, *pair.guest.tasks)
    for side in (pair.host, pair.guest):
        (zygote,) = side.starter.own()
        assert await all_gone(descendants(zygote) - {zygote})


async def test_without_a_warm_process_nothing_is_proven(pair: Pair) -> None:
    sent: list[FromAgent] = []
    starter = Starter(["python", "none.py"], dict(os.environ), pair.faults / "none.log", lambda _: None)
    work = PairCheck("job", "127.0.0.1", starter.pair, sent.append, lambda _r, _t: None).ask(PairTrial(9, "n1"))
    assert work is not None
    await work
    (answer,) = sent
    assert isinstance(answer, PairResult)
    assert replace(answer, text="") == PairResult(9, "unknown")
