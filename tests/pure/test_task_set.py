"""Tasks with an owner: none is lost, none fails unheard, none outlives a close."""

from __future__ import annotations

import asyncio

from surefoot.task_set import TaskSet


def recording() -> tuple[TaskSet, list[tuple[str, str]]]:
    failures: list[tuple[str, str]] = []
    return TaskSet(lambda name, error: failures.append((name, str(error)))), failures


async def test_an_error_is_reported_once_with_the_tasks_name() -> None:
    async def fail() -> None:
        raise ValueError("no")

    tasks, failures = recording()
    tasks.start(fail(), "reading")
    await tasks.join()
    assert failures == [("reading", "no")]


async def test_close_cancels_all_waits_for_their_ends_and_reports_no_failure() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks, failures = recording()
    for number in range(3):
        tasks.start(work(number))
    await asyncio.sleep(0)
    await tasks.close()
    assert sorted(ended) == [0, 1, 2]
    assert failures == []


async def test_join_waits_for_what_begins_meanwhile() -> None:
    tasks, _ = recording()
    ended: list[str] = []

    async def child() -> None:
        await asyncio.sleep(0)
        ended.append("child")

    async def parent() -> None:
        tasks.start(child())

    tasks.start(parent())
    await tasks.join()
    assert ended == ["child"]


async def test_work_of_one_name_runs_once_at_a_time() -> None:
    tasks, _ = recording()
    runs: list[int] = []
    gate = asyncio.Event()

    async def work() -> None:
        runs.append(1)
        await gate.wait()

    assert tasks.start_once("drops", work)
    assert not tasks.start_once("drops", work)
    gate.set()
    await tasks.join()
    assert tasks.start_once("drops", work)
    await tasks.join()
    assert runs == [1, 1]
