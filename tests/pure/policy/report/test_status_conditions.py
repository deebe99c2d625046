"""Tests of `policy.report.status_conditions`."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, manifest, running, with_holder, with_worker
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import (
    CheckpointLatency,
    Condition,
    Incident,
    JobStatus,
    LatencyQuantiles,
    Membership,
    StoredCheckpoints,
    TierContents,
)
from surefoot_operator.api.status_json import status_from_json, status_to_json
from surefoot_operator.api.topology_levels import topology_path
from surefoot_operator.job_snapshot import JobSnapshot, PersistentListing, Timings
from surefoot_operator.policy.core.actions import Plan
from surefoot_operator.policy.membership.lifecycle import status_with_rejection, status_without_rejection
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.report.status_conditions import status_change_events, update_contents

# ---- conditions ------------------------------------------------------------------------------------------------------
# What people read of a job: whether its workers have nodes, and what became of an edit that cannot be carried out.


def condition(status: JobStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)


def told(made: Plan) -> list[str]:
    return [e.message for e in made.events if e.reason == "SpecRejected"]


def after(seen: JobSnapshot, kind: str) -> Condition | None:
    return condition(plan(seen).status, kind)


def test_workers_with_nodes_are_scheduled_and_one_without_says_why() -> None:
    found = after(running(), "PodsScheduled")
    assert found is not None
    assert (found.status, found.message) == ("True", "3 of 3 workers have a node")
    pending = with_worker(running(), 1, node=None, phase="Pending", message="0/3 nodes are available")
    found = after(pending, "PodsScheduled")
    assert found is not None
    assert (found.status, found.reason) == ("False", "Unschedulable")
    assert found.message == "2 of 3 workers have a node; worker 1 has no node: 0/3 nodes are available"


def test_a_refused_edit_is_told_once_for_each_sentence() -> None:
    seen = replace(running(), spec_rejection="spec.x: 3 is not allowed")
    first = plan(seen)
    assert told(first) == ["spec.x: 3 is not allowed; the job continues with its former spec"]
    assert condition(first.status, "SpecRejected") is not None
    assert first.status.phase == "Running"
    again = replace(seen, status=first.status)
    assert told(plan(again)) == []
    other = plan(replace(again, spec_rejection="spec.y: 4 is not allowed"))
    assert told(other) == ["spec.y: 4 is not allowed; the job continues with its former spec"]
    assert condition(plan(replace(again, spec_rejection="")).status, "SpecRejected") is None


def test_a_refusal_before_the_beginning_fails_the_job_until_it_can_be_read() -> None:
    old = JobStatus(serial=3)
    told = status_with_rejection(old, "no such thing", 2, BEGAN)
    assert (told.phase, told.message, told.observed_generation, told.serial) == ("Failed", "no such thing", 2, 3)
    assert status_with_rejection(told, "no such thing", 2, BEGAN + 10) == told
    assert status_with_rejection(told, "another thing", 3, BEGAN + 10).conditions[0].last_transition_seconds == BEGAN
    assert status_without_rejection(told).phase == "Pending"
    assert condition(status_without_rejection(told), "Failed") is None


def test_a_refusal_later_changes_nothing_but_what_is_told() -> None:
    runs = JobStatus(phase="Running", membership=Membership(1, "Committed"), serial=3)
    told = status_with_rejection(runs, "no such thing", 2, BEGAN)
    assert (told.phase, told.membership) == ("Running", runs.membership)
    assert condition(told, "SpecRejected") is not None
    assert status_without_rejection(told) == told


def test_a_job_that_is_over_stays_as_it_ended() -> None:
    for phase in ("Complete", "Failed"):
        over = JobStatus(
            phase=phase, membership=Membership(1, "Committed"), conditions=(Condition(phase, "True", phase, "", 1.0),)
        )
        assert status_with_rejection(over, "no such thing", 2, BEGAN) == over
        assert status_without_rejection(over) == over


def test_a_memory_tier_that_is_away_protects_nothing_once_training_has_gone_on() -> None:
    """Found on a cluster: as no holder was there to be read, the condition stayed what it was for good."""
    safe = after(running(step=42), "CheckpointProtected")
    assert safe is not None
    assert safe.status == "True"
    soon, late = (replace(running(step=step), servers=()) for step in (79, 81))
    soon, late = (
        replace(s, status=replace(s.status, conditions=(safe,), last_uploaded=Checkpoint(1, 30))) for s in (soon, late)
    )
    kept, lost = after(soon, "CheckpointProtected"), after(late, "CheckpointProtected")
    assert kept is not None
    assert lost is not None
    assert (kept.status, lost.status, lost.reason) == ("True", "False", "Overdue")
    new_leader = after(replace(late, term_seconds=late.now_seconds - 1), "CheckpointProtected")
    assert new_leader is not None
    assert new_leader.status == "True"


def protected(racks: tuple[str, ...] = ()) -> str:
    """What is said of three nodes in these racks; ranks save to their own node and the next."""
    seen = running()
    nodes = tuple(
        replace(node, path=topology_path({"topology.kubernetes.io/zone": "z", "topology.kubernetes.io/rack": rack}))
        for node, rack in zip(seen.nodes, racks or ("", "", ""), strict=True)
    )
    found = after(replace(seen, nodes=nodes), "CheckpointProtected")
    assert found is not None
    assert found.status == "True"
    return found.message


def test_the_spread_of_copies_is_told() -> None:
    assert protected() == "a complete checkpoint has 2 copies on 2 nodes"
    assert protected(("r1", "r2", "r3")) == "a complete checkpoint has 2 copies in 2 racks"
    assert protected(("r1", "r1", "r2")) == "a complete checkpoint has 2 copies, for some ranks all within 1 rack"
    assert protected(("r1", "r1", "r1")) == "a complete checkpoint has 2 copies on 2 nodes", "there is one rack only"


def test_records_that_break_a_bound_are_told_by_name_and_training_goes_on() -> None:
    why = "holder n/i: index entry 1:113:0: world is 1000000000, allowed are 1 to 1048576"
    seen = replace(running(), rejected_records=(why, "another"))
    made = plan(seen)
    found = condition(made.status, "RecordsRejected")
    assert found is not None
    assert (found.status, found.reason, found.message) == ("True", "OutOfBounds", f"{why} (and 1 more)")
    assert [e.message for e in made.events if e.reason == "RecordsRejected"] == [
        f"ignored a record of this job: {why} (and 1 more)"
    ]
    assert (made.status.phase, made.actions) == ("Running", plan(running()).actions)
    assert not [e for e in plan(replace(seen, status=made.status)).events if e.reason == "RecordsRejected"]
    assert condition(plan(running()).status, "RecordsRejected") is None


# ---- tier contents ---------------------------------------------------------------------------------------------------
# What each tier has of a job is told with a status that is written anyway, and causes no write.

ONE_SAVE = 64 + 8 + 2
"""Tensors, digests and values of `manifest`."""
IN_MEMORY = TierContents(2 * 3 * 2 * ONE_SAVE, 2)
"""Of `running`: two steps of three ranks, each on two nodes."""


def told_tier_contents(seen: JobSnapshot, **other: object) -> StoredCheckpoints:
    return update_contents(seen, replace(seen.status, step=seen.status.step + 1, **other)).checkpoints  # type: ignore[arg-type]


def test_memory_is_counted_with_its_copies() -> None:
    assert told_tier_contents(running()) == StoredCheckpoints(IN_MEMORY, copies=2)


def test_bytes_that_moved_are_no_reason_to_write() -> None:
    seen = running()
    assert update_contents(seen, seen.status) == seen.status


def test_a_new_status_that_was_told_is_told_the_same_again() -> None:
    seen = running()
    status = update_contents(seen, replace(seen.status, step=43))
    again = replace(seen, status=status)
    assert update_contents(again, replace(status, step=44)).checkpoints == status.checkpoints


def test_the_persistent_tier_is_counted_as_it_was_listed() -> None:
    entries = tuple(manifest(1, step, rank, 3) for step in (20, 40) for rank in range(3))
    listed = replace(running(), persistent=PersistentListing(1, entries, 0.0))
    assert told_tier_contents(listed).persistent == TierContents(6 * ONE_SAVE, 2)


def test_each_upload_is_added_until_a_listing_has_it() -> None:
    entries = tuple(manifest(1, 20, rank, 3) for rank in range(3))
    seen = replace(running(), persistent=PersistentListing(1, entries, 0.0))
    first = update_contents(seen, replace(seen.status, last_uploaded=Checkpoint(1, 30)))
    assert first.checkpoints.persistent == TierContents(6 * ONE_SAVE, 2)
    second = update_contents(replace(seen, status=first), replace(first, last_uploaded=Checkpoint(1, 40)))
    assert second.checkpoints.persistent == TierContents(9 * ONE_SAVE, 3)
    later = update_contents(replace(seen, status=second), replace(second, step=50))
    assert later.checkpoints.persistent == second.checkpoints.persistent
    every = tuple(manifest(1, step, rank, 3) for step in (30, 40) for rank in range(3))  # 20 was dropped
    listed = replace(seen, status=later, persistent=PersistentListing(1, every, 60.0))
    assert update_contents(listed, replace(later, step=51)).checkpoints.persistent == TierContents(6 * ONE_SAVE, 2)


def test_a_first_upload_is_counted_before_any_listing() -> None:
    assert told_tier_contents(running(), last_uploaded=Checkpoint(1, 40)).persistent == TierContents(3 * ONE_SAVE, 1)


def test_a_listing_of_an_older_epoch_is_not_cut_to_what_memory_has() -> None:
    known = TierContents(9 * ONE_SAVE, 3)
    seen = running()
    seen = replace(seen, status=replace(seen.status, checkpoints=StoredCheckpoints(persistent=known)))
    seen = replace(seen, status=replace(seen.status, last_uploaded=Checkpoint(1, 40)))
    assert told_tier_contents(seen).persistent == known


def test_what_nobody_read_is_told_as_it_was_known() -> None:
    known = StoredCheckpoints(TierContents(5, 1), TierContents(7, 1), 1)
    seen = running()
    seen = replace(seen, status=replace(seen.status, checkpoints=known))
    for node in ("n0", "n1", "n2"):
        seen = with_holder(seen, node, read_generation=None)
    assert told_tier_contents(seen) == known
    # a world that was just claimed has read nothing yet
    assert told_tier_contents(running(), membership=Membership(2, "Claimed", None, 3)) == StoredCheckpoints()


def test_a_job_that_was_tidied_has_nothing_in_memory() -> None:
    seen = running()
    known = StoredCheckpoints(TierContents(5, 1), TierContents(7, 1), 1)
    seen = replace(seen, status=replace(seen.status, checkpoints=known))
    assert told_tier_contents(seen, memory_cleared=True) == StoredCheckpoints(None, TierContents(7, 1))


def test_a_status_says_nothing_where_nothing_is_known() -> None:
    seen = replace(running(), status=JobStatus(), servers=())
    assert told_tier_contents(seen) == StoredCheckpoints()


# ---- status events ---------------------------------------------------------------------------------------------------
# Every change that people care about is told once, with what happened and why.


def protection(truth: str, reason: str, message: str) -> JobStatus:
    condition = Condition("CheckpointProtected", truth, reason, message, 0.0)  # type: ignore[arg-type]
    return JobStatus(conditions=(condition,), last_complete=Checkpoint(1, 40))


NOTHING = protection("False", "NoCheckpoint", "no checkpoint is complete yet")
SAFE = protection("True", "Protected", "a complete checkpoint has 2 copies")
BARE = protection("False", "TooFewCopies", "no complete checkpoint has 2 copies yet")
STALLED = protection("False", "Overdue", "no checkpoint became complete within 3 save intervals")


def said(old: JobStatus, new: JobStatus) -> list[tuple[str, str, bool]]:
    return [(event.reason, event.message, event.warning) for event in status_change_events(old, new)]


def test_a_claim_is_told_with_its_epoch_and_why_and_a_commit_is_not_told_twice() -> None:
    claimed = JobStatus(membership=Membership(2, "Claimed", reason="node a is gone"))
    assert said(JobStatus(), claimed) == [("GenerationClaimed", "generation 2 is claimed: node a is gone", False)]
    assert said(claimed, replace(claimed, step=3)) == []
    assert said(claimed, JobStatus(membership=Membership(2, "Committed", reason="node a is gone"))) == []


def test_safety_is_told_when_it_comes_and_when_it_goes() -> None:
    assert said(JobStatus(), NOTHING) == []
    assert said(NOTHING, SAFE) == [("CheckpointProtected", "a complete checkpoint has 2 copies: step 40", False)]
    assert said(SAFE, replace(SAFE, step=50)) == []
    ((reason, message, warning),) = said(SAFE, BARE)
    assert (reason, warning) == ("CheckpointUnprotected", True)
    assert message.startswith("no complete checkpoint has 2 copies yet")


def test_a_stall_is_told_as_such_and_once() -> None:
    assert [reason for reason, *_ in said(SAFE, STALLED)] == ["CheckpointOverdue"]
    assert said(STALLED, STALLED) == []
    assert said(STALLED, BARE) == []
    assert [reason for reason, *_ in said(STALLED, SAFE)] == ["CheckpointProtected"]


def test_where_ranks_stood_is_told_once_when_every_worker_could_say_so() -> None:
    incident = Incident("hang", "no step", None, None, 1, 100.0, detail="rank 1: in load (job/train.py:28)")
    claimed = JobStatus(membership=Membership(2, "Claimed"), incidents=(incident,))
    committed = replace(claimed, membership=Membership(2, "Committed"))
    told_it = [
        ("StacksCollected", "stacks of the ranks at the end of generation 1:\nrank 1: in load (job/train.py:28)", False)
    ]
    assert said(claimed, claimed) == []
    assert said(claimed, committed) == told_it
    assert said(committed, replace(committed, step=9)) == []
    assert said(replace(claimed, phase="Running"), replace(claimed, phase="Failed")) == told_it


# ---- checkpoint latency ----------------------------------------------------------------------------------------------


def test_checkpoint_latency_is_measured_over_the_saves_of_all_agents() -> None:
    seen = running()
    measured = [Timings(stalls=(0.01, 0.02), flushes=(0.1,)), Timings(stalls=(0.03,), flushes=(0.30004,)), Timings()]
    sessions = tuple(replace(s, timings=timings) for s, timings in zip(seen.sessions, measured, strict=True))
    former = replace(seen.sessions[0], index=9, generation=0, timings=Timings(stalls=(9.0,)))
    seen = replace(seen, sessions=(*sessions, former), recent_upload_seconds=(2.0, 4.0, 3.0))
    status = update_contents(seen, replace(seen.status, step=43))
    assert status.checkpoint_latency == CheckpointLatency(
        LatencyQuantiles(0.02, 0.03), LatencyQuantiles(0.1, 0.3), LatencyQuantiles(3.0, 4.0)
    )
    # A generation that has saved nothing yet keeps the last values, and so does a job that is over.
    unmeasured = replace(running(), status=status)
    assert update_contents(unmeasured, replace(status, step=44)).checkpoint_latency == status.checkpoint_latency
    assert status_from_json(status_to_json(status)).checkpoint_latency == status.checkpoint_latency
