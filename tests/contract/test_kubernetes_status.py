"""A job's status on an API server of a few lines: what a write tests, and what becomes of one that nobody answered."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from support.servers.job_server import JobServer, fabric_of
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import ACCEPT_LOSS, ROLLBACK
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.errors import PlatformError, StatusConflict

RUNNING = JobStatus(phase="Running", membership=Membership(1, "Committed"))


async def test_our_own_writes_follow_each_other_without_a_look_at_the_server() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    status = JobStatus()
    for step in range(3):
        status = await fabric.patch_status(replace(RUNNING, step=step), status)
    assert server.calls == ["patch"] * 3
    assert (await fabric.observe()).status == status == replace(RUNNING, serial=3, step=2)


async def test_a_leader_whose_cache_is_behind_writes_over_nothing() -> None:
    server = JobServer()
    mine, other = fabric_of(server), fabric_of(server)
    first = await mine.patch_status(RUNNING, JobStatus())
    counted = await mine.patch_status(
        replace(first, next_attempt=4, unreadable_checkpoints=(Checkpoint(1, 10),)), first
    )
    with pytest.raises(
        StatusConflict, match="serial 2 with generation 1 Committed, this write expects serial 0 with no generation"
    ):
        await other.patch_status(replace(RUNNING, step=3), JobStatus())
    seen = (await other.observe()).status
    assert seen == counted  # learned from the answer: no watch was needed
    await other.patch_status(replace(seen, step=3), seen)
    assert (await other.observe()).status == replace(counted, serial=3, step=3)


@pytest.mark.parametrize("got_through", [True, False])
async def test_a_write_without_an_answer_is_found_out_by_the_next_one(got_through: bool) -> None:
    server = JobServer()
    fabric = fabric_of(server)
    server.loses_answer, server.loses_request = got_through, not got_through
    with pytest.raises(PlatformError, match="did not answer"):
        await fabric.patch_status(RUNNING, JobStatus())
    server.loses_answer = server.loses_request = False
    seen = (await fabric.observe()).status
    assert seen == JobStatus()  # the watch has not told it yet
    if got_through:
        with pytest.raises(StatusConflict):
            await fabric.patch_status(RUNNING, seen)
        seen = (await fabric.observe()).status
        assert seen == replace(RUNNING, serial=1)
    await fabric.patch_status(replace(RUNNING, step=7), seen)
    assert server.stored["status"]["serial"] == seen.serial + 1


async def test_a_job_that_is_another_one_now_is_never_written_to() -> None:
    server = JobServer()
    fabric = fabric_of(server)
    server.stored["metadata"]["uid"] = "another"
    with pytest.raises(PlatformError, match="was deleted and created again"):
        await fabric.patch_status(RUNNING, JobStatus())
    assert "status" not in server.stored


async def test_a_status_of_before_there_were_serials_is_taken_up() -> None:
    server = JobServer()
    server.stored["status"] = {"phase": "Running", "membership": {"generation": 1, "state": "Committed"}}
    fabric = fabric_of(server)
    seen = (await fabric.observe()).status
    await fabric.patch_status(replace(seen, step=7), seen)
    assert server.calls == ["patch"]


@pytest.mark.parametrize("is_valid", [True, False], ids=["a spec that can be read", "one that cannot"])
async def test_what_a_person_asks_beside_the_spec_is_seen_at_once(is_valid: bool) -> None:
    """An annotation makes no new generation, and counts although the spec was spoiled meanwhile."""
    server = JobServer()
    fabric = fabric_of(server)
    before = (await fabric.observe()).job
    assert (before.rollback, before.accepted_loss) == ("", "")
    changed = copy.deepcopy(server.stored)
    changed["metadata"] |= {"resourceVersion": "1000", "annotations": {ROLLBACK: "3/40", ACCEPT_LOSS: "3"}}
    if not is_valid:
        changed["metadata"]["generation"] = 2
        changed["spec"] = {**changed["spec"], "replicas": 0}
    fabric._cache.jobs.apply_write_result(changed)
    seen = await fabric.observe()
    assert (seen.job.rollback, seen.job.accepted_loss) == ("3/40", "3")
    assert seen.job.spec == before.spec
    assert bool(seen.spec_rejection) != is_valid
