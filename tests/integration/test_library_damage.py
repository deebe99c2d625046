"""Without an agent: whatever is damaged, a job goes on from what is whole and says what it passed over, or refuses.

It never begins at step 0 beside checkpoints, and never removes what it could not read.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import surefoot
from support.fakes.asked_chores import answers
from surefoot.errors import TierUnavailable, Unreadable
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import ListPersistent, PersistentPage
from surefoot.settings import PersistentSettings, job_settings
from surefoot.tiers.object_store import DirectoryStore

Damage = Callable[[Path], None]
STEPS = (10, 20, 35)


class Training:
    """A module and an optimizer whose state at each step follows from the step alone."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.checkpointer = surefoot.Checkpointer(
            model=self.model, optimizer=self.optimizer, folder=str(folder), interval_steps=1000, keep=3
        )

    def run(self, first: int, last: int, save_at: tuple[int, ...]) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 40), float(step))).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()
            if step in save_at:
                assert self.checkpointer.save_now()
                assert self.checkpointer._backend.wait_for_flush(30)

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    """A folder with whole checkpoints, and the weights of each."""
    folder = tmp_path_factory.mktemp("saved")
    training, weights, before = Training(folder), {}, 0
    training.checkpointer.restore()
    for step in STEPS:
        training.run(before + 1, step, (step,))
        weights[step], before = training.weights(), step
    training.checkpointer.close()
    assert sorted(p.name for p in (folder / "default").glob("*-1")) == ["10-1", "20-1", "35-1"]
    return folder, weights


@pytest.fixture
def folder(saved: tuple[Path, dict[int, torch.Tensor]], tmp_path: Path) -> Path:
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def flipped(pattern: str, at: float = 0.5) -> Damage:
    def strike(job: Path) -> None:
        (path,) = job.glob(pattern)
        data = bytearray(path.read_bytes())
        data[int(len(data) * at)] ^= 1
        path.write_bytes(data)

    return strike


