"""What one job's account wrote on a real server delays nobody who looks after other jobs too."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support.servers import redis_server
from surefoot.errors import OutOfBounds
from surefoot.memory_server import Credentials, MemoryServerClient, scripts
from surefoot.memory_server.async_connection import AsyncServerConnection
from surefoot.memory_server.client import FencedCalls
from surefoot.memory_server.connection import RespConnection
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol import bounds
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import RankSave

JOB = "5f0c1f4e-job"
ACCOUNT = redis_server.account("the-job", "the job's password")
LAYOUT = "00000000deadbeef"
MANIFEST = RankManifest(RankSave(1, 5, 0), 1, "i" * 12, LAYOUT, 64, 1, "d" * 16, 8, "v" * 16, 2, 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.of_kind(redis_server.PROGRAMS[0], tmp_path, memory_bytes=256 << 20) as started:
        yield started


@pytest.fixture
def tenant(server: RunningServer) -> Iterator[RespConnection]:
    admin = redis_server.admin_of(server)
    admin.provision(JOB, ACCOUNT, 0)
    admin.close()
    wire = redis_server.wire_of(server, ACCOUNT, 20.0)
    yield wire
    wire.close()


@pytest.fixture
def admin(server: RunningServer) -> Iterator[MemoryServerAdmin]:
    opened = redis_server.admin_of(server)
    yield opened
    opened.close()


@pytest.fixture
def operator(server: RunningServer, admin: MemoryServerAdmin) -> Iterator[RespConnection]:
    wire = redis_server.wire_of(server, Credentials("", server.settings.password), 20.0)
    yield wire
    wire.close()


def write_entries(wire: RespConnection, count: int, begin: int = 0) -> None:
    for first in range(begin, begin + count, 1000):
        entries = [
            word
            for step in range(first, min(first + 1000, begin + count))
            for word in (f"1:{step}:0", replace(MANIFEST, save=RankSave(1, step, 0)).to_json())
        ]
        wire.call("HSET", scripts.index_key(JOB), *entries)


def test_an_index_of_too_many_entries_is_refused_unread(
    server: RunningServer, tenant: RespConnection, operator: RespConnection
) -> None:
    calls = FencedCalls(redis_server.endpoint(server), JOB)
    write_entries(tenant, bounds.MAX_INDEX_ENTRIES)
    most = bounds.MAX_INDEX_ENTRIES
    assert len(operator.run_dialogue(calls.read_index(max_entries=most)).manifests) == most
    with pytest.raises(OutOfBounds, match=rf"of job {JOB} is out of bounds: the number of index entries is {most}"):
        operator.run_dialogue(calls.read_index(max_entries=most - 1))
    write_entries(tenant, 1, begin=most)
    with pytest.raises(OutOfBounds, match="index entries"):
        operator.run_dialogue(calls.read_index(max_entries=10 * most))


@pytest.mark.parametrize("key", [scripts.fence_key(JOB), scripts.watermark_key(JOB)])
def test_keys_and_entries_that_are_too_long_are_refused_unread(
    server: RunningServer, tenant: RespConnection, operator: RespConnection, key: str
) -> None:
    calls = FencedCalls(redis_server.endpoint(server), JOB)
    before = operator.call("GET", key) or b"1:1"
    tenant.call("SET", key, "7" * 1000)
    with pytest.raises(OutOfBounds, match="length of"):
        operator.run_dialogue(calls.read_index(max_entries=9))
    tenant.call("SET", key, before)
    tenant.call("HSET", scripts.index_key(JOB), "1:1:1", b"x" * (2 * bounds.MAX_INDEX_BYTES))
    with pytest.raises(OutOfBounds, match="bytes of the index"):
        operator.run_dialogue(calls.read_index(max_entries=9))


def test_an_entry_that_breaks_a_bound_is_damaged_and_named(
    server: RunningServer, tenant: RespConnection, operator: RespConnection
) -> None:
    calls = FencedCalls(redis_server.endpoint(server), JOB)
    tenant.call(
        "HSET",
        scripts.index_key(JOB),
        "1:113:0",
        replace(MANIFEST, save=RankSave(1, 113, 0), world_size=10**9).to_json(),
    )
    write_entries(tenant, 1, begin=5)
    index = operator.run_dialogue(calls.read_index(max_entries=99))
    assert [m.save.step for m in index.manifests] == [5]
    assert len(index.damaged_entries) == 1
    assert "1:113:0" in index.out_of_bounds[0]
    assert "world_size is 1000000000" in index.out_of_bounds[0]
    assert operator.run_dialogue(calls.read_index(max_entries=99)).out_of_bounds == index.out_of_bounds


def test_a_layout_that_is_longer_than_any_is_not_read(
    server: RunningServer, tenant: RespConnection, operator: RespConnection
) -> None:
    calls = FencedCalls(redis_server.endpoint(server), JOB)
    tenant.call("SET", scripts.layout_key(JOB, LAYOUT), b"[" * (bounds.MAX_LAYOUT_BYTES + (1 << 20)))
    with pytest.raises(OutOfBounds, match=f"layout {LAYOUT} is out of bounds: its length"):
        operator.run_dialogue(calls.read_layout(LAYOUT))


def test_leftovers_of_one_save_are_listed_in_a_time_that_grows_with_their_number(
    tenant: RespConnection, admin: MemoryServerAdmin
) -> None:
    save, count = RankSave(1, 5, 0), 40_000
    for first in range(0, count, 1000):
        for number in range(first, first + 1000):
            tenant.send("SET", scripts.chunk_key(JOB, save, number), "")
        for _ in range(1000):
            tenant.receive()
    begun = time.process_time()
    assert {one: len(names) for one, names in admin.list_unindexed(JOB).items()} == {save: count}
    assert time.process_time() - begun < 3.0, "it took 6.5 s where each name copied those before it"


def test_a_save_of_many_chunks_is_dropped_in_calls_of_few_keys(server: RunningServer, tenant: RespConnection) -> None:
    client = MemoryServerClient(redis_server.endpoint(server), JOB, ACCOUNT)
    save = RankSave(1, 5, 0)
    tenant.call("HSET", scripts.index_key(JOB), scripts.index_field(save), replace(MANIFEST, save=save).to_json())
    for number in (0, 1, 600, 1999):
        client.put_chunk(save, number, b"x")
    client.delete_save(save, 1, 2000)
    assert client.read_index().manifests == ()
    assert [tenant.call("STRLEN", scripts.chunk_key(JOB, save, n)) for n in (0, 1, 600, 1999)] == [0] * 4
    client.close()


async def test_other_tasks_have_their_turn_while_a_large_index_is_read(
    server: RunningServer, tenant: RespConnection
) -> None:
    await asyncio.to_thread(write_entries, tenant, bounds.MAX_INDEX_ENTRIES)
    line = AsyncServerConnection(
        server.settings.host, server.settings.port, Credentials("", server.settings.password), 20.0
    )
    await line.open()
    turns, late, ended = 0, 0.0, False

    async def work() -> None:
        nonlocal turns, late
        while not ended:
            begun = time.thread_time()
            await asyncio.sleep(0)
            turns, late = turns + 1, max(late, time.thread_time() - begun)

    # the collector looks at what this call makes, not at all that the tests of this process made before
    gc.collect()
    gc.freeze()
    try:
        working = asyncio.create_task(work())
        index = await line.run_dialogue(FencedCalls(redis_server.endpoint(server), JOB).read_index(max_entries=1 << 20))
        ended = True
        await working
    finally:
        gc.unfreeze()
        line.close()
    assert len(index.manifests) == bounds.MAX_INDEX_ENTRIES
    assert turns > bounds.MAX_INDEX_ENTRIES / 256
    print(f"one look at {bounds.MAX_INDEX_ENTRIES} entries: no pause of more than {late * 1000:.0f} ms of CPU")
    assert late < 0.25


@contextlib.asynccontextmanager
async def rogue_server(talk: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """A server that answers the first request by `talk`, until its client goes; yields its port."""
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(100)
            await talk(writer)
        except ConnectionError:
            pass  # the client has gone, as it should
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            ended.set()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
        await asyncio.wait_for(ended.wait(), 30.0)
    finally:
        listening.close()


async def test_an_endless_reply_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(writer: asyncio.StreamWriter) -> None:
        writer.write(b"*100000000\r\n")
        while True:
            writer.write(b"$1000\r\n" + b"x" * 1000 + b"\r\n")
            await writer.drain()

    monkeypatch.setattr("surefoot.memory_server.async_connection.MAX_REPLY_BYTES", 1 << 20)
    async with rogue_server(talk) as port:
        line = AsyncServerConnection("127.0.0.1", port, Credentials(), 5.0)
        await line.open()
        with pytest.raises(redis.exceptions.InvalidResponse, match="as one reply"):
            await line.exchange(("INFO", "server"))
        assert not line.is_open


async def test_a_reply_that_trickles_for_ever_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(writer: asyncio.StreamWriter) -> None:
        writer.write(b"$100000\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    monkeypatch.setattr("surefoot.memory_server.async_connection.MAX_REPLY_SECONDS", 0.5)
    async with rogue_server(talk) as port:
        line = AsyncServerConnection("127.0.0.1", port, Credentials(), 0.3)
        await line.open()
        with pytest.raises(redis.exceptions.TimeoutError, match="one reply took more"):
            await asyncio.wait_for(line.exchange(("INFO", "server")), 30.0)
        line.close()
