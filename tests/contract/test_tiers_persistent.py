"""What only the persistent tier promises: claims of epochs, damage found and healed, faults of disks and of S3 servers."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.saves import put_save, stream_of
from support.servers import s3_server
from support.servers.s3_server import S3Server
from surefoot import metrics
from surefoot.errors import ChunkMissing, ConfigurationError, TierError, TierFull, TierUnavailable
from surefoot.format.layouts import Stream, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.geometry import Box
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, object_store, open_persistent
from surefoot.tiers.s3 import S3Store
from surefoot.tiers.tier import RequestBody


def save_one(tier: ObjectStoreTier, save: RankSave) -> RankManifest:
    stream = Stream(build_layout([]))
    tier.put_layout(stream.digest, stream.text)
    tier.put_values(save, b"values")
    tier.put_digests(save, b"")
    manifest = build_manifest(save, 2, "abc", stream, (b"", b"values"), 1.0)
    tier.commit(manifest, save.generation, ())
    return manifest


def test_one_checkpoint_is_read_without_looking_at_the_others(tier: ObjectStoreTier) -> None:
    kept = [save_one(tier, RankSave(1, step, rank)) for step in (10, 20) for rank in (0, 1)]
    before = _requests()
    assert tier.manifests_of(Checkpoint(1, 20)) == tuple(kept[2:])
    alone = _requests() - before
    assert tier.manifests() == tuple(kept)
    assert _requests() - before - alone >= 2 * alone, "a listing and each manifest, of both"
    assert tier.manifests_of(Checkpoint(1, 30)) == ()


def _requests() -> float:
    """To S3; a folder has none."""
    samples = next(iter(metrics.s3_requests.collect())).samples
    return float(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def test_every_claim_of_an_epoch_is_a_new_one(tier: ObjectStoreTier, settings: PersistentSettings) -> None:
    assert tier.claim_generation() == 1
    others = [open_persistent(settings, "job-1") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        claimed = list(pool.map(lambda other: other.claim_generation(), others))
    assert sorted(claimed) == [2, 3, 4, 5]
    save_one(tier, RankSave(40, 10, 0))
    assert tier.claim_generation() == 41, "an epoch that has saved is taken, claimed or not"
    for other in others:
        other.close()


def test_checkpoints_are_seen_and_dropped_whole_complete_or_not(tier: ObjectStoreTier) -> None:
    kept = save_one(tier, RankSave(1, 20, 0))
    for rank in range(2):
        save_one(tier, RankSave(1, 10, rank))
    tier.put_values(RankSave(2, 15, 0), b"its writer died here")
    assert tier.list_all_checkpoints() == (Checkpoint(1, 10), Checkpoint(1, 20), Checkpoint(2, 15))
    for _ in range(2):
        tier.drop_checkpoint(Checkpoint(1, 10))
        tier.drop_checkpoint(Checkpoint(2, 15))
    assert tier.list_all_checkpoints() == (Checkpoint(1, 20),)
    assert tier.manifests() == (kept,)


def test_dropping_the_last_rank_removes_the_checkpoint(tier: ObjectStoreTier) -> None:
    save = RankSave(1, 20, 0)
    save_one(tier, save)
    tier.delete_save(save, 1, 0)
    assert tier.list_all_checkpoints() == ()


def test_a_damaged_manifest_is_named_and_healed_by_committing_again(tier: ObjectStoreTier) -> None:
    save = RankSave(1, 20, 0)
    manifest = save_one(tier, save)
    text = manifest.to_json().encode()
    tier._store.put("job-1/20-1/rank-0.json", text.replace(b'"world_size":2', b'"world_size":3'))
    assert tier.manifests() == ()
    (named,) = tier.damaged()
    assert named.startswith(
        f"persistent: job-1/20-1/rank-0.json of {save}: a rank manifest does not match its checksum"
    )
    tier.commit(manifest, 1, ())
    assert tier.manifests() == (manifest,)
    assert tier.damaged() == ()


def listed() -> float:
    """How often the newest was found by listing."""
    return metrics.fallbacks.labels("persistent_listed")._value.get()


def test_the_newest_is_known_without_a_listing_once_every_rank_is_there(
    tier: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listed()
    assert tier.read_newest_manifests() == ()
    assert listed() == before + 1
    whole = [save_one(tier, RankSave(1, 20, rank)) for rank in range(2)]
    save_one(tier, RankSave(1, 30, 0))
    save_one(tier, RankSave(1, 10, 1))
    save_one(tier, RankSave(1, 10, 0))
    with monkeypatch.context() as patched:
        for listing in ("list_sizes", "list_folders"):
            patched.delattr(type(tier._store), listing)
        assert tier.read_newest_manifests() == tuple(whole), (
            "neither the unfinished one nor one that came later and is older"
        )
    assert listed() == before + 1
    tier.drop_checkpoint(Checkpoint(1, 20))
    assert {m.save.checkpoint for m in tier.read_newest_manifests()} == {Checkpoint(1, 10)}
    assert listed() == before + 2, "what it named is gone"


@pytest.fixture
def whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes of one object as S3 has them: versitygw keeps ETags in files beside the objects, and while one is
    replaced tells the new one's ETag with the old one's bytes. A write on that condition undoes the other (seen once)."""
    one_at_a_time, read, write = threading.Lock(), S3Store._read_with_condition, S3Store._put

    def reads(store: S3Store, path: str) -> Any:
        with one_at_a_time:
            return read(store, path)

    def writes(store: S3Store, *told: Any) -> bool:
        with one_at_a_time:
            return write(store, *told)

    monkeypatch.setattr(S3Store, "_read_with_condition", reads)
    monkeypatch.setattr(S3Store, "_put", writes)


