"""Tests of `policy.core.availability`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.builders import BEGAN, job, running, with_node, with_session, with_worker
from support.paces import decided, paced
from surefoot_operator.api.spec import FailurePolicy, HealthPolicy
from surefoot_operator.api.status import JobStatus
from surefoot_operator.job_snapshot import JobSnapshot, ObservedNode
from surefoot_operator.policy.core.actions import CreateWorker, DeleteWorker
from surefoot_operator.policy.core.availability import evacuation_reason, is_node_lost
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.planning.plan import plan

# ---- outages ---------------------------------------------------------------------------------------------------------
# Nodes that seem gone because who watches them was away: what is heard there is never deleted, what is not may be lost.

NOW = BEGAN + 100
AWAY = "not ready: Kubelet stopped posting node status."


def doubted(seen: JobSnapshot, *names: str) -> JobSnapshot:
    for name in names or [node.name for node in seen.nodes]:
        seen = with_node(seen, name, unconfirmed_failure=AWAY)
    return seen


def claimed(seen: JobSnapshot) -> JobSnapshot:
    """Epoch 2 is claimed: nobody is a member, every worker is tended."""
    world = seen.status.membership
    assert world is not None
    status = replace(seen.status, membership=replace(world, generation=2, state="Claimed", changed_seconds=NOW - 1))
    return replace(seen, status=status)


def deleted(seen: JobSnapshot) -> list[str]:
    return [f"{a.name}{' by force' if a.force else ''}" for a in plan(seen).actions if isinstance(a, DeleteWorker)]


def created(seen: JobSnapshot) -> list[int]:
    return [a.index for a in plan(seen).actions if isinstance(a, CreateWorker)]


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_that_is_heard_is_deleted_on_no_node(ready: bool) -> None:
    seen = running()
    for name in ("n0", "n1", "n2"):
        seen = with_node(
            seen, name, ready=ready, reason="" if ready else AWAY, unconfirmed_failure=AWAY if ready else ""
        )
    assert plan(seen).status.membership == seen.status.membership
    assert (deleted(claimed(seen)), created(claimed(seen))) == ([], [])


def test_a_doubted_node_is_lost_once_its_agent_is_silent_while_others_are_heard() -> None:
    seen = with_session(doubted(running()), 1, last_message_seconds=NOW - 4)
    still = replace(seen, sessions=tuple(replace(s, step_at_seconds=NOW - 10) for s in seen.sessions))
    assert [name for name in ("n0", "n1", "n2") if is_node_lost(build_facts(still), name)] == ["n1"]
    incident = plan(still).status.incidents[-1]
    assert (incident.kind, incident.node) == ("node-lost", "n1")
    assert AWAY in incident.reason
    assert deleted(claimed(still)) == [f"{still.workers[1].name} by force"]


def test_where_nobody_is_heard_and_no_node_is_well_none_is_lost() -> None:
    seen = doubted(running())
    for index in range(3):
        seen = with_session(seen, index, last_message_seconds=NOW - 4, step_at_seconds=NOW - 4.1)
    assert not any(is_node_lost(build_facts(seen), name) for name in ("n0", "n1", "n2"))
    assert plan(seen).status.membership == seen.status.membership
    well = replace(seen, nodes=(*seen.nodes, ObservedNode("n3", "n3", True)))
    assert all(is_node_lost(build_facts(well), name) for name in ("n0", "n1", "n2"))


def test_a_new_leader_gives_agents_on_doubted_nodes_time_to_find_it() -> None:
    seen = replace(doubted(running()), sessions=running().sessions[:1], term_seconds=NOW - 5)
    assert not is_node_lost(build_facts(seen), "n1")
    assert is_node_lost(build_facts(replace(seen, term_seconds=NOW - 31)), "n1")


def test_a_worker_that_was_just_placed_is_not_replaced_for_its_nodes_sake() -> None:
    """Found on a cluster: 40 attempts in 50 s, each on a node that its scheduler took for well."""
    lost = claimed(with_node(running(), "n2", ready=False, reason=AWAY))
    lost = replace(lost, sessions=lost.sessions[:2], free_nodes=None)
    new = with_worker(lost, 2, phase="Pending", created_seconds=NOW - 1)
    assert (deleted(new), created(new)) == ([], [])
    wake = plan(new).wake_after_seconds
    assert wake is not None
    assert wake <= 29.0
    old = with_worker(lost, 2, phase="Pending", created_seconds=NOW - 31)
    assert created(old) == [2]
    ahead = with_worker(lost, 2, phase="Pending", created_seconds=NOW + 3600)
    assert created(ahead) == [2], "a clock that is ahead keeps no place empty"


def test_a_line_that_breaks_under_a_doubted_node_loses_it_only_once_its_agent_is_silent() -> None:
    """The API server was away and doubts every node; one agent's line breaks for a moment while all ranks train."""
    seen = with_session(
        doubted(running()), 0, connected=False, since_seconds=NOW - 0.01, last_message_seconds=NOW - 0.2
    )
    assert not is_node_lost(build_facts(seen), "n0")
    assert plan(seen).status.membership == seen.status.membership
    silent = with_session(doubted(running()), 0, connected=False, since_seconds=NOW - 4, last_message_seconds=NOW - 4)
    stands = replace(silent, sessions=tuple(replace(s, step_at_seconds=NOW - 4.1) for s in silent.sessions))
    assert is_node_lost(build_facts(stands), "n0")


