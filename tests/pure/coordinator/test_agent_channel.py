"""Tests of `coordinator.agent_channel`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from support.builders import endpoint, member
from support.fakes.fake_agent import hello
from support.operations import counted
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance, RankSave, WorkerId
from surefoot.protocol.memory_server_list import MemoryServerList, list_changes, list_transitions
from surefoot.protocol.messages import (
    Assign,
    Barrier,
    BarrierReply,
    ListAllServers,
    MemoryServers,
    RepairSave,
    StoreReady,
    ToAgent,
    TrainersStopped,
)
from surefoot.protocol.wire import decode
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.coordinator import agent_channel, pending_requests, uploads
from surefoot_operator.coordinator.agent_channel import (
    SEND_BATCH_AGENTS,
    AgentChannel,
    AgentConnection,
    EncodedListCache,
)
from surefoot_operator.coordinator.barrier import update_barrier
from surefoot_operator.coordinator.desired_messages import (
    DesiredState,
    ServerListScope,
    derive_desired_state,
    update_desired_state,
)
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers

# ---- channel costs ---------------------------------------------------------------------------------------------------
# Who is told what, and when: each change reaches whom it concerns, and a word to all lets the loop breathe.
#
# Said to everybody each time, one answer of each of two thousand agents would be four million messages looked over.

MANY = 3 * SEND_BATCH_AGENTS
MEMBERS = tuple(member(i) for i in range(MANY))
HOLDERS = tuple(endpoint(f"n{i}") for i in range(MANY))
USABLE = UsableMemoryServers(HOLDERS)
STATUS = JobStatus(membership=Membership(1, "Committed", world_size=MANY, members=MEMBERS), assigned_servers=HOLDERS)
CLAIMED = replace(STATUS, membership=Membership(2, "Claimed", world_size=MANY, members=MEMBERS))


class Told:
    """A line that notes how often it is told something."""

    was_sent_all_servers = False

    def __init__(self, log: list[int], index: int) -> None:
        self.worker: WorkerId | None = None
        self._log, self._index = log, index

    def send(self, message: ToAgent) -> None: ...

    def send_missing(self, wanted: Iterable[ToAgent]) -> None:
        assert tuple(wanted)
        self._log.append(self._index)

    def disconnect_now(self) -> None: ...


class Talk:
    """A channel with all members on their lines, which hold the present epoch."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.channel = AgentChannel("job-1", 0.5, lambda: 1000.0, lambda urgent: None)
        self.channel.set_expected_workers(WorkerId(i, 1) for i in range(MANY))
        self.channel.apply_desired_state(derive_desired_state(STATUS, UsableMemoryServers(HOLDERS), 2))
        self.lines = [cast(AgentConnection, Told(self.told, i)) for i in range(MANY)]
        for i, line in enumerate(self.lines):
            said = hello(i, incarnation=MEMBERS[i].incarnation, generation=1, stopped=1)
            assert self.channel.hello_rejection(said) is None
            self.channel.accept_agent(said, line)

    async def heard_by_now(self) -> list[int]:
        """Who was told since the last question, once nobody waits for his turn."""
        for _ in range(MANY):
            await asyncio.sleep(0)
            if not self.channel._workers_to_serve:
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
        again = replace(STATUS, step=77, message="epoch 1 runs", assigned_servers=tuple(HOLDERS))
        all_on.channel.apply_desired_state(derive_desired_state(again, UsableMemoryServers(tuple(HOLDERS)), 2))
        assert await all_on.heard_by_now() == []

    asyncio.run(talk())


def test_an_order_reaches_its_worker_and_an_answer_concerns_who_gave_it() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        save, holders = RankSave(1, 5, 0), (MemoryServerInstance("n0", "n0-i0"), MemoryServerInstance("n1", "n1-i0"))
        all_on.channel.apply_transition(
            lambda s: replace(
                s,
                requests=uploads.request_repairs(s.requests, [(WorkerId(7, 1), RepairSave(0, 1, save, *holders))], 0.0),
            )
        )
        assert await all_on.heard_by_now() == [7]
        members = [WorkerId(i, 1) for i in range(MANY)]
        all_on.channel.apply_transition(
            lambda s: replace(
                s, requests=replace(s.requests, barrier=update_barrier(None, Barrier(1, 9, "proposed"), members, 0.0))
            )
        )
        assert sorted(await all_on.heard_by_now()) == list(range(MANY))
        for i, line in enumerate(all_on.lines[:-1]):
            all_on.channel.handle_message(line, BarrierReply(1, 9, True))
            assert await all_on.heard_by_now() == [i]
        all_on.channel.handle_message(all_on.lines[-1], BarrierReply(1, 9, True))  # the last one: it binds
        assert sorted(set(await all_on.heard_by_now())) == list(range(MANY))

    asyncio.run(talk())


