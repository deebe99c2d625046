"""Tests of `reconcile.build_snapshot`."""

from __future__ import annotations

import asyncio

import pytest

from surefoot_operator.reconcile import build_snapshot
from surefoot_operator.reconcile.build_snapshot import (
    PROGRESS_WRITE_RETRY_SECONDS,
    ReconcileLimiter,
    StatusWriteLimiter,
)

# ---- turns -----------------------------------------------------------------------------------------------------------
# Rounds of many jobs: some at a time, and in each pass of the event loop no more than a slice of them.


class Passes:
    """Counts passes of the event loop, and rounds that begin in each; a round takes a fixed time by its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, round_seconds: float) -> None:
        self.now, self.round_seconds = 0.0, round_seconds
        self.begun, self.ended = [0], False
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        self._loop = loop
        self._next()

    def _next(self) -> None:
        self.begun.append(0)
        if not self.ended:
            self._loop.call_soon(self._next)

    async def round(self, given: ReconcileLimiter) -> None:
        async with given:
            self.begun[-1] += 1
            self.now += self.round_seconds


async def test_rounds_that_wait_for_nothing_do_not_follow_each_other_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes, given = Passes(monkeypatch, 0.25), ReconcileLimiter(64, slice_seconds=1.0)
    await asyncio.gather(*(passes.round(given) for _ in range(1000)))
    passes.ended = True
    assert sum(passes.begun) == 1000
    assert max(passes.begun) == 4


async def test_a_long_round_is_alone_in_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, given = Passes(monkeypatch, 2 * build_snapshot.SLICE_SECONDS), ReconcileLimiter(at_once=64)
    await asyncio.gather(*(passes.round(given) for _ in range(50)))
    passes.ended = True
    assert (sum(passes.begun), max(passes.begun)) == (50, 1)


async def test_no_more_are_under_way_than_allowed_and_who_is_cancelled_leaves_room() -> None:
    given, under_way, most, going = ReconcileLimiter(at_once=3, slice_seconds=60.0), 0, 0, asyncio.Event()

    async def work() -> None:
        nonlocal under_way, most
        async with given:
            under_way += 1
            most = max(most, under_way)
            await going.wait()
            under_way -= 1

    tasks = [asyncio.create_task(work()) for _ in range(12)]
    await asyncio.sleep(0)
    for one in (*tasks[:2], *tasks[5:7]):
        one.cancel()
    going.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3
    async with asyncio.timeout(60):
        for _ in range(3):
            await given.__aenter__()


async def test_who_is_cancelled_while_others_have_the_pass_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, given = Passes(monkeypatch, 2 * build_snapshot.SLICE_SECONDS), ReconcileLimiter(at_once=2)
    tasks = [asyncio.create_task(passes.round(given)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    passes.ended = True
    assert sum(passes.begun) == 2
    async with asyncio.timeout(None):
        await passes.round(given)
        await passes.round(given)


# ---- progress pace ---------------------------------------------------------------------------------------------------
# How often progress alone is written by many jobs: bounded for all together, at once for few.


def written(jobs: int, seconds: int, every: float, pace: StatusWriteLimiter) -> int:
    """How many of so many jobs write, of which each has news again and again, and asks again when it is told to."""
    due, count, now = dict.fromkeys(range(jobs), 0.0), 0, 0.0
    while now < seconds:
        for job, at in due.items():
            if at <= now:
                wait = pace.wait_seconds(now)
                count += wait == 0
                due[job] = now + (wait or every)
        now += 0.25
    return count


def test_few_jobs_wait_for_nobody() -> None:
    assert written(50, 60, 3.0, StatusWriteLimiter(30.0, 60)) == 50 * 20


def test_what_a_thousand_jobs_write_does_not_grow_with_them() -> None:
    counts = {jobs: written(jobs, 60, 3.0, StatusWriteLimiter(30.0, 60)) for jobs in (500, 1000, 2000)}
    assert max(counts.values()) <= 60 + 60 * 30
    assert min(counts.values()) >= 0.95 * 60 * 30


def test_every_job_has_its_turn() -> None:
    pace, done, now = StatusWriteLimiter(30.0, 60), set[int](), 0.0
    while len(done) < 1000:
        done |= {job for job in range(1000) if job not in done and pace.wait_seconds(now) == 0}
        now += PROGRESS_WRITE_RETRY_SECONDS
    assert now <= 1000 / 30.0 + 2
