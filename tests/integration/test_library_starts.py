"""Without an agent: what one start did not see costs no later start anything, and what is named is never begun over."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import surefoot
from surefoot.checkpointer.library_mode import epoch_records, library
from surefoot.checkpointer.library_mode.epoch_records import write_record
from surefoot.errors import ChunkMissing, ConfigurationError, Unreadable
from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint
from surefoot.tiers.object_store import DirectoryStore
from surefoot.tiers.persistent import ObjectStoreTier

STEPS = (10, 20, 35)


class Training:
    """A module whose state at each step follows from the step alone."""

    def __init__(self, folder: Path, keep: int = 9) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(20, 20)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.checkpointer = surefoot.Checkpointer(
            model=self.model, optimizer=self.optimizer, folder=str(folder), interval_steps=1000, keep=keep
        )
        self.start = self.checkpointer.restore()

    def run(self, *save_at: int) -> Training:
        for step in range(self.start + 1, save_at[-1] + 1):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 20), float(step))).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()
            if step in save_at:
                assert self.checkpointer.save_now()
                assert self.checkpointer._backend.wait_for_flush(30)
        return self

    def close(self) -> None:
        self.checkpointer.close()


def started(folder: Path) -> int:
    """What a start that saves nothing goes on from."""
    with closing(Training(folder)) as training:
        return training.start


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    Training(folder).run(*STEPS).close()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that end soon: they are tested by themselves."""
    monkeypatch.setattr(epoch_records, "MIN_SECONDS", 0.3)
    monkeypatch.setattr(epoch_records, "UNKNOWN_STEP_SECONDS", 0.01)
    monkeypatch.setattr(library, "step_seconds_of", lambda manifests: None)
    monkeypatch.setattr(epoch_records, "MISSING_SECONDS", 0.3)
    monkeypatch.setattr(epoch_records, "AWAY_SECONDS", 0.3)


def blind_start(folder: Path, parent: Checkpoint | None) -> None:
    """A start that saw too little, recorded it, and was killed before its first save."""
    with closing(ObjectStoreTier(DirectoryStore(folder), "default")) as tier:
        write_record(tier, LineageEntry(tier.claim_generation(), parent, 1))


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "default").iterdir() if path.name[0].isdecimal()}


@pytest.mark.parametrize("parent", [Checkpoint(1, 20), None], ids=["an older one", "nothing"])
def test_a_start_that_saved_nothing_cuts_nothing_off(parent: Checkpoint | None, folder: Path) -> None:
    blind_start(folder, parent)
    blind_start(folder, parent)
    assert started(folder) == 35
    assert names(folder) == {"10-1", "20-1", "35-1"}


