"""Whether other shards' jobs can spare a holder: their leaders say so of these very holders, or nobody restarts one."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot_operator.controller.memory_tier_maintenance import ASSENTS, OBJECTS, objection
from surefoot_operator.policy.maintenance.memory_tier_rollout import HolderPod, ready_holders


@pytest.mark.parametrize(
    ("holder", "notes", "said"),
    [
        ("b", {ASSENTS: "these"}, ""),
        ("b", {ASSENTS: "others"}, "b has not said yet whether the jobs of shard 2 can spare a holder"),
        ("b", {}, "has not said yet"),
        ("b", {OBJECTS: "job ns/gpt cannot spare a holder: it is recovering"}, "job ns/gpt cannot spare a holder"),
        ("", {ASSENTS: "these"}, "nobody leads shard 2"),
    ],
)
def test_silence_is_no_assent(holder: str, notes: dict[str, str], said: str) -> None:
    found = objection(2, holder, notes, "these")
    assert bool(found) == bool(said)
    assert said in found


def pod(name: str, uid: str, **changes: Any) -> HolderPod:
    return HolderPod(name, uid, f"node-{name}", "", "revision", **{"ready": True, **changes})


def test_an_assent_is_to_the_very_pods_that_were_ready() -> None:
    before = ready_holders([pod("a", "1"), pod("b", "2")])
    assert ready_holders([pod("b", "2"), pod("a", "1")]) == before
    assert ready_holders([pod("a", "1"), pod("b", "restarted")]) != before
    assert ready_holders([pod("a", "1"), pod("b", "2", ready=False)]) != before
    assert ready_holders([pod("a", "1"), pod("b", "2", node_ready=False)]) != before
