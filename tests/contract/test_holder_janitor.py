"""The janitor's hand, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers import redis_server
from surefoot.errors import Fenced, TierUnavailable
from surefoot.memory_server import MemoryServerClient
from surefoot.memory_server.client import FencedCalls
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import MemoryServerInstance, RankSave

JOB = "5f0c1f4e-job"
ACCOUNT = redis_server.account("the-job", "the job's password")
LAYOUT = "00000000deadbeef"


@pytest.fixture(params=redis_server.PROGRAMS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.of_kind(request.param, tmp_path, memory_bytes=24 << 20) as started:
        yield started


@pytest.fixture
def client(server: RunningServer, admin: MemoryServerAdmin) -> Iterator[MemoryServerClient]:
    admin.provision(JOB, ACCOUNT, 0)
    opened = MemoryServerClient(redis_server.endpoint(server), JOB, ACCOUNT)
    yield opened
    opened.close()


def manifest(save: RankSave) -> RankManifest:
    return RankManifest(save, 2, "abc", LAYOUT, 5, 2, "0" * 16, 8, "1" * 16, 5, 1.5)


def test_what_was_committed_between_the_janitors_look_and_its_hand_stays_whole(
    client: MemoryServerClient, admin: MemoryServerAdmin
) -> None:
    save, left = RankSave(4, 40, 0), RankSave(4, 40, 1)
    client.put_layout(LAYOUT, "{}")
    for one in (save, left):
        client.put_chunk(one, 0, b"abc")
        client.put_chunk(one, 1, b"de")
        client.put_digests(one, bytes(8))
        client.put_values(one, bytes(5))
    found = admin.list_unindexed(JOB)
    client.commit(manifest(save), 5, (3, 2))
    assert [client.delete_uncommitted(one, 5, names) for one, names in sorted(found.items())] == [False, True]
    assert bytes(client.read_chunk(save, 0, 0, 3)) == b"abc"
    assert admin.list_unindexed(JOB) == {}


def test_an_older_epochs_janitor_and_one_of_another_instance_remove_nothing(
    client: MemoryServerClient, admin: MemoryServerAdmin
) -> None:
    save = RankSave(4, 40, 0)
    client.put_chunk(save, 0, b"abc")
    client.fence(6)
    names = admin.list_unindexed(JOB)[save]
    with pytest.raises(Fenced):
        client.delete_uncommitted(save, 5, names)
    other = replace(client.endpoint, instance=MemoryServerInstance(client.endpoint.instance.node, "another"))
    with pytest.raises(TierUnavailable):
        client._connection.run_dialogue(FencedCalls(other, JOB).delete_uncommitted(save, 6, names))
    assert admin.list_unindexed(JOB) == {save: names}
