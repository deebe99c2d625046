"""What the operator knows for good survives its way through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.lineage import LineageEntry
from surefoot_operator.api.status import Incident, JobStatus, World
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.errors import InvariantBroken

numbers = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, numbers)


@settings(max_examples=60, deadline=None)
@given(st.from_type(JobStatus))
def test_a_status_comes_back_from_json_as_it_was(status: JobStatus) -> None:
    body = json.loads(json.dumps(status_to_json(status)))
    again = status_from_json(body)
    assert again == status
    assert again.extra == status.extra


def test_a_status_reads_as_a_cluster_would_show_it() -> None:
    status = JobStatus(
        phase="Running",
        world=World(2, "Committed", Checkpoint(1, 40), 2),
        lineage=(LineageEntry(1, None, 3), LineageEntry(2, Checkpoint(1, 40), 2)),
        incidents=(Incident("node-lost", "gone", 1, "node-1", 1, 10.0, steps_lost=0),),
    )
    body = status_to_json(status)
    assert body["world"] == {"epoch": 2, "state": "Committed", "parent": {"epoch": 1, "step": 40}, "size": 2}
    assert body["lineage"][0] == {"epoch": 1, "parent": None, "size": 3}
    assert body["incidents"][0]["stepsLost"] == 0
    assert status_from_json(body) == status


def test_an_empty_status_is_an_empty_mapping() -> None:
    assert status_to_json(JobStatus()) == {}
    assert status_from_json({}) == JobStatus()


def test_a_field_of_a_newer_operator_is_left_out() -> None:
    assert status_from_json({"phase": "Running", "brandNew": 1}) == JobStatus(phase="Running")


@pytest.mark.parametrize(
    "body", [{"phase": "Dancing"}, {"world": {"state": "Claimed"}}, {"world": []}, {"restarts": "3"}, {"step": True}]
)
def test_a_damaged_status_is_refused_by_name(body: dict[str, object]) -> None:
    with pytest.raises(InvariantBroken, match="status"):
        status_from_json(body)
