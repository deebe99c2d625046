"""Rows of `top`: what does not train comes first, and what is not known is a dash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running
from support.stored import stored_document, written
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Condition, Incident, JobStatus
from surefoot_operator.cli.jobs.read_jobs import Pace, StoredJob, stored_job
from surefoot_operator.cli.jobs.top import COLUMNS, TopRow, as_seen, copies, in_view, incidents, plain_line, top_row

SAVED = Checkpoint(1, 40)
FAILED = Incident("node-lost", "gone", 1, "n1", 1, BEGAN + 60)


def job(name: str = "gpt", **changes: Any) -> StoredJob:
    seen = running()
    return stored_job(written(replace(seen.status, **changes), seen, name=name))


def cells(row: TopRow) -> dict[str, str]:
    return dict(zip(COLUMNS, row.cells, strict=True))


def protected(status: str) -> Condition:
    return Condition("CheckpointProtected", status, "r", "m", BEGAN)  # type: ignore[arg-type]


def test_a_running_job_is_told_with_what_was_seen_of_it() -> None:
    found = cells(top_row(job(incidents=(FAILED,), conditions=(protected("True"),)), BEGAN + 100, 2.5, False))
    assert (found["JOB"], found["STATE"], found["STEP"], found["RATE"]) == ("gpt", "Running", "42", "2.5/s")
    assert (found["COPIES"], found["INCIDENTS"]) == ("enough", "1 (40s ago)")
    assert found["EXPOSED"].startswith("2 steps")
    assert cells(top_row(job(), BEGAN + 100, None, True))["JOB"] == "team/gpt"
    assert cells(top_row(job(), BEGAN + 100, None, True))["RATE"] == "0.42/s"  # as the status says, until it was seen


def test_what_is_left_goes_by_the_rate_that_is_shown() -> None:
    known = Pace(10, 20, steps_per_second=2.0, left_seconds=5.0, exposed_steps=4, exposed_seconds=2.0)
    assert as_seen(known, 4.0) == replace(known, steps_per_second=4.0, left_seconds=2.5, exposed_seconds=1.0)
    assert as_seen(known, None) == as_seen(known, 0.0) == known
    assert as_seen(Pace(10), 4.0) == Pace(10, steps_per_second=4.0)


def test_a_job_that_does_not_train_has_no_rate() -> None:
    found = cells(top_row(job(phase="Recovering"), BEGAN + 100, 2.5, False))
    assert found["RATE"] == "-"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "-"),
        (JobStatus(phase="Running", last_complete=SAVED), "-"),
        (JobStatus(phase="Pending", conditions=(protected("False"),)), "-"),  # nothing is there to be copied
        (JobStatus(phase="Running", last_complete=SAVED, conditions=(protected("True"),)), "enough"),
        (JobStatus(phase="Running", last_complete=SAVED, conditions=(protected("False"),)), "too few"),
        (JobStatus(phase="Running", last_complete=SAVED, conditions=(protected("Unknown"),)), "-"),
        (JobStatus(phase="Complete", last_complete=SAVED, conditions=(protected("False"),)), "-"),
    ],
)
def test_copies_are_the_conditions_word(status: JobStatus | None, said: str) -> None:
    assert copies(status) == said


def test_planned_changes_are_no_incidents() -> None:
    assert incidents(None, BEGAN) == "-"
    assert incidents(JobStatus(incidents=(replace(FAILED, kind="planned"),)), BEGAN) == "0"
    assert (
        incidents(JobStatus(incidents=(FAILED, replace(FAILED, detected_seconds=BEGAN + 90))), BEGAN + 100)
        == "2 (10s ago)"
    )


def test_what_does_not_train_comes_first() -> None:
    rows = [
        top_row(job(name, phase=phase), BEGAN, None, False)
        for name, phase in (("a", "Running"), ("b", "Failed"), ("c", "Pending"))
    ]
    unseen = top_row(stored_job(stored_document(name="d")), BEGAN, None, False)
    assert [row.job for row in in_view([*rows, unseen])] == ["b", "c", "d", "a"]


def test_a_line_names_its_values() -> None:
    line = plain_line(top_row(job(phase="Recovering", message="worker 1 is lost"), BEGAN + 100, None, False))
    assert line.startswith("gpt Recovering, ready 3/3, step 42, ")
    assert line.endswith(": worker 1 is lost")
