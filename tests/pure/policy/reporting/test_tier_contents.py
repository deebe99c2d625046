"""What each tier has of a job is told with a status that is written anyway, and causes no write."""

from __future__ import annotations

from dataclasses import replace

from support.builders import manifest, running, with_holder
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import JobStatus, StoredCheckpoints, TierContents, World
from surefoot_operator.job_snapshot import Observed, PersistentSeen
from surefoot_operator.policy.report.status_conditions import with_contents

ONE_SAVE = 64 + 8 + 2
"""Tensors, digests and values of `manifest`."""
IN_MEMORY = TierContents(2 * 3 * 2 * ONE_SAVE, 2)
"""Of `running`: two steps of three ranks, each on two nodes."""


def told(seen: Observed, **other: object) -> StoredCheckpoints:
    return with_contents(seen, replace(seen.status, step=seen.status.step + 1, **other)).checkpoints  # type: ignore[arg-type]


def test_memory_is_counted_with_its_copies() -> None:
    assert told(running()) == StoredCheckpoints(IN_MEMORY, copies=2)


def test_bytes_that_moved_are_no_reason_to_write() -> None:
    seen = running()
    assert with_contents(seen, seen.status) == seen.status


def test_a_new_status_that_was_told_is_told_the_same_again() -> None:
    seen = running()
    status = with_contents(seen, replace(seen.status, step=43))
    again = replace(seen, status=status)
    assert with_contents(again, replace(status, step=44)).checkpoints == status.checkpoints


def test_the_persistent_tier_is_counted_as_it_was_listed() -> None:
    entries = tuple(manifest(1, step, rank, 3) for step in (20, 40) for rank in range(3))
    listed = replace(running(), persistent=PersistentSeen(1, entries, 0.0))
    assert told(listed).persistent == TierContents(6 * ONE_SAVE, 2)


def test_each_upload_is_added_until_a_listing_has_it() -> None:
    entries = tuple(manifest(1, 20, rank, 3) for rank in range(3))
    seen = replace(running(), persistent=PersistentSeen(1, entries, 0.0))
    first = with_contents(seen, replace(seen.status, floor=Checkpoint(1, 30)))
    assert first.checkpoints.persistent == TierContents(6 * ONE_SAVE, 2)
    second = with_contents(replace(seen, status=first), replace(first, floor=Checkpoint(1, 40)))
    assert second.checkpoints.persistent == TierContents(9 * ONE_SAVE, 3)
    later = with_contents(replace(seen, status=second), replace(second, step=50))
    assert later.checkpoints.persistent == second.checkpoints.persistent
    every = tuple(manifest(1, step, rank, 3) for step in (30, 40) for rank in range(3))  # 20 was dropped
    listed = replace(seen, status=later, persistent=PersistentSeen(1, every, 60.0))
    assert with_contents(listed, replace(later, step=51)).checkpoints.persistent == TierContents(6 * ONE_SAVE, 2)


def test_a_first_upload_is_counted_before_any_listing() -> None:
    assert told(running(), floor=Checkpoint(1, 40)).persistent == TierContents(3 * ONE_SAVE, 1)


def test_a_listing_of_an_older_epoch_is_not_cut_to_what_memory_has() -> None:
    known = TierContents(9 * ONE_SAVE, 3)
    seen = running()
    seen = replace(seen, status=replace(seen.status, checkpoints=StoredCheckpoints(persistent=known)))
    seen = replace(seen, status=replace(seen.status, floor=Checkpoint(1, 40)))
    assert told(seen).persistent == known


def test_what_nobody_read_is_told_as_it_was_known() -> None:
    known = StoredCheckpoints(TierContents(5, 1), TierContents(7, 1), 1)
    seen = running()
    seen = replace(seen, status=replace(seen.status, checkpoints=known))
    for node in ("n0", "n1", "n2"):
        seen = with_holder(seen, node, read_epoch=None)
    assert told(seen) == known
    # a world that was just claimed has read nothing yet
    assert told(running(), world=World(2, "Claimed", None, 3)) == StoredCheckpoints()


def test_a_job_that_was_tidied_has_nothing_in_memory() -> None:
    seen = running()
    known = StoredCheckpoints(TierContents(5, 1), TierContents(7, 1), 1)
    seen = replace(seen, status=replace(seen.status, checkpoints=known))
    assert told(seen, tidied=True) == StoredCheckpoints(None, TierContents(7, 1))


def test_a_status_says_nothing_where_nothing_is_known() -> None:
    seen = replace(running(), status=JobStatus(), holders=())
    assert told(seen) == StoredCheckpoints()
