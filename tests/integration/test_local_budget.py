"""`surefoot local` where checkpoints do not fit: told with the numbers, before anything is full; the training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_whole, running
from surefoot_operator.api.status import Condition

MIB = 1 << 20


def fit(run: LocalRun) -> Condition | None:
    return next((c for c in run.status.conditions if c.type == "CheckpointsFit"), None)


def limit(run: LocalRun, size_bytes: int) -> None:
    for holder in run.holders():
        holder.call("CONFIG SET", "maxmemory", size_bytes)


def steps_kept(run: LocalRun) -> set[int]:
    indexes = [index for holder in run.holders() if (index := run.index_of(holder)) is not None]
    return {m.save.step for index in indexes for m in index.manifests}


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS)
def test_a_tier_that_is_too_small_is_told_before_a_save_is_refused_and_so_is_that_it_fits_again(tmp_path: Path) -> None:
    # 3.3 MB of state, half of it at each of two workers; two checkpoints are kept and one is written
    job = Job(steps=20, gates=(1,), trainer=("--width", "8192"))
    with running(tmp_path, job) as run:
        run.wait_for_step(1)
        limit(run, 6 * MIB)
        run.wait("a word that checkpoints do not fit", lambda: bool(run.told("CheckpointsTooLarge")))
        refused = fit(run)
        assert refused is not None
        assert (refused.status, refused.reason) == ("False", "MemoryTierTooSmall")
        assert "would have to store 3 checkpoints of 2 ranks at " in refused.message
        assert "its memory tier has 6.29 MB: raise the memory tier's maxMemory to " in refused.message
        assert run.told("SaveUnderReplicated") == []
        limit(run, 64 * MIB)
        run.wait("a word that they fit again", lambda: bool(run.told("CheckpointsFit")))
        run.open_gate(1)
        done = run.finish()
    assert_whole(done.report, 20)
    assert done.told("SaveUnderReplicated") == []
    assert run.status.last_complete is not None
    assert run.status.last_complete.step == 20


@pytest.mark.timeout(SECONDS)
def test_staging_that_is_too_large_is_refused_with_the_numbers_and_training_ends_well(tmp_path: Path) -> None:
    job = Job(steps=30, gates=(20,), trainer=("--unstageable", str(1 << 40)))
    with running(tmp_path, job) as run:
        run.wait("a word that there is no memory to stage in", lambda: bool(run.told("StagingMemoryUnavailable")))
        run.wait("a word that checkpoints do not fit", lambda: bool(run.told("CheckpointsTooLarge")))
        run.wait_for_step(20)
        refused = fit(run)
        assert refused is not None
        assert (refused.status, refused.reason) == ("False", "StagingMemoryTooSmall")
        assert (
            "makes no saves, training continues: 2 slots of 1.10 TB for 1 rank, 2.20 TB of staging memory, do not fit"
            in (refused.message)
        )
        # the other worker's saves of steps 5, 10 and 15 will never be checkpoints; that of 20 still may
        run.wait("only saves that may become complete", lambda: steps_kept(run) == {20})
        run.open_gate(20)
        done = run.finish()
    assert_whole(done.report, 30)
    assert done.report["incidents"] == []
    assert len(done.told("StagingMemoryUnavailable")) == 1, (
        "once, not once a save; the other rank has none of that tensor"
    )
    assert done.told("SaveFailed") == []
