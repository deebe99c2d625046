"""`surefoot rollback --to` writes one annotation, for the epoch that is there, and refuses what could not be done."""

from __future__ import annotations

from typing import Any

import pytest

from support.stored import stored_document
from surefoot_operator.cli.command_base import UsageError
from surefoot_operator.cli.jobs.read_jobs import StoredJob, stored_job
from surefoot_operator.cli.jobs.suspend_and_rollback import asking

WORLD = {"epoch": 7, "state": "Committed", "size": 3}


def stored(phase: str = "Running", world: dict[str, Any] | None = None, **metadata: Any) -> StoredJob:
    status = {"phase": phase, "step": 100, "schemaVersion": 1, "world": WORLD if world is None else world}
    return stored_job(stored_document(status, **metadata))


def test_the_word_names_the_epoch_and_the_step() -> None:
    patch = asking(stored(annotations={"team": "a"}), 40, keep_data=False)
    assert patch[0] == {"op": "test", "path": "/metadata/uid", "value": "uid-1"}
    assert patch[1:] == [{"op": "add", "path": "/metadata/annotations/surefoot.dev~1rollback", "value": "7/40"}]
    bare = asking(stored(), 40, keep_data=True)
    assert bare[1:] == [
        {"op": "add", "path": "/metadata/annotations", "value": {"surefoot.dev/rollback": "7/40/keep-data"}}
    ]


@pytest.mark.parametrize(
    ("found", "step", "said"),
    [
        (stored("Complete"), 40, "a job that is over does not go back"),
        (stored(world={**WORLD, "state": "Claimed"}), 40, "just changing its world"),
        (stored(), 101, "has finished step 100"),
        (stored(), 0, "has finished step 100"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(found: StoredJob, step: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asking(found, step, keep_data=False)
