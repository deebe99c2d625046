"""Who is told what, and when: each change reaches whom it concerns, and a word to all lets the loop breathe.

Said to everybody each time, one answer of each of two thousand agents would be four million messages looked over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import pytest

from support.builders import endpoint, member
from support.fakes.fake_agent import hello
from support.operations import counted
from surefoot.protocol.identities import Checkpoint, HolderId, RankSave, WorkerId
from surefoot.protocol.messages import Barrier, BarrierReply, RepairSave, Stopped, StoreReady, ToAgent
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.coordinator import pending_requests, uploads
from surefoot_operator.coordinator.agent_channel import TURN, AgentChannel, AgentConnection
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.desired_messages import desired_state, desired_state_after
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders

MANY = 3 * TURN
MEMBERS = tuple(member(i) for i in range(MANY))
HOLDERS = tuple(endpoint(f"n{i}") for i in range(MANY))
USABLE = UsableHolders(HOLDERS)
STATUS = JobStatus(world=World(1, "Committed", size=MANY, members=MEMBERS), named_holders=HOLDERS)
CLAIMED = replace(STATUS, world=World(2, "Claimed", size=MANY, members=MEMBERS))


class Told:
    """A line that notes how often it is told something."""

    hears_all = False

    def __init__(self, log: list[int], index: int) -> None:
        self.worker: WorkerId | None = None
        self._log, self._index = log, index

    def send(self, message: ToAgent) -> None: ...

    def tell(self, wanted: Iterable[ToAgent]) -> None:
        assert tuple(wanted)
        self._log.append(self._index)

    def cut(self) -> None: ...


class Talk:
    """A channel with all members on their lines, which hold the present epoch."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.channel = AgentChannel("job-1", 0.5, lambda: 1000.0, lambda urgent: None)
        self.channel.know(WorkerId(i, 1) for i in range(MANY))
        self.channel.rule(desired_state(STATUS, UsableHolders(HOLDERS), 2))
        self.lines = [cast(AgentConnection, Told(self.told, i)) for i in range(MANY)]
        for i, line in enumerate(self.lines):
            said = hello(i, incarnation=MEMBERS[i].incarnation, epoch=1, stopped=1)
            assert self.channel.refusal(said) is None
            self.channel.join(said, line)

    async def heard_by_now(self) -> list[int]:
        """Who was told since the last question, once nobody waits for his turn."""
        for _ in range(MANY):
            await asyncio.sleep(0)
            if not self.channel._due:
                break
        told, self.told[:] = list(self.told), []
        return told


def test_a_joining_agent_is_told_alone() -> None:
    async def talk() -> None:
        assert await Talk().heard_by_now() == list(range(MANY))

    asyncio.run(talk())


def test_nobody_hears_a_rule_that_says_the_same() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        again = replace(STATUS, step=77, message="epoch 1 runs", named_holders=tuple(HOLDERS))
        all_on.channel.rule(desired_state(again, UsableHolders(tuple(HOLDERS)), 2))
        assert await all_on.heard_by_now() == []

    asyncio.run(talk())


def test_an_order_reaches_its_worker_and_an_answer_concerns_who_gave_it() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        save, holders = RankSave(1, 5, 0), (HolderId("n0", "n0-i0"), HolderId("n1", "n1-i0"))
        all_on.channel.change(
            lambda s: replace(
                s, orders=uploads.repair(s.orders, [(WorkerId(7, 1), RepairSave(0, 1, save, *holders))], 0.0)
            )
        )
        assert await all_on.heard_by_now() == [7]
        members = [WorkerId(i, 1) for i in range(MANY)]
        all_on.channel.change(
            lambda s: replace(
                s, orders=replace(s.orders, barrier=update_barrier(None, Barrier(1, 9, "proposed"), members, 0.0))
            )
        )
        assert sorted(await all_on.heard_by_now()) == list(range(MANY))
        for i, line in enumerate(all_on.lines[:-1]):
            all_on.channel.hear(line, BarrierReply(1, 9, True))
            assert await all_on.heard_by_now() == [i]
        all_on.channel.hear(all_on.lines[-1], BarrierReply(1, 9, True))  # the last one: it binds
        assert sorted(set(await all_on.heard_by_now())) == list(range(MANY))

    asyncio.run(talk())


def test_the_address_of_the_store_is_told_to_all() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        all_on.channel.hear(all_on.lines[0], StoreReady(1, "10.0.0.1:4000"))
        assert sorted(set(await all_on.heard_by_now())) == list(range(MANY))

    asyncio.run(talk())


