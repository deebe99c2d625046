"""How a plan's actions are carried out: side by side where that is safe, in their order otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from support.builders import running
from surefoot.protocol.identities import WorkerId
from surefoot_operator.errors import FabricError
from surefoot_operator.policy.actions import Action, CleanMemory, CreateWorker, DeleteWorker
from surefoot_operator.reconcile.apply import AT_ONCE, carry_out


class Recorder:
    """Parts that note what is begun and ended, and let calls overlap."""

    def __init__(self, fails: Iterable[int] = ()) -> None:
        self.said: list[str] = []
        self.most = self.now = 0
        self.known: set[WorkerId] = set()
        self.fails = set(fails)
        self.parts: Any = SimpleNamespace(
            fabric=self, memory=self, conversation=self, environment=lambda job, action: None
        )

    def know(self, known: set[WorkerId]) -> None:
        self.known = known

    async def create_worker(self, action: CreateWorker, environment: object) -> None:
        assert WorkerId(action.index, action.attempt) in self.known
        await self._call(f"create {action.index}", action.index)

    async def delete_worker(self, action: DeleteWorker) -> None:
        await self._call(f"delete {action.name}", -1)

    async def clean(self) -> None:
        await self._call("clean", -1)

    async def _call(self, what: str, index: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.now -= 1
        if index in self.fails:
            raise FabricError(f"worker {index} was refused")
        self.said.append(what)


def creates(count: int) -> list[CreateWorker]:
    return [CreateWorker(index, 1) for index in range(count)]


async def test_workers_are_asked_for_side_by_side_and_no_more_at_once_than_the_limit() -> None:
    recorder = Recorder()
    await carry_out(recorder.parts, creates(3 * AT_ONCE), running())
    assert sorted(recorder.said) == sorted(f"create {n}" for n in range(3 * AT_ONCE))
    assert recorder.most == AT_ONCE


async def test_other_actions_keep_their_place() -> None:
    recorder = Recorder()
    actions: list[Action] = [
        DeleteWorker("a", "u", False, ""),
        CleanMemory(""),
        *creates(2),
        DeleteWorker("b", "u", False, ""),
    ]
    await carry_out(recorder.parts, actions, running())
    assert recorder.said == ["delete a", "clean", "create 0", "create 1", "delete b"]
    assert recorder.most == 2


async def test_an_error_is_raised_once_nothing_is_under_way_and_ends_what_was_not_begun() -> None:
    recorder = Recorder(fails=[1])
    with pytest.raises(FabricError, match="worker 1 was refused"):
        await carry_out(recorder.parts, [*creates(3 * AT_ONCE), CleanMemory("")], running())
    assert recorder.now == 0
    assert "create 0" in recorder.said
    assert len(recorder.said) < 2 * AT_ONCE
    assert "clean" not in recorder.said
