"""A status that was restored from a backup: what the persistent tier has beyond it is neither named again nor passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, holder, manifest, running
from surefoot_operator.api.spec import PersistentTierSpec
from surefoot_operator.job_snapshot import HIGHEST_EPOCH, Observed, PersistentSeen
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.membership.claim import newest_epoch_seen
from surefoot_operator.policy.planning.plan import plan

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
