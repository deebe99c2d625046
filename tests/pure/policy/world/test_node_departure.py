"""What a job loses with a node that is being left: the last copies, and nothing that is elsewhere or comes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, with_holder, with_node
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec, PersistentTierSpec
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.actions import CopySave
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.membership.planned_change import STALE_SECONDS, departure

NOW = BEGAN + 100
PERSISTENT = CheckpointPolicy(
    memory=MemoryTierSpec(interval_steps=10), persistent=PersistentTierSpec(uri="s3://bucket/jobs")
)


def lone(**spec: Any) -> Observed:
    """One whose rank 0 has saved on its own node alone."""
    seen = running(**spec)
    return with_holder(seen, "n1", entries=tuple(m for m in _entries(seen, "n1") if m.save.rank != 0))


def _entries(seen: Observed, node: str) -> Any:
    return next(h.entries for h in seen.holders if h.endpoint.holder.node == node)


def said(seen: Observed, node: str = "n0", now: float = NOW) -> str:
    return departure(seen, seen.status, node, now)


def test_a_node_whose_copies_are_elsewhere_too_may_be_left() -> None:
    assert [said(running(), f"n{index}") for index in range(3)] == ["", "", ""]


def test_the_last_copy_is_waited_for_and_is_being_made_meanwhile() -> None:
    seen = with_node(lone(), "n0", schedulable=False)
    assert said(seen) == "step 40 of epoch 1 has no copy on a node that stays, and is being copied to one"
    copies = [a for a in maintain(seen).actions if isinstance(a, CopySave)]
    assert [(a.save.rank, a.target.node) for a in copies if a.save.step == 40] == [(0, "n1")], copies


def test_of_a_world_that_trains_the_copies_may_be_a_little_behind_but_never_missing() -> None:
    """It saves faster than copies are seen; before its worker ends it halts, and copies what it saved then."""
    seen = running()
    behind = with_holder(seen, "n1", entries=tuple(m for m in _entries(seen, "n1") if m.save != RankSave(1, 40, 0)))
    assert said(behind) == "", "step 30 of all ranks is on nodes that stay"
    halted = replace(seen.status, world=replace(seen.status.world, state="Claimed"))
    assert said(replace(behind, status=halted)).startswith("step 40 of epoch 1 has no copy on a node that stays")
    assert said(lone()), "of rank 0 nothing is there, however few steps that is"


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_copy_is_brought_to_a_node_that_stays_while_others_are_left(replicas: int) -> None:
    memory = MemoryTierSpec(interval_steps=10, replicas=replicas)
    seen = with_node(
        with_node(running(checkpoint=CheckpointPolicy(memory=memory)), "n0", schedulable=False), "n1", signal="x"
    )
    copies = [a for a in maintain(seen).actions if isinstance(a, CopySave)]
    assert [(a.save.checkpoint.step, a.save.rank, a.target.node) for a in copies] == [(40, 0, "n2")]
    stored = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 40)))
    assert not [a for a in maintain(stored).actions if isinstance(a, CopySave)]


def test_where_no_node_is_left_or_none_stays_nothing_more_is_copied() -> None:
    seen = running()
    assert not [a for a in maintain(seen).actions if isinstance(a, CopySave)]
    for name in ("n0", "n1", "n2"):
        seen = with_node(seen, name, schedulable=False)
    assert not [a for a in maintain(seen).actions if isinstance(a, CopySave)]


def test_it_is_waited_for_before_the_operator_has_heard_of_the_cordon() -> None:
    assert said(lone())
    assert said(lone(), "n2") == "", "what n2 has, n1 or n0 has too"


def test_of_two_nodes_that_are_left_the_second_waits_for_what_both_had() -> None:
    assert said(with_node(running(), "n1", schedulable=False), "n0").startswith("step 40 of epoch 1 has no copy")


def test_what_is_in_the_persistent_tier_is_waited_for_by_nobody() -> None:
    seen = lone(checkpoint=PERSISTENT)
    assert said(seen)
    assert said(replace(seen, status=replace(seen.status, floor=Checkpoint(1, 40)))) == ""


def test_where_no_node_stays_the_way_out_is_named() -> None:
    seen = running()
    for name in ("n1", "n2"):
        seen = with_node(seen, name, schedulable=False)
    assert said(seen).endswith("; leave one that runs the job, or give it spec.checkpoint.persistent")
    stored = replace(seen, job=running(checkpoint=PERSISTENT).job)
    assert said(stored).endswith(", and is on its way to the persistent tier")


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_job_that_is_over_holds_no_node(phase: Any) -> None:
    seen = lone()
    assert said(replace(seen, status=replace(seen.status, phase=phase))) == ""


def test_a_job_that_is_being_deleted_or_has_saved_nothing_holds_no_node() -> None:
    seen = lone()
    assert said(replace(seen, job=replace(seen.job, deleted=True))) == ""
    assert said(replace(seen, status=replace(seen.status, last_complete=None))) == ""


def test_a_node_without_a_holder_or_with_an_empty_one_may_be_left() -> None:
    seen = lone()
    assert said(seen, "elsewhere") == ""
    assert said(with_holder(seen, "n0", entries=())) == ""
    assert said(with_holder(seen, "n0", state="Gone")) == ""


def test_what_cannot_be_seen_is_not_taken_for_safe() -> None:
    seen = running()
    for name in ("n0", "n1", "n2"):
        seen = with_holder(seen, name, state="Silent", read_epoch=None, entries=())
    assert said(seen) == "no holder says at present where the copies of step 40 of epoch 1 are"


def test_a_round_that_is_long_past_decides_nothing() -> None:
    assert said(running(), now=NOW + STALE_SECONDS + 1) == "it was not reconciled for 16 s"
