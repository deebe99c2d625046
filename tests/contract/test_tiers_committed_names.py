"""Under a committed name of the persistent tier nothing is written: compare, then refuse, then write. Folder and S3."""

from __future__ import annotations

from typing import Any

import pytest

from support.fakes.fake_tiers import MemoryPlace
from support.saves import arrays, put_save, split, stream_of
from surefoot.errors import SaveExists
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.uploader import copy_save
from surefoot.format.layouts import Stream
from surefoot.protocol.identities import RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, Tier, open_persistent
from surefoot.tiers import tier as verified

SAVE = RankSave(6, 100, 0)
SHAPES: dict[str, tuple[int, ...]] = {"weight": (300, 70), "bias": (70,)}


def made(seed: int) -> tuple[Stream, bytes]:
    """A rank's save in many small chunks, whose bytes the seed determines."""
    tensors = arrays(seed, SHAPES)
    return stream_of(tensors, {name: split(a.shape, 1, 0) for name, a in tensors.items()}, chunk_blocks=1)


def source(seed: int) -> Tier:
    tier = MemoryPlace(f"memory:{seed}").tier()
    put_save(tier, SAVE, 1, *made(seed))
    return tier


def assert_every_byte_is_good(tier: ObjectStoreTier) -> None:
    manifest = tier.read_manifest(SAVE)
    stream, table = verified.read_stream(tier, manifest), verified.read_digest_table(tier, manifest)
    verified.read_verified_values(tier, manifest)
    for index in range(manifest.chunks):
        verified.read_verified_chunk(tier, manifest, stream, table, index)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch, tier: ObjectStoreTier) -> list[str]:
    """Paths of the objects that anybody writes from now on."""
    written: list[str] = []
    for name in ("put", "create", "change", "copy"):
        before = getattr(type(tier._store), name)

        def watched(store: Any, path: str, *more: Any, before: Any = before, **named: Any) -> Any:
            written.append(path)
            return before(store, path, *more, **named)

        monkeypatch.setattr(type(tier._store), name, watched)
    return written


def copy(seed: int, settings: PersistentSettings) -> None:
    target = open_persistent(settings, "job-1")
    try:
        copy_save(SAVE, [source(seed)], target, 6, TokenBucket())
    finally:
        target.close()


def test_another_save_of_a_committed_name_is_refused_before_a_byte(
    tier: ObjectStoreTier, settings: PersistentSettings, writes: list[str]
) -> None:
    copy(100, settings)
    committed = tier.read_manifest(SAVE)
    other = source(777).manifests()[0]
    writes.clear()
    with pytest.raises(SaveExists) as refusal:
        copy(777, settings)
    assert writes == []
    assert committed.digests_digest in str(refusal.value)
    assert other.digests_digest in str(refusal.value)
    assert_every_byte_is_good(tier)


def test_the_same_save_again_is_success_without_a_byte(
    tier: ObjectStoreTier, settings: PersistentSettings, writes: list[str]
) -> None:
    copy(100, settings)
    writes.clear()
    copy(100, settings)
    assert [path for path in writes if not path.endswith("newest.json")] == []
    assert_every_byte_is_good(tier)


def test_a_writer_that_never_asks_first_is_refused_each_part(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    copy(100, settings)
    stream, content = made(777)
    with pytest.raises(SaveExists):
        put_save(open_persistent(settings, "job-1"), SAVE, 1, stream, content)
    other = open_persistent(settings, "job-1")
    for write in (
        lambda: other.put_values(SAVE, b"others"),
        lambda: other.put_digests(SAVE, b"others"),
        lambda: other.put_part(SAVE, 0, [memoryview(content)[:280]] * 4),
        lambda: other.commit(source(777).manifests()[0], 6, stream.layout.chunk_lengths()),
    ):
        with pytest.raises(SaveExists):
            write()
    assert_every_byte_is_good(tier)


def test_of_two_writers_at_once_the_later_overwrites_nothing_that_is_committed(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    late, (stream, content) = open_persistent(settings, "job-1"), made(777)
    late.put_values(SAVE, b"{}")  # it has looked, and found nothing committed
    copy(100, settings)
    with pytest.raises(SaveExists):
        put_save(late, SAVE, 1, stream, content)
    assert_every_byte_is_good(tier)


def test_what_an_attempt_without_a_manifest_left_is_replaced(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    stream, content = made(777)
    for index, (start, length) in enumerate(
        zip(stream.layout.chunk_starts, stream.layout.chunk_lengths(), strict=True)
    ):
        tier.put_chunk(SAVE, index, memoryview(content)[start : start + length])
    tier.put_digests(SAVE, b"of the attempt that died")
    copy(100, settings)
    assert_every_byte_is_good(tier)


@pytest.mark.parametrize("lost", ["p0000", "digests", "values"])
def test_the_same_save_again_mends_what_is_missing(
    tier: ObjectStoreTier, settings: PersistentSettings, lost: str
) -> None:
    copy(100, settings)
    tier._store.remove(f"job-1/100-6/rank-0/{lost}")
    copy(100, settings)
    assert_every_byte_is_good(tier)


def test_a_damaged_chunk_takes_back_its_own_bytes_alone(tier: ObjectStoreTier, settings: PersistentSettings) -> None:
    copy(100, settings)
    stream, content = made(100)
    own = memoryview(content)[: stream.layout.chunk_lengths()[0]]
    path = "job-1/100-6/rank-0/p0000"
    good = tier._store.read(path)
    tier._store.put(path, bytes([good[0] ^ 1]) + good[1:])
    healer = open_persistent(settings, "job-1")
    with pytest.raises(SaveExists):
        healer.put_chunk(SAVE, 0, memoryview(bytes(len(own))))
    healer.put_chunk(SAVE, 0, own)
    assert tier._store.read(path) == good
    assert_every_byte_is_good(tier)


def test_a_damaged_manifest_is_known_by_the_checkpoints_list(
    tier: ObjectStoreTier, settings: PersistentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.tiers.persistent_records.MIN_MANIFEST_LIST_RANKS", 1)
    copy(100, settings)
    text = tier._store.read("job-1/100-6/rank-0.json")
    tier._store.put("job-1/100-6/rank-0.json", text.replace(b'"world_size":1', b'"world_size":2'))
    with pytest.raises(SaveExists):
        copy(777, settings)
    copy(100, settings)
    stream = made(100)[0]
    open_persistent(settings, "job-1").commit(source(100).manifests()[0], 6, stream.layout.chunk_lengths())
    assert tier._store.read("job-1/100-6/rank-0.json") == text
