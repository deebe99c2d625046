"""The lease as it is taken, renewed, lost and given back, with an API server in memory and timings cut short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from support.fakes.fake_api import FakeApi, silent
from surefoot_operator.controller.leader.election import LeaseTimings
from surefoot_operator.controller.leader.lease import Elector, LeaseAt, LeaseLost, NotLeading

WHERE = LeaseAt("surefoot-system", "surefoot-operator")
SHORT = LeaseTimings(lease_seconds=1.0, renew_seconds=0.6, retry_seconds=0.05)
SECONDS = 60.0


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


async def leads(one: Elector) -> None:
    async with asyncio.timeout(SECONDS):
        await one.leading.wait()


async def holder_is(server: FakeApi, name: str) -> None:
    async with asyncio.timeout(SECONDS):
        while server.objects.get(WHERE.path, {}).get("spec", {}).get("holderIdentity") != name:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_of_two_leads_and_the_other_follows_when_it_gives_the_lease_back(server: FakeApi) -> None:
    first, second = elector(server, "a"), elector(server, "b")
    running = asyncio.create_task(first.run())
    await leads(first)
    waiting = asyncio.create_task(second.run())
    spec = server.objects[WHERE.path]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 1, 0)
    first.may_act()
    with pytest.raises(NotLeading):
        second.may_act()
    await ended(running)
    await first.release()
    with pytest.raises(NotLeading):
        first.may_act()
    await leads(second)
    assert server.objects[WHERE.path]["spec"]["leaseTransitions"] == 1
    await ended(waiting)


async def test_a_lease_that_is_not_renewed_passes_to_who_watched_it(server: FakeApi) -> None:
    first, second = elector(server, "a"), elector(server, "b")
    running = asyncio.create_task(first.run())
    await leads(first)
    waiting = asyncio.create_task(second.run())
    await ended(running)  # killed: it gives nothing back
    await leads(second)
    await ended(waiting)


async def test_a_leader_whose_server_is_away_ends_by_itself(server: FakeApi) -> None:
    first = elector(server, "a")
    running = asyncio.create_task(first.run())
    await leads(first)
    server.before = silent
    with pytest.raises(LeaseLost, match="could not be renewed"):
        await asyncio.wait_for(running, SECONDS)
    with pytest.raises(NotLeading):
        first.may_act()


async def test_a_leader_whose_server_hangs_ends_in_time_too(server: FakeApi) -> None:
    first = elector(server, "a")
    running = asyncio.create_task(first.run())
    await leads(first)
    server.reachable.clear()
    with pytest.raises(LeaseLost, match="could not be renewed"):
        await asyncio.wait_for(running, SECONDS)


async def test_a_short_outage_costs_nothing(server: FakeApi) -> None:
    first = elector(server, "a")
    running = asyncio.create_task(first.run())
    await leads(first)
    tried: list[str] = []

    def twice(verb: str, path: str) -> None:
        tried.append(verb)
        if len(tried) <= 2:
            silent(verb, path)

    server.before = twice
    async with asyncio.timeout(SECONDS):
        while len(tried) < 6:  # noqa: ASYNC110 -- more renewals are waited for
            await asyncio.sleep(0.01)
    first.may_act()
    assert not running.done()
    await ended(running)


async def test_an_answer_that_was_lost_is_found_again(server: FakeApi) -> None:
    """The server took the renewal, we never heard: the next one fails its test, and is made anew from what stands."""
    first = elector(server, "a")
    running = asyncio.create_task(first.run())
    await leads(first)
    server.keep(WHERE.path, server.objects[WHERE.path])
    before = server.objects[WHERE.path]["metadata"]["resourceVersion"]
    async with asyncio.timeout(SECONDS):
        while int(server.objects[WHERE.path]["metadata"]["resourceVersion"]) < int(before) + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    first.may_act()
    await ended(running)


async def test_who_was_frozen_may_not_act_even_before_it_knows(server: FakeApi) -> None:
    clock = Clock()
    first = elector(server, "a", clock)
    running = asyncio.create_task(first.run())
    await leads(first)
    first.may_act()
    clock.ahead = 60.0  # as after SIGCONT: no code of ours has run yet
    with pytest.raises(NotLeading):
        first.may_act()
    with pytest.raises(LeaseLost, match="could not be renewed for 6"):
        await asyncio.wait_for(running, SECONDS)


async def test_somebody_else_in_the_lease_ends_a_leader(server: FakeApi) -> None:
    first = elector(server, "a")
    running = asyncio.create_task(first.run())
    await leads(first)
    stored = server.objects[WHERE.path]
    server.keep(WHERE.path, {**stored, "spec": {**stored["spec"], "holderIdentity": "z"}})
    with pytest.raises(LeaseLost, match="the lease is held by z"):
        await asyncio.wait_for(running, SECONDS)


async def test_two_that_come_at_one_moment_make_one_leader(server: FakeApi) -> None:
    both = [elector(server, "a"), elector(server, "b")]
    tasks = [asyncio.create_task(one.run()) for one in both]
    async with asyncio.timeout(SECONDS):
        await asyncio.wait([asyncio.create_task(one.leading.wait()) for one in both], return_when="FIRST_COMPLETED")
    await asyncio.sleep(5 * SHORT.retry_seconds)  # nothing announces that the second does not follow
    assert [one.leading.is_set() for one in both].count(True) == 1
    for task in tasks:
        await ended(task)
