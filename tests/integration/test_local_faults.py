"""`surefoot local` with real trainers: every kind of fault, and the result of an undisturbed run."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from support.local_run import SECONDS, Job, assert_equal, assert_little_lost, assert_whole, faults, run
from surefoot_operator.cli.main import main

PACE = ("--pace", "0.05")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result(tmp_path: Path) -> None:
    job = Job(steps=240, workers=3, elastic=(2, 3), trainer=PACE)
    done = run(tmp_path, job, *faults("trainer:0@step=60", "node:1@step=120,for=2"), "--compare")
    report = done.report
    assert_whole(report, 240)
    assert_equal(report)
    kinds = [incident["kind"] for incident in report["incidents"] if incident["fault"]]
    assert kinds == ["trainer-failed", "node-lost"]
    for incident in report["incidents"]:
        if incident["first_step_seconds"] is None:
            # a slow machine's new worker comes when the last step is done: nothing is left to step to
            assert incident is report["incidents"][-1]
            assert incident["kind"] == "planned"
            continue
        assert 0 <= incident["detected_seconds"] <= incident["committed_seconds"] <= incident["first_step_seconds"]
        assert_little_lost([incident])
        # a rank's own share lies in the staging memory of its node, also if the save behind it had begun
        assert incident["restored_from"] == "staging+memory"
    assert report["checkpoints"]["bytes"] > 0
    assert "samples lost 0, repeated 0" in done.said.splitlines()
    assert main(["report", "--run-folder", str(tmp_path / "run"), "--to", str(tmp_path / "run.html")]) == 0
    page = html.unescape((tmp_path / "run.html").read_text(encoding="utf-8"))
    for said in ("result identical", "samples lost", *(one["reason"] for one in report["incidents"])):
        assert said in page


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_training_survives_a_coordinator_a_holder_an_agent_and_a_freeze(tmp_path: Path) -> None:
    struck = faults(
        "coordinator@step=20,for=1", "memory:2@step=60,for=1", "agent:0@step=110", "freeze:1@step=200,for=5"
    )
    report = run(tmp_path, Job(steps=420, workers=3, elastic=(2, 3), trainer=PACE), *struck).report
    assert_whole(report, 420)
    assert len(report["faults"]) == 4
    caused = {incident["fault"]: incident for incident in report["incidents"] if incident["fault"]}
    # neither a dead coordinator nor a dead holder ends an epoch
    killed, frozen = "kill agent of node-0 at step 110", "freeze node-1 at step 200, thaws after 5 s"
    assert killed in caused
    assert set(caused) <= {killed, frozen}
    # the growth that follows the first may halt at the very step of the second: then it goes on without the frozen node
    given_up = [
        i for i in report["incidents"] if i["kind"] == "planned" and i["world_size_after"] == i["world_size_before"]
    ]
    assert frozen in caused or given_up
    assert_little_lost(list(caused.values()))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_step_that_an_exception_interrupted_is_no_checkpoint(tmp_path: Path) -> None:
    # all ranks have taken their batch of step 37: saved then, it would be lost
    done = run(tmp_path, Job(steps=60, workers=2, trainer=("--raises", "37")))
    assert_whole(done.report, 60)
    (incident,) = done.report["incidents"]
    assert (incident["kind"], incident["steps_lost"]) == ("trainer-failed", 1), "the newest checkpoint is of step 35"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("elastic", [None, (2, 3)], ids=["fixed", "elastic"])
def test_a_drained_node_costs_no_step(tmp_path: Path, elastic: tuple[int, int] | None) -> None:
    """What was not saved at a due step is saved at the halt: intervals are so long that each loss would be seen."""
    job = Job(steps=120, workers=3, elastic=elastic, interval_steps=100, trainer=PACE)
    done = run(tmp_path, job, *faults("drain:1@step=30,for=2"), "--compare")
    report = done.report
    assert_whole(report, 120)
    assert_equal(report)
    assert {incident["kind"] for incident in report["incidents"]} == {"planned"}
    assert sum(incident["steps_lost"] for incident in report["incidents"]) == 0
    (left,) = [incident for incident in report["incidents"] if incident["fault"]]
    assert re.search(r"worker \d is being deleted \(node node-1 is drained\)", left["reason"])  # whichever runs there
    assert left["world_size_after"] == (3 if elastic is None else 2)
