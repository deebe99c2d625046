"""A job is read as far as it can be: of this and of a newer version, and damaged."""

from __future__ import annotations

from typing import Any

import pytest

from support.builders import running
from support.stored import stored_document, written
from surefoot_operator.cli.jobs.read_jobs import stored_job

STATUS: dict[str, Any] = {
    "schemaVersion": 1,
    "phase": "Running",
    "ready": "2/3",
    "step": 42,
    "restarts": 1,
    "checkpointTime": "1970-01-01T00:16:40Z",
    "lastComplete": {"epoch": 1, "step": 40},
    "world": {
        "epoch": 1,
        "state": "Committed",
        "size": 2,
        "members": ["0.1 n0 a"],
        "changedTime": "1970-01-01T00:16:40Z",
    },
}


def test_a_status_of_this_version_is_read_whole() -> None:
    seen = running()
    found = stored_job(written(seen.status, seen, creationTimestamp="1970-01-01T00:16:40Z"))
    assert found.status == seen.status
    assert found.job is not None
    assert (found.phase, found.ready, found.step, found.restarts) == ("Running", "3/3", 42, 0)
    assert (found.problems, found.created_seconds) == ((), 1000.0)


def test_a_status_of_a_newer_version_leaves_its_columns() -> None:
    found = stored_job(stored_document({**STATUS, "schemaVersion": 9}))
    assert found.status is None
    assert (found.phase, found.ready, found.step, found.restarts) == ("Running", "2/3", 42, 1)
    assert "cannot be read by this version" in found.problems[0]


def test_a_spec_that_is_refused_leaves_the_status() -> None:
    document = stored_document(STATUS)
    document["spec"] = {**document["spec"], "nodeSelector": {}}
    found = stored_job(document)
    assert (found.job, found.step) == (None, 42)
    assert found.problems[0].startswith("its spec cannot be read: spec.nodeSelector")


def test_a_job_that_no_operator_has_seen_has_no_phase() -> None:
    found = stored_job(stored_document())
    assert (found.phase, found.step, found.restarts, found.problems) == ("", None, None, ())


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"metadata": {"annotations": []}, "status": "x", "spec": 3}])
def test_anything_is_some_job(body: dict[str, Any]) -> None:
    assert stored_job(body).problems


@pytest.mark.parametrize(
    ("said", "total"), [("90", 90), ("", None), ("-1", None), ("9" * 20, None), ("1e3", None), ("٣", None)]
)
def test_steps_in_all_are_a_number_or_unknown(said: str, total: int | None) -> None:
    assert stored_job(stored_document(annotations={"surefoot.dev/total-steps": said})).total_steps == total