def test_the_address_of_the_store_is_told_to_all() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        all_on.channel.handle_message(all_on.lines[0], StoreReady(1, "10.0.0.1:4000"))
        assert sorted(set(await all_on.heard_by_now())) == list(range(MANY))

    asyncio.run(talk())


def test_a_word_to_all_lets_others_have_their_turns() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        claimed = replace(STATUS, membership=Membership(2, "Claimed", members=MEMBERS))
        all_on.channel.apply_desired_state(derive_desired_state(claimed, UsableMemoryServers(HOLDERS), 2))
        most = 0
        while all_on.channel._workers_to_serve:
            await asyncio.sleep(0)
            most = max(most, len(all_on.told))
            all_on.told.clear()
        assert 0 < most <= SEND_BATCH_AGENTS

    asyncio.run(talk())


def test_what_waits_for_its_turn_is_said_as_things_stand_then() -> None:
    async def talk() -> None:
        all_on = Talk()
        await all_on.heard_by_now()
        for epoch in (2, 3):
            claimed = replace(STATUS, membership=Membership(epoch, "Claimed", members=MEMBERS))
            all_on.channel.apply_desired_state(derive_desired_state(claimed, UsableMemoryServers(HOLDERS), 2))
        assert sorted(await all_on.heard_by_now()) == list(range(MANY))

    asyncio.run(talk())


def test_an_unused_checkpoint_is_no_reason_to_speak() -> None:
    """A status that only reports progress says nothing to agents, whatever it says to people."""
    ahead = replace(STATUS, last_complete=Checkpoint(1, 40))
    assert (
        derive_desired_state(ahead, UsableMemoryServers(HOLDERS), 2).sent_parts
        == derive_desired_state(STATUS, UsableMemoryServers(HOLDERS), 2).sent_parts
    )


def test_a_round_that_changes_neither_world_nor_holders_places_nothing_anew() -> None:
    first = update_desired_state(None, STATUS, USABLE, 2, "t")
    assert replace(first, inputs=()) == derive_desired_state(STATUS, UsableMemoryServers(HOLDERS), 2, "t")
    ahead = replace(STATUS, step=99)
    assert counted(lambda: update_desired_state(first, ahead, UsableMemoryServers(tuple(HOLDERS)), 2, "t")) < 5 * MANY
    assert update_desired_state(first, ahead, USABLE, 2, "t").status.step == 99
    fewer = update_desired_state(first, ahead, UsableMemoryServers(HOLDERS[:-1]), 2, "t")
    assert fewer.servers == derive_desired_state(ahead, UsableMemoryServers(HOLDERS[:-1]), 2, "t").servers
    assert update_desired_state(first, ahead, USABLE, 2, "another").token == "another"


def test_requests_to_everybody_are_made_and_found_in_proportion_to_the_agents() -> None:
    def cost(agents: int) -> int:
        workers = [WorkerId(index, 1) for index in range(agents)]
        holders = MemoryServerInstance("a", "i"), MemoryServerInstance("b", "i")
        copies = [(worker, RepairSave(0, 1, RankSave(1, 10, worker.index), *holders)) for worker in workers]

        def all_of_them() -> None:
            book = uploads.request_repairs(pending_requests.PendingRequests(1), copies, 0.0)
            assert [len(book.requests_of(worker)) for worker in workers] == [1] * agents

        return counted(all_of_them)

    assert cost(400) <= 10 * cost(40) * 1.1


