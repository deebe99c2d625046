"""`surefoot local` with a node whose trainers are slow: the rank is named, and by policy its worker moved without a lost step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_whole, faults, run, running

STEPS = 500
"""So long that a slow rank is named before the last one: each of its steps is 0.1 s longer."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_slow_rank_alone_is_named_and_its_worker_moved_at_a_saved_step(tmp_path: Path) -> None:
    """Three workers on four nodes; the trainers of one are slow from step 20 on."""
    job = Job(STEPS, workers=3, trainer=("--pace", "0.05"), spec={"healthPolicy": {"onStraggler": "Replace"}})
    done = run(tmp_path, job, "--nodes", "4", "--compare", *faults("slow:1@step=20"))
    assert_whole(done.report, STEPS)
    assert_equal(done.report)
    told = done.told("Straggler")
    assert len(told) == 1, done.said
    assert "(node node-1) is persistently slower" in told[0]
    assert told[0].endswith("its worker is moved to another node")
    assert len(done.told("StragglerResolved")) == 1
    (moved,) = done.report["incidents"]
    assert moved["kind"] == "planned"
    assert re.search(r"is moved off node node-1 \(rank \d was slow there\)", moved["reason"])
    assert moved["steps_lost"] == 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(SECONDS)
def test_it_is_told_once_and_taken_back_once(tmp_path: Path) -> None:
    """Until it is named the others make no step without it; then it is as fast as they are, until that is seen."""
    job = Job(100_000, workers=3, trainer=("--pace", "0.05"))
    with running(tmp_path, job, *faults("slow:2@step=20")) as under_way:
        under_way.wait("a straggler", lambda: bool(under_way.told("Straggler")))
        assert under_way.status.replaced_stragglers == ()
        condition = next(c for c in under_way.status.conditions if c.type == "NoStragglers")
        assert (condition.status, condition.reason) == ("False", "Straggler")
        (under_way.run_folder.faults_folder / "slow-node-2").unlink()
        under_way.wait("the end of it", lambda: bool(under_way.told("StragglerResolved")))
        assert [len(under_way.told(reason)) for reason in ("Straggler", "StragglerResolved")] == [1, 1]
        assert "(node node-2)" in under_way.told("Straggler")[0]
        assert under_way.status.stragglers == ()
