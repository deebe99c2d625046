"""Tests of `policy.membership.restore_decisions`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, holder, manifest, running, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.job_snapshot import MAX_GENERATION, JobSnapshot, PersistentListing
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.membership.claim import newest_known_generation
from surefoot_operator.policy.membership.restore_decisions import MAX_UNREADABLE, add_unreadable, may_be_forgotten
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check_plan

# ---- restored status -------------------------------------------------------------------------------------------------
# A status that was restored from a backup: what the persistent tier has beyond it is neither named again nor passed over.

NOW = BEGAN + 100


def restored(*epochs_and_steps: tuple[int, int], newest: int = 0, **world: object) -> JobSnapshot:
    """A claim of epoch 6 with empty memory, as status knows 5 at most; the tier was listed for it."""
    seen = running(now=NOW, workers=1)
    assert seen.status.membership is not None
    claim = replace(seen.status.membership, generation=6, state="Claimed", changed_seconds=NOW - 1, **world)
    status = replace(seen.status, membership=claim)
    entries = tuple(manifest(epoch, step, 0, 1) for epoch, step in epochs_and_steps)
    listed = PersistentListing(6, entries, NOW - 0.5, newest_generation=newest)
    spec = seen.job.spec
    kept = replace(spec.checkpoint, persistent=PersistentTierSpec(uri="file:///kept"))
    job = replace(seen.job, spec=replace(spec, checkpoint=kept))
    covers = {frozenset({m.layout}): True for m in entries}
    return replace(seen, job=job, status=status, persistent=listed, covers=covers, servers=(holder("n0", 6),))


@pytest.mark.parametrize(
    ("seen", "claimed"),
    [
        (restored((6, 100), (8, 300)), 9),
        (restored((6, 100)), 7),
        (restored(newest=6), 7),
        (restored(newest=7), 8),
    ],
)
def test_an_epoch_that_the_tier_has_already_is_not_claimed_again(seen: JobSnapshot, claimed: int) -> None:
    world = plan(seen).status.membership
    assert world is not None
    assert (world.state, world.generation) == ("Claimed", claimed)


def test_what_the_claim_itself_left_and_impossible_numbers_claim_nothing() -> None:
    for seen in (restored(newest=5), restored(newest=MAX_GENERATION + 1), restored((MAX_GENERATION + 1, 10))):
        assert newest_known_generation(build_facts(seen)) == 6
        world = plan(seen).status.membership
        assert world is not None
        assert world.generation == 6


def test_a_committed_epoch_that_the_tier_outlives_ends_with_a_newer_claim() -> None:
    seen = restored((8, 300))
    assert seen.status.membership is not None
    committed = replace(
        seen, status=replace(seen.status, membership=replace(seen.status.membership, state="Committed"))
    )
    world = plan(committed).status.membership
    assert world is not None
    assert (world.state, world.generation) == ("Claimed", 9)


def test_a_newer_checkpoint_that_status_does_not_know_is_offered_and_not_passed_over() -> None:
    seen = restored((8, 300))
    assert seen.status.membership is not None
    claim = replace(seen.status.membership, generation=9)
    seen = replace(
        seen,
        status=replace(seen.status, membership=claim),
        persistent=replace(seen.persistent, read_generation=9),
        servers=(holder("n0", 9),),
        sessions=tuple(replace(s, stopped=9) for s in seen.sessions),
    )
    waits = plan(seen)
    assert waits.status.membership == claim, waits.reason
    assert "step 300 of generation 8" in waits.reason
    assert "restoreFrom" in waits.reason
    assert any("step 300 of generation 8" in c.message for c in waits.status.conditions)
    accepted = plan(replace(seen, job=replace(seen.job, accepted_loss="9")))
    assert "step 300 of generation 8" not in accepted.reason


# ---- bad checkpoints -------------------------------------------------------------------------------------------------
# Which bad checkpoints a status remembers: those that could be chosen again, and never without end.

IMPORTED = Checkpoint(-1, 5)


def test_what_lies_below_the_floor_is_forgotten_and_an_older_jobs_never() -> None:
    status = replace(
        running().status,
        last_uploaded=Checkpoint(1, 30),
        unreadable_checkpoints=(IMPORTED, Checkpoint(1, 10), Checkpoint(1, 40)),
    )
    assert add_unreadable(status, Checkpoint(1, 50)) == (IMPORTED, Checkpoint(1, 40), Checkpoint(1, 50))
    assert add_unreadable(status, None) == status.unreadable_checkpoints
    unread = replace(status, unreadable_checkpoints=(*status.unreadable_checkpoints, Checkpoint(1, 30)))
    assert Checkpoint(1, 10) in add_unreadable(unread, Checkpoint(1, 50)), "a floor that is bad itself binds nobody"
    assert not may_be_forgotten(IMPORTED, status)
    assert not may_be_forgotten(Checkpoint(1, 40), status)


def test_a_job_on_bad_disks_remembers_so_many_and_its_plans_hold() -> None:
    seen = running()
    for step in range(0, 10 * MAX_UNREADABLE, 5):
        found = with_session(seen, 1, unreadable_report=(Checkpoint(1, step), False, "bits"))
        made = plan(found)
        check_plan(made, found)
        assert made.status.unreadable_checkpoints[-1] == Checkpoint(1, step)
        assert len(made.status.unreadable_checkpoints) <= MAX_UNREADABLE
        seen = replace(seen, status=replace(seen.status, unreadable_checkpoints=made.status.unreadable_checkpoints))
    assert len(seen.status.unreadable_checkpoints) == MAX_UNREADABLE
