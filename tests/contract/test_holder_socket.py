"""A process reaches its own node's holder by that holder's socket, every other by TCP; without the socket, by TCP and counted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers import redis_server
from surefoot import metrics
from surefoot.errors import ChunkMissing, ConfigurationError, TierUnavailable
from surefoot.memory_server import Credentials, MemoryServerClient, server_process
from surefoot.memory_server.server_process import RunningServer, ServerSettings
from surefoot.protocol.identities import LocalMemoryServers, RankSave
from surefoot.settings import job_settings

JOB = "job-1"
ACCOUNT = redis_server.account("the-job", "its password")
SAVE = RankSave(1, 10, 0)


@pytest.fixture(params=["plain", "TLS on its port"])
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    program = redis_server.program(redis_server.BY_SOCKET)
    tls = redis_server.tls_files(tmp_path / "tls") if request.param != "plain" else None
    with redis_server.running(tmp_path, program, tls=tls, by_socket=tmp_path / "redis.sock") as started:
        provision(started)
        yield started


def provision(holder: RunningServer) -> None:
    admin = redis_server.admin_of(holder)
    admin.provision(JOB, ACCOUNT, 1)
    admin.close()


def by_socket(holder: RunningServer) -> int:
    """How many of its clients came by its socket, as the server itself says."""
    wire = redis_server.wire_of(holder, redis_server.account("", redis_server.ADMIN_PASSWORD))
    wire.call("PING")
    try:
        listed = wire.call("CLIENT", "LIST").decode().splitlines()
    finally:
        wire.close()
    flags = [dict(word.split("=", 1) for word in line.split()) for line in listed]
    return sum("U" in client["flags"] for client in flags) - 1  # this one


def fallbacks() -> float:
    return metrics.fallbacks.labels("memory_socket")._value.get()


def client_of(holder: RunningServer, account: Credentials, node: str = redis_server.NODE) -> MemoryServerClient:
    return MemoryServerClient(redis_server.endpoint(holder, node), JOB, account)


def test_only_the_holder_of_the_own_node_is_reached_by_its_socket(holder: RunningServer) -> None:
    before, account = fallbacks(), redis_server.with_socket(ACCOUNT, holder)
    mine, other = client_of(holder, account), client_of(holder, account, "node-2")
    other.read_index()
    assert by_socket(holder) == 0, "that is another node's"
    mine.put_chunk(SAVE, 0, bytes(range(256)) * 16)
    assert by_socket(holder) == 1
    assert bytes(other.read_chunk(SAVE, 0, 0, 256)) == bytes(range(256)), "it is the same server"
    for client in (mine, other):
        client.close()
    assert fallbacks() == before


@pytest.mark.parametrize("left", ["nothing", "a name that nobody listens at"])
def test_without_its_socket_it_is_reached_by_tcp_and_that_is_counted(
    holder: RunningServer, tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "left.sock"
    if left != "nothing":
        path.touch()
    before = fallbacks()
    account = replace(ACCOUNT, local=LocalMemoryServers(redis_server.NODE, str(path)))
    for _ in range(2):
        client = client_of(holder, account)
        client.read_index()
        client.close()
    assert fallbacks() == before + 2
    assert [str(path) in record.getMessage() for record in caplog.records] == [True], "said once"


def test_a_server_that_is_gone_is_gone_and_no_fallback(holder: RunningServer) -> None:
    before = fallbacks()
    client = client_of(holder, redis_server.with_socket(ACCOUNT, holder))
    client.read_index()
    holder.kill()
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="does not answer"):
            client.read_index()
    assert fallbacks() == before


def test_a_server_that_restarted_behind_the_same_socket_is_another_holder(holder: RunningServer) -> None:
    account = redis_server.with_socket(ACCOUNT, holder)
    client = client_of(holder, account)
    client.put_chunk(SAVE, 0, b"abc")
    holder.kill()
    assert holder.settings.socket_path is not None
    assert holder.settings.socket_path.exists(), "a killed server leaves its name"
    restarted = server_process.start_server(holder.settings, redis_server.program(redis_server.BY_SOCKET))
    try:
        with pytest.raises(TierUnavailable):
            client.read_index()  # the connection of before
        with pytest.raises(TierUnavailable, match="account"):
            client.read_index()
        provision(restarted)
        with pytest.raises(ChunkMissing):
            client.read_chunk(SAVE, 0, 0, 3)
        with pytest.raises(TierUnavailable, match="restarted"):
            client.read_index()
        assert by_socket(restarted) == 1
        found = client_of(restarted, account)
        found.read_index()
        found.close()
        client.close()
    finally:
        restarted.kill()


def test_accounts_hold_there_as_everywhere(holder: RunningServer) -> None:
    for word, job, said in (("wrong", JOB, "account"), ("its password", "another", "account")):
        account = redis_server.with_socket(redis_server.account("the-job", word), holder)
        client = MemoryServerClient(redis_server.endpoint(holder), job, account)
        with pytest.raises(TierUnavailable, match=said):
            client.read_index()
        client.close()
    nobody = redis_server.wire_of(holder, Credentials())
    with pytest.raises(Exception, match="Authentication required"):
        nobody.call("GET", "x")
    nobody.close()


def test_a_folder_of_any_length_will_do(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 8) / "run"
    folder.mkdir(parents=True)
    program = redis_server.program(redis_server.BY_SOCKET)
    with redis_server.running(folder / "logs", program, by_socket=folder / "node.sock") as started:
        provision(started)
        client = client_of(started, redis_server.with_socket(ACCOUNT, started))
        client.read_index()
        assert by_socket(started) == 1
        client.close()


@pytest.mark.parametrize(
    "name", ['quo"te', "back\\slash", "new\nline", "ünïcode 🦶", "hash # and 'more'", "$(touch x)"]
)
def test_a_folder_of_any_name_will_do(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with redis_server.running(
        folder / "logs", redis_server.program(redis_server.BY_SOCKET), by_socket=folder / "node.sock"
    ) as started:
        provision(started)
        client = client_of(started, redis_server.with_socket(ACCOUNT, started))
        client.read_index()
        assert by_socket(started) == 1
        client.close()


def test_a_socket_that_cannot_be_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="shorter folder"):
        server_process.redis_configuration(ServerSettings(1, 1, tmp_path, socket_path=tmp_path / ("x" * 120)))


def test_a_process_is_told_both_its_node_and_the_socket_or_neither_counts() -> None:
    told = {"SUREFOOT_JOB_UID": "uid"}
    assert job_settings(told).local_server is None
    assert job_settings({**told, "SUREFOOT_MEMORY_SOCKET": "/a"}).local_server is None
    found = job_settings({**told, "SUREFOOT_MEMORY_SOCKET": "/a", "SUREFOOT_NODE": "n"}).local_server
    assert found == LocalMemoryServers("n", "/a")
