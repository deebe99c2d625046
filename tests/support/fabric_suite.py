"""What every fabric owes the reconciler, on real workers. A fabric joins by giving a `Lab` of its own.

Test modules import every name of this one and bring a fixture `lab`; see tests/contract and tests/cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import pytest

from support.machine_speed import scaled
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, Membership
from surefoot_operator.errors import StatusConflict
from surefoot_operator.job_snapshot import ObservedWorker
from surefoot_operator.platforms.interface import Platform, PlatformSnapshot, WorkerEnvironment
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker, Event

SECONDS = scaled(20.0)

DOCUMENT: dict[str, Any] = {
    "apiVersion": "surefoot.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "contract"},
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "terminationGracePeriodSeconds": 5,
                "containers": [{"name": "trainer", "command": ["sh", "-c", "sleep 600"]}],
            }
        },
    },
}


class Lab(Protocol):
    """A fabric with exactly two nodes, each with a holder, one job, and what may befall them."""

    fabric: Platform
    uid: str
    nodes: tuple[str, str]
    moment_seconds: float
    """How soon the end of a process is seen."""
    node_seconds: float
    """How soon the end of a node is seen."""
    tells_death: bool
    """Whether a dead node is known to be dead, and not only silent."""

    def free(self, count: int) -> int | None:
        """`count`, or None where only a scheduler knows."""
        ...

    def kill_node(self, name: str) -> None: ...

    def return_node(self, name: str) -> None: ...

    def freeze_node(self, name: str) -> None: ...

    def kill_agent(self, name: str) -> None: ...

    def kill_holder(self, name: str) -> None: ...

    def return_holder(self, name: str) -> None: ...

    async def close(self) -> None: ...


async def until(
    fabric: Platform, condition: Callable[[PlatformSnapshot], object], seconds: float = SECONDS
) -> PlatformSnapshot:
    """Observes at each change until the condition holds; the fabric's own `changes` is what wakes it."""
    seen = await fabric.observe()
    if condition(seen):
        return seen
    changes = fabric.watch_changes()
    try:
        async with asyncio.timeout(seconds):
            while True:
                seen = await fabric.observe()
                if condition(seen):
                    return seen
                await anext(changes)
    except TimeoutError:
        told = (seen.workers, seen.nodes, seen.servers)  # without the job, which is pages long
        raise AssertionError(f"not within {seconds} s; last seen: {told}") from None
    finally:
        await changes.aclose()  # type: ignore[attr-defined]  # an async generator wherever it is implemented


ENVIRONMENT = WorkerEnvironment(
    plain={
        "SUREFOOT_JOB_UID": "uid-1",
        "SUREFOOT_COORDINATOR_URL": "ws://127.0.0.1:1/agents",  # nobody answers: the agent waits
    },
    secret={"SUREFOOT_TOKEN": "a-token", "SUREFOOT_MEMORY_PASSWORD": "a-password"},
)


async def running(lab: Lab, index: int = 0, attempt: int = 1, avoid: tuple[str, ...] = ()) -> ObservedWorker:
    own = {"SUREFOOT_WORKER_INDEX": str(index), "SUREFOOT_WORKER_ATTEMPT": str(attempt)}
    environment = replace(ENVIRONMENT, plain={**ENVIRONMENT.plain, **own})
    await lab.fabric.create_worker(CreateWorker(index, attempt, avoid), environment)
    seen = await until(lab.fabric, lambda s: worker(s, index, attempt).phase == "Running")
    return worker(seen, index, attempt)


def worker(seen: PlatformSnapshot, index: int, attempt: int = 1) -> ObservedWorker:
    return next(w for w in seen.workers if (w.index, w.attempt) == (index, attempt))


async def timed(awaited: Awaitable[PlatformSnapshot]) -> tuple[PlatformSnapshot, float]:
    begin = time.monotonic()
    return await awaited, time.monotonic() - begin


async def test_a_new_job_shows_ready_nodes_with_a_holder_each(lab: Lab) -> None:
    seen = await lab.fabric.observe()
    assert (seen.job.uid, seen.job.metadata_generation, seen.status) == (lab.uid, 1, JobStatus())
    assert [(n.name, n.ready) for n in seen.nodes if n.schedulable] == [(name, True) for name in lab.nodes]
    assert [(h.node, h.running) for h in seen.servers] == [(name, True) for name in lab.nodes]
    assert len({(h.host, h.port) for h in seen.servers}) == 2
    assert seen.workers == ()


