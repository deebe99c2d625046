"""The janitor's hand, and what agents of a former version call, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.servers import redis_server
from surefoot.errors import Fenced, TierUnavailable
from surefoot.memory_server import HolderClient, scripts
from surefoot.memory_server.client import FencedCalls
from surefoot.memory_server.provisioning import HolderAdmin
from surefoot.memory_server.server_process import HolderServer
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import HolderId, RankSave
from surefoot.protocol.wire import OLDEST, VERSION

JOB = "5f0c1f4e-job"
ACCOUNT = redis_server.account("the-job", "the job's password")
LAYOUT = "00000000deadbeef"


@pytest.fixture(params=redis_server.PROGRAMS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HolderServer]:
    with redis_server.of_kind(request.param, tmp_path, memory_bytes=24 << 20) as started:
        yield started


@pytest.fixture
def client(server: HolderServer, admin: HolderAdmin) -> Iterator[HolderClient]:
    admin.provision(JOB, ACCOUNT, 0)
    opened = HolderClient(redis_server.endpoint(server), JOB, ACCOUNT)
    yield opened
    opened.close()


def manifest(save: RankSave) -> RankManifest:
    return RankManifest(save, 2, "abc", LAYOUT, 5, 2, "0" * 16, 8, "1" * 16, 5, 1.5)


def test_what_was_committed_between_the_janitors_look_and_its_hand_stays_whole(
    client: HolderClient, admin: HolderAdmin
) -> None:
    save, left = RankSave(4, 40, 0), RankSave(4, 40, 1)
    client.put_layout(LAYOUT, "{}")
    for one in (save, left):
        client.put_chunk(one, 0, b"abc")
        client.put_chunk(one, 1, b"de")
        client.put_digests(one, bytes(8))
        client.put_values(one, bytes(5))
    found = admin.unindexed(JOB)
    client.commit(manifest(save), 5, (3, 2))
    assert [client.sweep(one, 5, names) for one, names in sorted(found.items())] == [False, True]
    assert bytes(client.read_chunk(save, 0, 0, 3)) == b"abc"
    assert admin.unindexed(JOB) == {}


def test_an_older_epochs_janitor_and_one_of_another_instance_remove_nothing(
    client: HolderClient, admin: HolderAdmin
) -> None:
    save = RankSave(4, 40, 0)
    client.put_chunk(save, 0, b"abc")
    client.seal(6)
    names = admin.unindexed(JOB)[save]
    with pytest.raises(Fenced):
        client.sweep(save, 5, names)
    other = replace(client.endpoint, holder=HolderId(client.endpoint.holder.node, "another"))
    with pytest.raises(TierUnavailable):
        client._wire.converse(FencedCalls(other, JOB).sweep(save, 6, names))
    assert admin.unindexed(JOB) == {save: names}


_DIGESTS = {
    1: {
        "e8261c5b205ece1b0185d51c0019d052e406bc66",
        "ec5630efd0289dabd7ab67cac57e9cb2c55d5017",
        "bc37f86787a62f71a246fd232524a6e47c29d913",
        "2e13b1ad420d5757bd291194a9a95483e399d7f6",
    },
    2: {
        "faae36d97d81ee0c1848d92863c4fc8023c979bb",
        "0c93f746f9c5189479ecf014880bd662e1032f48",
        "ec1691367cf86f8b6f24f5e70ef47b616dcdda87",
        "2e13b1ad420d5757bd291194a9a95483e399d7f6",
    },
}
_DIGESTS[3] = _DIGESTS[2]
"""What agents of each version of the protocol call: commit, drop, mark, read."""


def test_a_holder_that_restarts_behind_an_upgrade_serves_agents_of_before(
    client: HolderClient, server: HolderServer, admin: HolderAdmin
) -> None:
    wire = redis_server.wire_of(server, redis_server.account("", redis_server.ADMIN_PASSWORD))
    wire.call("SCRIPT FLUSH")
    admin.provision(JOB, ACCOUNT, 0)
    for version in range(OLDEST, VERSION + 1):
        for digest in _DIGESTS[version]:
            assert wire.call("SCRIPT EXISTS", digest) == [1], f"version {version} of the protocol needs {digest}"
    wire.close()
    save = RankSave(1, 10, 0)
    client.put_layout(LAYOUT, "{}")
    for number, data in enumerate((b"abc", b"de")):
        client.put_chunk(save, number, data)
    client.put_digests(save, bytes(8))
    client.put_values(save, bytes(5))
    former = {script.name: script for script in scripts.FORMER}
    data = scripts.data_of(JOB, save, 2)
    arguments = [scripts.index_field(save), manifest(save).to_json(), "", 8, 5, 3, 2]

    def run(*call: Any) -> Any:
        return client._wire.converse(client.calls._run(*call))

    assert run(former["commit"], 1, [scripts.layout_key(JOB, LAYOUT), *data], arguments)[0] == "ok"
    assert [m.save for m in client.index().manifests] == [save]
    assert run(former["drop"], 1, data, [scripts.index_field(save)])[0] == "ok"
    assert client.index().manifests == ()
