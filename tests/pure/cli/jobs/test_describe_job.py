"""The description of a job names what is known, what happened, and what could not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, running, with_worker, worker
from support.stored import stored_document, view_of_snapshot
from surefoot_operator.api.status import (
    Condition,
    DataRead,
    ExcludedNode,
    Incident,
    StoredCheckpoints,
    TierContents,
)
from surefoot_operator.cli.jobs.describe import described, description_lines, incident_line, worker_state
from surefoot_operator.cli.jobs.read_jobs import JobView, stored_job
from surefoot_operator.cli.local.progress import Happened

LOST = Incident("node-lost", "node n2 is gone", 2, "n2", 1, BEGAN + 40, first_step_seconds=BEGAN + 46, steps_lost=3)


def text(view: JobView, wide: bool = False) -> str:
    return "\n".join(description_lines(described(view), wide))


def test_a_running_job_is_described_in_the_order_people_ask() -> None:
    seen = running()
    status = replace(
        seen.status,
        message="epoch 1 runs with 3 ranks on 3 workers",
        conditions=(
            Condition("Running", "True", "Running", "", BEGAN),
            Condition("Resizing", "False", "Running", "", BEGAN),
            Condition("CheckpointProtected", "False", "Stalled", "no checkpoint became complete", BEGAN),
        ),
        incidents=(LOST,),
        excluded_nodes=(ExcludedNode("n7", "it failed twice", BEGAN + 900),),
    )
    told = text(view_of_snapshot(replace(seen, status=status), Happened(BEGAN + 40, "WorkerLost", "worker 2", True)))
    places = [told.index(word) for word in ("State:", "Message:", "At risk:", "Workers:", "Conditions:", "Incidents:")]
    assert places == sorted(places)
    assert "2 steps (4s) would be run again after a failure now" in told
    assert "60s ago, node-lost: node n2 is gone (6.0 s to the first new step, 3 steps lost)" in told
    assert "60s ago   Warning WorkerLost: worker 2" in told
    assert "n7: it failed twice" in told
    assert "Resizing" not in told  # what is false and has nothing to say
    assert "Could not be read" not in told


def test_what_is_not_known_yet_leaves_no_dash_in_a_sentence() -> None:
    seen = running()
    young = replace(seen.status, step=0, progress_seconds=None, last_complete=None)
    told = text(view_of_snapshot(replace(seen, status=young)))
    assert "Step:        0\n" in told
    assert "Checkpoint:  none yet\n" in told


def test_what_the_loader_told_of_the_data_is_shown() -> None:
    seen = running()
    read = replace(seen, status=replace(seen.status, data=DataRead(1.25, 48.0), loss=2.34567))
    assert "Data:        1.25 passes, 48 samples/s" in text(view_of_snapshot(read))
    assert "steps/s, loss 2.346" in text(view_of_snapshot(read))
    assert "Data:" not in text(view_of_snapshot(seen))
    assert "loss" not in text(view_of_snapshot(seen)).partition("Workers:")[0]


def test_the_bytes_of_each_tier_are_shown_once_they_are_known() -> None:
    seen = running()
    assert "Stored:" not in text(view_of_snapshot(seen))
    stored = StoredCheckpoints(TierContents(1_200_000_000, 2), TierContents(512, 1), copies=2)
    told = text(view_of_snapshot(replace(seen, status=replace(seen.status, checkpoints=stored))))
    assert "memory 1.20 GB in 2 checkpoints, 2 copies of the newest; persistent tier 512 bytes in 1 checkpoint" in told
    over = replace(seen.status, checkpoints=stored, phase="Complete")  # memory is given back
    assert "Stored:      persistent tier 512 bytes in 1 checkpoint\n" in text(
        view_of_snapshot(replace(seen, status=over))
    )


def test_what_could_not_be_read_is_named() -> None:
    view = replace(view_of_snapshot(running()), nodes=None, unread=("you may not list nodes",))
    assert "Could not be read:\n  you may not list nodes" in text(view)


def test_a_job_that_no_operator_has_seen_is_described_too() -> None:
    told = text(JobView(now=BEGAN, stored=stored_job(stored_document())))
    assert "Unseen" in told
    assert "every step: no checkpoint is known to be complete yet" in told


def test_of_many_workers_those_are_shown_that_are_not_well() -> None:
    seen = with_worker(running(workers=100), 7, phase="Failed", exit_code=1)
    told = text(view_of_snapshot(seen))
    assert told.count("Running\n") == 0
    assert "Failed (1)" in told
    assert "and 99 that run; -o wide shows them" in told
    assert "and 99" not in text(view_of_snapshot(seen), wide=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, "Running"), ({"deleting": True}, "Running, leaving"), ({"phase": "Failed", "exit_code": -9}, "Failed (-9)")],
)
def test_a_workers_state_in_words(changes: dict[str, object], said: str) -> None:
    assert worker_state(worker(0, **changes)) == said


def test_an_incident_that_is_not_over_says_so() -> None:
    open_one = replace(LOST, first_step_seconds=None, steps_lost=None)
    assert incident_line(open_one, BEGAN + 50) == "10s ago, node-lost: node n2 is gone (still recovering)"