async def test_creating_a_worker_that_exists_is_success_and_makes_no_second(lab: Lab) -> None:
    first = await running(lab)
    await lab.fabric.create_worker(CreateWorker(0, 1), ENVIRONMENT)
    seen = await lab.fabric.observe()
    assert [w.uid for w in seen.workers] == [first.uid]
    assert first.node in lab.nodes
    assert seen.free_nodes == lab.free(1)


async def test_a_worker_waits_for_a_free_node_and_takes_it(lab: Lab) -> None:
    await running(lab, 0)
    await running(lab, 1)
    await lab.fabric.create_worker(CreateWorker(2, 1), ENVIRONMENT)
    seen = await lab.fabric.observe()
    assert (worker(seen, 2).phase, worker(seen, 2).node, seen.free_nodes) == ("Pending", None, lab.free(0))
    lost = worker(seen, 0)
    await lab.fabric.delete_worker(DeleteWorker(lost.name, lost.uid, True, "to make room"))
    seen = await until(lab.fabric, lambda s: worker(s, 2).node == lost.node)
    assert all(w.index != 0 for w in seen.workers)


async def test_a_node_to_avoid_is_taken_only_if_there_is_no_other(lab: Lab) -> None:
    first = await running(lab, 0, avoid=lab.nodes[:1])
    assert first.node == lab.nodes[1]
    second = await running(lab, 1, avoid=lab.nodes[:1])
    assert second.node == lab.nodes[0]


async def test_a_worker_is_deleted_only_under_its_own_uid(lab: Lab) -> None:
    found = await running(lab)
    await lab.fabric.delete_worker(DeleteWorker(found.name, "another", True, "a stale word"))
    assert worker(await lab.fabric.observe(), 0).uid == found.uid
    await lab.fabric.delete_worker(DeleteWorker(found.name, found.uid, False, "not needed"))
    await until(lab.fabric, lambda s: not s.workers and s.free_nodes == lab.free(2))
    await lab.fabric.delete_worker(DeleteWorker(found.name, found.uid, False, "again"))


async def test_a_gentle_delete_shows_until_the_worker_has_ended(lab: Lab) -> None:
    found = await running(lab)
    lab.freeze_node(found.node or "")
    await lab.fabric.delete_worker(DeleteWorker(found.name, found.uid, False, "drained"))
    assert worker(await lab.fabric.observe(), 0).deleting


async def test_a_forced_delete_forgets_the_worker_at_once_even_on_a_frozen_node(lab: Lab) -> None:
    found = await running(lab)
    lab.freeze_node(found.node or "")
    await lab.fabric.delete_worker(DeleteWorker(found.name, found.uid, True, "unreachable"))
    seen = await lab.fabric.observe()
    assert seen.workers == ()
    assert seen.free_nodes == lab.free(1)  # what it runs is still there: nobody else may be put beside it


async def test_a_killed_node_is_seen_in_time_and_where_it_can_be_told_all_that_was_on_it(lab: Lab) -> None:
    found = await running(lab)
    lab.kill_node(found.node or "")

    def not_ready(seen: PlatformSnapshot) -> bool:
        return [n.ready for n in seen.nodes if n.name == found.node] == [False]

    seen, seconds = await timed(until(lab.fabric, not_ready, SECONDS + lab.node_seconds))
    assert seconds < lab.node_seconds
    if lab.tells_death:
        assert worker(seen, 0).phase == "Failed"
        assert [h.running for h in seen.servers if h.node == found.node] == [False]


async def test_a_node_that_returns_is_another_life_with_another_holder(lab: Lab) -> None:
    found = await running(lab)
    name = found.node or ""
    before = {h.node: h.process for h in (await lab.fabric.observe()).servers}
    lab.kill_node(name)
    lab.return_node(name)

    def returned(seen: PlatformSnapshot) -> bool:
        another = any(h.running and h.process != before[name] for h in seen.servers if h.node == name)
        # the worker's process went with the node's former life
        return all(n.ready for n in seen.nodes) and another and worker(seen, 0).phase == "Failed"

    seen = await until(lab.fabric, returned, SECONDS + lab.node_seconds)
    assert seen.free_nodes == lab.free(2)