def test_a_word_to_all_lets_others_have_their_turns() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        claimed = replace(STATUS, world=World(2, "Claimed", members=MEMBERS))
        all_on.channel.rule(desired_state(claimed, UsableHolders(HOLDERS), 2))
        most = 0
        while all_on.channel._due:
            await asyncio.sleep(0)
            most = max(most, len(all_on.told))
            all_on.told.clear()
        assert 0 < most <= TURN

    asyncio.run(talk())


def test_what_waits_for_its_turn_is_said_as_things_stand_then() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        for epoch in (2, 3):
            claimed = replace(STATUS, world=World(epoch, "Claimed", members=MEMBERS))
            all_on.channel.rule(desired_state(claimed, UsableHolders(HOLDERS), 2))
        assert sorted(await all_on.heard_by_now()) == list(range(MANY))

    asyncio.run(talk())


def test_an_unused_checkpoint_is_no_reason_to_speak() -> None:
    """A status that only reports progress says nothing to agents, whatever it says to people."""
    ahead = replace(STATUS, last_complete=Checkpoint(1, 40))
    assert desired_state(ahead, UsableHolders(HOLDERS), 2).told == desired_state(STATUS, UsableHolders(HOLDERS), 2).told


def test_a_round_that_changes_neither_world_nor_holders_places_nothing_anew() -> None:
    first = desired_state_after(None, STATUS, USABLE, 2, "t")
    assert replace(first, made_from=()) == desired_state(STATUS, UsableHolders(HOLDERS), 2, "t")
    ahead = replace(STATUS, step=99)
    assert counted(lambda: desired_state_after(first, ahead, UsableHolders(tuple(HOLDERS)), 2, "t")) < 5 * MANY
    assert desired_state_after(first, ahead, USABLE, 2, "t").status.step == 99
    fewer = desired_state_after(first, ahead, UsableHolders(HOLDERS[:-1]), 2, "t")
    assert fewer.holders == desired_state(ahead, UsableHolders(HOLDERS[:-1]), 2, "t").holders
    assert desired_state_after(first, ahead, USABLE, 2, "another").token == "another"


def test_requests_to_everybody_are_made_and_found_in_proportion_to_the_agents() -> None:
    def cost(agents: int) -> int:
        workers = [WorkerId(index, 1) for index in range(agents)]
        holders = HolderId("a", "i"), HolderId("b", "i")
        copies = [(worker, RepairSave(0, 1, RankSave(1, 10, worker.index), *holders)) for worker in workers]

        def all_of_them() -> None:
            book = uploads.repair(pending_requests.PendingRequests(1), copies, 0.0)
            assert [len(book.requests_of(worker)) for worker in workers] == [1] * agents

        return counted(all_of_them)

    assert cost(400) <= 10 * cost(40) * 1.1


def test_an_agent_that_stopped_costs_no_copy_of_all_sessions_and_changes_no_snapshot() -> None:
    async def talk() -> None:
        one, woken = Talk(), list[bool]()
        one.channel._changed = woken.append
        before, (taken, _) = one.channel._by_worker, one.channel.taken()
        one.channel.hear(one.lines[7], Stopped(2))
        assert one.channel._by_worker is before
        seen = one.channel.sessions.by_worker[WorkerId(7, 1)].seen
        assert (seen.stopped, taken.by_worker[WorkerId(7, 1)].seen.stopped, woken) == (2, 1, [True])

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("status", "epoch", "at_once"),
    [
        pytest.param(STATUS, 1, False, id="comes back while its trainers run"),
        pytest.param(STATUS, 0, True, id="newcomer"),
        pytest.param(CLAIMED, 1, True, id="a world waits for it"),
    ],
)
def test_a_plan_waits_for_nobody_but_those_who_change_it(status: JobStatus, epoch: int, at_once: bool) -> None:
    """Behind a new leader 2,000 agents came back, and each had its job planned: half of what they cost it."""

    async def talk() -> None:
        one, woken = Talk(), list[bool]()
        one.channel.rule(desired_state(status, USABLE, 2))
        one.channel._changed = woken.append
        said = hello(7, incarnation=MEMBERS[7].incarnation, epoch=epoch, stopped=1)
        one.channel.join(said, cast(AgentConnection, Told([], 7)))
        assert woken == [at_once]

    asyncio.run(talk())


def test_of_a_claimed_world_no_copies_are_placed() -> None:
    assert desired_state(STATUS, USABLE, 2).targets
    assert not desired_state(CLAIMED, USABLE, 2).targets
