"""`surefoot local` with a program that is slow to begin: a loss waits once the job knows that this is cheaper."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, running


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_second_loss_waits_for_its_replacement_where_a_change_of_size_is_dear(tmp_path: Path) -> None:
    job = Job(steps=250, workers=3, elastic=(2, 3), trainer=("--pace", "0.06", "--setup-seconds", "8"))
    # a replacement is there in three seconds or four; a change of size costs eight and more
    with running(tmp_path, job) as run:
        run.wait_for_step(20)
        run.kill_agent(run.members()[1])
        run.wait("the world to be whole again", lambda: run.epoch() >= 3 and len(run.members()) == 3)
        run.wait_for_epoch(run.epoch())
        run.kill_agent(run.members()[1])
        report = run.finish().report
    assert_whole(report, 250)
    first, grown, second = report["incidents"]
    assert (first["kind"], first["world_after"]) == ("agent-lost", 2), "nobody has measured anything yet"
    assert (grown["kind"], grown["world_after"]) == ("planned", 3)
    assert (second["kind"], second["world_after"]) == ("agent-lost", 3), second
    assert second["sealed_seconds"] < second["assigned_seconds"]
