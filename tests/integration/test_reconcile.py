"""The whole operator over a real run folder, real Redis and real lines; only trainers are pretended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from support.fakes.fake_agent import until
from support.fakes.fake_node import Town, document
from surefoot_operator.api.status import JobStatus
from surefoot_operator.controller.credentials.derived_secrets import load_or_create_secrets
from surefoot_operator.controller.local_operator import LocalOperator
from surefoot_operator.coordinator.sessions import list_observed_sessions
from surefoot_operator.errors import PlatformError, StatusConflict
from surefoot_operator.platforms.interface import PlatformSnapshot
from surefoot_operator.platforms.local.platform import LocalPlatform
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.reconcile.job_metrics import job_collector
from surefoot_operator.settings import CoordinatorSettings, MemorySettings, OperatorSettings

Living = Callable[..., Awaitable[tuple[Town, LocalOperator]]]


def operator_of(town: Town, fabric: Any = None, port: int = 0) -> LocalOperator:
    root = town.folder.root
    settings = OperatorSettings(
        coordinator=CoordinatorSettings(port=port),
        memory=MemorySettings(probe_interval_seconds=0.1, read_interval_seconds=0.2),
    )
    return LocalOperator(fabric or LocalPlatform(root), load_or_create_secrets(root), settings)


@pytest.fixture
async def living(tmp_path: Path) -> AsyncIterator[Living]:
    towns: list[Town] = []
    operators: list[LocalOperator] = []

    async def begin(
        nodes: int = 3,
        last_step: int | None = None,
        fabric: type[LocalPlatform] = LocalPlatform,
        **job: Any,
    ) -> tuple[Town, LocalOperator]:
        town = Town(tmp_path / "run", document(**job), last_step)
        await town.__aenter__()
        towns.append(town)
        for number in range(nodes):
            town.start(f"node-{number}")
        operator = operator_of(town, fabric(town.folder.root))
        operators.append(operator)
        await operator.start()
        return town, operator

    yield begin
    for operator in operators:
        await operator.stop()
    for town in towns:
        await town.__aexit__()


def committed(town: Town, size: int) -> bool:
    world = town.status.membership
    return world is not None and world.state == "Committed" and world.world_size == size


def stepping(town: Town, beyond: int) -> bool:
    steps = [t.step for t in town.trainees if t.running]
    return bool(steps) and min(steps) > beyond


async def test_a_job_runs_from_nothing_to_complete_and_leaves_nothing_in_memory(living: Living) -> None:
    town, _ = await living(last_step=60)
    await until(lambda: committed(town, 3), "three workers are the world")
    await until(lambda: town.status.had_checkpoint, "a checkpoint is on two holders")
    assert town.status.membership is not None
    assert town.status.membership.generation == 1
    assert len(town.status.assigned_servers) == 3
    await until(lambda: town.status.checkpoints.memory is not None, "the status says what memory has")
    await until(lambda: town.status.phase == "Complete", "every trainer finished")
    await until(lambda: all(t.retired.is_set() for t in town.trainees), "the workers were retired")


async def test_old_checkpoints_are_dropped_and_the_newest_stay(living: Living) -> None:
    town, operator = await living()
    await until(lambda: stepping(town, 60), "sixty steps")
    memory = operator._memory
    assert memory is not None

    def few() -> bool:
        steps = {m.save.step for h in memory.observed_servers() for m in h.entries}
        return bool(steps) and min(steps) > 20 and len(steps) <= 8

    await until(few, "only the newest checkpoints are kept")
    assert town.status.membership is not None
    assert town.status.membership.generation == 1


async def test_what_others_saved_without_a_rank_that_cannot_save_is_dropped_and_counted(living: Living) -> None:
    town, operator = await living(nodes=2, replicas=2)
    await until(lambda: len(town.trainees) == 2, "two workers")
    town.trainees[1].unstaged = True
    await until(lambda: stepping(town, 60), "sixty steps")
    memory = operator._memory
    assert memory is not None

    def few() -> bool:
        steps = {m.save.step for h in memory.observed_servers() for m in h.entries}
        return bool(steps) and min(steps) > 20 and len(steps) <= 4

    await until(few, "only saves that may still become complete are kept")
    assert town.status.last_complete is None
    (count,) = [
        line.rpartition(" ")[2] for line in series() if line.startswith("surefoot_incomplete_checkpoints_total")
    ]
    assert float(count) >= 4


async def test_a_dead_node_leaves_the_world_and_comes_back_into_it(living: Living) -> None:
    town, _ = await living()
    await until(lambda: stepping(town, 20), "twenty steps at world 3")
    await until(lambda: town.status.had_checkpoint, "a checkpoint is on two holders")
    reached = max(t.step for t in town.trainees)
    await town.kill("node-1")
    await until(lambda: committed(town, 2), "two workers are the world")
    world = town.status.membership
    assert world is not None
    assert world.parent is not None
    assert reached - world.parent.step <= 15
    await until(lambda: stepping(town, reached + 5), "new steps at world 2")
    incident = town.status.incidents[-1]
    assert incident.restored_from == "memory"
    assert incident.detected_seconds <= (incident.claimed_seconds or 0) <= (incident.committed_seconds or 0)
    town.start("node-1")
    await until(lambda: committed(town, 3), "three workers are the world again")
    grown = town.status.membership
    assert grown is not None
    assert town.status.incidents[-1].kind == "planned"
    await until(lambda: town.status.incidents[-1].first_step_seconds is not None, "the grown world steps")
    assert town.status.incidents[-1].steps_lost == 0


async def test_an_operator_that_dies_and_returns_disturbs_nobody(living: Living) -> None:
    town, operator = await living()
    await until(lambda: stepping(town, 20), "twenty steps")
    port = operator._server.port
    await operator.stop()
    before = [(t.incarnation, tuple(t.epochs)) for t in town.trainees]
    again = operator_of(town, port=port)
    await again.start()
    try:
        reached = max(t.step for t in town.trainees)
        await until(lambda: stepping(town, reached + 20), "training goes on")
        await until(lambda: len(again_seen(again)) == 3, "every agent is heard again")
        await until(lambda: min(again_seen(again)) > reached, "steps are reported to the new operator")
        assert [(t.incarnation, tuple(t.epochs)) for t in town.trainees] == before
        assert town.status.membership is not None
        assert (town.status.membership.generation, town.status.restarts) == (1, 0)
    finally:
        await again.stop()


async def test_a_frozen_node_is_given_up_and_what_it_does_after_its_thaw_counts_nowhere(living: Living) -> None:
    town, operator = await living()
    await until(lambda: stepping(town, 20) and town.status.had_checkpoint, "twenty steps at world 3")
    began = time.monotonic()
    town.freeze("node-1")
    await until(lambda: committed(town, 2), "two workers are the world")
    assert time.monotonic() - began > 2.0, "no sooner than silence proves anything"
    world = town.status.membership
    assert world is not None
    assert town.status.incidents[-1].restored_from in (None, "memory")
    town.thaw("node-1")
    await until(lambda: committed(town, 3), "the thawed worker is taken in again")
    memory = operator._memory
    assert memory is not None
    fences = {h.endpoint.instance.node: h.fence for h in memory.observed_servers() if h.state == "Ready"}
    assert min(fence or 0 for fence in fences.values()) > 1
    assert len(fences) == 3
    grown = town.status.membership
    assert grown is not None
    assert grown.parent is not None
    assert grown.parent.generation != 1


def again_seen(operator: LocalOperator) -> list[int]:
    """The steps that this operator knows of."""
    assert operator.reconciler is not None
    return [
        s.progress.step
        for s in list_observed_sessions(operator.reconciler._dependencies.channel.sessions)
        if s.connected
    ]


class Stale(LocalPlatform):
    """A fabric that still shows a leader what stood there when it was cut off."""

    shown: PlatformSnapshot | None = None

    async def observe(self) -> PlatformSnapshot:
        if self.shown is None:
            self.shown = await super().observe()
        return self.shown


async def test_a_leader_that_was_overtaken_changes_nothing(living: Living) -> None:
    town, _ = await living(nodes=2, replicas=2)
    fabric = Stale(town.folder.root)
    stale = operator_of(town, fabric)
    await until(lambda: committed(town, 2), "two workers are the world")
    world = town.status.membership
    assert world is not None
    now = await LocalPlatform(town.folder.root).observe()
    fabric.shown = replace(now, status=JobStatus(), workers=())
    await stale.start()
    try:
        assert stale.reconciler is not None
        with pytest.raises(StatusConflict):
            await stale.reconciler.reconcile()
        await until(lambda: stepping(town, 10), "training goes on")
        assert town.status.membership == world
        assert len(list(town.folder.workers_folder.glob("*.json"))) == 2
    finally:
        await stale.stop()
        await asyncio.sleep(0)


class Failing(LocalPlatform):
    """A fabric that cannot be looked at for a while."""

    failures = 5

    async def observe(self) -> PlatformSnapshot:
        if self.failures:
            self.failures -= 1
            raise PlatformError("the disk is away")
        return await super().observe()


async def test_errors_are_counted_and_the_loop_goes_on(living: Living) -> None:
    town, operator = await living(nodes=1, replicas=1, least=None, fabric=Failing)
    fabric = operator._platform
    assert isinstance(fabric, Failing)
    fabric.failures = 5
    await until(lambda: committed(town, 1), "the world begins in spite of errors")


def series() -> list[str]:
    """Of the job of these tests."""
    return [line for line in generate_latest(job_collector).decode().splitlines() if 'job="t"' in line]


class Unheard(LocalPlatform):
    """A fabric that takes events only once a test lets it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.let = asyncio.Event(), asyncio.Event()
        self.over = False

    async def record_events(self, events: Sequence[Event]) -> None:
        self.asked.set()
        try:
            await self.let.wait()
        finally:
            self.over = True


