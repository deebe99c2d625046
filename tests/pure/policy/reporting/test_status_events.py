"""Every change that people care about is told once, with what happened and why."""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Condition, Incident, JobStatus, World
from surefoot_operator.policy.report.status_conditions import status_change_events


def protection(truth: str, reason: str, message: str) -> JobStatus:
    condition = Condition("CheckpointProtected", truth, reason, message, 0.0)  # type: ignore[arg-type]
    return JobStatus(conditions=(condition,), last_complete=Checkpoint(1, 40))


NOTHING = protection("False", "NothingSaved", "no checkpoint is complete yet")
SAFE = protection("True", "Protected", "a complete checkpoint has 2 copies")
BARE = protection("False", "TooFewCopies", "no complete checkpoint has 2 copies yet")
STALLED = protection("False", "Stalled", "no checkpoint became complete for 3 intervals")


def said(old: JobStatus, new: JobStatus) -> list[tuple[str, str, bool]]:
    return [(event.reason, event.message, event.warning) for event in status_change_events(old, new)]


def test_a_claim_is_told_with_its_epoch_and_why_and_a_commit_is_not_told_twice() -> None:
    claimed = JobStatus(world=World(2, "Claimed", reason="node a is gone"))
    assert said(JobStatus(), claimed) == [("WorldClaimed", "epoch 2 is claimed: node a is gone", False)]
    assert said(claimed, replace(claimed, step=3)) == []
    assert said(claimed, JobStatus(world=World(2, "Committed", reason="node a is gone"))) == []


def test_safety_is_told_when_it_comes_and_when_it_goes() -> None:
    assert said(JobStatus(), NOTHING) == []
    assert said(NOTHING, SAFE) == [("CheckpointProtected", "a complete checkpoint has 2 copies: step 40", False)]
    assert said(SAFE, replace(SAFE, step=50)) == []
    ((reason, message, warning),) = said(SAFE, BARE)
    assert (reason, warning) == ("CheckpointUnprotected", True)
    assert message.startswith("no complete checkpoint has 2 copies yet")


def test_a_stall_is_told_as_such_and_once() -> None:
    assert [reason for reason, *_ in said(SAFE, STALLED)] == ["CheckpointStalled"]
    assert said(STALLED, STALLED) == []
    assert said(STALLED, BARE) == []
    assert [reason for reason, *_ in said(STALLED, SAFE)] == ["CheckpointProtected"]


def test_where_ranks_stood_is_told_once_when_every_worker_could_say_so() -> None:
    incident = Incident("hang", "no step", None, None, 1, 100.0, detail="rank 1: in load (job/train.py:28)")
    claimed = JobStatus(world=World(2, "Claimed"), incidents=(incident,))
    committed = replace(claimed, world=World(2, "Committed"))
    told_it = [("RanksStood", "where the ranks of epoch 1 stood:\nrank 1: in load (job/train.py:28)", False)]
    assert said(claimed, claimed) == []
    assert said(claimed, committed) == told_it
    assert said(committed, replace(committed, step=9)) == []
    assert said(replace(claimed, phase="Running"), replace(claimed, phase="Failed")) == told_it
