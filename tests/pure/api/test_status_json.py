"""What the operator knows for good survives its way through JSON."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.protocol.checkpoints.completeness import LineageEntry
from surefoot.protocol.identities import Checkpoint, HolderEndpoint, HolderId
from surefoot_operator.api.status import Incident, JobStatus, Member, World
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.errors import InvariantBroken

COLUMNS = {"indices": "0..1", "attempts": "1x2", "incarnations": "{a,b}", "nodes": "node-{a,b}"}
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
    assert status_from_json({"schemaVersion": 2, "phase": "Running", "brandNew": 1}) == JobStatus(phase="Running")


@pytest.mark.parametrize(
    "body",
    [
        {"phase": "Dancing"},
        {"world": {"state": "Claimed"}},
        {"world": []},
        {"restarts": "3"},
        {"step": True},
        {"schemaVersion": 3},
        {"schemaVersion": 2, "startTime": "yesterday"},
        {"schemaVersion": 2, "startTime": "2026-01-31T12:00:00"},
        {"world": {"epoch": 1, "state": "Committed", "members": [{"indices": "0..1"}]}},
        {"world": {"epoch": 1, "state": "Committed", "members": [{**COLUMNS, "nodes": "a"}]}},
        {"world": {"epoch": 1, "state": "Committed", "members": [COLUMNS, COLUMNS]}},
        {"world": {"epoch": 1, "state": "Committed", "members": [{**COLUMNS, "indices": "0..999999999"}]}},
        {"namedHolders": [{"nodes": "0", "instances": "a", "hosts": "h", "ports": "1"}]},
        {"namedHolders": [{"nodes": "x", "others": "n", "instances": "a", "hosts": "h", "ports": "1"}]},
    ],
)
def test_a_damaged_status_is_refused_by_name(body: dict[str, object]) -> None:
    with pytest.raises(InvariantBroken, match="status"):
        status_from_json(body)


def test_a_small_world_is_read_by_people_in_its_columns() -> None:
    holders = tuple(HolderEndpoint(HolderId(f"node-{i}", f"i{i}"), f"10.0.0.{i}", 6379, f"node-{i}") for i in range(4))
    members = tuple(Member(i, 1, f"agent{i}", f"node-{i}") for i in range(3))
    status = JobStatus(world=World(1, "Committed", None, 3, members, changed_seconds=12.5), named_holders=holders)
    body = status_to_json(status)
    assert body["schemaVersion"] == 2
    assert body["world"]["changedTime"] == "1970-01-01T00:00:12.500000Z"
    assert body["world"]["members"] == [
        {"indices": "0..2", "attempts": "1x3", "incarnations": "agent{0,1,2}", "nodes": "node-{0,1,2}"}
    ]
    assert body["namedHolders"] == [
        {
            "nodes": "0..3",
            "others": "node-3",
            "instances": "i{0,1,2,3}",
            "hosts": "10.0.0.{0,1,2,3}",
            "ports": "6379x4",
        }
    ]
    assert status_from_json(body) == status


def test_servers_of_one_node_are_told_apart() -> None:
    holders = tuple(
        HolderEndpoint(HolderId(f"node-{i // 2}", f"i{i}"), "10.0.0.1", 6379 + i % 2, f"node-{i // 2}", server=i % 2)
        for i in range(4)
    )
    body = status_to_json(JobStatus(named_holders=holders))
    assert body["namedHolders"][0]["servers"] == "0..1,0..1"
    assert status_from_json(body).named_holders == holders


@pytest.mark.parametrize("whole", [False, True], ids=["identities of today", "identities of the former agents"])
def test_a_status_of_two_thousand_nodes_fits_into_64_kb(whole: bool) -> None:
    chance = random.Random(1)
    nodes = [f"ip-10-0-{i // 256}-{i % 256}.eu-central-1.compute.internal" for i in range(2000)]
    members = tuple(
        Member(i, 1, f"{chance.getrandbits(64 if whole else 48):0{16 if whole else 12}x}", n)
        for i, n in enumerate(nodes)
    )
    holders = tuple(
        HolderEndpoint(HolderId(n, f"{chance.getrandbits(48):012x}"), f"10.244.{i // 256}.{i % 256}", 6379, n)
        for i, n in sorted(enumerate(nodes), key=lambda one: one[1])
    )
    status = JobStatus(world=World(1, "Committed", None, 16_000, members), named_holders=holders)
    body = json.dumps(status_to_json(status))
    assert len(body) < 62_000  # what does not grow with the nodes has the rest
    assert status_from_json(json.loads(body)) == status


def test_the_same_rows_give_the_same_members_again() -> None:
    members = tuple(Member(i, 1, f"agent{i}", f"node-{i}") for i in range(3))
    body = status_to_json(JobStatus(world=World(1, "Committed", None, 3, members)))
    once, again = status_from_json(body).world, status_from_json(json.loads(json.dumps(body))).world
    assert once is not None
    assert again is not None
    assert once.members is again.members
