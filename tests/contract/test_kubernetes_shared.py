"""What workers share is made before the first of them, and keeps no replacement of a later one waiting."""

from __future__ import annotations

import asyncio
import logging

import pytest

from support.servers.job_server import JobServer, fabric_of
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot_operator import metrics
from surefoot_operator.api.status import JobStatus
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.platforms.kubernetes.api_objects import ApiError
from surefoot_operator.platforms.kubernetes.platform import KubernetesPlatform
from surefoot_operator.policy.core.actions import CreateWorker

QUOTA = ApiError("POST secrets", 403, "Forbidden", "exceeded quota: count/secrets=1, used: 1, limited: 1")
TOLD = WorkerEnvironment({}, {"SUREFOOT_MEMORY_PASSWORD": "p"})
ROTATED = WorkerEnvironment({}, {"SUREFOOT_MEMORY_PASSWORD": "q"})


async def make(fabric: KubernetesPlatform, index: int, attempt: int = 1, told: WorkerEnvironment = TOLD) -> None:
    await fabric.create_worker(CreateWorker(index, attempt), told)


def next_leader(server: JobServer) -> KubernetesPlatform:
    """It sees the pods that there are, and remembers nothing else."""
    fabric = fabric_of(server)
    for pod in server.made("pods"):
        fabric._cache.workers.apply_write_result(pod)
    return fabric


def begun() -> JobServer:
    """A job that had a world."""
    server = JobServer()
    server.stored["status"] = status_to_json(JobStatus(lineage=(LineageEntry(1, None, 1),)))
    return server


def refused(kind: str) -> float:
    return float(metrics.shared_object_failures.labels(kind)._value.get())


async def test_no_first_worker_is_made_without_what_it_refers_to() -> None:
    server = JobServer()
    server.refuses = {"secrets": QUOTA}
    fabric = fabric_of(server)
    for _ in range(2):
        with pytest.raises(ApiError, match="exceeded quota"):
            await make(fabric, 0)
    assert server.made("pods") == []
    server.refuses = {}
    await make(fabric, 0)
    assert [len(server.made(kind)) for kind in ("secrets", "services", "pods")] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["secrets", "services"])
async def test_a_quota_that_is_used_up_keeps_no_replacement_away(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """It answers before the server looks whether the name is there."""
    server = begun()
    await make(fabric_of(server), 0)
    server.refuses = {kind: QUOTA}
    before, fabric = refused(kind), next_leader(server)
    with caplog.at_level(logging.WARNING):
        for attempt in (2, 3):
            await make(fabric, 0, attempt)
    assert len(server.made("pods")) == 3
    assert refused(kind) == before + 2
    assert [r.getMessage() for r in caplog.records if "cannot create" in r.getMessage()] == [
        f"cannot create {kind[:-1].capitalize()} {server.made(kind)[0]['metadata']['name']} of job default/gpt again:"
        f" {QUOTA}; if it was deleted, pods that refer to it cannot start"
    ]


async def test_what_somebody_removed_is_made_anew_beside_the_next_pod() -> None:
    server = begun()
    await make(fabric_of(server), 0)
    for kind in ("secrets", "services"):
        server.forget(kind)
    await make(next_leader(server), 0, 2)
    assert [len(server.made(kind)) for kind in ("secrets", "services", "pods")] == [1, 1, 2]


@pytest.mark.parametrize("kind", ["secrets", "services"])
async def test_the_leader_that_made_it_makes_anew_what_somebody_removed(kind: str) -> None:
    server = begun()
    fabric = fabric_of(server)
    await make(fabric, 0)
    server.forget(kind)
    await make(fabric, 0, 2)
    assert [len(server.made(one)) for one in (kind, "pods")] == [1, 2]
    server.forget(kind)
    await make(fabric, 0, 3)
    assert len(server.made(kind)) == 1


async def test_workers_made_at_once_ask_for_what_they_share_together() -> None:
    server = begun()
    fabric = fabric_of(server)
    await make(fabric, 0)
    before = server.calls.count("post")
    await asyncio.gather(*(make(fabric, index) for index in range(1, 33)))
    asked = server.calls.count("post") - before - 32
    assert 2 <= asked <= 6


async def test_a_secret_that_no_pod_refers_to_is_made_before_its_first_pod() -> None:
    server = begun()
    await make(fabric_of(server), 0)
    server.refuses = {"secrets": QUOTA}
    with pytest.raises(ApiError, match="exceeded quota"):
        await make(next_leader(server), 0, 2, ROTATED)
    assert len(server.made("pods")) == 1


async def test_a_pod_that_is_refused_is_told_though_all_is_shared() -> None:
    server = begun()
    await make(fabric_of(server), 0)
    server.refuses = {"pods": ApiError("POST pods", 403, "Forbidden", "exceeded quota: pods=1")}
    with pytest.raises(ApiError, match="pods=1"):
        await make(next_leader(server), 0, 2)
