"""What a finished job's last checkpoint comes to where it is not where it should be."""

from __future__ import annotations

from dataclasses import replace

from support.builders import BEGAN, with_session
from support.finished_jobs import after, finished, listed, persisted
from surefoot.protocol.checkpoints.completeness import LeftOut
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.actions import ListPersistentTier, PromoteSaves
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.membership.final_checkpoint import RESCUE_SECONDS, SAVING_SECONDS
from surefoot_operator.policy.planning.plan import plan


def test_holders_out_of_the_operators_sight_are_waited_for_before_a_job_has_nothing_to_show() -> None:
    """It lost sight of all holders in the moment when their checkpoint was on its way, and failed (seed 88161)."""
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    silent = tuple(replace(h, state="Silent", since_seconds=seen.now) for h in seen.holders)
    seen = listed(replace(seen, holders=silent, sessions=sessions))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running"
    assert "which may have a checkpoint of it" in made.reason
    assert plan(after(seen, RESCUE_SECONDS)).status.phase == "Failed"


def test_what_a_former_leader_had_uploaded_is_what_the_job_ends_with() -> None:
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    holders = tuple(replace(h, entries=()) for h in seen.holders)
    seen = listed(replace(seen, holders=holders, sessions=sessions), Checkpoint(1, 16))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Complete"
    assert "the newest checkpoint is of step 16" in made.status.message
    unchecked = plan(after(replace(seen, covers={}), SAVING_SECONDS))
    assert unchecked.status.phase == "Running"
    assert "layouts" in unchecked.reason
    gone = (LeftOut("its layout is damaged", False, digest=one.layout) for one in seen.persistent.entries or ())
    damaged = replace(seen, covers={}, persistent=replace(seen.persistent, left_out=tuple(gone)))
    assert plan(after(damaged, SAVING_SECONDS)).status.phase == "Failed"


def test_what_a_worker_saved_before_it_finished_says_nothing_of_its_last_save() -> None:
    """Its end was heard an instant before its heartbeat, and the job was complete without its last step (seed 459417)."""
    seen = persisted(finished(step=47, saved=40), Checkpoint(1, 40))
    others = tuple(replace(s, saved=Checkpoint(1, 47)) for s in seen.sessions[1:])
    early = replace(seen, sessions=(replace(seen.sessions[0], saves_told=False), *others))
    made = plan(early)
    assert made.status.phase == "Running"
    assert "waiting for holders and workers to report" in made.reason
    assert plan(after(early, SAVING_SECONDS)).status.phase == "Complete", "one that is gone says nothing any more"
    assert plan(replace(early, holders=finished(step=47, saved=47).holders)).reason.endswith("to the persistent tier")


def offering(seen: Observed, step: int) -> Observed:
    """Every program had that step saved, or tried to, as it ended."""
    told = (replace(s, progress=replace(s.progress, offered=step)) for s in seen.sessions)
    return replace(seen, sessions=tuple(told))


def test_a_last_step_that_was_saved_and_is_nowhere_is_trained_again() -> None:
    """One holder died with the only copy of a rank: the job was complete, and sixteen steps of it were gone."""
    seen = offering(persisted(finished(step=47, saved=40), Checkpoint(1, 40)), 47)
    made = plan(seen)
    assert made.status.phase == "Recovering"
    assert "whose save was lost: it is trained again from step 40" in made.reason
    assert made.status.incidents[-1].kind == "checkpoint-lost"
    assert plan(offering(seen, 46)).status.phase == "Complete", "its state had moved on: nobody can save it"
    one_did_not = with_session(seen, 1, offered=0)
    assert plan(one_did_not).status.phase == "Complete"
    assert seen.status.world is not None
    world = replace(seen.status.world, parent=Checkpoint(1, 40))
    again = replace(seen, status=replace(seen.status, world=world))
    assert plan(again).status.phase == "Complete", "the whole epoch saved nothing: the next would not either"


