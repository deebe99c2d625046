"""How a plan's actions are carried out: each on its own, so that none that is refused or slow holds up another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from support.builders import running
from surefoot.protocol.identities import WorkerId
from surefoot_operator.errors import PlatformError
from surefoot_operator.job_snapshot import ObservedPurgeCall, PodGroup
from surefoot_operator.platforms.interface import PlatformSnapshot
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.policy.core.actions import (
    Action,
    ApplyPodGroup,
    ClearJobMemory,
    CreateWorker,
    DeletePodGroup,
    DeleteWorker,
    PurgePersistent,
    SetFinalizer,
)
from surefoot_operator.reconcile import worker_calls
from surefoot_operator.reconcile.apply_plan import apply_plan
from surefoot_operator.reconcile.worker_calls import MAX_CONCURRENT_CALLS, WorkerCalls


class Recorder:
    """Parts that note what is begun and ended, and let calls overlap, fail and hang."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.most = self.now = 0
        self.clock = 1000.0
        self.known: set[WorkerId] = set()
        self.fails: set[str] = set()
        self.refuses: set[str] = set()
        self.refused_with = 403
        self.hangs: set[str] = set()
        self.released = asyncio.Event()
        self.calls = WorkerCalls(lambda: self.clock, lambda: None)
        self.parts: Any = SimpleNamespace(
            platform=self, memory=self, channel=self, environment=lambda job, action: None
        )

    def set_expected_workers(self, workers: set[WorkerId]) -> None:
        self.known = workers

    async def create_worker(self, action: CreateWorker, environment: object) -> None:
        assert WorkerId(action.index, action.attempt) in self.known
        await self._call(f"create {action.index}")

    async def delete_worker(self, action: DeleteWorker) -> None:
        await self._call(f"delete {action.name}")

    async def apply_pod_group(self, action: ApplyPodGroup) -> None:
        await self._call(f"keep {action.group.gang}")

    async def delete_pod_group(self, removed: DeletePodGroup) -> None:
        await self._call(f"remove {removed.gang}")

    async def set_finalizer(self, present: bool) -> None:
        await self._call("hold")

    async def start_purge(self, attempt: int, environment: object) -> None:
        await self._call(f"purge {attempt}")

    async def delete_job(self) -> None:
        await self._call("clean")

    async def carry_out(self, *actions: Action) -> tuple[PlatformError, ...]:
        return await apply_plan(self.parts, self.calls, actions, running())

    async def _call(self, what: str) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        if what in self.hangs:
            await self.released.wait()
        self.now -= 1
        if what in self.refuses:
            raise ApiError(what, self.refused_with, "Forbidden", "a webhook says no")
        if what in self.fails:
            raise PlatformError(f"{what} was refused: exceeded quota")
        self.said.append(what)


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    made = Recorder()
    yield made
    await made.calls.close()


def creates(indexes: Iterable[int]) -> list[CreateWorker]:
    return [CreateWorker(index, 1) for index in indexes]


def refused(recorder: Recorder) -> list[tuple[int, str]]:
    return [(c.index, c.rejection) for c in recorder.calls.pending_creates()]


async def test_workers_are_asked_for_side_by_side_and_no_more_at_once_than_the_limit(recorder: Recorder) -> None:
    await recorder.carry_out(*creates(range(3 * MAX_CONCURRENT_CALLS)))
    await recorder.calls.wait_until_done()
    assert sorted(recorder.said) == sorted(f"create {n}" for n in range(3 * MAX_CONCURRENT_CALLS))
    assert recorder.most == MAX_CONCURRENT_CALLS


async def test_nothing_waits_for_a_worker_that_the_fabric_takes_its_time_about(recorder: Recorder) -> None:
    recorder.hangs = {"create 2", "delete a"}
    await recorder.carry_out(DeleteWorker("a", "u", False, ""), CreateWorker(2, 5), ClearJobMemory(""))
    assert recorder.said == ["clean"]
    assert [(c.index, c.attempt, c.in_progress) for c in recorder.calls.pending_creates()] == [(2, 5, True)]
    await recorder.carry_out(DeleteWorker("a", "u", False, ""), CreateWorker(2, 5))
    recorder.released.set()
    await recorder.calls.wait_until_done()
    assert sorted(recorder.said) == ["clean", "create 2", "delete a"], "what is under way is not asked for again"


