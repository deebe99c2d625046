"""Whether other shards' jobs can spare a holder: their leaders say so of these very holders, or nobody restarts one."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot_operator.controller.memory_tier_maintenance import ROLLOUT_APPROVED, ROLLOUT_BLOCKED, rollout_blocker
from surefoot_operator.policy.maintenance.memory_tier_rollout import MemoryServerPod, digest_ready_servers


@pytest.mark.parametrize(
    ("holder", "notes", "said"),
    [
        ("b", {ROLLOUT_APPROVED: "these"}, ""),
        (
            "b",
            {ROLLOUT_APPROVED: "others"},
            "b has not reported yet whether the jobs of shard 2 can lose a memory server",
        ),
        ("b", {}, "has not reported yet"),
        (
            "b",
            {ROLLOUT_BLOCKED: "job ns/gpt cannot lose a memory server: it is recovering"},
            "job ns/gpt cannot lose a memory server",
        ),
        ("", {ROLLOUT_APPROVED: "these"}, "shard 2 has no leader"),
    ],
)
def test_silence_is_no_assent(holder: str, notes: dict[str, str], said: str) -> None:
    found = rollout_blocker(2, holder, notes, "these")
    assert bool(found) == bool(said)
    assert said in found


def pod(name: str, uid: str, **changes: Any) -> MemoryServerPod:
    return MemoryServerPod(name, uid, f"node-{name}", "", "revision", **{"ready": True, **changes})


def test_an_assent_is_to_the_very_pods_that_were_ready() -> None:
    before = digest_ready_servers([pod("a", "1"), pod("b", "2")])
    assert digest_ready_servers([pod("b", "2"), pod("a", "1")]) == before
    assert digest_ready_servers([pod("a", "1"), pod("b", "restarted")]) != before
    assert digest_ready_servers([pod("a", "1"), pod("b", "2", ready=False)]) != before
    assert digest_ready_servers([pod("a", "1"), pod("b", "2", node_ready=False)]) != before
