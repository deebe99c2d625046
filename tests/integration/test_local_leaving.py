"""`surefoot local` with a node on which the program fails again and again: it is left, and no step is lost by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, faults, running


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_node_that_fails_the_job_again_and_again_is_left_at_a_saved_step(tmp_path: Path) -> None:
    """Six failures of six on one of three nodes; chance alone does that in one job of 243."""
    job = Job(steps=160, workers=3, gates=(120,), trainer=("--pace", "0.03"))
    struck = faults(*(f"trainer:1@step={step}" for step in range(15, 105, 15)))
    with running(tmp_path, job, "--nodes", "4", *struck, "--compare") as run:
        run.wait(
            "a worker elsewhere, for which it halts", lambda: "is moved off node node-1" in run.status.message, 180.0
        )
        run.open_gate(120)
        done = run.finish()
    assert_whole(done.report, 160)
    kinds = [one["kind"] for one in done.report["incidents"]]
    assert kinds == ["trainer-failed"] * 6 + ["planned"], done.said
    moved = done.report["incidents"][-1]
    assert moved["steps_lost"] == 0
    assert "is moved off node node-1 (6 of this job's 6 failures within 3600 s were on this node" in moved["reason"]
    assert "and excluding it" in moved["reason"]
    assert done.report["max_loss_difference"] == 0.0
    assert done.report["parameters_bit_exact"] is True
