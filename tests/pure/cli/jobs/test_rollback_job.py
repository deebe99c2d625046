"""Going back is a new job, made of the old one: what it keeps, and when there is none."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from support.stored import stored_document
from surefoot_operator.api.parse import parse_job
from surefoot_operator.api.spec import RestoreFrom
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.jobs.read_jobs import StoredJob, stored_job
from surefoot_operator.cli.jobs.suspend_and_rollback import rolled_back

TIER = {"persistent": {"uri": "s3://bucket/jobs"}, "memory": {"keep": 3}}


def stored(checkpoint: dict[str, Any] | None = None, step: int = 100, **metadata: Any) -> StoredJob:
    document = stored_document({"phase": "Running", "step": step, "schemaVersion": 1}, **metadata)
    document["spec"] = {**document["spec"], "suspend": True, "checkpoint": TIER if checkpoint is None else checkpoint}
    return stored_job(document)


def test_the_new_job_goes_on_from_the_step_and_keeps_the_rest() -> None:
    kept = {"team": "a", "kubectl.kubernetes.io/last-applied-configuration": "{}", "surefoot.dev/accept-loss": "3"}
    made = rolled_back(stored(labels={"x": "y"}, annotations=kept, resourceVersion="9"), 40)
    job = parse_job(yaml.safe_load(yaml.safe_dump(made)))
    assert (job.name, job.spec.suspend, job.spec.replicas) == ("gpt-from-40", False, 3)
    assert job.spec.checkpoint.restore_from == RestoreFrom(uid="uid-1", step=40)
    assert job.spec.checkpoint.memory.keep == 3
    assert made["metadata"] == {
        "name": "gpt-from-40",
        "namespace": "team",
        "labels": {"x": "y"},
        "annotations": {"team": "a"},
    }
    assert "status" not in made


def test_the_old_document_is_left_as_it_was() -> None:
    found = stored()
    before = repr(found.document)
    rolled_back(found, 40)
    assert repr(found.document) == before


@pytest.mark.parametrize(
    ("name", "step", "made"),
    [("gpt-from-40", 20, "gpt-from-20"), ("a" * 52, 1234567, "a" * 39 + "-from-1234567")],
)
def test_names_stay_within_their_bound(name: str, step: int, made: str) -> None:
    assert rolled_back(stored(step=step, name=name), step)["metadata"]["name"] == made


@pytest.mark.parametrize(
    ("found", "step", "name", "said"),
    [
        (stored({}), 40, None, "has no spec.checkpoint.persistent"),
        (stored(), 0, None, "--step 0 is not allowed"),
        (stored(), 101, None, "has finished step 100"),
        (stored(), 40, "Upper", "the new job would be refused"),
        (stored_job({"metadata": {"name": "x"}}), 40, None, "its spec cannot be read"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused(found: StoredJob, step: int, name: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        rolled_back(found, step, name)
