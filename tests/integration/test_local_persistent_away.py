"""`surefoot local` with a persistent tier that takes nothing for a while: training goes on, it is said, and promotion resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_whole, running
from support.servers import s3_server
from support.small_disk import fill, small_disk

FAILED = "StorageOperationFailed"


@dataclass(frozen=True)
class Disk:
    """A folder that can take nothing, until `make_room`."""

    folder: Path
    make_room: Callable[[], None]
    words: str
    """What a person hears of it."""


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Disk]:
    """A small file system without room; where mounting is not allowed, a folder without the right to write."""
    folder = tmp_path / "tier"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield Disk(folder, lambda: folder.chmod(0o700), "Permission denied")
        folder.chmod(0o700)
        return
    with small_disk(folder):
        filler = folder / ".filler"
        fill(filler)
        yield Disk(folder, filler.unlink, "No space left")


def goes_on_and_resumes(run: LocalRun, gate: int, words: str, make_room: Callable[[], None]) -> None:
    """Training reaches the gate with nothing more promoted; once there is room, what is in memory is promoted."""
    before = run.status.last_uploaded
    run.wait_for_step(gate)
    run.wait("a word on what is not promoted", lambda: any(words in text for text in run.told(FAILED)))
    assert run.status.last_uploaded == before
    make_room()
    run.wait("a promoted checkpoint, without another step", lambda: run.status.last_uploaded != before)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_full_disk_stops_no_training_and_promotion_resumes_with_room(tmp_path: Path, full_disk: Disk) -> None:
    job = Job(steps=60, gates=(42,), persistent={"uri": f"file://{full_disk.folder}", "intervalSteps": 10})
    with running(tmp_path, job) as run:
        goes_on_and_resumes(run, 42, full_disk.words, full_disk.make_room)
        done = run.finish()
    assert_whole(done.report, 60)
    assert done.report["incidents"] == []
    assert run.status.last_uploaded is not None
    assert run.status.last_uploaded.step == 60


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_an_s3_server_that_is_away_stops_no_training_and_promotion_resumes_with_it(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY}
    with s3_server.running(tmp_path) as server:
        bucket = {"uri": f"s3://{s3_server.BUCKET}/jobs", "endpoint": server.endpoint, "region": "us-east-1"}
        job = Job(steps=60, gates=(12, 42), persistent={**bucket, "intervalSteps": 10}, environment=keys)
        with running(tmp_path, job) as run:
            run.wait("a promoted checkpoint", lambda: run.status.last_uploaded is not None)
            server.stop()
            run.open_gate(12)
            goes_on_and_resumes(run, 42, "Could not connect", server.start)
            done = run.finish()
    assert_whole(done.report, 60)
    assert done.report["incidents"] == []
    assert run.status.last_uploaded is not None
    assert run.status.last_uploaded.step == 60
    assert s3_server.SECRET_KEY not in done.said


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_folder_that_went_away_is_named_and_not_made_anew_by_the_next_worker(tmp_path: Path) -> None:
    folder, away = tmp_path / "tier", tmp_path / "unmounted"
    job = Job(steps=60, gates=(22, 42), persistent={"uri": f"file://{folder}", "intervalSteps": 10})
    with running(tmp_path, job) as run:
        run.wait_for_step(22)
        run.wait(
            "a promoted checkpoint",
            lambda: run.status.last_uploaded is not None and run.status.last_uploaded.step == 20,
        )
        folder.rename(away)
        run.kill_agent(run.members()[0])
        run.open_gate(22)
        run.wait_for_epoch(2)
        run.wait_for_step(42)
        run.wait(
            "a word on the folder",
            lambda: any(f"folder {folder}" in text for text in run.told(FAILED)),
        )
        assert not folder.exists(), "a new folder would hide what the old one has"
        away.rename(folder)
        run.wait(
            "a promoted checkpoint", lambda: run.status.last_uploaded is not None and run.status.last_uploaded.step > 20
        )
        done = run.finish()
    assert_whole(done.report, 60)
    assert run.status.last_uploaded is not None
    assert run.status.last_uploaded.step == 60