def test_an_agent_that_stopped_costs_no_copy_of_all_sessions_and_changes_no_snapshot() -> None:
    async def talk() -> None:
        one, woken = Talk(), list[bool]()
        one.channel._changed = woken.append
        before, (taken, _) = one.channel._by_worker, one.channel.take_snapshot()
        one.channel.handle_message(one.lines[7], TrainersStopped(2))
        assert one.channel._by_worker is before
        seen = one.channel.sessions.by_worker[WorkerId(7, 1)].observed
        assert (seen.stopped, taken.by_worker[WorkerId(7, 1)].observed.stopped, woken) == (2, 1, [True])

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("status", "generation", "at_once"),
    [
        pytest.param(STATUS, 1, False, id="comes back while its trainers run"),
        pytest.param(STATUS, 0, True, id="newcomer"),
        pytest.param(CLAIMED, 1, True, id="a world waits for it"),
    ],
)
def test_a_plan_waits_for_nobody_but_those_who_change_it(status: JobStatus, generation: int, at_once: bool) -> None:
    """Behind a new leader 2,000 agents came back, and each had its job planned: half of what they cost it."""

    async def talk() -> None:
        one, woken = Talk(), list[bool]()
        one.channel.apply_desired_state(derive_desired_state(status, USABLE, 2))
        one.channel._changed = woken.append
        said = hello(7, incarnation=MEMBERS[7].incarnation, generation=generation, stopped=1)
        one.channel.accept_agent(said, cast(AgentConnection, Told([], 7)))
        assert woken == [at_once]

    asyncio.run(talk())


def test_of_a_claimed_world_no_copies_are_placed() -> None:
    assert derive_desired_state(STATUS, USABLE, 2).targets
    assert not derive_desired_state(CLAIMED, USABLE, 2).targets


# ---- shared texts ----------------------------------------------------------------------------------------------------
# What all agents of a job are told alike is encoded once, and a change that concerns nobody costs few bytes each.

COUNT = 8
MEMBERS_SHARED_TEXTS = tuple(member(i) for i in range(COUNT))
HOLDERS_SHARED_TEXTS = tuple(endpoint(f"node-{i:04}.eu-central-1.compute.internal", "f" * 40) for i in range(200))
STATUS_SHARED_TEXTS = JobStatus(
    membership=Membership(1, "Committed", world_size=COUNT, members=MEMBERS_SHARED_TEXTS),
    assigned_servers=HOLDERS_SHARED_TEXTS,
)


def ruled(
    holders: tuple[MemoryServerEndpoint, ...] = HOLDERS_SHARED_TEXTS,
    status: JobStatus = STATUS_SHARED_TEXTS,
    scope: ServerListScope | None = None,
) -> DesiredState:
    return derive_desired_state(status, UsableMemoryServers(tuple(holders)), 2, scope=ALL if scope is None else scope)


class Texts(AgentConnection):
    """A connection that keeps the texts that it would send."""

    def __init__(self, shared: EncodedListCache) -> None:
        class Request:
            transport = None

        super().__init__(cast(Any, None), cast(Any, Request()), 1, shared)
        self.sent = list[str]()
        self.holders = MemoryServerList()

    def _queue_text(self, text: str) -> None:
        self.sent.append(text)

    def heard(self) -> list[Any]:
        told, self.sent = [self.holders.apply_message(cast(Any, decode(text))) for text in self.sent], []
        return [message for message in told if message is not None]


ALL = ServerListScope(send_all_up_to=len(HOLDERS_SHARED_TEXTS))
"""Every agent is told of all holders."""


def joined(scope: ServerListScope = ALL) -> tuple[AgentChannel, list[Texts]]:
    channel, shared = AgentChannel("job-1", 0.5, lambda: 1000.0, lambda urgent: None), EncodedListCache()
    channel.set_expected_workers(WorkerId(i, 1) for i in range(COUNT))
    channel.apply_desired_state(ruled(scope=scope))
    lines = [Texts(shared) for _ in range(COUNT)]
    for i, line in enumerate(lines):
        channel.accept_agent(hello(i, incarnation=MEMBERS_SHARED_TEXTS[i].incarnation, generation=1, stopped=1), line)
    return channel, lines


def test_the_list_of_holders_is_encoded_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = agent_channel.encode
    monkeypatch.setattr(agent_channel, "encode", lambda *given: encoded.append(given) or encode(*given))
    channel, lines = joined()
    assert len([message for (message,) in encoded if type(message).__name__ == "MemoryServerChanges"]) == 1
    lists = [next(text for text in line.sent if '"MemoryServerChanges"' in text) for line in lines]
    assert all(text is lists[0] for text in lists)
    for line in lines:
        (mine,) = (m for m in line.heard() if isinstance(m, Assign))
        assert mine.servers == HOLDERS_SHARED_TEXTS
    channel.apply_desired_state(ruled(HOLDERS_SHARED_TEXTS[:-1]))
    assert len([message for (message,) in encoded if type(message).__name__ == "MemoryServerChanges"]) == 2