async def test_a_frozen_node_looks_alive(lab: Lab) -> None:
    found = await running(lab)
    lab.freeze_node(found.node or "")
    seen = await lab.fabric.observe()
    assert worker(seen, 0).phase == "Running"
    assert all(n.ready for n in seen.nodes)
    assert all(h.running for h in seen.servers)


async def test_a_killed_agent_is_seen_within_a_moment_and_its_node_is_free_again(lab: Lab) -> None:
    found = await running(lab)
    lab.kill_agent(found.node or "")
    seen, seconds = await timed(until(lab.fabric, lambda s: worker(s, 0).phase == "Failed"))
    assert seconds < lab.moment_seconds
    assert worker(seen, 0).exit_code == -9
    assert seen.free_nodes == lab.free(2)


async def test_a_killed_holder_is_gone_and_one_that_returns_is_another(lab: Lab) -> None:
    before = {h.node: h for h in (await lab.fabric.observe()).servers}
    hurt, well = lab.nodes
    lab.kill_holder(hurt)

    def gone(seen: PlatformSnapshot) -> bool:
        # where a kubelet restarts it, the next life may be all that is ever seen
        return [h for h in seen.servers if h.node == hurt] != [before[hurt]]

    seen, seconds = await timed(until(lab.fabric, gone))
    assert seconds < lab.moment_seconds
    assert all(n.ready for n in seen.nodes)
    lab.return_holder(hurt)
    seen = await until(lab.fabric, lambda s: all(h.running for h in s.servers))
    after = {h.node: h for h in seen.servers}
    assert after[hurt].process != before[hurt].process
    assert after[well] == before[well]


async def test_a_status_is_written_only_over_the_one_that_it_was_decided_from(lab: Lab) -> None:
    claimed, committed = Membership(1, "Claimed"), Membership(1, "Committed")
    new, failed = JobStatus(), JobStatus(phase="Failed")
    with pytest.raises(StatusConflict):
        await lab.fabric.patch_status(failed, JobStatus(membership=claimed))
    with pytest.raises(StatusConflict):
        await lab.fabric.patch_status(failed, JobStatus(serial=1))
    first = await lab.fabric.patch_status(JobStatus(phase="Starting", membership=claimed), new)
    assert first == JobStatus(serial=1, phase="Starting", membership=claimed)
    for old in (new, replace(first, membership=None), replace(first, membership=committed), replace(first, serial=2)):
        with pytest.raises(StatusConflict):
            await lab.fabric.patch_status(failed, old)
    assert (await lab.fabric.observe()).status == first
    second = await lab.fabric.patch_status(JobStatus(phase="Running", membership=committed, step=7), first)
    assert second.serial == 2
    assert (await lab.fabric.observe()).status == second


async def test_of_two_leaders_that_change_one_world_one_wins(lab: Lab) -> None:
    old = await lab.fabric.patch_status(JobStatus(membership=Membership(1, "Committed")), JobStatus())
    mine = [JobStatus(membership=Membership(2, "Claimed", reason=str(n))) for n in range(8)]
    tries = [lab.fabric.patch_status(status, old) for status in mine]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["JobStatus", *["StatusConflict"] * 7]
    (winner,) = [r for r in results if isinstance(r, JobStatus)]
    assert (await lab.fabric.observe()).status == winner


async def test_of_two_leaders_of_one_world_neither_undoes_what_the_other_wrote(lab: Lab) -> None:
    await lab.fabric.patch_status(JobStatus(membership=Membership(1, "Committed")), JobStatus())
    one, other = (await lab.fabric.observe()).status, (await lab.fabric.observe()).status
    counted = await lab.fabric.patch_status(
        replace(one, next_attempt=5, unreadable_checkpoints=(Checkpoint(1, 10),)), one
    )
    with pytest.raises(StatusConflict):
        await lab.fabric.patch_status(replace(other, step=20), other)
    again = (await lab.fabric.observe()).status
    assert again == counted
    await lab.fabric.patch_status(replace(again, step=20), again)
    assert (await lab.fabric.observe()).status == replace(counted, step=20, serial=3)


async def test_a_change_is_heard_and_close_ends_the_listening(lab: Lab) -> None:
    changes = lab.fabric.watch_changes()
    async with asyncio.timeout(SECONDS):
        await anext(changes)
        await lab.fabric.create_worker(CreateWorker(0, 1), ENVIRONMENT)
        await anext(changes)
        await lab.fabric.record_events([Event("Tested", "told once")])
        await lab.fabric.close()
        assert [None async for _ in changes][1:] == []