async def test_a_refused_worker_keeps_no_other_from_being_made_and_is_asked_for_again_when_due(
    recorder: Recorder,
) -> None:
    recorder.fails = {"create 1"}
    await recorder.carry_out(*creates(range(3)))
    await recorder.calls.wait_until_done()
    assert sorted(recorder.said) == ["create 0", "create 2"]
    assert refused(recorder) == [(1, "create 1 was refused: exceeded quota")]
    recorder.fails.clear()
    await recorder.carry_out(CreateWorker(1, 1))
    assert "create 1" not in recorder.said, "it is not due yet"
    recorder.clock += worker_calls.REJECTED_CALL_BACKOFF.first_seconds
    await recorder.carry_out(CreateWorker(1, 1))
    await recorder.calls.wait_until_done()
    assert "create 1" in recorder.said
    assert refused(recorder) == []


async def test_pauses_between_refusals_grow_to_a_limit(recorder: Recorder) -> None:
    recorder.fails = {"create 0"}
    pauses = []
    for _ in range(9):
        await recorder.carry_out(CreateWorker(0, 1))
        await recorder.calls.wait_until_done()
        (seen,) = recorder.calls.pending_creates()
        pauses.append(seen.until_seconds - recorder.clock)
        recorder.clock = seen.until_seconds
    first, longest = worker_calls.REJECTED_CALL_BACKOFF.first_seconds, worker_calls.REJECTED_CALL_BACKOFF.max_seconds
    assert first / 2 <= pauses[0] <= first
    assert pauses[0] <= pauses[2] <= pauses[4]
    assert longest / 2 <= pauses[-1] <= longest


async def test_a_refusal_is_forgotten_once_the_worker_is_there(recorder: Recorder) -> None:
    recorder.fails = {"create 7"}
    await recorder.carry_out(CreateWorker(7, 1))
    await recorder.calls.wait_until_done()
    recorder.calls.forget_rejections(running().workers)
    assert refused(recorder) != [], "the fabric shows no worker 7"
    recorder.fails = {"create 0"}
    await recorder.carry_out(CreateWorker(0, 1))
    await recorder.calls.wait_until_done()
    recorder.calls.forget_rejections(running().workers)
    assert [index for index, _ in refused(recorder)] == [7]


async def test_what_cannot_be_done_to_the_job_keeps_nothing_else_from_being_done(recorder: Recorder) -> None:
    recorder.fails = {"hold"}
    errors = await recorder.carry_out(SetFinalizer(True), ClearJobMemory(""), CreateWorker(0, 1))
    await recorder.calls.wait_until_done()
    assert [str(error) for error in errors] == ["hold was refused: exceeded quota"]
    assert recorder.said == ["clean", "create 0"]


async def test_what_is_under_way_ends_with_its_owner(recorder: Recorder) -> None:
    recorder.hangs = {"create 0"}
    await recorder.carry_out(CreateWorker(0, 1))
    await recorder.calls.close()
    assert recorder.calls.pending_creates() == ()


async def test_a_worker_that_is_made_while_the_fabric_is_read_is_not_made_again(recorder: Recorder) -> None:
    """The look had been before it and the call was over behind it: the next attempt was made beside it."""
    recorder.hangs = {"create 2", "delete a"}
    await recorder.carry_out(DeleteWorker("a", "uid-a", False, ""), CreateWorker(2, 5))

    async def look() -> PlatformSnapshot:
        seen = running()
        recorder.released.set()
        await recorder.calls.wait_until_done()
        return PlatformSnapshot(seen.job, seen.status, seen.workers, seen.nodes, ())

    _, calls = await recorder.calls.observe_with_calls(look())
    assert [(c.index, c.attempt, c.in_progress) for c in calls.creates] == [(2, 5, True)]
    assert calls.deletions == {"uid-a"}
    recorder.hangs = set()
    _, calls = await recorder.calls.observe_with_calls(look())
    assert (calls.creates, calls.deletions) == ((), frozenset()), "a look that began behind it shows it"


