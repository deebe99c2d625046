"""`surefoot local` with several ranks in each worker: one staging memory a rank, one restart for all of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, running


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_workers_of_two_ranks_survive_a_trainer_and_a_node(tmp_path: Path) -> None:
    job = Job(steps=160, ranks=2, elastic=(1, 2), trainer=("--pace", "0.05"))
    with running(tmp_path, job, *faults("trainer:0@step=40", "node:1@step=90,for=2"), "--compare") as run:
        run.wait_for_step(20)
        world = run.status.membership
        assert world is not None
        assert (world.world_size, len(world.members)) == (4, 2)
        done = run.finish()
    report = done.report
    assert_whole(report, 160)
    assert_equal(report)
    worlds = [generation["world_size"] for generation in report["generations"]]
    assert set(worlds) == {2, 4}, "both ranks of a worker go and come together"
    caused = [incident for incident in report["incidents"] if incident["fault"]]
    assert [incident["kind"] for incident in caused] == ["trainer-failed", "node-lost"]
    assert_little_lost(caused)
    assert [incident["restored_from"] for incident in caused] == ["staging+memory"] * 2
