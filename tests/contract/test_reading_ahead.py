"""Reading and writing ahead, on a real Redis, plain and over TLS: in order, and never another's bytes or answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import redis_server
from surefoot.errors import ChunkMissing, TierFull, TierUnavailable
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES
from surefoot.protocol.identities import RankSave
from surefoot.tiers import SupportsPipelinedReads, SupportsPipelinedWrites

SAVE = RankSave(1, 10, 0)
JOB = "reading-ahead"
CHUNKS = [bytes([number]) * (MAX_CHUNK_BYTES if number < 2 else 1000) for number in range(4)]


@pytest.fixture(params=["plain", "over TLS", "by its socket"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    kinds = {"over TLS": redis_server.OVER_TLS, "by its socket": redis_server.BY_SOCKET}
    kind = kinds.get(request.param)
    with redis_server.of_kind(kind, tmp_path) if kind else redis_server.running(tmp_path) as found:
        yield found


@pytest.fixture
def tier(server: RunningServer) -> Iterator[MemoryServerClient]:
    account = redis_server.account(f"user-{JOB}", "a password")
    admin = redis_server.admin_of(server)
    admin.provision(JOB, account, 1)
    admin.close()
    opened = MemoryServerClient(redis_server.endpoint(server), JOB, redis_server.with_socket(account, server), 1.0)
    for number, data in enumerate(CHUNKS):
        opened.put_chunk(SAVE, number, memoryview(data))
    yield opened
    opened.close()


def taken(tier: MemoryServerClient, number: int, length: int) -> bytes:
    into = memoryview(bytearray(length))
    tier.receive_chunk(SAVE, number, into)
    return bytes(into)


def test_what_was_asked_for_comes_in_that_order(tier: MemoryServerClient) -> None:
    assert isinstance(tier, SupportsPipelinedReads)
    tier.request_chunk(SAVE, 0, 0, MAX_CHUNK_BYTES)
    tier.request_chunk(SAVE, 2, 10, 20)
    assert taken(tier, 0, MAX_CHUNK_BYTES) == CHUNKS[0]
    tier.request_chunk(SAVE, 1, 5, 7)
    assert taken(tier, 2, 20) == CHUNKS[2][10:30]
    assert taken(tier, 1, 7) == CHUNKS[1][5:12]


def test_any_other_call_forgets_it(tier: MemoryServerClient) -> None:
    tier.request_chunk(SAVE, 0, 0, 100)
    assert bytes(tier.read_chunk(SAVE, 3, 0, 50)) == CHUNKS[3][:50]
    with pytest.raises(TierUnavailable):
        taken(tier, 0, 100)
    tier.request_chunk(SAVE, 0, 0, 100)
    assert tier.manifests() == ()
    with pytest.raises(TierUnavailable):
        taken(tier, 0, 100)


def test_what_is_not_there_is_missing_and_what_was_asked_behind_it_is_not_taken_for_it(
    tier: MemoryServerClient,
) -> None:
    for absent in ((9, 0), (2, 990)):
        tier.request_chunk(SAVE, *absent, 20)
        tier.request_chunk(SAVE, 3, 0, 20)
        with pytest.raises(ChunkMissing):
            taken(tier, absent[0], 20)
        with pytest.raises(TierUnavailable):
            taken(tier, 3, 20)
    assert bytes(tier.read_chunk(SAVE, 3, 0, 20)) == CHUNKS[3][:20]


def test_chunks_sent_ahead_are_all_there_when_they_are_settled(tier: MemoryServerClient) -> None:
    assert isinstance(tier, SupportsPipelinedWrites)
    for number, data in enumerate(CHUNKS):
        tier.send_chunk(SAVE, 10 + number, memoryview(data))
    tier.wait_stored()
    for number, data in enumerate(CHUNKS):
        assert bytes(tier.read_chunk(SAVE, 10 + number, 0, len(data))) == data


def test_a_full_holder_says_so_of_the_chunk_before_or_when_it_is_settled(tier: MemoryServerClient) -> None:
    def send() -> None:
        for number in range(20):  # 80 MiB into 64
            tier.send_chunk(SAVE, 10 + number, memoryview(CHUNKS[0]))
        tier.wait_stored()

    with pytest.raises(TierFull):
        send()


def test_an_account_that_is_gone_is_said_so(tier: MemoryServerClient, server: RunningServer) -> None:
    tier.request_chunk(SAVE, 3, 0, 20)
    assert taken(tier, 3, 20) == CHUNKS[3][:20]
    admin = redis_server.admin_of(server)
    admin.remove_job(JOB, f"user-{JOB}")
    admin.close()
    with pytest.raises(TierUnavailable):
        tier.read_chunk(SAVE, 3, 0, 20)


def test_a_frozen_holder_costs_the_limit_and_answers_again_when_it_thaws(
    tier: MemoryServerClient, server: RunningServer
) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        tier.request_chunk(SAVE, 0, 0, MAX_CHUNK_BYTES)
        with pytest.raises(TierUnavailable, match=r"nothing for 1 s|timed out"):
            taken(tier, 0, MAX_CHUNK_BYTES)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert bytes(tier.read_chunk(SAVE, 2, 0, 1000)) == CHUNKS[2]
