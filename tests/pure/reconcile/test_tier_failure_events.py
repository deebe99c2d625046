"""What agents could not do: told once, told again while it lasts, and never in a flood."""

from __future__ import annotations

from surefoot_operator.reconcile.event_recorder import MOST_TOLD, QUIET_SECONDS, TierFailureEvents


def test_the_same_failure_is_told_once_until_it_has_lasted_for_a_while() -> None:
    complaints = TierFailureEvents()
    (event,) = complaints.events(["worker 0 could not upload: no space"], 100.0)
    assert (event.reason, event.warning) == ("TierFailed", True)
    assert complaints.events(["worker 0 could not upload: no space"], 104.0) == ()
    assert len(complaints.events(["worker 0 could not upload: no space"], 100.0 + QUIET_SECONDS)) == 1


def test_a_tier_that_fails_for_every_rank_makes_few_events() -> None:
    complaints = TierFailureEvents()
    told = complaints.events([f"rank {rank} could not be uploaded" for rank in range(1000)], 0.0)
    assert len(told) == MOST_TOLD
    assert complaints.events(["rank 7000 could not be uploaded"], 1.0) == ()
    assert len(complaints.events(["rank 7000 could not be uploaded"], QUIET_SECONDS + 1.0)) == 1
