"""The list of a checkpoint's manifests in the persistent tier: what it saves, and that it never tells more than lies there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot import metrics
from surefoot.errors import TierUnavailable
from surefoot.flush.garbage_collection import survey_tier
from surefoot.format.layouts import Stream, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.tiers import ObjectStoreTier
from surefoot.tools.rank_streams import ByteProgress
from surefoot.tools.verify import describe_checkpoint as describe_checkpoint

WORLD = 12
WHOLE = Checkpoint(1, 10)
LIST = "job-1/10-1/manifests.jsonl"


@pytest.fixture
def reads(tier: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were read from the store."""
    told: list[str] = []
    plain = tier._store.read

    def read(path: str, offset: int = 0, length: int | None = None) -> bytes:
        told.append(path)
        return plain(path, offset, length)

    monkeypatch.setattr(tier._store, "read", read)
    return told


def save_ranks(tier: ObjectStoreTier, ranks: range, step: int = 10) -> tuple[RankManifest, ...]:
    saved = []
    for rank in ranks:
        save, stream = RankSave(1, step, rank), Stream(build_layout([]))
        tier.put_layout(stream.digest, stream.text)
        tier.put_values(save, b"values")
        tier.put_digests(save, b"")
        manifest = build_manifest(save, WORLD, "abc", stream, (b"", b"values"), 1.0)
        tier.commit(manifest, 1, ())
        saved.append(manifest)
    return tuple(saved)


def test_all_ranks_of_a_whole_checkpoint_are_one_read(tier: ObjectStoreTier, reads: list[str]) -> None:
    saved = save_ranks(tier, range(WORLD))
    rest = save_ranks(tier, range(3), step=20)
    reads.clear()
    assert survey_tier(tier).manifests == saved + rest
    assert reads.count(LIST) == 1
    assert len(reads) == 4, "the list, and the three of a checkpoint that has none yet"
    reads.clear()
    assert tier.manifests_of(WHOLE) == saved
    assert reads == [LIST]
    reads.clear()
    assert survey_tier(tier, {m.save: m for m in saved + rest}).manifests == saved + rest
    assert reads == [], "what was read before is still there"


def test_a_list_tells_no_manifest_that_is_gone_or_is_another_one(tier: ObjectStoreTier, reads: list[str]) -> None:
    saved = save_ranks(tier, range(WORLD))
    tier._store.remove("job-1/10-1/rank-3.json")
    assert [m.save.rank for m in survey_tier(tier).manifests] == [0, 1, 2, *range(4, WORLD)]
    remembered = {m.save: m for m in saved}
    assert len(survey_tier(tier, remembered).manifests) == WORLD - 1, "what is remembered is not there either"
    other = replace(saved[5], saved_at=1234.5)
    tier._store.put("job-1/10-1/rank-5.json", other.to_json().encode())
    tier._store.put("job-1/10-1/rank-7.json", b"cut off")
    reads.clear()
    found = survey_tier(tier, remembered)
    assert other in found.manifests
    assert [one.checkpoint for one in found.unread_records] == [WHOLE]
    assert "rank-7.json" in found.unread_records[0].reason
    assert set(reads) >= {"job-1/10-1/rank-5.json", "job-1/10-1/rank-7.json"}


@pytest.mark.parametrize("trouble", ["gone", "damaged", "of another checkpoint", "nested without end", "silent"])
def test_a_list_that_cannot_be_read_costs_reads_and_nothing_else(
    tier: ObjectStoreTier, reads: list[str], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_ranks(tier, range(WORLD))
    good = tier._store.read(LIST)
    if trouble == "gone":
        tier._store.remove(LIST)
    elif trouble == "damaged":
        tier._store.put(LIST, good.replace(b'"world_size":12', b'"world_size":13'))
    elif trouble == "nested without end":
        tier._store.put(LIST, b"[" * 100_000 + good)
    elif trouble == "of another checkpoint":
        tier._store.put(LIST, good.replace(b'"step":10', b'"step":20'))
    else:
        plain = tier._store.read

        def read(path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path == LIST:
                raise TierUnavailable("the server is busy")
            return plain(path, offset, length)

        monkeypatch.setattr(tier._store, "read", read)
    before = metrics.fallbacks.labels("manifest_list_unreadable")._value.get()
    reads.clear()
    found = survey_tier(tier)
    assert (found.manifests, found.unread_records) == (saved, ())
    assert sum(path.endswith(".json") for path in reads) == WORLD
    assert metrics.fallbacks.labels("manifest_list_unreadable")._value.get() == before + (trouble != "gone")


def test_the_list_goes_first_and_comes_last(tier: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch) -> None:
    save_ranks(tier, range(WORLD - 1))
    assert "manifests.jsonl" not in tier._store.list_sizes("job-1/10-1")
    save_ranks(tier, range(WORLD - 1, WORLD))
    assert "manifests.jsonl" in tier._store.list_sizes("job-1/10-1")
    removed: list[str] = []
    plain = tier._store.remove
    monkeypatch.setattr(tier._store, "remove", lambda path: (removed.append(path), plain(path)))
    tier.drop_checkpoint(WHOLE)
    assert removed[0] == LIST
    assert tier.list_all_checkpoints() == ()
    save_ranks(tier, range(WORLD), step=20)
    removed.clear()
    for rank in range(WORLD):
        tier.delete_save(RankSave(1, 20, rank), 1, 0)
    assert removed[0] == "job-1/20-1/manifests.jsonl"
    assert tier.list_all_checkpoints() == ()


def test_verifying_reads_each_manifest_itself(tier: ObjectStoreTier) -> None:
    saved = save_ranks(tier, range(WORLD))
    assert describe_checkpoint(tier, WHOLE, {m.save.rank: m for m in saved}, ByteProgress(0))["damaged"] == []
    text = saved[4].to_json().encode()
    tier._store.put("job-1/10-1/rank-4.json", text.replace(b'"world_size":12', b'"world_size":13'))
    assert tier.manifests() == saved, "a restore goes by the list"
    (damage,) = describe_checkpoint(tier, WHOLE, {m.save.rank: m for m in saved}, ByteProgress(0))["damaged"]
    assert "rank-4.json" in damage


def test_a_list_that_cannot_be_written_fails_no_save(tier: ObjectStoreTier, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tier._store.put

    def put(path: str, *pieces: bytes | memoryview) -> None:
        if path == LIST:
            raise TierUnavailable("the server is busy")
        plain(path, *pieces)

    monkeypatch.setattr(tier._store, "put", put)
    before = metrics.fallbacks.labels("manifest_list_write_failed")._value.get()
    saved = save_ranks(tier, range(WORLD))
    assert metrics.fallbacks.labels("manifest_list_write_failed")._value.get() == before + 1
    assert tier.read_newest_manifests() == saved
