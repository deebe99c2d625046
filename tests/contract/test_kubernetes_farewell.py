"""Holding a job back and letting it go, on a server of a few lines: nobody else's finalizer is touched."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from support.servers.job_server import JobServer, fabric_of
from surefoot_operator.errors import JobRejected, PlatformError
from surefoot_operator.platforms.interface import WorkerEnvironment
from surefoot_operator.policy.core.actions import Event

OURS, THEIRS = "surefoot.dev/persistent-data", "example.org/backup"


async def test_a_job_is_held_and_let_go_beside_others_finalizers() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    await fabric.set_finalizer(True)
    assert server.stored["metadata"]["finalizers"] == [OURS]
    assert (await fabric.observe()).job.has_finalizer
    calls = len(server.calls)
    await fabric.set_finalizer(True)
    assert len(server.calls) == calls  # it is so already
    server.finalize([THEIRS, OURS])
    with pytest.raises(PlatformError):
        await fabric.set_finalizer(False)  # the cache did not know of the other one; now it does
    await fabric.set_finalizer(False)
    assert server.stored["metadata"]["finalizers"] == [THEIRS]
    assert not (await fabric.observe()).job.has_finalizer


async def test_a_try_to_delete_its_data_is_seen_and_is_no_worker() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    await fabric.start_purge(1, WorkerEnvironment({}, {}))
    await fabric.start_purge(1, WorkerEnvironment({}, {}))
    seen = await fabric.observe()
    assert [p.attempt for p in seen.purges] == [1]
    assert seen.workers == ()
    assert len(server.made("pods")) == 1


async def test_only_this_life_of_the_job_is_deleted() -> None:
    server = JobServer()
    await fabric_of(server).delete_job()
    assert [uid for _, uid in server.deleted] == ["u"]


async def test_a_deleted_job_that_cannot_be_read_says_that_it_waits_for_us() -> None:
    server = JobServer()
    server.stored["metadata"] |= {"finalizers": [OURS], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    server.stored["spec"] |= {"replicas": "three"}
    with pytest.raises(JobRejected) as caught:
        await fabric_of(server).observe()
    assert caught.value.being_deleted


async def test_the_last_words_on_a_job_are_kept_when_it_is_gone_already() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    fabric._cache.jobs.remove_deleted("default", "gpt", "u")
    await fabric.record_events([Event("PersistentDataDeleted", "s3://bucket/prefix/u was deleted")])
    assert [e["reason"] for e in server.made("events")] == ["PersistentDataDeleted"]


async def test_a_finished_word_of_a_job_survives_its_end() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    seen = await fabric.observe()
    written = await fabric.patch_status(replace(seen.status, memory_cleared=True), seen.status)
    assert copy.deepcopy(server.stored["status"])["memoryCleared"] is True
    assert (await fabric.observe()).status == written
