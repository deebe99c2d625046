"""What Prometheus reads of a cluster's operator: its own figures and each job's, however many; and who goes away meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from support.builders import running
from surefoot_operator.controller import health_endpoints as probes_module
from surefoot_operator.controller.health_endpoints import HealthEndpoints
from surefoot_operator.reconcile.job_metrics import JobMetrics, job_collector

SECONDS = 30.0
JOBS = [("fleet", f"job-{number}") for number in range(60)]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    probes = HealthEndpoints(0, 0, lambda: (), lambda: ())
    await probes.start()
    snapshot, shown = running(), [JobMetrics() for _ in JOBS]
    for (namespace, name), figures in zip(JOBS, shown, strict=True):
        of_job = replace(snapshot, job=replace(snapshot.job, namespace=namespace, name=name))
        rolled_back = replace(snapshot.status, rollback_count=3 if name == JOBS[7][1] else 0)
        figures.count_changes(snapshot.status, rolled_back, of_job.job)
        figures.update_gauges(of_job, snapshot.status, None)
    yield f"http://127.0.0.1:{probes.metrics_port}/metrics"
    for figures in shown:
        figures.stop_export()
    await probes.close()


async def test_each_jobs_series_stand_beside_the_operators_own(address: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(address) as answer:
        found = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert {"surefoot_operator_loop_lag_seconds", "process_resident_memory_bytes"} <= set(found)
    told = {sample.labels["job"]: sample.value for sample in found["surefoot_rollbacks"].samples}
    assert told == {job: 3.0 if job == JOBS[7][1] else 0.0 for _, job in JOBS}
    async with aiohttp.ClientSession() as session, session.head(address) as answer:
        assert answer.status == 200


async def test_the_event_loop_goes_on_while_a_text_is_rendered(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering, go_on = threading.Event(), threading.Event()

    def collect() -> Iterator[Metric]:
        rendering.set()
        assert go_on.wait(SECONDS), "the loop never came to it"
        yield GaugeMetricFamily("late", "Comes late.", 1)

    monkeypatch.setattr(job_collector, "collect", collect)
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.get(address))
        assert await asyncio.to_thread(rendering.wait, SECONDS)
        go_on.set()
        answer = await asked
        assert "late 1.0" in await answer.text()


async def test_a_loop_that_does_not_run_is_unwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_module, "MAX_EVALUATION_AGE_SECONDS", 0.5)
    probes = HealthEndpoints(0, 0, lambda: (), lambda: ())
    await probes.start()
    deadline, status, said = time.monotonic() + SECONDS, 200, ""
    while status == 200 and time.monotonic() < deadline:
        status, said = _asked(probes.port, "/healthz")  # by the loop itself, which runs nothing else meanwhile
    assert (status, "the event loop has been blocked for" in said) == (503, True)
    await asyncio.sleep(2 * probes_module.EVALUATION_INTERVAL_SECONDS)
    status = await asyncio.to_thread(_status, probes.port, "/healthz")
    await probes.close()
    assert status == 200, "it runs again"


async def test_probes_have_a_port_of_their_own() -> None:
    probes = HealthEndpoints(0, 0, lambda: (), lambda: ("not yet",))
    await probes.start()
    try:
        assert await asyncio.to_thread(_status, probes.port, "/readyz") == 503
        assert await asyncio.to_thread(_status, probes.port, "/metrics") == 404
        assert await asyncio.to_thread(_status, probes.metrics_port, "/healthz") == 404
    finally:
        await probes.close()


def _status(port: int, path: str) -> int:
    return _asked(port, path)[0]


def _asked(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