def removed(*patterns: str) -> Damage:
    def strike(job: Path) -> None:
        for pattern in patterns:
            for path in list(job.glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return strike


def truncated(pattern: str) -> Damage:
    def strike(job: Path) -> None:
        (path,) = job.glob(pattern)
        path.write_bytes(path.read_bytes()[:100])

    return strike


def of_format_2(job: Path) -> None:
    path = job / "35-1" / "rank-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))


def swapped(job: Path) -> None:
    one, other = job / "35-1/rank-0/p0000", job / "20-1/rank-0/p0000"
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def foreign(job: Path) -> None:
    (job / "notes.txt").write_text("mine")
    (job / "90-x").mkdir()
    (job / "generations" / "old.json").write_text("{}")


def both(*strikes: Damage) -> Damage:
    return lambda job: [strike(job) for strike in strikes] and None  # type: ignore[func-returns-value]


CASES: dict[str, tuple[Damage, int, str]] = {
    # what is struck: what must be restored, and what must be named
    "a flipped layout": (flipped("layouts/*.json"), 35, "layouts"),
    "no layout": (removed("layouts/*.json"), 35, "layouts"),
    "no layout at all for 35": (removed("layouts/*.json", "35-1/rank-0/layout"), 35, "layouts"),
    "a flipped epoch": (flipped("generations/1.json"), 35, "epoch 1"),
    "a lost epoch": (both(flipped("generations/1.json"), removed("generations/1")), 35, "epoch 1"),
    "both records of the epoch lost": (removed("generations", "lineage"), 35, "epoch 1"),
    "a flipped manifest": (flipped("35-1/rank-0.json"), 20, "35-1/rank-0.json"),
    "a manifest of format 2": (of_format_2, 20, "35-1/rank-0.json"),
    "a removed manifest": (removed("35-1/rank-0.json"), 20, "step 35 of generation 1"),
    "a flipped part": (flipped("35-1/rank-0/p0000"), 20, "chunk 0"),
    "flipped digests": (flipped("35-1/rank-0/digests"), 20, "digest"),
    "flipped values": (flipped("35-1/rank-0/values"), 20, "values"),
    "a truncated part": (truncated("35-1/rank-0/p0000"), 20, "p0000"),
    "a removed part": (removed("35-1/rank-0/p0000"), 20, "p0000"),
    "parts that changed places": (swapped, 10, "chunk 0"),
    "two damaged checkpoints": (both(flipped("35-1/rank-0.json"), flipped("20-1/rank-0/p0000")), 10, "20"),
    "a wrong record of the newest": (lambda job: void((job / "newest.json").write_text("{]")), 35, ""),
    "foreign files": (foreign, 35, ""),
}


def void(_: object) -> None:
    return None


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_gone_on_from_and_what_was_passed_over_is_named(
    case: str, folder: Path, saved: tuple[Path, dict[int, torch.Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    strike, wanted, named = CASES[case]
    strike(folder / "default")
    with caplog.at_level(logging.WARNING):
        training = Training(folder)
        start = training.checkpointer.restore()
        newest = training.checkpointer.latest()
        assert start == wanted
    assert torch.equal(training.weights(), saved[1][wanted])
    (layout,) = (saved[0] / "default" / "layouts").iterdir()
    assert (folder / "default" / "layouts" / layout.name).read_bytes() == layout.read_bytes(), (
        "mended where it was struck"
    )
    told = [record.getMessage() for record in caplog.records]
    assert any(named in text for text in told) or not named, told
    assert newest is not None
    if wanted != 35:
        assert any("step 35 of generation 1" in text and f"step {wanted} of generation 1" in text for text in told), (
            told
        )
    training.run(start + 1, start + 30, (start + 10, start + 20))
    training.checkpointer.close()

    with closing(Again(folder)) as again:
        assert again.start == start + 30, "what it saved since is what counts now"


class Again:
    def __init__(self, folder: Path) -> None:
        self._training = Training(folder)
        self.start = self._training.checkpointer.restore()

    def close(self) -> None:
        self._training.checkpointer.close()


@pytest.mark.parametrize("what", ["layouts", "manifests", "parts"])
def test_where_nothing_can_be_restored_it_refuses_names_the_files_and_leaves_all_as_it_is(
    what: str, folder: Path
) -> None:
    job = folder / "default"
    if what == "layouts":
        removed("layouts/*.json", "*-1/rank-0/layout")(job)
    elif what == "manifests":
        for step in STEPS:
            flipped(f"{step}-1/rank-0.json")(job)
    else:
        removed("*-1/rank-0/p0000")(job)
    before = {path: path.read_bytes() for path in job.rglob("*") if path.is_file() and "generations" not in str(path)}
    with pytest.raises(Unreadable, match=r"none can be restored.*step 35 of generation 1.*job_uid= or folder="):
        Training(folder).checkpointer.restore()
    assert {p: p.read_bytes() for p in before if p.exists()} == before


@pytest.mark.parametrize("path", ["layouts", "rank-0.json", "generations/1.json", ""])
def test_one_request_that_fails_at_the_start_costs_nothing(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def once(self: DirectoryStore, name: str, *more: int | None) -> bytes:
        if path in name and not failed:
            failed.append(name)
            raise TierUnavailable("the tier did not answer")
        return read(self, name, *more)  # type: ignore[arg-type]

    read = DirectoryStore.read
    monkeypatch.setattr(DirectoryStore, "read", once)
    training = Training(folder)
    assert (training.checkpointer.restore(), len(failed)) == (35, 1)
    training.checkpointer.close()


def test_a_tier_that_is_away_at_the_start_is_an_error_and_not_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: DirectoryStore, name: str, *more: int | None) -> bytes:
        raise TierUnavailable("the tier did not answer")

    monkeypatch.setattr(DirectoryStore, "read", away)
    with pytest.raises((TierUnavailable, Unreadable), match="did not answer"):
        Training(folder)
    assert sorted(p.name for p in (folder / "default" / "generations").iterdir()) == ["1", "1.json"], (
        "nothing is claimed"
    )


def test_what_cannot_be_judged_is_not_removed_by_later_saves(folder: Path) -> None:
    flipped("20-1/rank-0.json")(folder / "default")
    training = Training(folder)
    start = training.checkpointer.restore()
    training.run(start + 1, start + 50, tuple(range(start + 10, start + 51, 10)))
    training.checkpointer.close()
    left = {p.name for p in (folder / "default").iterdir() if p.name[0].isdecimal()}
    assert {"20-1", "85-2"} <= left
    assert "10-1" not in left, "what was read and is superseded goes as always"


def test_another_program_in_the_folder_is_told_whose_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/other/finetune.py"])
    with caplog.at_level(logging.WARNING):
        Training(folder).checkpointer.close()
    told = " ".join(record.getMessage() for record in caplog.records)
    assert " of the run begun with `" in told
    assert "this is another program, /home/other/finetune.py" in told
    assert "end it now and give it a job_uid= or a folder=" in told


def listings(folder: Path, *requests: ListPersistent) -> list[PersistentPage]:
    """What an agent of the job answers."""
    persistent = PersistentSettings(uri=folder.as_uri())
    job = replace(job_settings({"SUREFOOT_JOB_UID": "default"}), persistent=persistent)
    return [answer for answer in answers(job, *requests) if isinstance(answer, PersistentPage)]


def test_an_agents_listing_leaves_out_one_damaged_manifest_and_names_it(folder: Path) -> None:
    flipped("35-1/rank-0.json")(folder / "default")
    listing, again = listings(folder, ListPersistent(7), ListPersistent(8, layouts=()))
    assert (listing.request, listing.error, listing.more) == (7, None, False)
    assert [RankManifest.from_json(text).save.step for text in listing.manifests] == [10, 20]
    assert len(listing.layouts) == 1
    (left_out,) = listing.unread_records
    assert (left_out.checkpoint, left_out.is_silent) == (Checkpoint(1, 35), False)
    assert "35-1/rank-0.json" in left_out.reason
    assert (again.manifests, again.layouts) == (listing.manifests, {})
    assert again.unread_records == listing.unread_records, "what was remembered is no less damaged"


def test_an_agents_listing_names_a_layout_that_is_lost_and_keeps_all_else(folder: Path) -> None:
    removed("layouts/*.json", "*-1/rank-0/layout")(folder / "default")
    (listing,) = listings(folder, ListPersistent(7))
    assert (listing.error, len(listing.manifests), listing.layouts) == (None, 3, {})
    assert [one.digest for one in listing.unread_records] == [RankManifest.from_json(listing.manifests[0]).layout]


@pytest.mark.parametrize("part", ["p0000", "digests", "values"])
def test_one_object_that_is_refused_for_ever_gives_way_to_the_next_older_checkpoint(
    part: str,
    folder: Path,
    saved: tuple[Path, dict[int, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("surefoot.restore.copy_choice.REJECTION_TIMEOUT_SECONDS", 1.0)
    path = folder / "default" / "35-1" / "rank-0" / part
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        training = Training(folder)
        assert training.checkpointer.restore() == 20
    assert torch.equal(training.weights(), saved[1][20])
    training.checkpointer.close()
    told = " ".join(record.getMessage() for record in caplog.records)
    assert f"35-1/rank-0/{part}: Is a directory" in told
