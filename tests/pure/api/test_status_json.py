"""Tests of `api.status_json`."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.codec import TypeMismatch
from surefoot.protocol.identities import Checkpoint, MemoryServerEndpoint, MemoryServerInstance
from surefoot_operator.api.status import Incident, JobStatus, Member, Membership, parse_rfc3339, to_rfc3339
from surefoot_operator.api.status_json import status_from_json, status_to_json, with_seconds
from surefoot_operator.errors import InvariantViolation
from surefoot_operator.platforms.kubernetes.views.observations import created_seconds

# ---- status json -----------------------------------------------------------------------------------------------------
# What the operator knows for good survives its way through JSON.

numbers = st.integers(0, 4_000_000_000_000_000).map(lambda micros: micros / 1e6)  # moments have microseconds
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
        membership=Membership(2, "Committed", Checkpoint(1, 40), 2),
        lineage=(LineageEntry(1, None, 3), LineageEntry(2, Checkpoint(1, 40), 2)),
        incidents=(Incident("node-lost", "gone", 1, "node-1", 1, 10.0, steps_lost=0),),
    )
    body = status_to_json(status)
    assert body["membership"] == {
        "generation": 2,
        "state": "Committed",
        "parent": {"generation": 1, "step": 40},
        "worldSize": 2,
    }
    assert body["lineage"][0] == {"generation": 1, "parent": None, "worldSize": 3}
    assert body["incidents"][0]["stepsLost"] == 0
    assert status_from_json(body) == status


def test_an_empty_status_is_an_empty_mapping() -> None:
    assert status_to_json(JobStatus()) == {}
    assert status_from_json({}) == JobStatus()


def test_a_field_of_a_newer_operator_is_left_out() -> None:
    assert status_from_json({"schemaVersion": 1, "phase": "Running", "brandNew": 1}) == JobStatus(phase="Running")


@pytest.mark.parametrize(
    "body",
    [
        {"phase": "Dancing"},
        {"membership": {"state": "Claimed"}},
        {"membership": []},
        {"restarts": "3"},
        {"step": True},
        {"schemaVersion": 2},
        {"startTime": "yesterday"},
        {"startTime": "2026-01-31T12:00:00"},
        {"membership": {"generation": 1, "state": "Committed", "members": "0.1 node-a a"}},
        {"membership": {"generation": 1, "state": "Committed", "members": [{"index": 0}]}},
        {"membership": {"generation": 1, "state": "Committed", "members": ["0 node-a a"]}},
        {"membership": {"generation": 1, "state": "Committed", "members": ["0.1 node-a a b"]}},
        {"assignedServers": ["n i h"]},
        {"assignedServers": ["n i h:x"]},
        {"assignedServers": ["n i h:1 zone=a"]},
    ],
)
def test_a_damaged_status_is_refused_by_name(body: dict[str, object]) -> None:
    with pytest.raises(InvariantViolation, match="status"):
        status_from_json(body)


def test_each_member_and_each_holder_is_one_text_that_people_read() -> None:
    members = (Member(0, 1, "5f0e9a1b2c3d", "node-a"), Member(4, 2, "agent 4", "node-b"))
    holders = (
        MemoryServerEndpoint(MemoryServerInstance("node-a", "9d2c4e6f8a0b"), "10.0.0.7", 6379, "node-a"),
        MemoryServerEndpoint(MemoryServerInstance("node-b", "i"), "::1", 6380, "rack 3", tls=True, server_index=1),
    )
    status = JobStatus(
        membership=Membership(1, "Committed", None, 2, members, changed_seconds=12.5), assigned_servers=holders
    )
    body = status_to_json(status)
    assert body["schemaVersion"] == 1
    assert body["membership"]["changedTime"] == "1970-01-01T00:00:12.500000Z"
    assert body["membership"]["members"] == ["0.1 node-a 5f0e9a1b2c3d", "4.2 node-b agent%204"]
    assert body["assignedServers"] == [
        "node-a 9d2c4e6f8a0b 10.0.0.7:6379",
        "node-b i ::1:6380 domain=rack%203 tls server=1",
    ]
    assert status_from_json(body) == status


def test_a_text_that_cannot_be_read_is_named_by_its_place() -> None:
    members = ["0.1 node-a a", "1.1 node-b"]
    with pytest.raises(InvariantViolation, match=r"status\.membership\.members\[1\] is '1\.1 node-b', not INDEX"):
        status_from_json({"membership": {"generation": 1, "state": "Committed", "members": members}})


@pytest.mark.parametrize("length", [26, 63])
def test_two_thousand_workers_take_little_more_than_the_names_of_their_nodes(length: int) -> None:
    """Of 26 characters, as EC2 names a node, all members take 100 kB. Of 63, as long as names may be, the names alone take 126 kB."""
    chance = random.Random(1)
    nodes = [f"ip-10-0-{i // 256:03}-{i % 256:03}.".ljust(length, "x") for i in range(2000)]
    members = tuple(Member(i, 1, f"{chance.getrandbits(48):012x}", n) for i, n in enumerate(nodes))
    holders = tuple(
        MemoryServerEndpoint(
            MemoryServerInstance(n, f"{chance.getrandbits(48):012x}"), f"10.244.{i // 256}.{i % 256}", 6379, n
        )
        for i, n in enumerate(nodes)
    )
    status = JobStatus(membership=Membership(1, "Committed", None, 16_000, members), assigned_servers=holders)
    body = json.loads(json.dumps(status_to_json(status)))
    sizes = [
        len(json.dumps(texts, separators=(",", ":")))
        for texts in (body["membership"]["members"], body["assignedServers"])
    ]
    assert sizes[0] < 2000 * (length + 24)
    assert sizes[1] < 2000 * (length + 35)
    assert status_from_json(body) == status


def test_the_same_texts_give_the_same_members_again() -> None:
    members = tuple(Member(i, 1, f"agent{i}", f"node-{i}") for i in range(3))
    body = status_to_json(JobStatus(membership=Membership(1, "Committed", None, 3, members)))
    once, again = status_from_json(body).membership, status_from_json(json.loads(json.dumps(body))).membership
    assert once is not None
    assert again is not None
    assert once.members is again.members


# ---- moments ---------------------------------------------------------------------------------------------------------
# One reader of times for a status, for Kubernetes' objects and for the command line.

TIMES = {
    "1970-01-01T00:16:40Z": 1000.0,
    "1970-01-01T00:16:40.000000Z": 1000.0,
    "1970-01-01T00:16:40.25Z": 1000.25,
    "1970-01-01T00:16:40.123456789Z": 1000.123456,  # as Go writes nanoseconds
    "1970-01-01T01:16:40+01:00": 1000.0,
    "1969-12-31T23:16:40-01:00": 1000.0,
    "1970-01-01t00:16:40z": 1000.0,
}
OTHERS = [
    None, 3, 1000.0, True, "", "yesterday", "1970-01-01", "1970-01-01T00:16:40", "1970-01-01 00:16:40Z", "19700101T001640Z",
    "1970-W01-4T00:16:40Z", "1970-02-31T00:16:40Z", "1970-01-01T24:16:40Z", "1970-01-01T00:16Z", "1970-01-01T00:16:40Z ",
    "\u0661970-01-01T00:16:40Z", "1970-01-01T00:16:40." + "1" * 100 + "Z",
]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_a_time_is_the_same_moment_wherever_it_is_read(text: str, seconds: float) -> None:
    assert parse_rfc3339(text) == pytest.approx(seconds, abs=1e-6)
    assert created_seconds({"creationTimestamp": text}) == parse_rfc3339(text)
    assert with_seconds({"sinceTime": text}) == {"sinceSeconds": parse_rfc3339(text)}


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_time_is_none_wherever_it_is_read(text: object) -> None:
    assert parse_rfc3339(text) is None
    assert created_seconds({"creationTimestamp": text}) == 0.0
    if text is not None:  # null is no moment yet
        with pytest.raises(TypeMismatch, match="sinceTime"):
            with_seconds({"sinceTime": text})


@given(st.floats(0, 4e9))
def test_a_written_moment_is_read_back_to_the_microsecond(seconds: float) -> None:
    assert parse_rfc3339(to_rfc3339(seconds)) == pytest.approx(seconds, abs=2e-6)
