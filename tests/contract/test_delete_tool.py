"""Deleting what a job has in its persistent tier: on a folder and on a bucket, and nothing of its neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.settings import JobSettings, PersistentSettings, job_environment
from surefoot.tiers.persistent import open_persistent
from surefoot.tools import delete

Answer = tuple[int, dict[str, object]]


def job(uid: str, place: PersistentSettings) -> JobSettings:
    return JobSettings(uid, 10, 2, 2, "u", "", persistent=place)


def steps(settings: JobSettings) -> list[int]:
    assert settings.persistent is not None
    tier = open_persistent(settings.persistent, settings.job)
    try:
        return [c.step for c in tier.list_all_checkpoints()]
    finally:
        tier.close()


def fill(settings: JobSettings) -> None:
    assert settings.persistent is not None
    tier = open_persistent(settings.persistent, settings.job, create_root=True)
    for step in (10, 20):
        for rank in (0, 1):
            tier.put_part(RankSave(1, step, rank), 0, [memoryview(b"bytes")])
    tier.put_layout("0" * 16, "{}")
    tier.claim_generation()
    tier.close()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(settings: JobSettings, *arguments: str) -> Answer:
        for name, value in job_environment(settings).items():
            monkeypatch.setenv(name, value)
        code = delete.main(list(arguments))
        return code, json.loads(capsys.readouterr().out)

    return call


def test_a_job_goes_whole_and_its_neighbour_stays(called: Callable[..., Answer], place: PersistentSettings) -> None:
    mine, other = job("mine", place), job("mine-too", place)
    fill(mine)
    fill(other)
    code, said = called(mine)
    assert (code, said["deleted"]) == (0, True)
    assert said["checkpoints"] == [{"step": 10, "generation": 1}, {"step": 20, "generation": 1}]
    assert (steps(mine), steps(other)) == ([], [10, 20])
    assert called(mine) == (0, {**said, "checkpoints": []})  # again is success
    tier = open_persistent(place, "mine")
    assert tier.claim_generation() == 1  # its claims are gone too
    tier.close()


def test_the_tiers_own_folder_stays_when_its_last_job_goes(called: Callable[..., Answer], tmp_path: Path) -> None:
    mine = job("mine", PersistentSettings(tmp_path.as_uri()))
    fill(mine)
    assert called(mine)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_only_says_what_is_there(called: Callable[..., Answer], place: PersistentSettings) -> None:
    mine = job("mine", place)
    fill(mine)
    code, said = called(mine, "--dry")
    assert (code, said["deleted"]) == (0, False)
    assert said["checkpoints"] == [{"step": 10, "generation": 1}, {"step": 20, "generation": 1}]
    assert steps(mine) == [10, 20]


def test_when_its_time_is_up_it_says_so_and_fails(called: Callable[..., Answer], place: PersistentSettings) -> None:
    mine = job("mine", place)
    fill(mine)
    code, said = called(mine, "--seconds", "0")
    assert code == 1
    assert "the time was up" in str(said["problem"])
    assert steps(mine) == [10, 20]


@pytest.mark.parametrize("uid", ["..", "a/b"])
def test_a_uid_that_is_no_folders_name_deletes_nothing(called: Callable[..., Answer], tmp_path: Path, uid: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    code, said = called(job(uid, PersistentSettings(tmp_path.as_uri())))
    assert code == 1
    assert "the name of one folder" in str(said["problem"])
    assert (tmp_path / "a" / "b").is_dir()


def test_a_checkpoint_is_invisible_before_its_data_goes() -> None:
    """The order is the tier's own; what is asked of it is one checkpoint after the other, and the rest last."""
    asked: list[object] = []

    class Tier:
        def list_all_checkpoints(self) -> tuple[Checkpoint, ...]:
            return (Checkpoint(1, 10), Checkpoint(1, 20))

        def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
            asked.append(checkpoint)

        def remove_all(self) -> None:
            asked.append("the rest")

    delete.delete(Tier(), lambda: 0.0, 1.0)  # type: ignore[arg-type]
    assert asked == [Checkpoint(1, 10), Checkpoint(1, 20), "the rest"]
