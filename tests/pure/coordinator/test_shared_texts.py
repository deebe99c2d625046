"""What all agents of a job are told alike is encoded once, and a change that concerns nobody costs few bytes each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from support.builders import endpoint, member
from support.fakes.fake_agent import hello
from surefoot.protocol.identities import HolderEndpoint, WorkerId
from surefoot.protocol.memory_server_list import HolderList, changes, told_steps
from surefoot.protocol.messages import Assign, Holders, HoldersWanted
from surefoot.protocol.wire import decode
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.coordinator import agent_channel
from surefoot_operator.coordinator.agent_channel import AgentChannel, AgentConnection, SharedTexts
from surefoot_operator.coordinator.desired_messages import DesiredState, HolderScope, desired_state
from surefoot_operator.policy.failure.memory_server_liveness import UsableHolders

COUNT = 8
MEMBERS = tuple(member(i) for i in range(COUNT))
HOLDERS = tuple(endpoint(f"node-{i:04}.eu-central-1.compute.internal", "f" * 40) for i in range(200))
STATUS = JobStatus(world=World(1, "Committed", size=COUNT, members=MEMBERS), named_holders=HOLDERS)


def ruled(
    holders: tuple[HolderEndpoint, ...] = HOLDERS, status: JobStatus = STATUS, scope: HolderScope | None = None
) -> DesiredState:
    return desired_state(status, UsableHolders(tuple(holders)), 2, scope=ALL if scope is None else scope)


class Texts(AgentConnection):
    """A connection that keeps the texts that it would send."""

    def __init__(self, shared: SharedTexts) -> None:
        class Request:
            transport = None

        super().__init__(cast(Any, None), cast(Any, Request()), 1, shared)
        self.sent = list[str]()
        self.holders = HolderList()

    def _put(self, text: str) -> None:
        self.sent.append(text)

    def heard(self) -> list[Any]:
        told, self.sent = [self.holders.heard(cast(Any, decode(text))) for text in self.sent], []
        return [message for message in told if message is not None]


ALL = HolderScope(few=len(HOLDERS))
"""Every agent is told of all holders."""


def joined(scope: HolderScope = ALL) -> tuple[AgentChannel, list[Texts]]:
    channel, shared = AgentChannel("job-1", 0.5, lambda: 1000.0, lambda urgent: None), SharedTexts()
    channel.know(WorkerId(i, 1) for i in range(COUNT))
    channel.rule(ruled(scope=scope))
    lines = [Texts(shared) for _ in range(COUNT)]
    for i, line in enumerate(lines):
        channel.join(hello(i, incarnation=MEMBERS[i].incarnation, epoch=1, stopped=1), line)
    return channel, lines


def test_the_list_of_holders_is_encoded_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = agent_channel.encode
    monkeypatch.setattr(agent_channel, "encode", lambda *given: encoded.append(given) or encode(*given))
    channel, lines = joined()
    assert len([message for (message,) in encoded if type(message).__name__ == "HolderChanges"]) == 1
    lists = [next(text for text in line.sent if '"HolderChanges"' in text) for line in lines]
    assert all(text is lists[0] for text in lists)
    for line in lines:
        (mine,) = (m for m in line.heard() if isinstance(m, Assign))
        assert mine.holders == HOLDERS
    channel.rule(ruled(HOLDERS[:-1]))
    assert len([message for (message,) in encoded if type(message).__name__ == "HolderChanges"]) == 2


def test_a_change_that_does_not_concern_a_worker_costs_it_less_than_a_kilobyte() -> None:
    channel, lines = joined()
    for line in lines:
        line.heard()
    channel.rule(ruled(HOLDERS[:-1]))
    for line in lines:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, Holders)
        assert told.holders == HOLDERS[:-1]
    world = replace(cast(World, STATUS.world), epoch=2, members=MEMBERS[:-1])
    channel.rule(ruled(HOLDERS[:-1], replace(STATUS, world=world)))
    for line in lines[:-1]:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, Assign)
        assert told.holders == HOLDERS[:-1]


# ---- some of the holders ----------------------------------------------------------------------------------------------

NARROW = HolderScope()


def words_of(line: Texts) -> tuple[Assign | Holders, ...]:
    return tuple(m for m in line.heard() if isinstance(m, Assign | Holders))


def test_an_agent_hears_of_what_its_worker_needs_and_whoever_keeps_house_of_all() -> None:
    channel, lines = joined(NARROW)
    assert all(sum(map(len, line.sent)) < 1500 for line in lines[1:])
    (first,), *others = map(words_of, lines)
    assert (first.holders, first.partial) == (HOLDERS, False)
    for (mine,) in others:
        assert {one.holder for one in mine.holders} == set(mine.targets)
        assert mine.partial
    channel.rule(ruled(HOLDERS[:-1], scope=NARROW))
    assert not any(line.sent for line in lines[1:])  # it concerns nobody else
    assert [told.holders for told in words_of(lines[0])] == [HOLDERS[:-1]]


def test_who_asks_is_told_of_all_holders_in_a_text_that_is_the_same_for_others() -> None:
    channel, lines = joined(NARROW)
    for line in lines:
        line.heard()
    for line in lines[2:4]:
        channel.hear(line, HoldersWanted(1))
    large = [max(line.sent, key=len) for line in lines[2:4]]
    assert large[0] is large[1]
    for line in lines[2:4]:
        (told,) = words_of(line)
        assert (told.holders, told.partial) == (HOLDERS, False)
    # it is told of changes from then on, also by the next assignment; nothing is taken back
    world = replace(cast(World, STATUS.world), epoch=2)
    channel.rule(ruled(HOLDERS[:-1], replace(STATUS, world=world), NARROW))
    for line in lines[2:4]:
        assert sum(map(len, line.sent)) < 1000
        (told,) = words_of(line)
        assert (told.holders, told.partial) == (HOLDERS[:-1], False)


def test_a_holder_that_went_is_not_among_all_that_are_told_later() -> None:
    _, lines = joined(NARROW)
    (before,) = words_of(lines[2])
    left = tuple(one for one in HOLDERS if one != before.holders[0])
    # begun from what it knew, the agent ends with those that are left
    known = HolderList()
    for steps in (
        ((), before.holders),
        *told_steps(before.holders, False, replace(before, holders=left, partial=False)),
    ):
        changed = changes(*steps)
        if changed is not None:
            assert known.heard(changed) is None
    told = known.heard(Holders(1, (), (), 2))
    assert isinstance(told, Holders)
    assert told.holders == left


def test_an_agent_that_came_anew_is_asked_again_what_it_wants() -> None:
    channel, lines = joined(NARROW)
    channel.hear(lines[2], HoldersWanted(1))
    again = Texts(SharedTexts())
    channel.join(hello(2, incarnation=MEMBERS[2].incarnation, epoch=1, stopped=1), again)
    (told,) = words_of(again)
    assert told.partial