async def test_the_series_of_a_job_end_before_its_last_events_are_waited_for(living: Living) -> None:
    """Else they would end in the midst of a job that was made anew under its name."""
    town, operator = await living(nodes=1, replicas=1, least=None, fabric=Unheard)
    fabric = operator._platform
    assert isinstance(fabric, Unheard)
    await fabric.asked.wait()
    await until(lambda: committed(town, 1), "a world")
    assert series(), "a job that is looked after is told of"
    stopping = asyncio.create_task(operator.stop())
    await until(lambda: not series(), "its series to end")
    assert not fabric.over, "its events are still waited for"
    fabric.let.set()
    await stopping


async def test_a_step_of_the_wall_clock_changes_nothing_for_a_job_that_runs(
    living: Living, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + ahead[0])
    town, _ = await living(nodes=1, replicas=1)
    await until(lambda: stepping(town, 10), "ten steps of a world of one")
    for seconds in (3600.0, -3600.0, 0.0):
        ahead[0] = seconds
        reached = max(t.step for t in town.trainees)
        told = town.status.step
        await until(lambda reached=reached: stepping(town, reached + 30), "thirty more steps")
        await until(lambda told=told: town.status.step > told, "status to tell newer steps")
    assert town.status.membership is not None
    assert town.status.membership.generation == 1
    assert town.status.incidents == ()
