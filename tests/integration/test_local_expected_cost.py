"""`surefoot local` with a program that is slow to begin: a loss waits once the job knows that this is cheaper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, LocalRun, assert_whole, running


def lose_a_worker(run: LocalRun, behind: int) -> int:
    """Kills one of a whole world of an epoch behind that one; returns its epoch. A busy machine begins with two, and grows."""
    run.wait("the world to be whole", lambda: run.epoch() > behind and len(run.members()) == 3)
    run.wait_for_epoch(run.epoch())
    epoch = run.epoch()
    run.kill_agent(run.members()[1])
    return epoch


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_second_loss_waits_for_its_replacement_where_a_change_of_size_is_dear(tmp_path: Path) -> None:
    job = Job(steps=450, workers=3, elastic=(2, 3), trainer=("--pace", "0.06", "--setup-seconds", "8"))
    # a replacement is there in three seconds or four; a change of size costs eight and more
    with running(tmp_path, job) as run:
        run.wait_for_step(20)
        lost_in = lose_a_worker(run, 0)
        lose_a_worker(run, lost_in)
        done = run.finish()
    assert_whole(done.report, 450)
    incidents = done.report["incidents"]
    first, second = (i for i in incidents if i["kind"] != "planned")
    assert (first["kind"], second["kind"]) == ("agent-lost", "agent-lost")
    if incidents[0] == first:
        assert first["world_size_after"] == 2, "nobody has measured anything yet"
    before = incidents[incidents.index(second) - 1]
    assert before["world_size_after"] == 3, "the second was lost by a whole world"
    assert first["world_size_after"] == 3 or before["kind"] == "planned", "which had grown again"
    if second["world_size_after"] == 3:
        assert second["fenced_seconds"] < second["committed_seconds"], "it waited"
        assert incidents[-1] == second, "and nothing had to grow behind it"
        return
    # a machine that is busy with other things starts a worker in longer than a world: then the sums must say so
    sums = re.findall(
        r"so waiting costs ([0-9.]+) s of training, and continuing with 2 of 3 workers ([0-9.]+) s", done.said
    )
    waiting, going_on = map(float, sums[-1])
    assert going_on <= waiting, sums  # told to a tenth of a second