def test_a_doubted_node_whose_ranks_step_with_the_others_lives_however_long_its_line_is_broken() -> None:
    """Found by the simulator: an API server that was away and a line of 3.6 s were two witnesses that both erred."""
    broken = with_session(doubted(running()), 0, connected=False, since_seconds=NOW - 20, last_message_seconds=NOW - 20)
    steps = with_session(broken, 1, step_at_seconds=NOW - 0.5)
    assert not is_node_lost(build_facts(steps), "n0")
    assert plan(steps).status.membership == steps.status.membership
    assert deleted(steps) == []
    slow = broken
    for index in range(3):
        slow = with_session(slow, index, step_at_seconds=NOW - 8, step_seconds=10.0)
    assert not is_node_lost(build_facts(slow), "n0"), "steps may take longer than silence is borne"
    long_ago = replace(broken, sessions=tuple(replace(s, step_at_seconds=NOW - 10) for s in broken.sessions))
    assert is_node_lost(build_facts(long_ago), "n0"), "steps that ended say nothing"
    assert is_node_lost(build_facts(claimed(steps)), "n0"), "of a world that is over nobody steps"


def test_the_last_node_that_an_api_server_hears_again_is_not_lost_for_a_line_that_broke() -> None:
    """Found on a cluster: two nodes were heard again, the third's worker was replaced in the second in which its line was away."""
    last = with_node(running(), "n2", ready=False, unconfirmed_failure=AWAY)
    broken = with_session(last, 2, connected=False, since_seconds=NOW - 1.2, last_message_seconds=NOW - 1.3)
    assert not is_node_lost(build_facts(claimed(broken)), "n2")
    assert (deleted(claimed(broken)), created(claimed(broken))) == ([], [])
    silent = with_session(last, 2, connected=False, since_seconds=NOW - 4, last_message_seconds=NOW - 4)
    assert is_node_lost(build_facts(claimed(silent)), "n2")


def test_the_last_node_that_is_heard_again_has_time_to_reach_a_new_leader() -> None:
    last = claimed(with_node(running(), "n2", ready=False, unconfirmed_failure=AWAY))
    last = replace(last, sessions=last.sessions[:2])
    young, old = replace(last, term_seconds=NOW - 1), replace(last, term_seconds=NOW - 4)
    assert (is_node_lost(build_facts(young), "n2"), is_node_lost(build_facts(old), "n2")) == (False, True)
    told_to_wait = replace(old, retry_later_seconds=NOW - 1)
    assert not is_node_lost(build_facts(told_to_wait), "n2"), "a herd comes in an order"


def test_a_node_that_its_fabric_knows_to_be_down_is_lost_at_once() -> None:
    down = with_node(running(), "n2", ready=False, reason="its process is gone")
    broken = with_session(down, 2, connected=False, since_seconds=NOW - 0.1, last_message_seconds=NOW - 0.2)
    assert is_node_lost(build_facts(broken), "n2")


# ---- straggler replacement -------------------------------------------------------------------------------------------
# A straggler's node is left by policy: one at a time, within the budget, and never twice for the same place.

