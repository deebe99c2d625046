"""Tests of `policy.membership.restore_decisions`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, holder, manifest, running, with_session
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.job_snapshot import HIGHEST_EPOCH, Observed, PersistentSeen
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.membership.claim import newest_epoch_seen
from surefoot_operator.policy.membership.restore_decisions import MOST_REMEMBERED, may_be_forgotten, with_bad
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check

# ---- restored status -------------------------------------------------------------------------------------------------
# A status that was restored from a backup: what the persistent tier has beyond it is neither named again nor passed over.

NOW = BEGAN + 100


def restored(*epochs_and_steps: tuple[int, int], newest: int = 0, **world: object) -> Observed:
    """A claim of epoch 6 with empty memory, as status knows 5 at most; the tier was listed for it."""
    seen = running(now=NOW, workers=1)
    assert seen.status.world is not None
    claim = replace(seen.status.world, epoch=6, state="Claimed", changed_seconds=NOW - 1, **world)
    status = replace(seen.status, world=claim)
    entries = tuple(manifest(epoch, step, 0, 1) for epoch, step in epochs_and_steps)
    listed = PersistentSeen(6, entries, NOW - 0.5, newest_epoch=newest)
    spec = seen.job.spec
    kept = replace(spec.checkpoint, persistent=PersistentTierSpec(uri="file:///kept"))
    job = replace(seen.job, spec=replace(spec, checkpoint=kept))
    covers = {frozenset({m.layout}): True for m in entries}
    return replace(seen, job=job, status=status, persistent=listed, covers=covers, holders=(holder("n0", 6),))


@pytest.mark.parametrize(
    ("seen", "claimed"),
    [
        (restored((6, 100), (8, 300)), 9),
        (restored((6, 100)), 7),
        (restored(newest=6), 7),
        (restored(newest=7), 8),
    ],
)
def test_an_epoch_that_the_tier_has_already_is_not_claimed_again(seen: Observed, claimed: int) -> None:
    world = plan(seen).status.world
    assert world is not None
    assert (world.state, world.epoch) == ("Claimed", claimed)


def test_what_the_claim_itself_left_and_impossible_numbers_claim_nothing() -> None:
    for seen in (restored(newest=5), restored(newest=HIGHEST_EPOCH + 1), restored((HIGHEST_EPOCH + 1, 10))):
        assert newest_epoch_seen(gather(seen)) == 6
        world = plan(seen).status.world
        assert world is not None
        assert world.epoch == 6


def test_a_committed_epoch_that_the_tier_outlives_ends_with_a_newer_claim() -> None:
    seen = restored((8, 300))
    assert seen.status.world is not None
    committed = replace(seen, status=replace(seen.status, world=replace(seen.status.world, state="Committed")))
    world = plan(committed).status.world
    assert world is not None
    assert (world.state, world.epoch) == ("Claimed", 9)


def test_a_newer_checkpoint_that_status_does_not_know_is_offered_and_not_passed_over() -> None:
    seen = restored((8, 300))
    assert seen.status.world is not None
    claim = replace(seen.status.world, epoch=9)
    seen = replace(
        seen,
        status=replace(seen.status, world=claim),
        persistent=replace(seen.persistent, read_epoch=9),
        holders=(holder("n0", 9),),
        sessions=tuple(replace(s, stopped=9) for s in seen.sessions),
    )
    waits = plan(seen)
    assert waits.status.world == claim, waits.reason
    assert "step 300 of epoch 8" in waits.reason
    assert "restoreFrom" in waits.reason
    assert any("step 300 of epoch 8" in c.message for c in waits.status.conditions)
    accepted = plan(replace(seen, job=replace(seen.job, accepted_loss="9")))
    assert "step 300 of epoch 8" not in accepted.reason


# ---- bad checkpoints -------------------------------------------------------------------------------------------------
# Which bad checkpoints a status remembers: those that could be chosen again, and never without end.

IMPORTED = Checkpoint(-1, 5)


def test_what_lies_below_the_floor_is_forgotten_and_an_older_jobs_never() -> None:
    status = replace(running().status, floor=Checkpoint(1, 30), bad=(IMPORTED, Checkpoint(1, 10), Checkpoint(1, 40)))
    assert with_bad(status, Checkpoint(1, 50)) == (IMPORTED, Checkpoint(1, 40), Checkpoint(1, 50))
    assert with_bad(status, None) == status.bad
    unread = replace(status, bad=(*status.bad, Checkpoint(1, 30)))
    assert Checkpoint(1, 10) in with_bad(unread, Checkpoint(1, 50)), "a floor that is bad itself binds nobody"
    assert not may_be_forgotten(IMPORTED, status)
    assert not may_be_forgotten(Checkpoint(1, 40), status)


def test_a_job_on_bad_disks_remembers_so_many_and_its_plans_hold() -> None:
    seen = running()
    for step in range(0, 10 * MOST_REMEMBERED, 5):
        found = with_session(seen, 1, unreadable=(Checkpoint(1, step), False, "bits"))
        made = plan(found)
        check(made, found)
        assert made.status.bad[-1] == Checkpoint(1, step)
        assert len(made.status.bad) <= MOST_REMEMBERED
        seen = replace(seen, status=replace(seen.status, bad=made.status.bad))
    assert len(seen.status.bad) == MOST_REMEMBERED
