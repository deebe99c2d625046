"""What all agents of a job are told alike is encoded once, and a change that concerns nobody costs few bytes each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from support.builders import endpoint, member
from support.fakes.fake_agent import hello
from surefoot.protocol import wire
from surefoot.protocol.holder_list import HolderList
from surefoot.protocol.identities import WorkerId
from surefoot.protocol.messages import Assign, Holders
from surefoot.protocol.wire import decode
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.coordinator import shared_texts
from surefoot_operator.coordinator.agent_channel import AgentChannel
from surefoot_operator.coordinator.agent_connection import AgentConnection
from surefoot_operator.coordinator.desired_messages import desired_state
from surefoot_operator.coordinator.shared_texts import SharedTexts

COUNT = 8
MEMBERS = tuple(member(i) for i in range(COUNT))
HOLDERS = tuple(endpoint(f"node-{i:04}.eu-central-1.compute.internal", "f" * 40) for i in range(200))
STATUS = JobStatus(world=World(1, "Committed", size=COUNT, members=MEMBERS), named_holders=HOLDERS)


class Texts(AgentConnection):
    """A connection that keeps the texts that it would send."""

    def __init__(self, shared: SharedTexts, version: int) -> None:
        class Request:
            transport = None

        super().__init__(cast(Any, None), cast(Any, Request()), 1, shared)
        self.version, self.sent = version, list[str]()
        self.holders = HolderList()

    def _put(self, text: str) -> None:
        self.sent.append(text)

    def heard(self) -> list[Any]:
        told, self.sent = [self.holders.heard(cast(Any, decode(text))) for text in self.sent], []
        return [message for message in told if message is not None]


def joined(version: int) -> tuple[AgentChannel, list[Texts]]:
    channel, shared = AgentChannel("job-1", 0.5, lambda: 1000.0, lambda urgent: None), SharedTexts()
    channel.know(WorkerId(i, 1) for i in range(COUNT))
    channel.rule(desired_state(STATUS, HOLDERS, 2))
    lines = [Texts(shared, version) for _ in range(COUNT)]
    for i, line in enumerate(lines):
        channel.join(hello(i, incarnation=MEMBERS[i].incarnation, epoch=1, stopped=1), line)
    return channel, lines


def test_the_list_of_holders_is_encoded_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = shared_texts.encode
    monkeypatch.setattr(shared_texts, "encode", lambda *given: encoded.append(given) or encode(*given))
    channel, lines = joined(wire.VERSION)
    assert len(encoded) == 1
    lists = [next(text for text in line.sent if '"HolderChanges"' in text) for line in lines]
    assert all(text is lists[0] for text in lists)
    for line in lines:
        (mine,) = (m for m in line.heard() if isinstance(m, Assign))
        assert mine.holders == HOLDERS
    channel.rule(desired_state(STATUS, HOLDERS[:-1], 2))
    assert len(encoded) == 2


def test_a_change_that_does_not_concern_a_worker_costs_it_less_than_a_kilobyte() -> None:
    channel, lines = joined(wire.VERSION)
    for line in lines:
        line.heard()
    channel.rule(desired_state(STATUS, HOLDERS[:-1], 2))
    for line in lines:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, Holders)
        assert told.holders == HOLDERS[:-1]
    world = replace(cast(World, STATUS.world), epoch=2, members=MEMBERS[:-1])
    channel.rule(desired_state(replace(STATUS, world=world), HOLDERS[:-1], 2))
    for line in lines[:-1]:
        assert 0 < sum(map(len, line.sent)) < 1000
        (told,) = line.heard()
        assert isinstance(told, Assign)
        assert told.holders == HOLDERS[:-1]


def test_an_agent_of_the_version_before_hears_its_holders_with_its_assignment() -> None:
    _, lines = joined(wire.OLDEST)
    assert not any('"HolderChanges"' in text for line in lines for text in line.sent)
    told = [json.loads(text) for text in lines[0].sent]
    (mine,) = (body for body in told if body["type"] == "Assign")
    assert len(mine["holders"]) == len(HOLDERS)
    assert "listed" not in mine
