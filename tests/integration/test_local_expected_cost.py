"""`surefoot local` with a program that is slow to begin: a loss waits once the job knows that this is cheaper."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, faults, run


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_second_loss_waits_for_its_replacement_where_a_change_of_size_is_dear(tmp_path: Path) -> None:
    job = Job(steps=120, workers=3, elastic=(2, 3), trainer=("--pace", "0.06", "--setup-seconds", "8"))
    # a replacement is there in three seconds or four; a change of size costs eight and more
    report = run(tmp_path, job, *faults("agent:1@step=20", "agent:1@step=80")).report
    assert_whole(report, 120)
    first, grown, second = report["incidents"]
    assert (first["kind"], first["world_after"]) == ("agent-lost", 2), "nobody has measured anything yet"
    assert (grown["kind"], grown["world_after"]) == ("planned", 3)
    assert (second["kind"], second["world_after"]) == ("agent-lost", 3), second
    assert second["sealed_seconds"] < second["assigned_seconds"]