def test_a_change_that_does_not_concern_a_worker_costs_it_less_than_a_kilobyte() -> None:
    channel, lines = joined()
    for line in lines:
        line.heard()
    channel.apply_desired_state(ruled(HOLDERS_SHARED_TEXTS[:-1]))
    for line in lines:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, MemoryServers)
        assert told.servers == HOLDERS_SHARED_TEXTS[:-1]
    world = replace(cast(Membership, STATUS_SHARED_TEXTS.membership), generation=2, members=MEMBERS_SHARED_TEXTS[:-1])
    channel.apply_desired_state(ruled(HOLDERS_SHARED_TEXTS[:-1], replace(STATUS_SHARED_TEXTS, membership=world)))
    for line in lines[:-1]:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, Assign)
        assert told.servers == HOLDERS_SHARED_TEXTS[:-1]


# ---- some of the holders ----------------------------------------------------------------------------------------------

NARROW = ServerListScope()


def words_of(line: Texts) -> tuple[Assign | MemoryServers, ...]:
    return tuple(m for m in line.heard() if isinstance(m, Assign | MemoryServers))


def test_an_agent_hears_of_what_its_worker_needs_and_whoever_keeps_house_of_all() -> None:
    channel, lines = joined(NARROW)
    assert all(sum(map(len, line.sent)) < 1500 for line in lines[1:])
    (first,), *others = map(words_of, lines)
    assert (first.servers, first.is_partial) == (HOLDERS_SHARED_TEXTS, False)
    for (mine,) in others:
        assert {one.instance for one in mine.servers} == set(mine.targets)
        assert mine.is_partial
    channel.apply_desired_state(ruled(HOLDERS_SHARED_TEXTS[:-1], scope=NARROW))
    assert not any(line.sent for line in lines[1:])  # it concerns nobody else
    assert [told.servers for told in words_of(lines[0])] == [HOLDERS_SHARED_TEXTS[:-1]]


def test_who_asks_is_told_of_all_holders_in_a_text_that_is_the_same_for_others() -> None:
    channel, lines = joined(NARROW)
    for line in lines:
        line.heard()
    for line in lines[2:4]:
        channel.handle_message(line, ListAllServers(1))
    large = [max(line.sent, key=len) for line in lines[2:4]]
    assert large[0] is large[1]
    for line in lines[2:4]:
        (told,) = words_of(line)
        assert (told.servers, told.is_partial) == (HOLDERS_SHARED_TEXTS, False)
    # it is told of changes from then on, also by the next assignment; nothing is taken back
    world = replace(cast(Membership, STATUS_SHARED_TEXTS.membership), generation=2)
    channel.apply_desired_state(
        ruled(HOLDERS_SHARED_TEXTS[:-1], replace(STATUS_SHARED_TEXTS, membership=world), NARROW)
    )
    for line in lines[2:4]:
        assert sum(map(len, line.sent)) < 1000
        (told,) = words_of(line)
        assert (told.servers, told.is_partial) == (HOLDERS_SHARED_TEXTS[:-1], False)


def test_a_holder_that_went_is_not_among_all_that_are_told_later() -> None:
    _, lines = joined(NARROW)
    (before,) = words_of(lines[2])
    left = tuple(one for one in HOLDERS_SHARED_TEXTS if one != before.servers[0])
    # begun from what it knew, the agent ends with those that are left
    known = MemoryServerList()
    for steps in (
        ((), before.servers),
        *list_transitions(before.servers, False, replace(before, servers=left, is_partial=False)),
    ):
        changed = list_changes(*steps)
        if changed is not None:
            assert known.apply_message(changed) is None
    told = known.apply_message(MemoryServers(1, (), (), 2))
    assert isinstance(told, MemoryServers)
    assert told.servers == left


def test_an_agent_that_came_anew_is_asked_again_what_it_wants() -> None:
    channel, lines = joined(NARROW)
    channel.handle_message(lines[2], ListAllServers(1))
    again = Texts(EncodedListCache())
    channel.accept_agent(hello(2, incarnation=MEMBERS_SHARED_TEXTS[2].incarnation, generation=1, stopped=1), again)
    (told,) = words_of(again)
    assert told.is_partial
