"""`surefoot local` whose world cannot go on: what only memory has goes to the persistent tier, by real agents of a claimed world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.local_run import SECONDS, Job, LocalRun, running
from surefoot_operator.platforms.local.platform import RunFolderStore

SELDOM = 1000
"""Steps between uploads: nothing but the end, or a wait, asks for one."""


def stored(folder: Path) -> dict[str, Any]:
    return {"uri": f"file://{folder}/tier", "intervalSteps": SELDOM}


def stored_step(run: LocalRun) -> int | None:
    """Of the newest checkpoint that is complete in the persistent tier."""
    floor = run.status.last_uploaded
    return None if floor is None else floor.step


def wait_for_copies(run: LocalRun, step: int) -> None:
    """Until every rank's save of that step is on both nodes."""

    def has_copies() -> bool:
        indexes = [index for holder in run.holders() if (index := run.index_of(holder)) is not None]
        return len(indexes) == 2 and all(
            {m.save.rank for m in index.manifests if m.save.step == step} == {0, 1} for index in indexes
        )

    run.wait(f"two copies of step {step}", has_copies)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_world_that_waits_for_a_worker_uploads_what_it_will_restore(tmp_path: Path) -> None:
    job = Job(steps=40, gates=(22,), persistent=stored(tmp_path))
    with running(tmp_path, job, "--nodes", "2") as run:
        run.wait_for_step(22)
        wait_for_copies(run, 20)
        assert stored_step(run) is None
        run.kill_node(run.members()[1])
        run.wait("an upload while the world is claimed", lambda: stored_step(run) == 20)
        assert run.status.membership is not None
        assert run.status.membership.state == "Claimed"
        assert run.status.phase == "Recovering"


@pytest.mark.timeout(SECONDS)
def test_a_job_that_its_deadline_ends_stores_its_newest_checkpoint_first(tmp_path: Path) -> None:
    job = Job(steps=40, gates=(22,), persistent=stored(tmp_path))
    with running(tmp_path, job) as run:
        run.wait_for_step(22)
        wait_for_copies(run, 20)
        store = RunFolderStore(run.run_folder)
        overdue = replace(job, spec={"runPolicy": {"activeDeadlineSeconds": 1}})
        store.write_job(overdue.document(tmp_path), store.read_job().uid)
        assert run.process.wait(SECONDS / 2) != 0
        run.events += run.progress.poll()
    assert run.status.phase == "Failed"
    assert "activeDeadlineSeconds" in run.status.message
    assert stored_step(run) == 20
    assert run.status.ending is None
    assert [text for text in run.told("CheckpointUploaded") if "step 20" in text]
