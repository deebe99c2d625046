"""One suite for every tier, each on the real thing: a Redis server, a folder, an S3 server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from support.servers import redis_server, s3_server
from support.servers.s3_server import S3Server
from surefoot.errors import ChunkMissing, TierError
from surefoot.format.layouts import Stream, TensorParts, block_digests, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.geometry.box import Box
from surefoot.memory_server.client import MemoryServerClient
from surefoot.memory_server.connection import Credentials
from surefoot.memory_server.server_process import RunningServer
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, RankManifest
from surefoot.protocol.identities import RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import SupportsChunkCopy, SupportsPartCopy, Tier, open_persistent

OpenTier = Callable[[], Tier]
USUAL = RankSave(2, 40, 0)
VALUES = b'{"format":1,"values":{"step":40}}'


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with redis_server.running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def redis_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with redis_server.of_kind(redis_server.OVER_TLS, tmp_path_factory.mktemp("redis-tls")) as server:
        yield server


@pytest.fixture(scope="module")
def redis_by_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with redis_server.of_kind(redis_server.BY_SOCKET, tmp_path_factory.mktemp("redis-by-socket")) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["redis", "redis over TLS", "redis by its socket", "directory", "s3"])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenTier]:
    """Opens the same fresh job as often as asked; closes all."""
    job, opened = str(uuid4()), []
    account = redis_server.account(f"user-{job}", "a password")
    holders = {"redis": "redis", "redis over TLS": "redis_tls", "redis by its socket": "redis_by_socket"}
    holder = request.getfixturevalue(holders[request.param]) if request.param in holders else None
    if holder is not None:
        provision(holder, job, account)

    def make() -> Tier:
        if holder is not None:
            known = redis_server.with_socket(account, holder)
            opened.append(MemoryServerClient(redis_server.endpoint(holder), job, known))
        elif request.param == "directory":
            opened.append(
                open_persistent(PersistentSettings(uri=(tmp_path / "a folder").as_uri()), job, create_root=True)
            )
        else:
            opened.append(open_persistent(request.getfixturevalue("s3").settings("some/prefix"), job))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(open_tier: OpenTier) -> Tier:
    return open_tier()


def provision(server: RunningServer, job: str, account: Credentials) -> None:
    admin = redis_server.admin_of(server)
    admin.provision(job, account, 1)
    admin.close()


@dataclasses.dataclass(frozen=True)
class Saved:
    """A small rank save with two chunks."""

    stream: Stream
    data: memoryview
    table: bytes
    manifest: RankManifest

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.stream.layout.chunk_lengths()


def make_save(save: RankSave = USUAL, seed: int = 1, elements: int = 1_100_000) -> Saved:
    layout = build_layout([TensorParts("w", "float32", (elements,), (Box((0,), (elements,)),))])
    stream = Stream(layout)
    pattern = bytes((seed + i) % 251 for i in range(251))
    data = memoryview((pattern * (layout.stream_bytes // 251 + 1))[: layout.stream_bytes])
    table = block_digests(data, stream.edges, range(stream.blocks))
    return Saved(stream, data, table, build_manifest(save, 2, "abc", stream, (table, VALUES), 5.5))


def write(tier: Tier, saved: Saved, without: str = "") -> None:
    save, starts = saved.manifest.save, saved.stream.layout.chunk_starts
    if without != "layout":
        tier.put_layout(saved.stream.digest, saved.stream.text)
    for index, (start, length) in enumerate(zip(starts, saved.lengths, strict=True)):
        if without != f"chunk {index}":
            tier.put_chunk(save, index, saved.data[start : start + length])
    if without != "values":
        tier.put_values(save, VALUES)
    if without != "digests":
        tier.put_digests(save, saved.table)


def commit(tier: Tier, saved: Saved) -> None:
    tier.commit(saved.manifest, saved.manifest.save.generation, saved.lengths)


def test_what_was_saved_is_what_another_reads(open_tier: OpenTier) -> None:
    saved, writer = make_save(), open_tier()
    write(writer, saved)
    commit(writer, saved)
    reader, save = open_tier(), saved.manifest.save
    assert reader.manifests() == (saved.manifest,)
    assert reader.damaged() == ()
    assert reader.read_layout(saved.manifest.layout) == saved.stream.text
    assert reader.read_values(save) == VALUES
    assert reader.read_digests(save, 0, len(saved.table)) == saved.table
    assert reader.read_digests(save, 8, 16) == saved.table[8:24]
    start, length = saved.stream.layout.chunk_starts[1], saved.lengths[1]
    assert bytes(reader.read_chunk(save, 1, 0, length)) == saved.data[start:]
    assert bytes(reader.read_chunk(save, 1, 1000, 77)) == saved.data[start + 1000 : start + 1077]
    assert bytes(reader.read_chunk(save, 0, 5, 0)) == b""


def test_nothing_is_visible_before_its_commit(tier: Tier) -> None:
    assert tier.manifests() == ()
    write(tier, make_save())
    assert tier.manifests() == ()
    assert tier.damaged() == ()


@pytest.mark.parametrize("part", ["layout", "chunk 0", "chunk 1", "values", "digests"])
def test_a_commit_without_one_part_is_refused(tier: Tier, part: str) -> None:
    saved = make_save()
    write(tier, saved, without=part)
    with pytest.raises(ChunkMissing):
        commit(tier, saved)
    assert tier.manifests() == ()
    write(tier, saved)
    commit(tier, saved)
    assert tier.manifests() == (saved.manifest,)


def test_a_commit_of_a_chunk_cut_short_is_refused(tier: Tier) -> None:
    saved = make_save()
    write(tier, saved)
    tier.put_chunk(saved.manifest.save, 1, saved.data[:100])
    with pytest.raises(ChunkMissing, match="100"):
        commit(tier, saved)


def test_repeating_writes_and_commit_with_the_same_bytes_is_success(tier: Tier) -> None:
    saved = make_save()
    for saved_at in (5.5, 9.9):
        write(tier, saved)
        tier.commit(dataclasses.replace(saved.manifest, saved_at=saved_at), 2, saved.lengths)
    assert tier.manifests() == (saved.manifest,), "the first word stays"


def test_another_save_of_the_same_name_is_refused_and_the_first_stays(tier: Tier) -> None:
    first, second = make_save(seed=1), make_save(seed=2)
    write(tier, first)
    commit(tier, first)
    with pytest.raises(TierError, match="other bytes"):
        commit(tier, second)
    assert tier.manifests() == (first.manifest,)


def test_of_many_racing_commits_of_different_bytes_one_wins(open_tier: OpenTier) -> None:
    saves = [make_save(seed=seed, elements=1000) for seed in range(4)]
    tiers = [open_tier() for _ in saves]
    for tier, saved in zip(tiers, saves, strict=True):
        write(tier, saved)

    def race(number: int) -> bool:
        try:
            commit(tiers[number], saves[number])
        except TierError:
            return False
        return True

    with ThreadPoolExecutor(len(saves)) as pool:
        won = list(pool.map(race, range(len(saves))))
    assert won.count(True) == 1
    assert tiers[0].manifests() == (saves[won.index(True)].manifest,)


def test_what_is_not_there_is_named_missing(tier: Tier) -> None:
    saved = make_save(elements=100)
    save, absent = saved.manifest.save, RankSave(2, 50, 7)
    write(tier, saved)
    for read in (
        lambda: tier.read_chunk(absent, 0, 0, 4),
        lambda: tier.read_chunk(save, 0, 0, 401),
        lambda: tier.read_chunk(save, 0, 400, 1),
        lambda: tier.read_chunk(save, 1, 0, 1),
        lambda: tier.read_values(absent),
        lambda: tier.read_digests(absent, 0, 8),
        lambda: tier.read_digests(save, len(saved.table), 8),
        lambda: tier.read_layout("0" * 16),
    ):
        with pytest.raises(ChunkMissing):
            read()


def test_dropping_removes_the_entry_and_the_data_and_repeats(tier: Tier) -> None:
    saved, other = make_save(elements=1000), make_save(RankSave(2, 50, 1), elements=1000)
    for each in (saved, other):
        write(tier, each)
        commit(tier, each)
    for _ in range(2):
        tier.delete_save(saved.manifest.save, 2, saved.manifest.chunks)
        assert tier.manifests() == (other.manifest,)
        with pytest.raises(ChunkMissing):
            tier.read_chunk(saved.manifest.save, 0, 0, 1)
    assert bytes(tier.read_chunk(other.manifest.save, 0, 0, 4000)) == other.data
    write(tier, saved)
    commit(tier, saved)
    assert tier.manifests() == (saved.manifest, other.manifest), "a dropped save may come again"


def test_ranks_without_tensors_and_chunks_of_full_size_are_kept(tier: Tier) -> None:
    empty, save = Stream(build_layout([])), RankSave(2, 60, 3)
    tier.put_layout(empty.digest, empty.text)
    tier.put_values(save, VALUES)
    tier.put_digests(save, b"")
    manifest = build_manifest(save, 4, "abc", empty, (b"", VALUES), 1.0)
    tier.commit(manifest, 2, ())
    assert tier.manifests() == (manifest,)
    assert tier.read_digests(save, 0, 0) == b""
    full = make_save(RankSave(2, 70, 3), elements=MAX_CHUNK_BYTES // 4)
    write(tier, full)
    commit(tier, full)
    assert full.lengths == (MAX_CHUNK_BYTES,)
    assert len(tier.read_chunk(full.manifest.save, 0, 0, MAX_CHUNK_BYTES)) == MAX_CHUNK_BYTES


def test_jobs_do_not_see_each_other(open_tier: OpenTier, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    saved, mine = make_save(elements=10), open_tier()
    write(mine, saved)
    commit(mine, saved)
    other = "another-job"
    kind = request.node.callspec.params["open_tier"]
    if kind == "redis":
        server = request.getfixturevalue("redis")
        provision(server, other, Credentials("other", "p"))
        theirs: Tier = MemoryServerClient(redis_server.endpoint(server), other, Credentials("other", "p"))
    elif kind == "directory":
        theirs = open_persistent(PersistentSettings(uri=(tmp_path / "a folder").as_uri()), other)
    else:
        theirs = open_persistent(request.getfixturevalue("s3").settings("some/prefix"), other)
    assert theirs.manifests() == ()
    with pytest.raises(ChunkMissing):
        theirs.read_values(saved.manifest.save)
    theirs.close()


def copied(tier: Tier, source: RankSave, save: RankSave) -> bool:
    """All of a small save's data, by whichever way the tier has: a chunk, or a part of several."""
    if isinstance(tier, SupportsChunkCopy):
        return all(tier.copy_chunk(source, save, index) for index in range(2))
    assert isinstance(tier, SupportsPartCopy)
    return tier.copy_part(source, save, 0)


def test_a_tier_copies_within_itself_what_a_save_shares_with_the_one_before(tier: Tier, open_tier: OpenTier) -> None:
    old, new = make_save(), make_save(RankSave(3, 50, 0))
    write(tier, old)
    commit(tier, old)
    save = new.manifest.save
    assert copied(tier, USUAL, save)
    tier.put_layout(new.stream.digest, new.stream.text)
    tier.put_values(save, VALUES)
    tier.put_digests(save, new.table)
    commit(tier, new)
    tier.delete_save(USUAL, 3, 2)
    reader = open_tier()
    assert [m.save for m in reader.manifests()] == [save]
    for index, length in enumerate(new.lengths):
        start = new.stream.layout.chunk_starts[index]
        assert bytes(reader.read_chunk(save, index, 0, length)) == new.data[start : start + length]


def test_nothing_is_copied_of_a_save_that_was_dropped(tier: Tier) -> None:
    assert not copied(tier, USUAL, RankSave(3, 50, 0))
