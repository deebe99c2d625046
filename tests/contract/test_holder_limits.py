"""What one account can make a server hold, in a memory cgroup of its container's limit: the kernel must not end it.

Each attack is one that a job's own account can make, on the server that all jobs of a node share; the save of another
job must be readable behind it. Without limits, each of the first three ended the server.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.saves import arrays, put_save, split, stream_of
from support.servers import redis_server
from support.servers.memory_cgroup import MemoryCgroup, container_bytes, limited_to
from surefoot.errors import TierError
from surefoot.memory_server import Credentials, MemoryServerClient, scripts
from surefoot.memory_server.client import MAX_VALUE_BYTES
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import CLIENT_BYTES, RunningServer
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES
from surefoot.protocol.identities import RankSave

MEMORY_BYTES = 256 << 20
ATTACKER, VICTIM = "attacker", "victim"
SAVE = RankSave(1, 10, 0)
FILLING, FILLING_CHUNKS = RankSave(1, 9, 0), 40
VALUES = b"what must stay readable"


@dataclass(frozen=True, slots=True)
class Node:
    """A server in its cgroup with the accounts of two jobs, each with a rank save."""

    server: RunningServer
    group: MemoryCgroup

    def client(self, job: str) -> MemoryServerClient:
        return MemoryServerClient(redis_server.endpoint(self.server), job, _account(job), 10.0)

    def attack(self, *commands: bytes) -> socket.socket:
        """A connection of the attacker that sends these and reads nothing."""
        line = socket.create_connection((self.server.settings.host, self.server.settings.port))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(5.0)
        account = _account(ATTACKER)
        send(line, command(b"AUTH", account.user.encode(), account.password.encode()), *commands)
        return line

    def used_bytes(self) -> int:
        where = self.server.settings
        admin = MemoryServerAdmin(where.host, where.port, where.password, call_seconds=10.0)
        try:
            return admin.measure_memory().used_bytes
        finally:
            admin.close()


def _account(job: str) -> Credentials:
    return redis_server.account(f"user-{job}", f"password of {job}")


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def send(line: socket.socket, *pieces: bytes) -> None:
    """Sends as much as the server takes: it closes the connection of whoever goes too far."""
    try:
        for piece in pieces:
            line.sendall(piece)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        return


@pytest.fixture(params=redis_server.PROGRAMS)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    with _node(tmp_path, redis_server.program(request.param)) as made:
        yield made


@contextmanager
def _node(folder: Path, program: str) -> Iterator[Node]:
    limit = container_bytes(MEMORY_BYTES, CLIENT_BYTES)
    with (
        limited_to(limit) as group,
        redis_server.running(folder, program, MEMORY_BYTES, before_exec=group.join) as server,
    ):
        made = Node(server, group)
        admin = redis_server.admin_of(server)
        tensors = arrays(1, {"w": (3000, 700)})
        stream, data = stream_of(tensors, {"w": split((3000, 700), 1, 0)})
        for job in (ATTACKER, VICTIM):
            admin.provision(job, _account(job), 1)
            client = made.client(job)
            put_save(client, SAVE, 1, stream, data)
            client.put_values(SAVE, VALUES)
            client.close()
        admin.close()
        client = made.client(ATTACKER)
        for index in range(FILLING_CHUNKS):  # a full server is the plan, and has the least room beside
            client.put_chunk(FILLING, index, bytes(MAX_CHUNK_BYTES))
        client.close()
        yield made


def _make_room(node: Node) -> None:
    """For a longest value, which the server has twice for a moment: as it came, and stored."""
    client = node.client(ATTACKER)
    client.delete_save(FILLING, 1, FILLING_CHUNKS)
    client.close()


def _key(index: int) -> bytes:
    return scripts.chunk_key(ATTACKER, SAVE, index).encode()


def _unread_replies(node: Node) -> list[socket.socket]:
    return [node.attack(command(b"GET", _key(0)) * 100) for _ in range(8)]


def _unread_replies_in_small_parts(node: Node) -> list[socket.socket]:
    """Of many connections, each below every limit of one."""
    return [node.attack(command(b"GET", _key(0)) * 8) for _ in range(60)]


def _unfinished_values(node: Node) -> list[socket.socket]:
    begun = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(_key(0)), _key(0), MAX_VALUE_BYTES)
    return [node.attack(begun, *[bytes(1 << 20)] * 60) for _ in range(10)]


def _values_beyond_the_longest(node: Node) -> list[socket.socket]:
    begun = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(_key(0)), _key(0), 512 << 20)
    return [node.attack(begun, *[bytes(1 << 20)] * 250) for _ in range(3)]


def _unfinished_lists_of_words(node: Node) -> list[socket.socket]:
    """Words of one command that are whole lie in no query buffer."""
    word = b"$%d\r\n%s\r\n" % (4 << 20, bytes(4 << 20))
    return [node.attack(b"*1000\r\n$6\r\nUNLINK\r\n", *[word] * 40) for _ in range(4)]


def _longest_values_at_once(node: Node) -> list[socket.socket]:
    _make_room(node)
    client = node.client(ATTACKER)
    client.put_values(RankSave(1, 20, 0), bytes(MAX_VALUE_BYTES))
    client.close()
    name = scripts.values_key(ATTACKER, RankSave(1, 20, 0)).encode()
    lines = [node.attack() for _ in range(40)]
    for line in lines:
        send(line, command(b"GET", name))
    return lines


ATTACKS: dict[str, Callable[[Node], list[socket.socket]]] = {
    "unread replies": _unread_replies,
    "unread replies of many": _unread_replies_in_small_parts,
    "unfinished values": _unfinished_values,
    "values beyond the longest": _values_beyond_the_longest,
    "unfinished lists of words": _unfinished_lists_of_words,
    "longest values at once": _longest_values_at_once,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_one_account_cannot_have_the_server_killed(node: Node, attack: Callable[[Node], list[socket.socket]]) -> None:
    with ExitStack() as stack:
        for line in attack(node):
            stack.callback(line.close)
        deadline = time.monotonic() + 20.0
        while node.used_bytes() > MEMORY_BYTES + CLIENT_BYTES:
            assert time.monotonic() < deadline, "clients hold more than they may"
        victim = node.client(VICTIM)
        assert [manifest.save for manifest in victim.read_index().manifests] == [SAVE]
        assert victim.read_values(SAVE) == VALUES
        victim.close()
    assert node.server.process.poll() is None
    assert node.group.kill_count == 0, f"at {node.group.peak_bytes} bytes"


def test_a_value_beyond_the_longest_is_refused_by_name_before_it_is_sent(node: Node) -> None:
    _make_room(node)
    client = node.client(VICTIM)
    client.put_values(SAVE, bytes(MAX_VALUE_BYTES))
    assert len(client.read_values(SAVE)) == MAX_VALUE_BYTES
    with pytest.raises(
        TierError, match=r"writing the values of rank 0 .* 67108865 bytes, and a memory server accepts at most"
    ):
        client.put_values(SAVE, bytes(MAX_VALUE_BYTES + 1))
    client.close()


def test_a_digest_table_of_the_longest_is_read_in_pieces(node: Node) -> None:
    _make_room(node)
    client = node.client(VICTIM)
    table = bytes(range(256)) * (40 << 12)
    client.put_digests(SAVE, table)
    assert client.read_digests(SAVE, 0, len(table)) == table
    assert client.read_digests(SAVE, MAX_CHUNK_BYTES - 1, 3) == table[MAX_CHUNK_BYTES - 1 : MAX_CHUNK_BYTES + 2]
    client.close()
