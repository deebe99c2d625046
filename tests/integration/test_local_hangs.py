"""`surefoot local` with a rank that stops for ever, one that computes for long and says nothing, one in another collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_whole, run

CEILING_SECONDS = 40


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_hang_is_found_by_stacks_that_stand_still_and_a_long_evaluation_is_none(tmp_path: Path) -> None:
    # suspect after a fifth of the ceiling, 8 s: the evaluation takes longer, and its stack moves while two ranks wait
    trainer = ("--pace", "0.05", "--hangs", "60", "--evaluates", "100", "--evaluates-seconds", "11")
    spec = {"healthPolicy": {"stepTimeoutSeconds": CEILING_SECONDS}}
    done = run(tmp_path, Job(steps=120, workers=3, trainer=trainer, spec=spec))
    assert_whole(done.report, 120)
    assert len(done.report["incidents"]) == 1, done.report["incidents"]
    (incident,) = done.report["incidents"]
    assert incident["kind"] == "hang"
    assert "two observations of every rank show the same stack and no I/O" in incident["reason"]
    assert "rank 1 on worker 1 is in main (programs/local_trainer.py:" in incident["reason"]
    stood = incident["reason"].removeprefix("no step for ").split(" s, ")[0]
    assert float(stood) < CEILING_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_where_all_ranks_stand_in_one_line_the_flight_recorder_tells_who_is_in_another_collective(
    tmp_path: Path,
) -> None:
    spec = {"healthPolicy": {"stepTimeoutSeconds": CEILING_SECONDS}}
    done = run(tmp_path, Job(steps=60, workers=3, trainer=("--pace", "0.05", "--diverges", "40"), spec=spec))
    assert_whole(done.report, 60)
    (incident,) = done.report["incidents"]
    assert (incident["kind"], incident["node"]) == ("hang", None)
    reason = incident["reason"]
    assert "rank 1 on worker 1 waits in all_reduce #1 of group 1 (Double[]), all others in all_reduce #" in reason
    assert reason.endswith(
        "of default_pg (Double[]): the program's ranks take different code paths, no node is at fault"
    )
    assert any(reason in told for told in done.told("GenerationClaimed"))
    (stood,) = done.told("StacksCollected")
    assert "rank 1: waits in all_reduce #1 of group 1 (Double[])" in stood
    assert "rank 0: in all_reduce (distributed/distributed_c10d.py:" in stood
    logs = "".join(path.read_text() for path in tmp_path.rglob("agent.log"))
    assert "collectives: rank 1: waits in all_reduce #1 of group 1" in logs