def test_a_job_whose_every_copy_was_lost_while_nobody_led_is_trained_again() -> None:
    """It failed for good with "not one checkpoint of it was saved", although its agents had saved each."""
    seen = offering(finished(step=47, saved=40), 47)
    seen = listed(replace(seen, holders=tuple(replace(h, entries=()) for h in seen.holders)))
    seen = replace(seen, status=replace(seen.status, last_complete=None, floor=None))
    made = plan(after(seen, RESCUE_SECONDS))
    assert made.status.phase == "Recovering", made.reason
    assert "whose save was lost: it is trained again from step 0" in made.reason
    nothing = replace(seen, sessions=tuple(replace(s, saved=None) for s in seen.sessions))
    assert plan(after(nothing, RESCUE_SECONDS)).status.phase == "Failed", "the next epoch would save nothing either"


def test_an_earlier_listing_does_not_say_what_was_uploaded_since() -> None:
    seen = finished(step=47, saved=40)
    sessions = tuple(replace(s, saved=None) for s in seen.sessions)
    seen = listed(replace(seen, holders=tuple(replace(h, entries=()) for h in seen.holders), sessions=sessions))
    early = replace(seen, persistent=replace(seen.persistent, asked_seconds=BEGAN))
    made = plan(after(early, SAVING_SECONDS))
    assert made.status.phase == "Running"
    assert [type(action) for action in made.actions] == [ListPersistentTier]


def test_a_last_checkpoint_out_of_the_operators_sight_is_waited_for_and_not_trained_again() -> None:
    """Found by the simulator: begun anew each half minute, a job that had made all its steps failed by its budget."""
    seen = finished(step=47, saved=47)
    silent = tuple(replace(h, state="Silent", since_seconds=seen.now) for h in seen.holders[1:])
    seen = replace(seen, holders=(seen.holders[0], *silent))
    made = plan(after(seen, SAVING_SECONDS))
    assert made.status.phase == "Running"
    names = ", ".join(str(h.endpoint.holder) for h in silent)
    assert f"{names}, which the operator cannot reach and which may have a part of step 47" in made.reason
    assert plan(after(seen, RESCUE_SECONDS)).status.incidents[-1].kind == "checkpoint-lost"
    unheard = replace(seen, sessions=(*after(seen, SAVING_SECONDS).sessions[1:], seen.sessions[0]))
    later = replace(unheard, now=seen.now + SAVING_SECONDS)
    assert "cannot reach" not in plan(later).reason, "whoever may upload it is gone, too"


def test_a_last_checkpoint_of_which_each_tier_has_a_part_is_uploaded_and_not_trained_again() -> None:
    """A node died behind its upload: the job restored the step from both tiers, and began anew for ever (seed 470975)."""
    seen, last = finished(step=47, saved=47), Checkpoint(1, 47)
    gone = tuple(replace(h, entries=tuple(m for m in h.entries if m.save != RankSave(1, 47, 0))) for h in seen.holders)
    parted = replace(seen, holders=gone, promoted={last: frozenset({RankSave(1, 47, 0)})})
    asked = plan(parted)
    assert asked.status.phase == "Running"
    assert [type(action) for action in asked.actions] == [ListPersistentTier]
    there = listed(parted, last)
    part = replace(there.persistent, entries=tuple(m for m in there.persistent.entries or () if m.save.rank == 0))
    known = after(replace(there, persistent=part), SAVING_SECONDS)
    made = plan(known)
    assert made.reason.endswith("to the persistent tier")
    upload = [a for a in maintain(replace(known, status=made.status)).actions if isinstance(a, PromoteSaves)]
    assert {save for one in upload for save in one.saves} == {RankSave(1, 47, 1), RankSave(1, 47, 2)}
    alone = after(replace(known, persistent=replace(part, entries=())), 1.0)
    assert plan(alone).status.incidents[-1].kind == "checkpoint-lost", "no tier has what memory lacks"


def test_a_finished_job_whose_last_checkpoint_is_in_the_persistent_tier_waits_for_no_holder() -> None:
    """Out of the operator's sight they kept it from its end for ten minutes, with nothing left to upload."""
    seen = persisted(finished(step=47, saved=47), Checkpoint(1, 47))
    silent = tuple(replace(h, state="Silent", since_seconds=seen.now) for h in seen.holders)
    made = plan(after(replace(seen, holders=silent), SAVING_SECONDS + 1))
    assert made.status.phase == "Complete", made.reason
