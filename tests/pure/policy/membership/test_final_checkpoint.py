"""Tests of `policy.membership.final_checkpoint`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, running, told, with_session
from support.finished_jobs import KEPT, after, finished, listed, persisted
from surefoot.protocol.checkpoints.completeness import LineageEntry, UnreadRecord
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator import reasons
from surefoot_operator.api.spec import RunPolicy
from surefoot_operator.job_snapshot import JobSnapshot, ObservedExit
from surefoot_operator.policy.core.actions import DeleteWorker, ListPersistentTier, UploadSaves
from surefoot_operator.policy.maintenance.maintenance_plan import plan_maintenance
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS, SAVING_SECONDS, UPLOAD_SECONDS
from surefoot_operator.policy.membership.lifecycle import LAST_SAVE_SECONDS, SHUTDOWN_SECONDS
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- completion ------------------------------------------------------------------------------------------------------
# A job ends with its last checkpoint where people look for it.

NOW = BEGAN + 100


def test_a_finished_job_waits_for_its_last_checkpoint_to_be_promoted() -> None:
    seen = finished(step=47, saved=47)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "last checkpoint" in made.reason
    assert plan_maintenance(replace(seen, status=made.status)).pinned == Checkpoint(1, 47)


def test_it_is_complete_once_that_is_there() -> None:
    seen = finished(step=47, saved=47)
    there = {Checkpoint(1, 47): frozenset(RankSave(1, 47, r) for r in range(3))}
    kept = plan_maintenance(replace(seen, uploaded=there))
    assert kept.status.last_uploaded == Checkpoint(1, 47)
    assert plan(replace(seen, status=kept.status)).status.phase == "Complete"


def test_it_does_not_wait_for_ever_and_then_does_not_call_itself_complete() -> None:
    made = plan(after(finished(step=47, saved=47), UPLOAD_SECONDS + 1))
    assert made.status.phase == "Failed"
    assert "did not reach the persistent tier" in made.status.message


def test_it_does_not_wait_for_what_was_never_saved_and_says_so() -> None:
    seen = finished(step=47, saved=40)
    assert plan(seen).status.phase == "Running", "but for what was"
    made = plan(persisted(seen, Checkpoint(1, 40)))
    assert made.status.phase == "Complete"
    assert "step 47, which was not saved: the newest checkpoint is of step 40" in made.status.message
    assert [e.reason for e in made.events][:2] == ["FinalStepNotSaved", "JobComplete"]


def test_a_job_of_which_nothing_was_saved_anywhere_has_failed() -> None:
    seen = finished(step=47, saved=40)
    empty = tuple(replace(h, entries=()) for h in seen.servers)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    seen = replace(seen, servers=empty, sessions=sessions, status=replace(seen.status, last_complete=None))
    assert plan(seen).status.phase == "Running", "workers may still be to say what they saved"
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running", "a leader that is gone may have had something uploaded"
    assert made.reason == "every trainer finished after step 47; listing the persistent tier through worker 0"
    assert [type(action) for action in made.actions] == [ListPersistentTier]
    made = plan(after(listed(seen), SAVING_SECONDS))
    assert made.status.phase == "Failed"
    assert "not one checkpoint" in made.status.message
    assert plan(after(seen, RESCUE_SECONDS)).status.phase == "Failed", "a tier that never answers is not waited for"


@pytest.mark.parametrize("silent", ["a worker", "a holder"])
def test_a_leader_that_has_just_begun_takes_what_it_has_not_heard_for_unknown_and_not_for_unsaved(silent: str) -> None:
    """Step 40 is in the persistent tier and all have finished after step 47; where that is saved is still to be heard."""
    seen = persisted(finished(step=47, saved=40), Checkpoint(1, 40))
    if silent == "a worker":
        seen = with_session(seen, 1, saved=None)
    else:
        (first, *others) = seen.servers
        seen = replace(seen, servers=(replace(first, state="Unreachable", read_generation=None), *others))
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "to report whether it was saved" in made.reason
    assert plan(after(seen, SAVING_SECONDS)).status.phase == "Complete"


def restarted(saved: bool = True, **other: Any) -> JobSnapshot:
    """Epoch 1 made step 47, saved it and was killed; epoch 2 restored that and had nothing more to do."""
    seen = finished(step=47, saved=47)
    last, world = Checkpoint(1, 47), seen.status.membership
    assert world is not None
    world = replace(world, generation=2, parent=last, changed_seconds=NOW - 3)
    lineage = (*seen.status.lineage, LineageEntry(2, last, 3))
    sessions = tuple(
        told(
            s,
            generation=2,
            stopped=2,
            step=0,
            step_at_seconds=None,
            finished_steps=0,
            saved=last if saved else None,
            **other,
        )
        for s in seen.sessions
    )
    return replace(
        seen,
        status=replace(seen.status, membership=world, lineage=lineage),
        sessions=sessions,
        servers=tuple(replace(h, fence=2, read_generation=2) for h in seen.servers),
    )


@pytest.mark.parametrize("saved", [True, False], ids=["agents that lived", "agents made anew"])
def test_a_job_that_restarted_behind_its_last_step_still_has_it_promoted(saved: bool) -> None:
    seen = restarted(saved)
    made = plan(seen)
    assert made.status.phase == "Starting"
    assert "being uploaded to the persistent tier" in made.reason
    kept = plan_maintenance(replace(seen, status=made.status))
    assert kept.pinned == Checkpoint(1, 47)
    assert any(isinstance(e, UploadSaves) for e in kept.actions)
    done = plan(persisted(seen, Checkpoint(1, 47)))
    assert (done.status.phase, done.status.message) == ("Complete", "every trainer finished after step 47")


def test_an_epoch_without_steps_is_told_by_the_step_that_it_began_with() -> None:
    seen = replace(restarted(), job=running(step=47).job)
    assert plan(seen).status.message == "every trainer finished after step 47"


def test_workers_that_all_end_before_the_upload_are_a_loss_and_not_the_end() -> None:
    seen = finished(step=47, saved=47)
    gone = tuple(replace(s, connected=False, since_seconds=NOW) for s in seen.sessions)
    ended = tuple(replace(w, phase="Failed", exit_code=-9) for w in seen.workers)
    seen = replace(seen, sessions=gone, workers=ended)
    assert plan(seen).status.phase == "Running"
    made = plan(replace(seen, now_seconds=NOW + 7))
    assert made.status.membership is not None
    assert (made.status.membership.generation, made.status.membership.state) == (2, "Claimed")
    assert made.status.incidents[-1].kind == "agent-lost"


def test_a_last_checkpoint_that_memory_lost_is_made_again() -> None:
    seen = finished(step=47, saved=47)
    seen = replace(seen, servers=running(step=47).servers)
    assert "reading the memory servers again" in plan(seen).reason
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.incidents[-1].kind == "checkpoint-lost"


def failed_at_the_end(saved: int = 47) -> JobSnapshot:
    """Rank 1 ended with code 3 behind the last step; another restart is not allowed."""
    seen = finished(step=47, saved=saved)
    sessions = tuple(replace(s, finished=None, finished_steps=0) for s in seen.sessions)
    job = replace(seen.job, spec=replace(seen.job.spec, run_policy=RunPolicy(backoff_limit=0)))
    seen = replace(seen, sessions=sessions, job=job)
    return with_session(seen, 1, exit=ObservedExit(1, 1, 3, "exit code 3", False, NOW - 0.1))


def test_a_job_that_fails_has_its_newest_checkpoint_promoted_first() -> None:
    seen = failed_at_the_end()
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "backoffLimit" in made.reason
    assert "is uploaded to the persistent tier first" in made.reason
    assert plan_maintenance(replace(seen, status=made.status)).pinned == Checkpoint(1, 47)
    assert plan(persisted(seen, Checkpoint(1, 47))).status.phase == "Failed"
    assert plan(after(seen, 601)).status.phase == "Failed", "not for ever"


def test_a_job_that_fails_has_its_holders_read_for_what_was_just_saved() -> None:
    seen = replace(failed_at_the_end(), servers=running(step=47).servers)
    assert "reading the memory servers again" in plan(seen).reason
    assert "is uploaded to the persistent tier first" in plan(after(seen, SAVING_SECONDS)).reason


def test_a_job_that_fails_waits_for_holders_out_of_sight_that_may_have_what_was_just_saved() -> None:
    seen = failed_at_the_end()
    silent = tuple(replace(h, state="Unreachable", since_seconds=seen.now_seconds) for h in seen.servers[1:])
    seen = replace(seen, servers=(seen.servers[0], *silent))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running"
    assert "which the operator cannot reach and which may have a part of step 47" in made.reason
    assert plan(after(seen, 601)).status.phase == "Failed", "not for ever"


def test_without_a_persistent_tier_there_is_nothing_to_wait_for() -> None:
    assert plan(finished(step=47, saved=47, persistent=False)).status.phase == "Complete"


def test_the_last_complete_checkpoint_is_the_one_that_the_holders_have() -> None:
    done = plan(finished(step=47, saved=47, persistent=False)).status
    assert (done.phase, done.last_complete) == ("Complete", Checkpoint(1, 47))


def unread(pending: bool) -> JobSnapshot:
    """The agents saved step 47, or are about to; the holders were last read before that."""
    seen = finished(step=47, saved=47, persistent=False)
    last = Checkpoint(1, 47)
    fields = {"saved": Checkpoint(1, 40), "pending": (last,)} if pending else {}
    return replace(
        seen,
        sessions=tuple(told(s, **fields) for s in seen.sessions),
        servers=running(step=47).servers,
    )


@pytest.mark.parametrize("pending", [True, False])
def test_a_finished_job_has_its_holders_read_once_more(pending: bool) -> None:
    seen = unread(pending)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "reading the memory servers again" in made.reason
    assert made.wake_after_seconds is not None
    read = replace(seen, servers=finished(step=47, saved=47).servers)
    assert plan(read).status.last_complete == Checkpoint(1, 47)


def test_but_not_for_longer_than_it_is_worth() -> None:
    seen = unread(pending=False)
    later = seen.now_seconds + LAST_SAVE_SECONDS + 1
    heard = tuple(replace(s, last_message_seconds=later) for s in seen.sessions)
    done = plan(replace(seen, now_seconds=later, sessions=heard)).status
    assert (done.phase, done.last_complete) == ("Complete", Checkpoint(1, 40))


def test_nor_where_nobody_is_there_any_more_who_saved_it() -> None:
    seen = unread(pending=False)
    ended = tuple(replace(w, phase="Succeeded", exit_code=0) for w in seen.workers)
    gone = tuple(replace(s, connected=False) for s in seen.sessions)
    assert plan(replace(seen, workers=ended, sessions=gone)).status.phase == "Complete"


def test_a_pod_whose_sidecar_goes_on_is_ended_a_minute_after_the_job() -> None:
    seen = running()
    over = replace(seen.status, phase="Complete", completion_seconds=NOW)
    ended = replace(seen.workers[0], phase="Succeeded", exit_code=0)
    seen = replace(
        seen, status=over, sessions=(), workers=(replace(ended, sidecar_running=True), replace(ended, index=1))
    )
    first = plan(seen)
    assert not any(isinstance(a, DeleteWorker) for a in first.actions)
    assert first.wake_after_seconds is not None
    late = plan(replace(seen, now_seconds=NOW + SHUTDOWN_SECONDS))
    assert [a.uid for a in late.actions if isinstance(a, DeleteWorker)] == [seen.workers[0].uid]


def test_while_training_goes_on_only_due_steps_are_promoted() -> None:
    seen = finished(step=47, saved=47)
    training = replace(seen, sessions=tuple(replace(s, finished=None) for s in seen.sessions))
    assert plan_maintenance(training).pinned == Checkpoint(1, 40)


def failed(ago: float = 1.0, **session: Any) -> JobSnapshot:
    """A job that has just failed; its pods still run, and of its agents is known what `session` says."""
    seen = running()
    sessions = tuple(replace(s, **session) for s in seen.sessions)
    return replace(
        seen, sessions=sessions, status=replace(seen.status, phase="Failed", message="", completion_seconds=NOW - ago)
    )


def deleted(seen: JobSnapshot) -> set[str]:
    return {a.name for a in plan(seen).actions if isinstance(a, DeleteWorker)}


def test_pods_of_a_failed_job_end_by_themselves_and_stay_for_their_logs() -> None:
    assert [type(a).__name__ for a in plan(failed()).actions] == ["ShutDownWorkers"]
    left = failed(connected=False, since_seconds=NOW - 0.1)
    assert not deleted(left), "an agent that has left is about to end: its pod is not running much longer"
    assert plan(left).wake_after_seconds == pytest.approx(SHUTDOWN_SECONDS - 1.0)
    ended = replace(left, workers=tuple(replace(w, phase="Failed", exit_code=1) for w in left.workers))
    assert not deleted(ended)
    assert not deleted(replace(ended, now_seconds=NOW + SHUTDOWN_SECONDS))


def test_what_does_not_end_by_itself_is_deleted() -> None:
    mute = failed(ago=SHUTDOWN_SECONDS + 1, connected=False, since_seconds=NOW - 50)
    assert len(deleted(mute)) == 3
    pending = failed(connected=False, since_seconds=NOW - 50)
    pending = replace(pending, workers=tuple(replace(w, phase="Pending") for w in pending.workers))
    assert len(deleted(pending)) == 3, "no log is in a pod that never ran"
    lost = failed(connected=False, since_seconds=NOW - 50)
    lost = replace(lost, nodes=tuple(replace(n, ready=n.name != "n1") for n in lost.nodes))
    assert deleted(lost) == {"gpt-1-1"}


UNREADABLE = frozenset({RankSave(1, 47, 1)})


def test_a_last_checkpoint_of_which_no_copy_is_good_is_trained_again() -> None:
    seen = replace(finished(step=47, saved=47), unreadable=UNREADABLE)
    made = plan(seen)
    check_plan(made, seen)
    assert made.status.unreadable_checkpoints == (Checkpoint(1, 47),)
    assert made.status.membership is not None
    assert made.status.membership.state == "Claimed"
    assert "no copy of" in made.reason
    assert [e.reason for e in made.events].count(reasons.CHECKPOINT_UNREADABLE) == 1


def test_what_is_unreadable_in_memory_and_complete_in_the_persistent_tier_is_no_loss() -> None:
    there = {Checkpoint(1, 47): frozenset(RankSave(1, 47, r) for r in range(3))}
    seen = replace(finished(step=47, saved=47), unreadable=UNREADABLE, uploaded=there)
    seen = replace(seen, status=plan(seen).status)
    assert seen.status.unreadable_checkpoints == ()
    kept = plan_maintenance(seen)
    assert plan(replace(seen, status=kept.status)).status.phase == "Complete"


def test_a_world_that_trains_goes_on_and_remembers_what_its_upload_found() -> None:
    seen = running(step=47, checkpoint=KEPT)
    newest = max(m.save.checkpoint for h in seen.servers for m in h.entries)
    found = replace(seen, unreadable=frozenset({RankSave(newest.generation, newest.step, 0)}))
    made = plan(found)
    check_plan(made, found)
    assert made.status.membership == seen.status.membership
    assert made.status.unreadable_checkpoints == (newest,)
    assert plan_maintenance(replace(found, status=made.status)).pinned != newest
    again = plan(replace(found, status=made.status))
    assert reasons.CHECKPOINT_UNREADABLE not in [e.reason for e in again.events], "said once"


def test_a_finished_worker_whose_pod_is_gone_is_no_loss_while_the_others_finish() -> None:
    seen = finished(step=47, saved=47)
    first, *others = seen.sessions
    left = replace(first, connected=False)
    waiting = replace(seen, sessions=(left, *(replace(s, finished=None) for s in others)), workers=seen.workers[1:])
    made = plan(waiting)
    assert made.status.membership == seen.status.membership
    assert plan(replace(seen, sessions=(left, *others), workers=seen.workers[1:])).status.restarts == 0


# ---- last checkpoint -------------------------------------------------------------------------------------------------
# What a finished job's last checkpoint comes to where it is not where it should be.


def test_holders_out_of_the_operators_sight_are_waited_for_before_a_job_has_nothing_to_show() -> None:
    """It lost sight of all holders in the moment when their checkpoint was on its way, and failed (seed 88161)."""
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    silent = tuple(replace(h, state="Unreachable", since_seconds=seen.now_seconds) for h in seen.servers)
    seen = listed(replace(seen, servers=silent, sessions=sessions))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running"
    assert "which may have a checkpoint of it" in made.reason
    assert plan(after(seen, RESCUE_SECONDS)).status.phase == "Failed"


def test_what_a_former_leader_had_uploaded_is_what_the_job_ends_with() -> None:
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    holders = tuple(replace(h, entries=()) for h in seen.servers)
    seen = listed(replace(seen, servers=holders, sessions=sessions), Checkpoint(1, 16))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Complete"
    assert "the newest checkpoint is of step 16" in made.status.message
    unchecked = plan(after(replace(seen, covers={}), SAVING_SECONDS))
    assert unchecked.status.phase == "Running"
    assert "layouts" in unchecked.reason
    gone = (UnreadRecord("its layout is damaged", False, digest=one.layout) for one in seen.persistent.entries or ())
    damaged = replace(seen, covers={}, persistent=replace(seen.persistent, unread_records=tuple(gone)))
    assert plan(after(damaged, SAVING_SECONDS)).status.phase == "Failed"


def test_what_a_worker_saved_before_it_finished_says_nothing_of_its_last_save() -> None:
    """Its end was heard an instant before its heartbeat, and the job was complete without its last step (seed 459417)."""
    seen = persisted(finished(step=47, saved=40), Checkpoint(1, 40))
    others = tuple(replace(s, saved=Checkpoint(1, 47)) for s in seen.sessions[1:])
    early = replace(seen, sessions=(replace(seen.sessions[0], final_saves_reported=False), *others))
    made = plan(early)
    assert made.status.phase == "Running"
    assert "waiting for memory servers and workers to report" in made.reason
    assert plan(after(early, SAVING_SECONDS)).status.phase == "Complete", "one that is gone says nothing any more"
    assert plan(replace(early, servers=finished(step=47, saved=47).servers)).reason.endswith("to the persistent tier")


def offering(seen: JobSnapshot, step: int) -> JobSnapshot:
    """Every program had that step saved, or tried to, as it ended."""
    told = (replace(s, progress=replace(s.progress, final_save_step=step)) for s in seen.sessions)
    return replace(seen, sessions=tuple(told))


def test_a_last_step_that_was_saved_and_is_nowhere_is_trained_again() -> None:
    """One holder died with the only copy of a rank: the job was complete, and sixteen steps of it were gone."""
    seen = offering(persisted(finished(step=47, saved=40), Checkpoint(1, 40)), 47)
    made = plan(seen)
    assert made.status.phase == "Recovering"
    assert "whose save was lost: it is trained again from step 40" in made.reason
    assert made.status.incidents[-1].kind == "checkpoint-lost"
    assert plan(offering(seen, 46)).status.phase == "Complete", "its state had moved on: nobody can save it"
    one_did_not = with_session(seen, 1, final_save_step=0)
    assert plan(one_did_not).status.phase == "Complete"
    assert seen.status.membership is not None
    world = replace(seen.status.membership, parent=Checkpoint(1, 40))
    again = replace(seen, status=replace(seen.status, membership=world))
    assert plan(again).status.phase == "Complete", "the whole epoch saved nothing: the next would not either"


def test_a_job_whose_every_copy_was_lost_while_nobody_led_is_trained_again() -> None:
    """It failed for good with "not one checkpoint of it was saved", although its agents had saved each."""
    seen = offering(finished(step=47, saved=40), 47)
    seen = listed(replace(seen, servers=tuple(replace(h, entries=()) for h in seen.servers)))
    seen = replace(seen, status=replace(seen.status, last_complete=None, last_uploaded=None))
    made = plan(after(seen, RESCUE_SECONDS))
    assert made.status.phase == "Recovering", made.reason
    assert "whose save was lost: it is trained again from step 0" in made.reason
    nothing = replace(seen, sessions=tuple(replace(s, saved=None) for s in seen.sessions))
    assert plan(after(nothing, RESCUE_SECONDS)).status.phase == "Failed", "the next epoch would save nothing either"


def test_an_earlier_listing_does_not_say_what_was_uploaded_since() -> None:
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    seen = listed(replace(seen, servers=tuple(replace(h, entries=()) for h in seen.servers), sessions=sessions))
    early = replace(seen, persistent=replace(seen.persistent, requested_seconds=BEGAN))
    made = plan(after(early, SAVING_SECONDS))
    assert made.status.phase == "Running"
    assert [type(action) for action in made.actions] == [ListPersistentTier]


def test_a_last_checkpoint_out_of_the_operators_sight_is_waited_for_and_not_trained_again() -> None:
    """Found by the simulator: begun anew each half minute, a job that had made all its steps failed by its budget."""
    seen = finished(step=47, saved=47)
    silent = tuple(replace(h, state="Unreachable", since_seconds=seen.now_seconds) for h in seen.servers[1:])
    seen = replace(seen, servers=(seen.servers[0], *silent))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running"
    names = ", ".join(str(h.endpoint.instance) for h in silent)
    assert f"{names}, which the operator cannot reach and which may have a part of step 47" in made.reason
    assert plan(after(seen, RESCUE_SECONDS)).status.incidents[-1].kind == "checkpoint-lost"
    unheard = replace(seen, sessions=(*after(seen, SAVING_SECONDS).sessions[1:], seen.sessions[0]))
    later = replace(unheard, now_seconds=seen.now_seconds + SAVING_SECONDS)
    assert "cannot reach" not in plan(later).reason, "whoever may upload it is gone, too"


def test_a_last_checkpoint_of_which_each_tier_has_a_part_is_uploaded_and_not_trained_again() -> None:
    """A node died behind its upload: the job restored the step from both tiers, and began anew for ever (seed 470975)."""
    seen, last = finished(step=47, saved=47), Checkpoint(1, 47)
    gone = tuple(replace(h, entries=tuple(m for m in h.entries if m.save != RankSave(1, 47, 0))) for h in seen.servers)
    parted = replace(seen, servers=gone, uploaded={last: frozenset({RankSave(1, 47, 0)})})
    asked = plan(parted)
    assert asked.status.phase == "Running"
    assert [type(action) for action in asked.actions] == [ListPersistentTier]
    there = listed(parted, last)
    part = replace(there.persistent, entries=tuple(m for m in there.persistent.entries or () if m.save.rank == 0))
    known = after(replace(there, persistent=part), SAVING_SECONDS)
    made = plan(known)
    assert made.reason.endswith("to the persistent tier")
    upload = [a for a in plan_maintenance(replace(known, status=made.status)).actions if isinstance(a, UploadSaves)]
    assert {save for one in upload for save in one.saves} == {RankSave(1, 47, 1), RankSave(1, 47, 2)}
    alone = after(replace(known, persistent=replace(part, entries=())), 1.0)
    assert plan(alone).status.incidents[-1].kind == "checkpoint-lost", "no tier has what memory lacks"


def test_a_finished_job_whose_last_checkpoint_is_in_the_persistent_tier_waits_for_no_holder() -> None:
    """Out of the operator's sight they kept it from its end for ten minutes, with nothing left to upload."""
    seen = persisted(finished(step=47, saved=47), Checkpoint(1, 47))
    silent = tuple(replace(h, state="Unreachable", since_seconds=seen.now_seconds) for h in seen.servers)
    made = plan(after(replace(seen, servers=silent), SAVING_SECONDS + 1))
    assert made.status.phase == "Complete", made.reason
