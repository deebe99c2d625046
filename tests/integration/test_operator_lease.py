"""The lease as it is taken, renewed, lost and given back, with an API server in memory and timings cut short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from support.fakes.fake_api import FakeApi, silent
from support.machine_speed import scaled
from surefoot_operator.controller.leader.election_rules import LeaseTimings
from surefoot_operator.controller.leader.leader_election import Elector, LeaseLost, LeaseRef
from surefoot_operator.errors import NotLeader
from surefoot_operator.platforms.kubernetes.api_client import Api

WHERE = LeaseRef("surefoot-system", "surefoot-operator")
SHORT = LeaseTimings(lease_seconds=1.0, renew_seconds=0.6, retry_seconds=0.05, stand_down_seconds=1.5, call_seconds=0.4)
SECONDS = scaled(60.0)


class Cut:
    """A way to the server that can be cut for one of those who use it."""

    def __init__(self, server: FakeApi) -> None:
        self.server, self.cut = server, False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            silent(name, "")
        return getattr(self.server, name)


class Clock:
    """Real time, and a jump."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def server() -> FakeApi:
    return FakeApi()


def elector(server: FakeApi, name: str, now: Callable[[], float] = time.monotonic) -> Elector:
    return Elector(server.api, WHERE, name, SHORT, now)


async def term(one: Elector) -> None:
    """From the lease's taking to the end of the term."""
    await one.acquire()
    await one.renew_until_lost()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def leads(one: Elector) -> None:
    await until(lambda: one.leading)


async def leading(one: Elector) -> asyncio.Task[None]:
    """Its first term, once it leads."""
    running = asyncio.create_task(term(one))
    await leads(one)
    return running


def may_act(one: Elector) -> bool:
    try:
        one.require_leadership()
    except NotLeader:
        return False
    return True


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_of_two_leads_and_the_other_follows_when_it_gives_the_lease_back(server: FakeApi) -> None:
    first, second = elector(server, "a"), elector(server, "b")
    running = await leading(first)
    waiting = asyncio.create_task(term(second))
    spec = server.objects[WHERE.path]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 1, 0)
    first.require_leadership()
    with pytest.raises(NotLeader):
        second.require_leadership()
    await ended(running)
    await first.release()
    with pytest.raises(NotLeader):
        first.require_leadership()
    await leads(second)
    assert server.objects[WHERE.path]["spec"]["leaseTransitions"] == 1
    await ended(waiting)


async def test_a_lease_that_is_not_renewed_passes_to_who_watched_it(server: FakeApi) -> None:
    first, second = elector(server, "a"), elector(server, "b")
    running = await leading(first)
    waiting = asyncio.create_task(term(second))
    await ended(running)  # killed: it gives nothing back
    await leads(second)
    await ended(waiting)


async def test_a_leader_whose_server_is_away_may_not_act_and_stands_down_in_place(server: FakeApi) -> None:
    first = elector(server, "a")
    running = await leading(first)
    server.before = silent
    await until(lambda: not may_act(first))
    assert not running.done()  # its term is not over yet
    await asyncio.wait_for(running, SECONDS)
    assert not first.leading
    server.before = lambda verb, path: None
    await asyncio.wait_for(first.acquire(), SECONDS)
    first.require_leadership()
    assert server.objects[WHERE.path]["spec"]["leaseTransitions"] == 1  # another term


async def test_a_leader_whose_server_hangs_stands_down_in_time_too(server: FakeApi) -> None:
    first = elector(server, "a")
    running = await leading(first)
    server.reachable.clear()
    await asyncio.wait_for(running, SECONDS)
    assert not first.leading


async def test_a_term_goes_on_where_nobody_led_meanwhile(server: FakeApi) -> None:
    """Longer away than it may act, shorter than until it stands down."""
    first = elector(server, "a")
    running = await leading(first)
    server.before = silent
    await until(lambda: not may_act(first))
    server.before = lambda verb, path: None
    await until(lambda: may_act(first))
    assert first.leading
    assert not running.done()
    assert server.objects[WHERE.path]["spec"]["leaseTransitions"] == 0
    await ended(running)


async def test_a_leader_that_was_away_gives_way_to_who_took_the_lease(server: FakeApi) -> None:
    away = Cut(server)
    first, second = (
        Elector(cast(Api, away), WHERE, "a", replace(SHORT, stand_down_seconds=SECONDS)),
        elector(server, "b"),
    )
    running = await leading(first)
    away.cut = True
    following = asyncio.create_task(term(second))
    await leads(second)
    assert not may_act(first)
    away.cut = False
    with pytest.raises(LeaseLost, match="the lease belongs to b"):
        await asyncio.wait_for(running, SECONDS)
    second.require_leadership()
    await ended(following)


async def test_a_short_outage_costs_nothing(server: FakeApi) -> None:
    first = elector(server, "a")
    running = await leading(first)
    tried: list[str] = []

    def twice(verb: str, path: str) -> None:
        tried.append(verb)
        if len(tried) <= 2:
            silent(verb, path)

    server.before = twice
    await until(lambda: len(tried) >= 6)  # more renewals
    first.require_leadership()
    assert not running.done()
    await ended(running)


async def test_an_answer_that_was_lost_is_found_again(server: FakeApi) -> None:
    """The server took the renewal, we never heard: the next one fails its test, and is made anew from what stands."""
    first = elector(server, "a")
    running = await leading(first)
    server.keep(WHERE.path, server.objects[WHERE.path])
    before = server.objects[WHERE.path]["metadata"]["resourceVersion"]
    await until(lambda: int(server.objects[WHERE.path]["metadata"]["resourceVersion"]) >= int(before) + 3)
    first.require_leadership()
    await ended(running)


async def test_who_was_frozen_may_not_act_even_before_it_knows(server: FakeApi) -> None:
    clock = Clock()
    first = elector(server, "a", clock)
    running = await leading(first)
    first.require_leadership()
    clock.ahead = 60.0  # as after SIGCONT: no code of ours has run yet
    with pytest.raises(NotLeader):
        first.require_leadership()
    await asyncio.wait_for(running, SECONDS)
    assert not first.leading


async def test_somebody_else_in_the_lease_ends_a_leader(server: FakeApi) -> None:
    first = elector(server, "a")
    running = await leading(first)
    stored = server.objects[WHERE.path]
    server.keep(WHERE.path, {**stored, "spec": {**stored["spec"], "holderIdentity": "z"}})
    with pytest.raises(LeaseLost, match="the lease belongs to z"):
        await asyncio.wait_for(running, SECONDS)


async def test_two_that_come_at_one_moment_make_one_leader(server: FakeApi) -> None:
    both = [elector(server, "a"), elector(server, "b")]
    tasks = [asyncio.create_task(term(one)) for one in both]
    await asyncio.wait([asyncio.create_task(leads(one)) for one in both], return_when="FIRST_COMPLETED")
    await asyncio.sleep(5 * SHORT.retry_seconds)  # nothing announces that the second does not follow
    assert [one.leading for one in both].count(True) == 1
    for task in tasks:
        await ended(task)
