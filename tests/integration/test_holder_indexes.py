"""Real holders' indexes, read together: over TCP, TLS and a socket, beside holders that are silent, refuse or lie."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from support.samples import sample
from support.servers import redis_server
from support.servers.redis_server import BY_SOCKET, OVER_TLS, account, admin_of, endpoint, of_kind, wire_of, with_socket
from surefoot.memory_server import Credentials, scripts
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore.catalogue import MAX_CONCURRENT_INDEXES, SaveSource, read_catalogue, server_sources

JOB = "job"
WANTED = Checkpoint(2, 20)
KINDS = ("redis on PATH", OVER_TLS, BY_SOCKET)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RunningServer]]:
    """Each has rank N of two checkpoints, and the same rank 9."""
    with ExitStack() as stack:
        started = []
        for number, kind in enumerate(KINDS):
            server = stack.enter_context(of_kind(kind, tmp_path / str(number)))
            admin_of(server).provision(JOB, account("u", "word"), 1)
            store(server, *(manifest(step, rank) for step in (10, 20) for rank in (number, 9)))
            started.append(server)
        yield started


def manifest(step: int, rank: int) -> RankManifest:
    return replace(sample(RankManifest), save=RankSave(2, step, rank))


def store(server: RunningServer, *saves: RankManifest, text: str = "") -> None:
    wire = wire_of(server, account("", redis_server.ADMIN_PASSWORD))
    for one in saves:
        wire.call("HSET", scripts.index_key(JOB), scripts.index_field(one.save), text or one.to_json())
    wire.close()


def sources(servers: list[RunningServer], who: Credentials | None = None, seconds: float = 1.0) -> list[SaveSource]:
    found: list[SaveSource] = []
    for number, server in enumerate(servers):
        mine = with_socket(who or account("u", "word"), server) if server.settings.socket_path is not None else None
        where = endpoint(server, redis_server.NODE if mine is not None else f"node-{number}")
        found += server_sources([where], JOB, mine or who or account("u", "word"), None, seconds)
    return found


def test_every_holder_tells_its_part_of_one_checkpoint(servers: list[RunningServer]) -> None:
    store(servers[0], manifest(20, 7), text="{}")
    store(servers[1], manifest(10, 7), text="{}")  # of another checkpoint, so nobody reads it
    found = read_catalogue(sources(servers), WANTED)
    assert found.unanswered_sources == ()
    assert found.copies_by_rank(WANTED) == {
        **{n: [(n, manifest(20, n))] for n in range(len(KINDS))},
        9: [(n, manifest(20, 9)) for n in range(len(KINDS))],
    }
    assert [len(r.damaged_entries) for r in found.readings if r is not None] == [1, 0, 0]
    whole = read_catalogue(sources(servers))
    assert [len(r.manifests) for r in whole.readings if r is not None] == [4, 4, 4]


async def test_a_program_that_runs_an_event_loop_reads_too(servers: list[RunningServer]) -> None:
    assert asyncio.get_running_loop().is_running()
    assert read_catalogue(sources(servers), WANTED).unanswered_sources == ()


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_one_that_stands_still_delays_nobody_beyond_its_limit(servers: list[RunningServer], number: int) -> None:
    os.kill(servers[number].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    found = read_catalogue(sources(servers, seconds=0.5), WANTED)
    assert time.monotonic() - began < 10.0, "each wait has a limit"
    assert len(found.unanswered_sources) == 1
    assert [n for n, reading in enumerate(found.readings) if reading is None] == [number]
    os.kill(servers[number].process.pid, signal.SIGCONT)


def test_one_that_refuses_or_restarted_is_silent(servers: list[RunningServer]) -> None:
    assert len(read_catalogue(sources(servers, account("u", "wrong")), WANTED).unanswered_sources) == len(KINDS)
    given = sources(servers)
    servers[0].kill()
    assert [n for n, r in enumerate(read_catalogue(given, WANTED).readings) if r is None] == [0]


def test_more_than_are_asked_at_a_time_are_all_asked(servers: list[RunningServer]) -> None:
    many = [endpoint(servers[0], f"node-{n}") for n in range(MAX_CONCURRENT_INDEXES + 5)]
    found = read_catalogue(server_sources(many, JOB, account("u", "word"), None, 10.0), WANTED)
    assert found.unanswered_sources == ()
    assert len(found.copies_by_rank(WANTED)[9]) == MAX_CONCURRENT_INDEXES + 5
