"""Progress, rate, what is left and what a failure now would cost: known, or said to be unknown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running
from support.stored import stored_document, written
from surefoot_operator.api.status import Interval, JobStatus, StoredCheckpoints, TierContents
from surefoot_operator.cli.jobs.describe import JobSummary, exposed, job_lines, progressed, saved, summary
from surefoot_operator.cli.jobs.read_jobs import Pace, pace_of, stored_job

TOTAL = {"annotations": {"surefoot.dev/total-steps": "142"}}


def cells(found: list[JobSummary]) -> list[dict[str, str]]:
    """Each row of the list by its columns."""
    columns, *rows = (re.split(r" {3,}", line) for line in job_lines(found, wide=True, everywhere=True))
    return [dict(zip(columns, [*row, ""], strict=False)) for row in rows]


def pace(status: JobStatus | None = None, now: float = BEGAN + 100, **metadata: Any) -> Pace:
    seen = running()
    return pace_of(stored_job(written(status or seen.status, seen, **metadata)), now)


def test_rate_and_rest_are_of_the_present_world() -> None:
    found = pace(**TOTAL)
    assert found.steps_per_second == pytest.approx(42 / 99.95)
    assert found.left_seconds == pytest.approx(100 * 99.95 / 42)
    assert (found.checkpoint_step, found.exposed_steps) == (40, 2)
    assert found.exposed_seconds == pytest.approx(2 * 99.95 / 42)


def test_what_the_operator_measured_goes_before() -> None:
    chosen = Interval(5, 0, "auto", BEGAN, 0, BEGAN, step_seconds=0.5)
    assert pace(replace(running().status, memory_interval=chosen)).steps_per_second == 2


@pytest.mark.parametrize(
    "changes", [{"step": 2}, {"progress_seconds": None}, {"world": None}, {"step": 0, "last_complete": None}]
)
def test_a_rate_of_too_little_is_unknown(changes: dict[str, Any]) -> None:
    found = pace(replace(running().status, **changes), **TOTAL)
    assert (found.steps_per_second, found.left_seconds, found.exposed_seconds) == (None, None, None)


def test_a_checkpoint_that_is_newer_than_the_step_counts_as_the_step() -> None:
    newer = replace(running().status, step=38)
    assert pace(newer, BEGAN + 99.95).step == 40


def test_what_is_at_risk_counts_the_steps_since_the_status_was_written() -> None:
    seen = replace(running().status, memory_interval=Interval(5, 0, "auto", BEGAN, 0, BEGAN, step_seconds=0.5))
    assert seen.progress_seconds is not None
    at = seen.progress_seconds
    assert [pace(seen, at + late).exposed_steps for late in (-1, 0, 3, 8, 600)] == [2, 2, 8, 18, 18]
    held = replace(seen, phase="Suspended")
    assert pace(held, at + 3).exposed_steps == 2


def test_wide_rows_have_the_bytes_of_each_tier() -> None:
    seen = running()
    stored = StoredCheckpoints(TierContents(2_500_000_000, 2), TierContents(512, 1))
    found = summary(stored_job(written(replace(seen.status, checkpoints=stored), seen)), BEGAN + 100)
    row = cells([found])[0]
    assert (row["IN-MEMORY"], row["PERSISTENT"]) == ("2.50 GB", "512 bytes")
    over = summary(stored_job(written(replace(seen.status, checkpoints=stored, phase="Complete"), seen)), BEGAN + 100)
    assert (over.memory_bytes, over.persistent_bytes) == (None, 512)
    unknown = summary(stored_job(written(seen.status, seen)), BEGAN + 100)
    assert (cells([unknown])[0]["IN-MEMORY"], cells([unknown])[0]["PERSISTENT"]) == ("-", "-")


def test_a_job_that_is_over_risks_nothing() -> None:
    found = pace(replace(running().status, phase="Complete"), **TOTAL)
    assert (found.exposed_steps, found.left_seconds) == (None, None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Pace(), ("-", "-", "-")),
        (Pace(7), ("7", "-", "-")),
        (Pace(7, 10, 1.0, 3.0, 5, 12.0, 1, 1.0), ("7/10 (70%)", "5 (12s)", "1 step (1s)")),
        (Pace(12, 10, None, None, 5, None, 2, None), ("12/10 (100%)", "5", "2 steps")),
    ],
)
def test_words_of_a_pace(found: Pace, words: tuple[str, str, str]) -> None:
    assert (progressed(found), saved(found), exposed(found)) == words


def test_the_list_has_a_row_for_each_job_whatever_is_wrong_with_it() -> None:
    seen = running()
    jobs = (
        stored_job(written(seen.status, seen, creationTimestamp="1970-01-01T00:16:40Z", **TOTAL)),
        stored_job(stored_document(name="new")),
        stored_job(stored_document({"schemaVersion": 9, "phase": "Running", "step": 3}, name="newer")),
    )
    found = [summary(one, BEGAN + 100) for one in jobs]
    well, new, newer = cells(found)
    assert list(well.values())[:8] == ["team", "gpt", "Running", "3/3", "3", "42/142 (29%)", "3m57s", "40 (0s)"]
    assert [new[name] for name in ("STATE", "READY", "WORLD", "STEP", "LEFT")] == ["Unseen", "-", "-", "-", "-"]
    assert "is surefoot-operator running" in new["MESSAGE"]
    assert newer["STEP"] == "3"
    assert "another version" in newer["MESSAGE"]
    assert len(job_lines(found, wide=False, everywhere=False)[0].split()) == 9


def test_no_jobs_are_said_to_be_none() -> None:
    assert "-A looks in all" in job_lines([], wide=False, everywhere=False)[0]
    assert job_lines([], wide=False, everywhere=True) == ["no TrainingJobs"]