async def test_a_deletion_counts_until_the_fabric_confirms_it(recorder: Recorder) -> None:
    """One that was not answered, or not yet, may be carried out all the same; one that was refused is not."""
    recorder.hangs, recorder.fails, recorder.refuses = {"delete a"}, {"delete b"}, {"delete d"}
    await recorder.carry_out(*(DeleteWorker(name, f"uid-{name}", False, "") for name in "abcd"))
    assert recorder.calls.pending_deletions() == {f"uid-{name}" for name in "abcd"}
    recorder.released.set()
    await recorder.calls.wait_until_done()
    assert recorder.calls.pending_deletions() == {"uid-b"}
    recorder.calls.forget_rejections(())
    assert recorder.calls.pending_deletions() == frozenset(), "it is no more"


async def test_a_pod_group_that_hangs_keeps_nothing_else_from_being_done(recorder: Recorder) -> None:
    recorder.hangs = {"keep Coscheduling"}
    keep = ApplyPodGroup(PodGroup("Coscheduling", 2))
    errors = await recorder.carry_out(keep, CreateWorker(0, 1), ClearJobMemory(""))
    await asyncio.wait_for(_done(recorder, "create 0"), 10)
    assert errors == ()
    await recorder.carry_out(keep)
    (under_way,) = recorder.calls.pending_group_calls()
    assert (under_way.gang, under_way.in_progress, under_way.rejection) == ("Coscheduling", True, "")
    assert recorder.calls.pending_deletions() == frozenset()
    recorder.calls.forget_rejections(())
    assert len(recorder.calls.pending_group_calls()) == 1, "no worker that is seen says anything of a group"
    recorder.released.set()
    await recorder.calls.wait_until_done()
    assert recorder.said.count("keep Coscheduling") == 1
    assert recorder.calls.pending_group_calls() == ()


async def test_a_pod_group_that_is_refused_keeps_nothing_else_from_being_done(recorder: Recorder) -> None:
    recorder.fails = {"remove Coscheduling"}
    remove = DeletePodGroup("Coscheduling", "u", "")
    assert await recorder.carry_out(remove, CreateWorker(0, 1)) == ()
    await asyncio.wait_for(_done(recorder, "create 0"), 10)
    await recorder.calls.wait_until_done()
    (refused,) = recorder.calls.pending_group_calls()
    assert (refused.gang, refused.in_progress) == ("Coscheduling", False)
    assert refused.rejection == "remove Coscheduling was refused: exceeded quota"
    assert refused.until_seconds > recorder.clock


async def _done(recorder: Recorder, what: str) -> None:
    while what not in recorder.said:  # noqa: ASYNC110 -- the recorder's plain list is waited for
        await asyncio.sleep(0)


async def test_refused_deletions_of_persistent_data_are_counted_and_keep_nothing_waiting(recorder: Recorder) -> None:
    recorder.refuses = {"purge 1"}
    for refusals in (1, 2):
        assert await recorder.carry_out(PurgePersistent(1), SetFinalizer(True)) == ()
        assert recorder.calls.purge_state.in_progress
        await recorder.calls.wait_until_done()
        seen = recorder.calls.purge_state
        assert (seen.rejections, seen.since_seconds, seen.last_seconds) == (refusals, 1000.0, recorder.clock)
        assert seen.rejection.startswith("a webhook says no")
        recorder.clock += 10
    recorder.refused_with = 429
    await recorder.carry_out(PurgePersistent(1))
    await recorder.calls.wait_until_done()
    assert recorder.calls.purge_state.rejections == 2  # a busy server has nothing against it
    recorder.refuses, recorder.fails = set(), {"purge 1"}
    await recorder.carry_out(PurgePersistent(1))
    await recorder.calls.wait_until_done()
    assert recorder.calls.purge_state.rejections == 2  # nobody knows whether that one was carried out
    recorder.fails = set()
    await recorder.carry_out(PurgePersistent(1))
    await recorder.calls.wait_until_done()
    assert recorder.calls.purge_state == ObservedPurgeCall(1, recorder.clock, rejections=2)


async def test_a_deletion_of_persistent_data_under_way_is_asked_for_once(recorder: Recorder) -> None:
    recorder.hangs = {"purge 1"}
    for _ in range(3):
        await recorder.carry_out(PurgePersistent(1))
    recorder.released.set()
    await recorder.calls.wait_until_done()
    assert recorder.said == ["purge 1"]
