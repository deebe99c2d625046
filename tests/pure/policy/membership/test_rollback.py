"""A rollback from the odd step to the commit: what is restored, what is left out, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from support.builders import manifest, running, session, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.messages import Assign
from surefoot_operator.api.spec import HealthPolicy, NumericsPolicy, PersistentTierSpec
from surefoot_operator.api.status import JobStatus
from surefoot_operator.coordinator import sessions as talk
from surefoot_operator.coordinator.desired_messages import derive_desired_state, list_desired_messages
from surefoot_operator.job_snapshot import JobSnapshot, PersistentListing
from surefoot_operator.policy.core.actions import DeleteUploaded, DropSaves, UploadSaves
from surefoot_operator.policy.failure.memory_server_liveness import UsableMemoryServers
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

GOOD, NEWER = Checkpoint(1, 30), Checkpoint(1, 40)


def watched(good: Checkpoint | None = GOOD, floor: Checkpoint | None = None, **policy: Any) -> JobSnapshot:
    seen = running(health_policy=HealthPolicy(numerics=NumericsPolicy(**policy)))
    return replace(seen, status=replace(seen.status, last_good=good, last_uploaded=floor))


def broken(seen: JobSnapshot, since: int | None = None) -> JobSnapshot:
    step = max(s.progress.step for s in seen.sessions)
    since = step - 1 if since is None else since
    for one in seen.sessions:
        told = {
            "anomaly_step": step,
            "anomaly_since_step": since,
            "anomaly_kind": "not-finite",
            "anomaly_text": f"the loss of step {step} is nan",
        }
        seen = with_session(seen, one.index, **told)
    return seen


def with_steps(seen: JobSnapshot, step: int) -> JobSnapshot:
    for one in seen.sessions:
        seen = with_session(seen, one.index, step=step)
    return seen


def decided(seen: JobSnapshot) -> JobStatus:
    made = plan(seen)
    check_plan(made, seen)
    return made.status


def claimed(seen: JobSnapshot) -> JobSnapshot:
    """The claim is written, every trainer has stopped, and every holder was read again."""
    status = decided(seen)
    assert status.membership is not None
    assert status.membership.state == "Claimed"
    epoch = status.membership.generation
    holders = tuple(replace(h, fence=epoch, read_generation=epoch) for h in seen.servers)
    sessions = tuple(replace(s, stopped=epoch) for s in seen.sessions)
    return replace(seen, status=status, servers=holders, sessions=sessions, now_seconds=seen.now_seconds + 0.5)


def trained(seen: JobSnapshot, step: int) -> JobSnapshot:
    """The committed epoch is at `step`."""
    status = seen.status
    assert status.membership is not None
    now = seen.now_seconds + 10
    sessions = tuple(
        session(s.index, now=now, generation=status.membership.generation, stopped=status.membership.generation, step=step, step_at_seconds=now, step_seconds=0.1)
        for s in seen.sessions
    )  # fmt: skip
    return replace(seen, sessions=sessions, now_seconds=now)


def back(seen: JobSnapshot) -> JobSnapshot:
    """Rolled back and committed."""
    before = claimed(broken(seen))
    return replace(before, status=decided(before))


def test_it_goes_back_to_the_last_good_one_past_newer_ones_and_past_the_floor() -> None:
    after = back(watched(floor=NEWER))
    world, status = after.status.membership, after.status
    assert world is not None
    assert (world.state, world.parent) == ("Committed", GOOD)
    assert status.last_uploaded is None, "what the persistent tier has beyond it is of another history"
    assert (status.rollback_count, status.last_good) == (1, GOOD)
    assert [(one.generation, one.steps) for one in status.skipped_data] == [(2, 12)]
    incident = status.incidents[-1]
    assert (incident.kind, incident.node, incident.steps_lost) == ("numerics", None, 12)
    assert status.restarts_counted == 0


def test_a_step_that_was_under_way_at_the_claim_is_left_out_too() -> None:
    """A rank tells of it before it hears that the world has ended: its batch was trained on, and the report counts it as lost."""
    before = claimed(broken(watched()))
    after = decided(with_session(before, 1, step=43))
    assert [(one.generation, one.steps) for one in after.skipped_data] == [(2, 13)]
    assert after.rollback is not None
    assert after.rollback.reached_step == 43
    assert after.incidents[-1].steps_lost == 13


def test_loaders_hear_what_they_leave_out() -> None:
    after = back(watched())
    sessions = talk.create_sessions("job", 0.0)
    by_worker = {talk.WorkerId(s.index, s.attempt): talk.Session(s) for s in after.sessions}
    sessions = talk.apply_membership(replace(sessions, by_worker=by_worker), after.status.membership)
    rule = derive_desired_state(after.status, UsableMemoryServers(), 1)
    told = list_desired_messages(rule, sessions, talk.WorkerId(0, 1))
    assert [m.skip_steps for m in told if isinstance(m, Assign)] == [12]


@pytest.mark.parametrize("good", [None, GOOD])
def test_what_a_failure_before_the_next_save_restores_again_leaves_the_same_out(good: Checkpoint | None) -> None:
    seen = back(watched(good=good, good_after_steps=30))
    failed = with_session(trained(seen, 35), 1, terminating=False, exit=None, connected=False)
    failed = replace(failed, workers=failed.workers[:1] + failed.workers[2:])
    before = claimed(failed)
    ready = replace(
        before, sessions=tuple(s for s in before.sessions if s.index != 1), now_seconds=before.now_seconds + 60
    )
    ready = replace(ready, sessions=tuple(replace(s, last_message_seconds=ready.now_seconds) for s in ready.sessions))
    status = decided(ready)
    assert status.membership is not None
    assert (status.membership.state, status.membership.parent) == ("Committed", good)
    steps = 42 - (good.step if good else 0)
    assert [(one.generation, one.steps) for one in status.skipped_data] == [(2, steps), (3, steps)]
    assert status.rollback_count == 1


def test_the_same_again_skips_further_and_ends() -> None:
    seen = watched(max_rollbacks=2)
    left_out = []
    for reached in (42, 38):
        seen = back(trained(seen, reached) if reached != 42 else seen)
        left_out.append(seen.status.skipped_data[-1].steps)
    assert left_out == [12, 12 + 8], "the second window lies behind the first"
    assert seen.status.rollback is not None
    assert seen.status.rollback.consecutive == 2
    over = decided(broken(trained(seen, 36), since=36))
    assert over.phase == "Failed"
    assert "2 rollbacks in a row led to no newer good checkpoint" in over.message
    assert "the last good checkpoint is that of step 30" in over.message


def test_while_nothing_is_proven_a_young_run_begins_again_and_an_old_one_goes_as_far_back_as_it_can() -> None:
    young = decided(broken(watched(good=None, good_after_steps=30)))
    assert young.rollback is not None
    assert (young.rollback.to_step, young.rollback.target_known_good) == (0, False)
    old = decided(broken(watched(good=None, good_after_steps=5)))
    assert old.rollback is not None
    assert (old.rollback.to_step, old.rollback.target_known_good) == (30, False)


def test_a_good_one_beyond_begins_to_count_anew() -> None:
    seen = back(watched(max_rollbacks=1))
    assert seen.status.last_good == GOOD
    further = trained(replace(seen, status=replace(seen.status, last_good=Checkpoint(2, 50))), 70)
    entries = tuple(manifest(2, 50, r, 3) for r in range(3))
    further = replace(further, servers=tuple(replace(h, entries=entries) for h in further.servers))
    status = decided(broken(further, since=70))
    assert status.rollback is not None
    assert (status.rollback.consecutive, status.rollback.to_step) == (1, 50)


def test_a_newer_checkpoint_that_was_read_is_not_chosen_by_a_new_operator_either() -> None:
    before = replace(claimed(broken(watched())), term_seconds=2e9)
    assert plan(before).status.membership.parent in (None, GOOD)  # type: ignore[union-attr]


def test_the_policy_may_stop_or_warn() -> None:
    stopped = decided(broken(watched(on_non_finite="Stop")))
    assert stopped.phase == "Failed"
    assert "healthPolicy.numerics stops the job for this" in stopped.message
    warned = decided(broken(watched(on_non_finite="Warn")))
    assert warned.phase == "Running"
    assert warned.rollback is None


def test_a_job_that_ended_with_no_number_is_not_complete() -> None:
    seen = broken(watched())
    for one in seen.sessions:
        seen = with_session(seen, one.index, finished=0, finished_steps=42)
    assert decided(seen).rollback is not None


def test_a_person_goes_back_to_a_step_that_is_there_and_hears_where_it_is_not() -> None:
    seen = running()
    asked = replace(seen, job=replace(seen.job, rollback="1/30"))
    status = decided(asked)
    assert status.rollback is not None
    assert (status.rollback.to_step, status.rollback.consecutive) == (30, 0)
    committed = decided(claimed(asked))
    assert committed.membership is not None
    assert committed.membership.parent == GOOD
    assert committed.last_good is None, "nobody asked for good ones"
    assert [one.steps for one in committed.skipped_data] == [12]
    keeping = replace(seen, job=replace(seen.job, rollback="1/30/keep-data"))
    assert decided(claimed(keeping)).skipped_data == ()
    # done once: the word names the epoch that it ended
    again = replace(asked, status=committed)
    assert plan(replace(again, sessions=claimed(asked).sessions)).status.membership == committed.membership
    lacking = plan(replace(seen, job=replace(seen.job, rollback="1/25")))
    assert [e.message for e in lacking.events if e.reason == "RollbackRejected"] == [
        "cannot roll back to step 25, because no checkpoint of it is complete: complete checkpoints are at steps 30, 40"
    ]
    odd = plan(replace(seen, job=replace(seen.job, rollback="back")))
    assert any("GENERATION/STEP" in e.message for e in odd.events)


def test_upkeep_remembers_the_good_one_and_keeps_it() -> None:
    seen = watched(good=None, good_after_steps=12)
    kept = plan_maintenance(seen)
    assert kept.status.last_good == GOOD, "12 steps behind step 30 were well, and two behind step 40"
    assert not [a for a in kept.actions if "drop" in str(a)]


def left(seen: JobSnapshot, suspect: bool) -> JobSnapshot:
    """Of all checkpoints the newest alone can be read."""
    entries = tuple(replace(manifest(1, 40, r, 3), suspect=suspect) for r in range(3))
    return replace(seen, servers=tuple(replace(h, entries=entries) for h in seen.servers))


def test_where_what_it_goes_back_to_is_lost_the_nearest_behind_it_is_taken() -> None:
    lost = left(claimed(broken(watched())), suspect=False)
    made = plan(lost)
    check_plan(made, lost)
    assert made.status.membership == lost.status.membership, "durable before anything is done about it"
    assert made.status.rollback is not None
    assert (made.status.rollback.to_step, made.status.rollback.target_known_good) == (40, False)
    assert [e.message for e in made.events if e.reason == "RolledBack"] == [
        "no checkpoint up to step 30 is left: rolling back to step 40, which is not known to be good"
    ]
    after = decided(replace(lost, status=made.status))
    assert after.membership is not None
    assert (after.membership.state, after.membership.parent) == ("Committed", NEWER)
    assert after.last_good == GOOD, "nothing newer is proven"
    assert [(one.generation, one.steps) for one in after.skipped_data] == [(2, 2)]


def test_what_is_as_odd_as_what_it_leaves_is_not_taken() -> None:
    lost = left(claimed(broken(watched())), suspect=True)
    made = plan(lost)
    check_plan(made, lost)
    assert made.status.membership == lost.status.membership
    assert "every copy of every checkpoint up to step 30, the target of a rollback, is lost" in made.reason


def test_what_an_epoch_restored_is_left_before_it_ends_with_it() -> None:
    """A failure at the last steps, which were no numbers: what was restored is finished, and makes no step of its own."""
    seen = back(watched())
    world = seen.status.membership
    assert world is not None
    parent = Checkpoint(1, 40)
    ended = replace(seen, status=replace(seen.status, membership=replace(world, parent=parent), rollback=None))
    ended = trained(ended, 0)
    for one in ended.sessions:
        told = {
            "anomaly_step": 40,
            "anomaly_since_step": 38,
            "anomaly_kind": "not-finite",
            "anomaly_text": "the loss of step 40 is nan",
        }
        ended = with_session(ended, one.index, **told)
        ended = with_session(ended, one.index, finished=0, finished_steps=40)
    status = decided(ended)
    assert status.phase != "Complete"
    assert status.rollback is not None
    assert (status.rollback.to_step, status.rollback.reached_step) == (30, 40)


def test_what_is_being_dropped_becomes_no_good_one() -> None:
    """An index that was read before the drop still shows it, and an older good one would go for it."""
    seen = watched(good=None, good_after_steps=12)
    going = {GOOD: seen.now_seconds + 1.0}
    assert plan_maintenance(seen, pending_deletions=going).status.last_good is None
    late = replace(seen, now_seconds=seen.now_seconds + 1.0)
    assert plan_maintenance(late, pending_deletions=going).status.last_good == GOOD, "the drop is void by then"
    assert plan_maintenance(late, pending_deletions=going).pending_deletions == {}


def listed(seen: JobSnapshot, *steps: int) -> JobSnapshot:
    """The persistent tier has these whole, and memory the newest alone."""
    entries = {step: tuple(manifest(1, step, rank, 3) for rank in range(3)) for step in steps}
    newest = max(steps)
    spec = replace(
        seen.job.spec, checkpoint=replace(seen.job.spec.checkpoint, persistent=PersistentTierSpec("s3://there", keep=1))
    )
    return replace(
        seen,
        job=replace(seen.job, spec=spec),
        status=replace(seen.status, last_uploaded=Checkpoint(1, newest)),
        servers=tuple(replace(h, entries=entries[newest]) for h in seen.servers),
        persistent=PersistentListing(1, tuple(chain.from_iterable(entries.values())), seen.now_seconds - 1),
    )


def deleted(kept: MaintenancePlan) -> set[Checkpoint]:
    return {c for a in kept.actions if isinstance(a, DeleteUploaded) for c in a.checkpoints}


def test_what_is_being_deleted_from_the_persistent_tier_becomes_no_good_one() -> None:
    """A listing shows it until its agent answers, whatever later steps prove meanwhile."""
    seen = listed(watched(good=Checkpoint(1, 10), good_after_steps=12), 10, 20, 30, 40)
    early = plan_maintenance(with_steps(seen, 31))  # of those that may come to be proven the oldest stays
    assert deleted(early) == {GOOD}
    late = with_steps(seen, 42)
    assert plan_maintenance(late).status.last_good == GOOD, "nobody has asked for its deletion"
    late = replace(late, persistent=late.persistent.without_checkpoints(frozenset({GOOD})))
    kept = plan_maintenance(late)
    assert kept.status.last_good == Checkpoint(1, 20)
    assert deleted(kept) == {Checkpoint(1, 10), GOOD}, "it is asked for again until it was done"


def test_what_is_being_deleted_becomes_no_floor() -> None:
    """A rollback behind the floor looks for another one, and an upload of the same would meet its deletion."""
    seen = listed(watched(), 20, 30)
    seen = replace(
        seen,
        status=replace(seen.status, last_uploaded=None),
        persistent=seen.persistent.without_checkpoints(frozenset({GOOD})),
    )
    kept = plan_maintenance(with_steps(seen, 42))
    assert kept.status.last_uploaded == Checkpoint(1, 20)
    assert not [a for a in kept.actions if isinstance(a, UploadSaves)], "memory has nothing else to upload"


def test_a_leader_believes_no_listing_while_deletions_of_the_one_before_may_be_under_way() -> None:
    seen = listed(with_steps(watched(good=Checkpoint(1, 10), good_after_steps=12), 42), 10, 20, 30, 40)
    assert plan_maintenance(seen).status.last_good == GOOD
    young = plan_maintenance(replace(seen, term_seconds=seen.now_seconds - 1.0))
    assert young.status.last_good == Checkpoint(1, 10)
    assert not [a for a in young.actions if isinstance(a, DeleteUploaded)]


def test_a_leader_drops_nothing_while_drops_of_the_one_before_may_be_under_way() -> None:
    seen = watched()
    entries = tuple(manifest(1, step, rank, 3) for step in (10, 20, 30, 40) for rank in range(3))
    seen = replace(seen, servers=tuple(replace(h, entries=entries) for h in seen.servers))
    assert [a for a in plan_maintenance(seen).actions if isinstance(a, DropSaves)]
    young = replace(seen, term_seconds=seen.now_seconds - 1.0)
    assert not [a for a in plan_maintenance(young).actions if isinstance(a, DropSaves)]
