"""What Prometheus reads of a cluster's operator: its own figures and each job's, however many; and who goes away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from surefoot_operator import metrics
from surefoot_operator.controller.health.probes import Probes
from surefoot_operator.reconcile.job_metrics import JobMetrics

JOBS = [("fleet", f"job-{number}") for number in range(60)]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    probes = Probes(0, lambda: (), lambda: ())
    await probes.start()
    for job in JOBS:
        JobMetrics()._count(job)
    yield f"http://127.0.0.1:{probes.port}/metrics"
    for job in JOBS:
        metrics.forget(*job)
    await probes.close()


async def test_each_jobs_series_stand_beside_the_operators_own(address: str) -> None:
    metrics.of(metrics.rollbacks, JOBS[7]).inc(3)
    async with aiohttp.ClientSession() as session, session.get(address) as answer:
        found = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert {"surefoot_operator_loop_lag_seconds", "process_resident_memory_bytes"} <= set(found)
    told = {sample.labels["job"]: sample.value for sample in found["surefoot_rollbacks"].samples}
    assert told == {job: 3.0 if job == JOBS[7][1] else 0.0 for _, job in JOBS}
    async with aiohttp.ClientSession() as session, session.head(address) as answer:
        assert answer.status == 200


async def test_others_have_their_turn_while_many_jobs_are_read(address: str) -> None:
    turns, ended = 0, False

    async def work() -> None:
        nonlocal turns
        while not ended:
            turns += 1
            await asyncio.sleep(0)

    async with aiohttp.ClientSession() as session:
        working = asyncio.create_task(work())
        before = turns
        async with session.get(address) as answer:
            await answer.read()
        ended = True
        await working
    assert turns - before > len(list(metrics.jobs.text()))
