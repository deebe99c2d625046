"""What an agent tells of the persistent tier: manifests once, by pages, and the layouts that are asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes.asked_chores import answers
from surefoot.agent import coordinator_requests as chores
from surefoot.errors import TierFull
from surefoot.flush.garbage_collection import survey_tier
from surefoot.format.layouts import Stream, build_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.identities import RankSave, SourceJob
from surefoot.protocol.messages import ListPersistent, PersistentPage
from surefoot.settings import JobSettings, PersistentSettings, job_settings
from surefoot.tiers import ObjectStoreTier, open_persistent
from surefoot.tiers.persistent_records import GenerationRecords


@pytest.fixture
def job(tmp_path: Path) -> JobSettings:
    persistent = PersistentSettings(uri=(tmp_path / "kept").as_uri())
    return replace(job_settings({"SUREFOOT_JOB_UID": "job-1"}), persistent=persistent)


def save(job: JobSettings, ranks: range, folder: str = "job-1") -> str:
    assert job.persistent is not None
    tier = open_persistent(job.persistent, folder, create_root=True)
    stream = Stream(build_layout([]))
    for rank in ranks:
        tier.put_layout(stream.digest, stream.text)
        tier.put_values(RankSave(1, 10, rank), b"values")
        tier.put_digests(RankSave(1, 10, rank), b"")
        tier.commit(build_manifest(RankSave(1, 10, rank), 4, "abc", stream, (b"", b"values"), 1.0), 1, ())
    tier.close()
    return stream.digest


def test_layouts_come_as_far_as_they_are_asked_for(job: JobSettings) -> None:
    digest = save(job, range(2))
    everything, manifests, layouts, none = answers(
        job,
        ListPersistent(1),
        ListPersistent(2, layouts=()),
        ListPersistent(3, manifests=False, layouts=(digest, "0" * 16)),
        ListPersistent(4, manifests=False, layouts=()),
    )
    assert isinstance(everything, PersistentPage)
    assert (len(everything.manifests), list(everything.layouts)) == (2, [digest])
    assert isinstance(manifests, PersistentPage)
    assert (manifests.manifests, manifests.layouts) == (everything.manifests, {})
    assert isinstance(layouts, PersistentPage)
    assert (layouts.manifests, layouts.layouts) == ((), everything.layouts)
    assert [one.digest for one in layouts.unread_records] == ["0" * 16], "one that is not there is named"
    assert none == PersistentPage(4)


def test_pages_hold_what_fits_and_the_last_says_so(job: JobSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    save(job, range(4))
    monkeypatch.setattr(chores, "PAGE_BYTES", 500)
    pages = [page for page in answers(job, ListPersistent(1)) if isinstance(page, PersistentPage)]
    assert [(page.page, page.more) for page in pages] == [(n, n < len(pages) - 1) for n in range(len(pages))]
    assert sum(len(page.manifests) for page in pages) == 4
    assert len(pages) > 2


def test_manifests_are_remembered_as_long_as_they_lie_there(job: JobSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    save(job, range(3))
    save(job, range(1), folder="older")
    reads: list[RankSave] = []
    plain = ObjectStoreTier.read_manifest

    def read(tier: ObjectStoreTier, wanted: RankSave) -> object:
        reads.append(wanted)
        return plain(tier, wanted)

    monkeypatch.setattr(ObjectStoreTier, "read_manifest", read)
    assert job.persistent is not None
    older = SourceJob(job.persistent.uri, "older")
    answers(job, ListPersistent(1), ListPersistent(2), ListPersistent(3, older), ListPersistent(4))
    assert sorted(reads) == [RankSave(1, 10, rank) for rank in (0, 0, 1, 2)], "each folder's once"


def test_a_look_that_remembers_finds_what_came_and_what_went(job: JobSettings) -> None:
    save(job, range(3))
    assert job.persistent is not None
    tier = open_persistent(job.persistent, "job-1")
    remembered = {m.save: m for m in survey_tier(tier).manifests}
    tier.delete_save(RankSave(1, 10, 1), 1, 0)
    save(job, range(3, 4))
    assert [m.save.rank for m in survey_tier(tier, remembered).manifests] == [0, 2, 3]
    tier.close()


def test_a_folder_that_went_away_is_not_made_anew_and_is_named(job: JobSettings, tmp_path: Path) -> None:
    save(job, range(1))
    (tmp_path / "kept").rename(tmp_path / "away")
    (answer,) = answers(job, ListPersistent(1, begin=False))
    assert isinstance(answer, PersistentPage)
    assert answer.error is not None
    assert f"folder {tmp_path / 'kept'}" in answer.error
    assert not (tmp_path / "kept").exists()
    (tmp_path / "kept").mkdir()  # as an unmounted share leaves it
    (empty,) = answers(job, ListPersistent(1, begin=False))
    assert isinstance(empty, PersistentPage)
    assert empty.error is not None
    assert f"{tmp_path / 'kept' / 'job-1'} is missing" in empty.error
    assert list((tmp_path / "kept").iterdir()) == []
    (begun,) = answers(job, ListPersistent(1, begin=True))
    assert isinstance(begun, PersistentPage)
    assert begun.error is None


def test_an_epoch_is_claimed_once_and_a_listing_names_what_others_have(job: JobSettings) -> None:
    def newest(epoch: int, ticket: str) -> int:
        (answer,) = answers(job, ListPersistent(1, claim_generation=epoch, claim_ticket=ticket))
        assert isinstance(answer, PersistentPage)
        return answer.newest_generation

    assert newest(2, "first") == 0
    assert newest(2, "first") == 0, "the same claim again is the same"
    assert newest(2, "restored from a backup") == 2
    assert newest(3, "restored from a backup") == 2
    save(job, range(1))
    assert newest(1, "restored from an older one") == 3
    assert newest(0, "") == 3, "who claims nothing hears of all"


def test_a_tier_that_takes_no_writes_is_listed_all_the_same(job: JobSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that lost its memory restores from a full disk, or with a credential that may only read."""
    save(job, range(1))

    def full(*_: object) -> bool:
        raise TierFull("the disk is full")

    monkeypatch.setattr(GenerationRecords, "claim_with_ticket", full)
    (answer,) = answers(job, ListPersistent(1, claim_generation=5, claim_ticket="mine"))
    assert isinstance(answer, PersistentPage)
    assert answer.error is None
    assert len(answer.manifests) == 1
    assert answer.newest_generation < 5, "the claim that could not be written is not taken for another's"
