"""`surefoot local` with a rank that stops for ever, and one that computes for long and says nothing."""

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
    (incident,) = done.report["incidents"]
    assert incident["kind"] == "hang"
    assert "in no rank did stack or I/O move between two looks" in incident["reason"]
    assert "rank 1 on worker 1 stands in main (programs/local_trainer.py:" in incident["reason"]
    stood = incident["reason"].removeprefix("no step for ").split(" s, ")[0]
    assert float(stood) < CEILING_SECONDS
