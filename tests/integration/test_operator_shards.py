"""Shards as replicas take, hand on and cut them anew, with an API server in memory and timings cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from support.fakes.fake_api import FakeApi, silent
from support.machine_speed import scaled
from surefoot_operator.controller.leader import shard_election
from surefoot_operator.controller.leader.election_rules import LeaseTimings, lease_name
from surefoot_operator.controller.leader.leader_election import LeaseRef
from surefoot_operator.controller.leader.shard_election import SHARD_COUNT_ANNOTATION, ShardElection
from surefoot_operator.errors import NotLeader

WHERE = LeaseRef("surefoot-system", "surefoot-operator")
SHORT = LeaseTimings(lease_seconds=1.0, renew_seconds=0.6, retry_seconds=0.05, stand_down_seconds=1.5, call_seconds=0.4)
SECONDS = scaled(60.0)


class Led:
    """Who leads what, by all replicas' terms together; two at once are kept as a mistake."""

    def __init__(self) -> None:
        self.terms: dict[tuple[int, int], tuple[str, Callable[[], None]]] = {}
        self.begun: list[tuple[str, int, int]] = []
        self.doubled: list[tuple[int, int]] = []

    def may_act(self) -> set[int]:
        """How many shards the jobs are cut into, by those who may write at this moment."""
        found = set()
        for (_, shards), (_, may_act) in self.terms.items():
            try:
                may_act()
            except NotLeader:
                continue
            found.add(shards)
        return found


class Terms:
    """Of one replica."""

    def __init__(self, name: str, led: Led) -> None:
        self.name, self.led = name, led
        self.mine: dict[int, tuple[int, int]] = {}

    def start_leading(self, shard: int, shards: int, may_act: Callable[[], None]) -> None:
        key = (shard, shards)
        before = self.led.terms.get(key)
        if before is not None and before[0] != self.name:
            try:
                before[1]()
                self.led.doubled.append(key)
            except NotLeader:
                pass
        self.led.terms[key] = (self.name, may_act)
        self.led.begun.append((self.name, *key))
        self.mine[shard] = key
        if len(self.led.may_act()) > 1:
            self.led.doubled.append(key)

    async def stop_leading(self, shard: int, in_peace: bool) -> None:
        await asyncio.sleep(0)
        key = self.mine.pop(shard, None)
        if key is not None and self.led.terms.get(key, ("",))[0] == self.name:
            del self.led.terms[key]

    def annotations(self, shard: int) -> Mapping[str, str]:
        return {}


class Replica:
    """One process: `kill` it, or have it leave."""

    def __init__(self, server: FakeApi, led: Led, name: str, wished: int) -> None:
        self.election = ShardElection(server.api, WHERE, name, wished, Terms(name, led), SHORT)
        self.task = asyncio.create_task(self.election.run())

    @property
    def count(self) -> int:
        return len(self.election.led_shards)

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leave(self) -> None:
        await self.kill()
        await self.election.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(shard_election, "REQUEST_INTERVAL_SECONDS", 0.3)
    monkeypatch.setattr(shard_election, "SHARD_COUNT_POLL_SECONDS", 0.02)
    return FakeApi()


@pytest.fixture
def led() -> Led:
    return Led()


def holders(server: FakeApi, shards: int) -> list[str]:
    paths = [LeaseRef(WHERE.namespace, lease_name(WHERE.name, shard)).path for shard in range(shards)]
    return [server.objects[path]["spec"]["holderIdentity"] if path in server.objects else "" for path in paths]


async def test_three_replicas_lead_one_shard_each_and_one_that_dies_moves_its_own_alone(
    server: FakeApi, led: Led
) -> None:
    three = {name: Replica(server, led, name, 3) for name in "abc"}
    await until(lambda: [one.count for one in three.values()] == [1, 1, 1])
    begun = list(led.begun)
    dead = holders(server, 3)[1]
    await three[dead].kill()
    await until(lambda: sum(one.count for name, one in three.items() if name != dead) == 3)
    assert [shard for _, shard, _ in led.begun[len(begun) :]] == [1], "the others' terms went on"
    again = Replica(server, led, "again", 3)
    await until(lambda: again.count == 1)
    assert sorted(one.count for name, one in three.items() if name != dead) == [1, 1]
    before = len(led.begun)
    await asyncio.sleep(1.0)  # nothing announces that nothing moves
    assert len(led.begun) == before
    assert not led.doubled
    for one in (*three.values(), again):
        await one.kill()


async def test_a_replica_that_leaves_hands_its_shards_to_those_who_lead_least(server: FakeApi, led: Led) -> None:
    first = Replica(server, led, "a", 4)
    await until(lambda: first.count == 4)
    second = Replica(server, led, "b", 4)
    await until(lambda: (first.count, second.count) == (2, 2))
    await first.leave()
    await until(lambda: second.count == 4)
    assert holders(server, 4) == ["b"] * 4
    assert not led.doubled
    await second.kill()


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (2, 5)])
async def test_another_number_of_shards_is_in_force_for_all_or_for_none(
    server: FakeApi, led: Led, old: int, new: int
) -> None:
    """As a Deployment is rolled: new replicas stand ready before any old one leaves."""
    former = [Replica(server, led, name, old) for name in ("a", "b")]
    await until(lambda: sum(one.count for one in former) == old)
    newer = [Replica(server, led, name, new) for name in ("c", "d")]
    for one in former:
        await one.leave()
    await until(
        lambda: sum(one.count for one in newer) == new and all(one.election.shard_count == new for one in newer)
    )
    noted = server.objects[WHERE.path]["metadata"]["annotations"]
    assert noted.get(SHARD_COUNT_ANNOTATION, "1") == str(new)
    assert not led.doubled
    assert led.may_act() == {new}
    for one in newer:
        await one.kill()


async def test_a_number_whose_writing_was_not_answered_is_read_again(server: FakeApi, led: Led) -> None:
    """The server took it, and the replica never heard: it does not go on with the number of before."""
    former = Replica(server, led, "a", 1)
    await until(lambda: former.count == 1)
    await former.leave()
    stored = server.put

    async def unheard(path: str, body: dict[str, object]) -> dict[str, object]:
        kept = await stored(path, body)
        if SHARD_COUNT_ANNOTATION in kept["metadata"]["annotations"] and not cut:
            cut.append(path)
            silent("PUT", path)
        return kept

    cut: list[str] = []
    server.put = unheard  # type: ignore[method-assign,assignment]
    newer = Replica(server, led, "b", 2)
    await until(lambda: newer.count == 2)
    assert cut
    assert [shards for name, _, shards in led.begun if name == "b"][-2:] == [2, 2]
    assert not led.doubled
    await newer.kill()