def test_a_manifest_that_is_unreadable_for_one_start_is_restored_by_the_next(
    folder: Path, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as meanwhile:
        failing(meanwhile, "35-1/rank-0.json", 9999, throttled)
        with pytest.raises(Unreadable, match=r"step 35 of generation 1 cannot be read.*SUREFOOT_ACCEPT_STEP=20"):
            Training(folder)
        meanwhile.setenv("SUREFOOT_ACCEPT_STEP", "20")
        older = Training(folder)
        assert older.start == 20
        older.run(25).close()

    assert started(folder) == 35, "what that start saved is not newer"
    assert {"25-2", "35-1"} <= names(folder)


def test_what_a_start_saves_beyond_what_it_passed_over_is_what_counts(
    folder: Path, hasty: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = folder / "default" / "35-1" / "rank-0.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        training = Training(folder, keep=1)
    assert training.start == 20
    assert "The next start tries the former again if no newer step is saved" in caplog.text
    training.run(30, 40).close()
    manifest.write_bytes(good)
    assert "35-1" in names(folder), "what could not be read is not removed"
    assert started(folder) == 40


@pytest.mark.parametrize(
    ("gone", "older"), [(("10-1", "20-1", "35-1"), 0), (("35-1",), 20)], ids=["all", "the newest alone"]
)
def test_a_checkpoint_that_is_named_and_gone_is_an_error_that_names_it(
    gone: tuple[str, ...], older: int, folder: Path, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in gone:
        shutil.rmtree(folder / "default" / name)
    with pytest.raises(Unreadable, match=rf"newest.json names step 35 of generation 1.*SUREFOOT_ACCEPT_STEP={older} "):
        Training(folder)
    assert {p.name for p in (folder / "default" / "generations").iterdir()} == {"1", "1.json"}, "nothing is claimed"
    monkeypatch.setenv("SUREFOOT_ACCEPT_STEP", str(older))
    training = Training(folder)
    assert training.start == older
    training.run(older + 5).close()
    monkeypatch.delenv("SUREFOOT_ACCEPT_STEP")
    assert started(folder) == older + 5, "a newer save replaces the record"


def test_what_is_accepted_is_exactly_one_step(folder: Path, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "default" / "35-1")
    monkeypatch.setenv("SUREFOOT_ACCEPT_STEP", "10")
    with pytest.raises(Unreadable, match="names step 35"):
        Training(folder)
    monkeypatch.setenv("SUREFOOT_ACCEPT_STEP", "-1")
    with pytest.raises(ConfigurationError, match="SUREFOOT_ACCEPT_STEP"):
        Training(folder)


def hidden(monkeypatch: pytest.MonkeyPatch, times: int, *gone: str) -> None:
    """A listing of checkpoints that lacks some, so many times."""
    true, left = DirectoryStore.list_folders, [times]

    def folders(self: DirectoryStore, where: str) -> list[str]:
        left[0] -= 1
        return [name for name in true(self, where) if left[0] < 0 or name not in gone]

    monkeypatch.setattr(DirectoryStore, "list_folders", folders)


def test_a_stale_listing_hides_nothing_that_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden(monkeypatch, 99, "10-1", "20-1", "35-1")
    assert started(folder) == 35


def test_what_is_named_and_missing_is_looked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = folder / "aside"
    (folder / "default" / "35-1").rename(aside)
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        aside.rename(folder / "default" / "35-1")

    monkeypatch.setattr(library, "Patience", lambda: epoch_records.Patience(sleep=sleep))
    assert started(folder) == 35
    assert len(waits) == 1


@pytest.mark.parametrize("record", ["damaged", "unreadable"])
def test_a_record_of_the_newest_that_says_nothing_stops_no_clear_listing_and_no_empty_one(
    record: str, folder: Path, hasty: None
) -> None:
    newest = folder / "default" / "newest.json"
    newest.unlink()
    newest.write_text("<html>portal</html>") if record == "damaged" else newest.mkdir()
    assert started(folder) == 35
    for name in names(folder):
        shutil.rmtree(folder / "default" / name)
    with pytest.raises(Unreadable, match=r"no checkpoint can be restored, and .*newest\.json"):
        Training(folder)


def failing(monkeypatch: pytest.MonkeyPatch, part: str, times: int, fault: Callable[[bytes], bytes]) -> list[str]:
    """Spoils so many reads of files whose path holds `part`; returns which."""
    true, struck = DirectoryStore.read, list[str]()

    def read(self: DirectoryStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = true(self, path, offset, length)
        if part not in path or len(struck) >= times:
            return data
        struck.append(path)
        with self._translate_errors("reading", path):
            return fault(data)

    monkeypatch.setattr(DirectoryStore, "read", read)
    return struck


def throttled(data: bytes) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def missing(data: bytes) -> bytes:
    raise ChunkMissing("it is not there")


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def test_a_silent_manifest_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck = failing(monkeypatch, "35-1/rank-0.json", 7, throttled)
    waits: list[float] = []
    monkeypatch.setattr(library, "Patience", lambda: epoch_records.Patience(sleep=waits.append))
    assert started(folder) == 35
    assert len(struck) == 7
    assert len(waits) == 2


@pytest.mark.parametrize("twin", ["generations/1.json", "lineage/1.json"])
def test_of_two_records_of_an_epoch_one_may_be_unreadable(twin: str, folder: Path, hasty: None) -> None:
    (folder / "default" / twin).unlink()
    (folder / "default" / twin).mkdir()
    assert started(folder) == 35


@pytest.mark.parametrize("fault", [flipped, cut, missing])
@pytest.mark.parametrize(
    "part", ["35-1/rank-0.json", "35-1/rank-0/p0000", "rank-0/values", "rank-0/digests", "layouts/"]
)
def test_one_bad_read_is_no_verdict(
    part: str,
    fault: Callable[[bytes], bytes],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    struck = failing(monkeypatch, part, 1, fault)
    with caplog.at_level(logging.WARNING):
        assert started(folder) == 35
    assert len(struck) == 1
    assert "reading another copy" not in caplog.text


def test_a_manifest_that_comes_spoiled_while_it_is_restored_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = surefoot.Checkpointer(model=torch.nn.Linear(20, 20), folder=str(folder))
    with closing(training):
        struck = failing(monkeypatch, "35-1/rank-0.json", 1, flipped)
        assert training.restore(strict=False) == 35
        assert len(struck) == 1
