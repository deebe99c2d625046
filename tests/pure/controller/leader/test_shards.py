"""Names of shards: jobs are spread evenly and the same everywhere; one shard is called as before there were any."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot_operator.controller.credentials.certificates import server_names
from surefoot_operator.controller.leader.election_rules import leader_label, lease_name, shard_of, shard_url
from surefoot_operator.controller.leader.leader_election import LEADER

URL = "wss://surefoot-coordinator.surefoot-system.svc:8443/v1/agents"


@given(st.uuids(), st.integers(1, 8))
def test_every_job_is_in_one_shard(uid: object, shards: int) -> None:
    assert 0 <= shard_of(str(uid), shards) < shards
    assert shard_of(str(uid), 1) == 0


def test_a_jobs_shard_is_the_same_in_every_version() -> None:
    uids = ["5d0f1c2e-0000-4000-8000-000000000000", "a", ""]
    assert [shard_of(uid, 3) for uid in uids] == [2, 1, 1]


def test_jobs_are_spread_evenly() -> None:
    found = Counter(shard_of(f"job-{n}", 3) for n in range(3000))
    assert all(900 < count < 1100 for count in found.values()), found


def test_one_shard_has_the_names_of_before() -> None:
    assert (lease_name("surefoot-operator", 0), leader_label(0), shard_url(URL, 0)) == (
        "surefoot-operator",
        LEADER,
        URL,
    )
    assert server_names(URL, "surefoot-system", 1) == server_names(URL, "surefoot-system")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (URL, "wss://surefoot-coordinator-2.surefoot-system.svc:8443/v1/agents"),
        ("wss://here/v1/agents", "wss://here-2/v1/agents"),
        ("wss://10.0.0.1:8443/v1/agents", "wss://10.0.0.1:8443/v1/agents"),
        ("ws://[::1]:8443/v1/agents", "ws://[::1]:8443/v1/agents"),
    ],
)
def test_each_shard_has_an_address_where_there_are_names(url: str, expected: str) -> None:
    assert shard_url(url, 2) == expected


def test_the_certificate_has_every_shards_name() -> None:
    names = server_names(URL, "surefoot-system", 3)
    assert {f"surefoot-coordinator-{n}.surefoot-system.svc" for n in (1, 2)} <= set(names)
    assert "surefoot-coordinator-2.surefoot-system.svc.cluster.local" in names
