"""A program that another one overtook in library mode removes nothing that the other may stand on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from surefoot.checkpointer.library_mode.other_writers import WriterMark, WriterWatch
from surefoot.flush.garbage_collection import RetentionThread
from surefoot.format.layouts import Stream, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import RankSave
from surefoot.tiers import ObjectStoreTier
from surefoot.tiers.object_store import DirectoryStore

LINEAGE = (LineageEntry(1, None, 1),)


def open_tier(folder: Path) -> ObjectStoreTier:
    return ObjectStoreTier(DirectoryStore(folder), "job")


def save(tier: ObjectStoreTier, *steps: int) -> None:
    stream = Stream(build_layout([]))
    for step in steps:
        rank_save = RankSave(1, step, 0)
        tier.put_layout(stream.digest, stream.text)
        tier.put_values(rank_save, b"values")
        tier.put_digests(rank_save, b"")
        tier.commit(build_manifest(rank_save, 1, "abc", stream, (b"", b"values"), 1.0), 1, ())


def steps_in(folder: Path) -> list[int]:
    with closing(open_tier(folder)) as tier:
        return [checkpoint.step for checkpoint in tier.list_all_checkpoints()]


class LateWatch(WriterWatch):
    """Another program begins while this one looks, and stands on what was saved last."""

    def check(self, tier: ObjectStoreTier) -> bool:
        if not self.overtaken:
            save(tier, 30)
            tier.claim_generation()
        return super().check(tier)


def test_what_was_saved_while_another_program_began_stays(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        assert tier.claim_generation() == 1
        save(tier, 10, 20)
        keeper = RetentionThread(lambda: open_tier(tmp_path), LINEAGE, 1, 1, LateWatch(1, WriterMark.here()))
        keeper.collect_now()
        save(tier, 40, 50)
        keeper.collect_now()
        keeper.close()
    assert steps_in(tmp_path) == [10, 20, 30, 50]


def test_a_rank_that_makes_room_removes_nothing_once_another_program_began(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path)) as tier:
        assert tier.claim_generation() == 1
        save(tier, 10, 20, 30)
        assert tier.claim_generation() == 2
    keeper = RetentionThread(lambda: open_tier(tmp_path), LINEAGE, 1, 3, leads=False)
    keeper.free_space()
    keeper.close()
    assert steps_in(tmp_path) == [10, 20, 30]
