"""A straggler's node is left by policy: one at a time, within the budget, and never twice for the same place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.builders import job
from support.paces import decided, paced
from surefoot_operator.api.spec import FailurePolicy, HealthPolicy
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import Observed
from surefoot_operator.policy.core.availability import vacate_reason
from surefoot_operator.policy.core.facts import gather
from surefoot_operator.policy.planning.plan import plan

SLOW = (0.32, 0.32, 0.96)


def replacing(
    *shares: float,
    status: JobStatus | None = None,
    lines: tuple[tuple[tuple[int, int, int], ...], ...] = (),
    **spec: Any,
) -> Observed:
    seen = paced(*shares, lines=lines)
    asked = job(health_policy=HealthPolicy(on_straggler="Replace"), **spec)
    return replace(seen, job=asked, free_nodes=1, status=seen.status if status is None else status)


def nodes(status: JobStatus) -> list[str]:
    return [one.node for one in status.replaced_stragglers]


def answer(status: JobStatus) -> str:
    return status.stragglers[0].answer


def test_nothing_follows_unless_it_is_asked_for() -> None:
    status = decided(paced(*SLOW))
    assert (nodes(status), answer(status)) == ([], "")


def test_its_node_is_left_and_counts_as_a_restart() -> None:
    seen = replacing(*SLOW)
    status = decided(seen)
    assert (nodes(status), answer(status)) == (["n2"], "its worker leaves that node")
    assert [one.counted for one in status.recent_restarts] == [False]
    after = replace(seen, status=status)
    assert vacate_reason(gather(after), "n2") == "rank 2 was slow there"
    again = decided(after)
    assert (again.replaced_stragglers, again.recent_restarts) == (status.replaced_stragglers, status.recent_restarts)
    assert any("CreateWorker" in type(action).__name__ for action in plan(after).actions), "another one is made for it"
    period = seen.job.spec.failure_policy.eval_period_seconds
    assert status.replaced_stragglers[0].until_seconds == seen.now + period


def test_another_one_waits_until_then() -> None:
    first = decided(replacing(*SLOW))
    status = replace(first, stragglers=())
    second = decided(replacing(0.96, 0.32, 0.32, status=status))
    assert nodes(second) == ["n2"]
    assert answer(second) == "it stays for now: rank 2 was replaced, and one is at a time"
    over = replace(status, replaced_stragglers=(replace(first.replaced_stragglers[0], until_seconds=0.0),))
    assert nodes(decided(replacing(0.96, 0.32, 0.32, status=over))) == ["n2", "n0"]


def test_a_place_that_is_slow_on_two_nodes_stays() -> None:
    status = decided(replacing(*SLOW))
    moved = replace(status, replaced_stragglers=(replace(status.replaced_stragglers[0], node="n9", until_seconds=0.0),))
    again = decided(replacing(*SLOW, status=moved))
    assert nodes(again) == ["n9"]
    assert answer(again) == "its place was slow on node n9 too: it is the program or its data, and it stays"
    told = next(c.message for c in again.conditions if c.type == "RanksEven")
    assert told.endswith("it is the program or its data, and it stays")


def test_the_last_restart_of_the_budget_is_for_failures() -> None:
    assert nodes(decided(replacing(*SLOW, failure_policy=FailurePolicy(max_restarts=2)))) == ["n2"]
    kept = decided(replacing(*SLOW, failure_policy=FailurePolicy(max_restarts=1)))
    assert (nodes(kept), kept.recent_restarts) == ([], ())
    assert answer(kept) == "it stays for now: the last of maxRestarts (1) is kept for a failure"


def test_who_does_more_than_its_peers_stays_where_it_is() -> None:
    """Rank 2 writes logs for two thirds of each step, and no other rank does."""
    status = decided(replacing(*SLOW, lines=((), (), ((88, 12, 32),))))
    assert (nodes(status), status.recent_restarts) == ([], ())
    assert answer(status) == "on another node it would do the same, and it stays"
    told = next(c.message for c in status.conditions if c.type == "RanksEven")
    assert "in line 88 of its training loop (line 12 of what is called there), where its peers are not found" in told
    assert "It is the program, and not node n2" in told
    slower = replacing(*SLOW, status=status)
    assert nodes(decided(slower)) == [], "what was the program's stays so while it is named"


def test_where_no_node_is_free_it_stays() -> None:
    full = decided(replace(replacing(*SLOW), free_nodes=0))
    assert (nodes(full), answer(full)) == ([], "it stays for now: no other node is free")
