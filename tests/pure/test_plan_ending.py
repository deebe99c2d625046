"""A job ends with its last checkpoint where people look for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, manifest, running
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTier, PersistentTier
from surefoot_operator.observed import Observed
from surefoot_operator.policy.actions import DeleteWorker
from surefoot_operator.policy.ending import LAST_PROMOTION_SECONDS, LAST_SAVE_SECONDS
from surefoot_operator.policy.plan import plan
from surefoot_operator.policy.tidying import LEAVING_SECONDS
from surefoot_operator.policy.upkeep import upkeep

NOW = BEGAN + 100
KEPT = CheckpointPolicy(MemoryTier(interval_steps=10), PersistentTier("file:///there", interval_steps=20))


def finished(step: int, saved: int, persistent: bool = True) -> Observed:
    """Every trainer ended well after `step`; the newest save is of step `saved`, on two holders each."""
    seen = running(step=step, **({"checkpoint": KEPT} if persistent else {}))
    last = Checkpoint(1, saved)
    sessions = tuple(replace(s, finished=0, finished_steps=step, saved=last) for s in seen.sessions)
    saves = [manifest(1, saved, r, 3) for r in range(3)]
    holders = tuple(
        replace(h, entries=(*h.entries, *(m for m in saves if place in (m.save.rank, (m.save.rank + 1) % 3))))
        for place, h in enumerate(seen.holders)
    )
    return replace(seen, sessions=sessions, holders=holders)


def test_a_finished_job_waits_for_its_last_checkpoint_to_be_promoted() -> None:
    seen = finished(step=47, saved=47)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "last checkpoint" in made.reason
    assert upkeep(replace(seen, status=made.status)).pinned == Checkpoint(1, 47)


def test_it_is_complete_once_that_is_there() -> None:
    seen = finished(step=47, saved=47)
    there = {Checkpoint(1, 47): frozenset(RankSave(1, 47, r) for r in range(3))}
    kept = upkeep(replace(seen, promoted=there))
    assert kept.status.floor == Checkpoint(1, 47)
    assert plan(replace(seen, status=kept.status)).status.phase == "Complete"


def test_it_does_not_wait_for_ever() -> None:
    seen = finished(step=47, saved=47)
    later = seen.now + LAST_PROMOTION_SECONDS + 1
    heard = tuple(replace(s, heard_seconds=later) for s in seen.sessions)
    assert plan(replace(seen, now=later, sessions=heard)).status.phase == "Complete"


def test_it_does_not_wait_for_what_was_never_saved() -> None:
    assert plan(finished(step=47, saved=40)).status.phase == "Complete"


def test_without_a_persistent_tier_there_is_nothing_to_wait_for() -> None:
    assert plan(finished(step=47, saved=47, persistent=False)).status.phase == "Complete"


def test_the_last_complete_checkpoint_is_the_one_that_the_holders_have() -> None:
    done = plan(finished(step=47, saved=47, persistent=False)).status
    assert (done.phase, done.last_complete) == ("Complete", Checkpoint(1, 47))


def unread(pending: bool) -> Observed:
    """The agents saved step 47, or are about to; the holders were last read before that."""
    seen = finished(step=47, saved=47, persistent=False)
    last = Checkpoint(1, 47)
    fields = {"saved": Checkpoint(1, 40), "pending": (last,)} if pending else {}
    return replace(
        seen,
        sessions=tuple(replace(s, **fields) for s in seen.sessions),
        holders=running(step=47).holders,
    )


@pytest.mark.parametrize("pending", [True, False])
def test_a_finished_job_has_its_holders_read_once_more(pending: bool) -> None:
    seen = unread(pending)
    made = plan(seen)
    assert made.status.phase == "Running"
    assert "read once more" in made.reason
    assert made.wake_after_seconds is not None
    read = replace(seen, holders=finished(step=47, saved=47).holders)
    assert plan(read).status.last_complete == Checkpoint(1, 47)


def test_but_not_for_longer_than_it_is_worth() -> None:
    seen = unread(pending=False)
    later = seen.now + LAST_SAVE_SECONDS + 1
    heard = tuple(replace(s, heard_seconds=later) for s in seen.sessions)
    done = plan(replace(seen, now=later, sessions=heard)).status
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
    seen = replace(seen, status=over, sessions=(), workers=(replace(ended, lingering=True), replace(ended, index=1)))
    first = plan(seen)
    assert not any(isinstance(a, DeleteWorker) for a in first.actions)
    assert first.wake_after_seconds is not None
    late = plan(replace(seen, now=NOW + LEAVING_SECONDS))
    assert [a.uid for a in late.actions if isinstance(a, DeleteWorker)] == [seen.workers[0].uid]


def test_while_training_goes_on_only_due_steps_are_promoted() -> None:
    seen = finished(step=47, saved=47)
    training = replace(seen, sessions=tuple(replace(s, finished=None) for s in seen.sessions))
    assert upkeep(training).pinned == Checkpoint(1, 40)