SLOW = (0.32, 0.32, 0.96)


def replacing(
    *shares: float,
    status: JobStatus | None = None,
    lines: tuple[tuple[tuple[int, int, int], ...], ...] = (),
    **spec: Any,
) -> JobSnapshot:
    seen = paced(*shares, lines=lines)
    asked = job(health_policy=HealthPolicy(on_straggler="Replace"), **spec)
    return replace(seen, job=asked, free_nodes=1, status=seen.status if status is None else status)


def nodes(status: JobStatus) -> list[str]:
    return [one.node for one in status.replaced_stragglers]


def answer(status: JobStatus) -> str:
    return status.stragglers[0].action


def test_nothing_follows_unless_it_is_asked_for() -> None:
    status = decided(paced(*SLOW))
    assert (nodes(status), answer(status)) == ([], "")


def test_its_node_is_left_and_counts_as_a_restart() -> None:
    seen = replacing(*SLOW)
    status = decided(seen)
    assert (nodes(status), answer(status)) == (["n2"], "its worker is moved to another node")
    assert ([one.count for one in status.recent_restarts], status.restarts_counted) == ([1], 0)
    after = replace(seen, status=status)
    assert evacuation_reason(build_facts(after), "n2") == "rank 2 was slow there"
    again = decided(after)
    assert (again.replaced_stragglers, again.recent_restarts) == (status.replaced_stragglers, status.recent_restarts)
    assert any("CreateWorker" in type(action).__name__ for action in plan(after).actions), "another one is made for it"
    period = seen.job.spec.failure_policy.eval_period_seconds
    assert status.replaced_stragglers[0].until_seconds == seen.now_seconds + period


def test_another_one_waits_until_then() -> None:
    first = decided(replacing(*SLOW))
    status = replace(first, stragglers=())
    second = decided(replacing(0.96, 0.32, 0.32, status=status))
    assert nodes(second) == ["n2"]
    assert answer(second) == "it stays for now: rank 2 was replaced, and stragglers are replaced one at a time"
    over = replace(status, replaced_stragglers=(replace(first.replaced_stragglers[0], until_seconds=0.0),))
    assert nodes(decided(replacing(0.96, 0.32, 0.32, status=over))) == ["n2", "n0"]


def test_a_place_that_is_slow_on_two_nodes_stays() -> None:
    status = decided(replacing(*SLOW))
    moved = replace(status, replaced_stragglers=(replace(status.replaced_stragglers[0], node="n9", until_seconds=0.0),))
    again = decided(replacing(*SLOW, status=moved))
    assert nodes(again) == ["n9"]
    assert (
        answer(again)
        == "it stays, because its group rank was slow on node n9 too: the program or its data is the cause"
    )
    told = next(c.message for c in again.conditions if c.type == "NoStragglers")
    assert told.endswith("the program or its data is the cause")


def test_the_last_restart_of_the_budget_is_for_failures() -> None:
    assert nodes(decided(replacing(*SLOW, failure_policy=FailurePolicy(max_restarts=2)))) == ["n2"]
    kept = decided(replacing(*SLOW, failure_policy=FailurePolicy(max_restarts=1)))
    assert (nodes(kept), kept.recent_restarts) == ([], ())
    assert answer(kept) == "it stays for now: the last of maxRestarts (1) is reserved for a failure"


def test_who_does_more_than_its_peers_stays_where_it_is() -> None:
    """Rank 2 writes logs for two thirds of each step, and no other rank does."""
    status = decided(replacing(*SLOW, lines=((), (), ((88, 12, 32),))))
    assert (nodes(status), status.recent_restarts) == ([], ())
    assert answer(status) == "it stays, because it would be as slow on another node"
    told = next(c.message for c in status.conditions if c.type == "NoStragglers")
    assert (
        "in line 88 of its training loop (line 12 of the function called there), where its peers were not observed"
        in told
    )
    assert "The cause is the program, not node n2" in told
    slower = replacing(*SLOW, status=status)
    assert nodes(decided(slower)) == [], "what was the program's stays so while it is named"


def test_where_no_node_is_free_it_stays() -> None:
    full = decided(replace(replacing(*SLOW), free_nodes=0))
    assert (nodes(full), answer(full)) == ([], "it stays for now: no other node is free")