@pytest.mark.usefixtures("whole_answers")
def test_of_many_that_commit_the_last_rank_at_once_the_newest_is_named(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    others = [open_persistent(settings, "job-1") for _ in range(6)]

    def save(number: int) -> None:
        save_one(others[number], RankSave(1, 10 + number // 2 * 10, number % 2))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(6)))
    before = listed()
    assert {m.save for m in tier.read_newest_manifests()} == {RankSave(1, 30, 0), RankSave(1, 30, 1)}
    assert listed() == before
    for other in others:
        other.close()


def test_a_part_is_known_again_by_its_bytes_not_by_its_length(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    if settings.endpoint and s3_server.versitygw() is None:
        pytest.skip("moto keeps no checksums")
    save, chunks = RankSave(1, 20, 0), [memoryview(b"a" * 100_000), memoryview(b"b" * 50_000)]
    assert tier.list_parts(save) == {}
    assert not tier.has_part(save, 0, chunks)
    tier.put_part(save, 0, chunks)
    tier.put_values(save, b"values")
    assert tier.list_parts(save) == {0: 150_000}
    assert tier.has_part(save, 0, chunks)
    assert not tier.has_part(save, 0, [chunks[0], memoryview(b"c" * 50_000)])
    assert tier._store.read("job-1/20-1/rank-0/p0000") == b"a" * 100_000 + b"b" * 50_000


def test_one_chunk_of_a_committed_save_is_written_again_in_its_part(
    tier: ObjectStoreTier, settings: PersistentSettings
) -> None:
    data = {"w": np.arange(40_000, dtype="float32").reshape(400, 100)}
    stream, content = stream_of(data, {"w": (Box.whole((400, 100)),)}, chunk_blocks=1)
    save, starts, lengths = RankSave(1, 20, 0), stream.layout.chunk_starts, stream.layout.chunk_lengths()
    assert len(lengths) > 2 * tier.chunks_per_part
    put_save(tier, save, 1, stream, content)
    path, last = "job-1/20-1/rank-0/p0001", tier.chunks_per_part * 2 - 1
    good = tier._store.read(path)
    for left in (bytes(len(good)), good[:-1]):
        tier._store.put(path, left)
        healer = open_persistent(settings, "job-1")
        assert [m.save for m in healer.manifests()] == [save]
        for index in range(tier.chunks_per_part, last + 1):
            healer.put_chunk(save, index, memoryview(content)[starts[index] : starts[index] + lengths[index]])
        assert tier._store.read(path) == good
        with pytest.raises(TierError, match="other bytes"):
            healer.put_chunk(save, last, memoryview(b"not of this length"))
        healer.close()
    assert tier.read_chunk(save, last, 8, 24) == content[starts[last] + 8 : starts[last] + 32]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server.running(tmp_path) as server:
        yield server


def test_an_s3_server_that_is_gone_is_unavailable_not_empty(s3: S3Server) -> None:
    tier = open_persistent(s3.settings(), "job-1")
    save_one(tier, RankSave(1, 20, 0))
    s3.stop()
    for attempt in (tier.manifests, tier.claim_generation, lambda: tier.put_values(RankSave(1, 30, 0), b"x")):
        with pytest.raises(TierUnavailable, match="s3://checkpoints"):
            attempt()
    tier.close()


def test_requests_are_counted_as_they_leave_and_tries_apart(s3: S3Server) -> None:
    def counted(attempt: str) -> float:
        return metrics.s3_requests.labels("PutObject", attempt)._value.get()

    tier = open_persistent(s3.settings(), "job-1")
    before = counted("first"), counted("retry")
    tier.put_values(RankSave(1, 20, 0), b"x")
    assert (counted("first"), counted("retry")) == (before[0] + 1, before[1])
    s3.stop()
    with pytest.raises(TierUnavailable):
        tier.put_values(RankSave(1, 20, 0), b"x")
    assert (counted("first"), counted("retry")) == (before[0] + 2, before[1] + 2), "three tries, and no more"
    tier.close()


def test_bytes_that_are_not_those_of_their_checksum_are_not_kept(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if s3.engine == "moto":
        pytest.skip("moto checks no checksums")
    tier, save = open_persistent(s3.settings(), "job-1"), RankSave(1, 20, 0)
    with monkeypatch.context() as patched:
        patched.setattr(RequestBody, "checksum", lambda _: "AAAAAA==")
        with pytest.raises(TierUnavailable):
            tier.put_part(save, 0, [memoryview(b"a" * 100_000)])
    assert tier.list_parts(save) == {}
    tier.close()


def test_over_tls_a_body_is_guarded_by_the_line_and_its_checksum(tmp_path: Path) -> None:
    with s3_server.running(tmp_path, over_tls=True) as server:
        if server.engine == "moto":
            pytest.skip("moto speaks no TLS")
        tier, save = open_persistent(server.settings(), "job-1"), RankSave(1, 20, 0)
        chunks = [memoryview(os.urandom(3_000_000)), memoryview(os.urandom(1_000_000))]
        tier.put_part(save, 0, chunks)
        assert tier.has_part(save, 0, chunks)
        assert tier._store.read("job-1/20-1/rank-0/p0000") == b"".join(chunks)
        manifest = save_one(tier, RankSave(1, 30, 0))
        assert tier.manifests() == (manifest,)
        tier.drop_checkpoint(Checkpoint(1, 20))
        assert tier.list_all_checkpoints() == (Checkpoint(1, 30),)
        with pytest.raises(TierUnavailable, match="SSL"):
            open_persistent(replace(server.settings(), ca_bundle=None), "job-1").list_all_checkpoints()
        tier.close()


def test_a_wrong_secret_or_bucket_is_said_without_saying_the_secret(s3: S3Server) -> None:
    if s3.engine == "moto":
        pytest.skip("moto does not check credentials")
    wrong = replace(s3.settings(), secret_key="a-wrong-secret")
    for settings, hint in (
        (wrong, "the secret's secret key is not the right one"),
        (replace(s3.settings(), access_key="nobody"), "the secret's access key is not known there"),
        (replace(s3.settings(), uri="s3://another-bucket/"), "create the bucket"),
    ):
        tier = open_persistent(settings, "job-1")
        with pytest.raises(TierUnavailable, match=hint) as caught:
            tier.put_values(RankSave(1, 1, 0), b"x")
        told = f"{caught.value} {caught.value.__cause__} {settings}"
        assert "a-wrong-secret" not in told
        assert s3_server.SECRET_KEY not in told
        assert "nobody" not in told
        tier.close()


def test_a_full_disk_is_full_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kept"
    tier = open_persistent(PersistentSettings(uri=root.as_uri()), "job-1", create_root=True)
    save = RankSave(1, 20, 0)
    tier.put_values(save, b"x")

    def half(path: Path, pieces: Sequence[memoryview], _create: object) -> None:
        path.write_bytes(bytes(pieces[0])[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_store, "_write_all", half)
    with pytest.raises(TierFull, match="No space left on device: free space"):
        tier.put_part(save, 0, [memoryview(b"123456")])
    assert os.listdir(root / "job-1" / "20-1" / "rank-0") == ["values"]
    monkeypatch.undo()
    tier.put_part(save, 0, [memoryview(b"123456")])
    assert tier.has_part(save, 0, [memoryview(b"123"), memoryview(b"456")])


def test_a_folder_that_went_away_is_unavailable_not_empty(tmp_path: Path) -> None:
    root = tmp_path / "mount" / "kept"
    tier = open_persistent(PersistentSettings(uri=root.as_uri()), "job-1", create_root=True)
    save_one(tier, RankSave(1, 20, 0))
    root.rename(tmp_path / "elsewhere")
    looks = (tier.manifests, tier.list_all_checkpoints, lambda: tier.read_values(RankSave(1, 20, 0)))
    later = open_persistent(PersistentSettings(uri=root.as_uri()), "job-1")  # as a thread does that opens its own
    writes = (tier.claim_generation, *(lambda to=to: save_one(to, RankSave(1, 30, 0)) for to in (tier, later)))
    for attempt in (*looks, *writes):
        with pytest.raises(TierUnavailable, match="check the disk or mount"):
            attempt()
    assert not root.exists(), "an empty tier begun where the disk was"
    (tmp_path / "elsewhere").rename(root)
    assert len(tier.manifests()) == 1
    with pytest.raises(ChunkMissing):
        tier.read_values(RankSave(1, 30, 0))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_mount_without_locks_keeps_saves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    tier = open_persistent(PersistentSettings(uri=tmp_path.as_uri()), "job-1")
    without = metrics.fallbacks.labels("directory_without_locks")._value.get()
    for rank in range(2):
        save_one(tier, RankSave(1, 20, rank))
    assert len(tier.read_newest_manifests()) == 2
    assert metrics.fallbacks.labels("directory_without_locks")._value.get() == without + 1


@pytest.mark.parametrize("uri", ["", "folder", "file://host/folder", "file:relative", "s3://", "gs://bucket", "s3:/x"])
def test_an_uri_that_is_not_one_is_refused_by_its_text(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="are allowed"):
        open_persistent(PersistentSettings(uri=uri), "job-1")


def test_a_folder_that_is_only_read_is_not_made_and_counts_as_silent(tmp_path: Path) -> None:
    tier = open_persistent(PersistentSettings(uri=(tmp_path / "older").as_uri()), "old", read_only=True)
    with pytest.raises(TierUnavailable, match="check the disk or mount"):
        tier.manifests()
    assert not (tmp_path / "older").exists()


def test_what_is_removed_while_it_is_listed_makes_nothing_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention goes on beside readers: for one of them a whole tier seemed to be away."""
    tier = open_persistent(PersistentSettings(uri=tmp_path.as_uri()), "job-1")
    for step in (10, 20):
        save_one(tier, RankSave(1, step, 0))
    listed = object_store.DirectoryStore._list_entries

    def overtaken(store: object_store.DirectoryStore, folder: str) -> list[os.DirEntry[str]]:
        entries = listed(store, folder)
        for entry in entries:
            if "10-1" in folder and entry.is_file():
                os.unlink(entry.path)
        return entries

    monkeypatch.setattr(object_store.DirectoryStore, "_list_entries", overtaken)
    assert [manifest.save.step for manifest in tier.manifests()] == [20]


@pytest.mark.parametrize(
    ("made", "folders", "files"), [(None, 0o700, 0o600), (0o755, 0o755, 0o644), (0o2770, 0o2770, 0o660)]
)
def test_what_lies_in_a_folder_is_as_open_as_the_folder_itself(
    tmp_path: Path, made: int | None, folders: int, files: int
) -> None:
    root = tmp_path / "kept"
    if made is not None:
        root.mkdir()
        root.chmod(made)
    former = os.umask(0o002)
    try:
        tier = open_persistent(PersistentSettings(uri=root.as_uri()), "job-1", create_root=True)
        save_one(tier, RankSave(1, 10, 0))
        tier.close()
    finally:
        os.umask(former)
    found = list(root.rglob("*"))
    assert {path.stat().st_mode & 0o7777 for path in (root, *found) if path.is_dir()} == {folders}
    assert {path.stat().st_mode & 0o7777 for path in found if path.is_file()} == {files}
