"""Whether the checkpoints that a job keeps fit into its holders and its pods, with the numbers, and when it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.builders import BEGAN, endpoint, manifest, running, told, with_holder, with_session
from surefoot_operator.api.spec import CheckpointPolicy, MemoryTierSpec
from surefoot_operator.api.status import Condition
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.policy.core.facts import build_facts
from surefoot_operator.policy.maintenance.maintenance_plan import MaintenancePlan, plan_maintenance
from surefoot_operator.policy.maintenance.memory_budget import (
    MemoryServerBudget,
    judge_by_tightest_node,
    judge_memory_budget,
)
from surefoot_operator.policy.planning.plan import plan

GIB = 1 << 30
POLICY = CheckpointPolicy(MemoryTierSpec(interval_steps=10))


def share(node: str = "node-b", **other: int | None) -> MemoryServerBudget:
    """Four ranks at 1.2 GB, kept twice and written once, on a server of 8 GiB."""
    body = MemoryServerBudget(node, 4, 4_800_000_000, 3, 8 * GIB, 0, None)
    return replace(body, **other)  # type: ignore[arg-type]  # tests name real fields


def saying(seen: JobSnapshot, save_bytes: int, limit: int | None, used: int = 0) -> JobSnapshot:
    """Every agent has said what it needs; every holder has this limit, and holds so much of anybody's."""
    sessions = tuple(told(s, save_bytes=save_bytes) for s in seen.sessions)
    holders = tuple(replace(h, limit_bytes=limit, used_bytes=used) for h in seen.servers)
    return replace(seen, sessions=sessions, servers=holders)


def condition(kept: MaintenancePlan) -> Condition | None:
    return next((c for c in kept.status.conditions if c.type == "CheckpointsFit"), None)


@pytest.mark.parametrize(
    ("shares", "policy", "text"),
    [
        (
            [share("node-a", save_bytes=1000), share()],
            POLICY,
            "node-b would have to store 3 checkpoints of 4 ranks at 1.20 GB each = 14.4 GB; its memory tier has 8.59 GB: raise the"
            " memory tier's maxMemory to 14.4 GB or more, keep fewer checkpoints, use fewer replicas or train with more"
            " workers",
        ),
        (
            [share(others_bytes=2_000_000_000, ranks=1, save_bytes=3_000_000_000)],
            CheckpointPolicy(MemoryTierSpec(interval_steps=10, keep=1, replicas=1)),
            "node-b would have to store 3 checkpoints of 1 rank at 3.00 GB = 9.00 GB; its memory tier has 8.59 GB, of which other"
            " jobs use 2.00 GB: raise the memory tier's maxMemory to 11.0 GB or more or train with more workers",
        ),
        (
            [share(limit_bytes=None, job_limit_bytes=GIB)],
            POLICY,
            "node-b would have to store 3 checkpoints of 4 ranks at 1.20 GB each = 14.4 GB; sizeLimit allows 1.07 GB: raise"
            " checkpoint.memory.sizeLimit to 14.4 GB or more, keep fewer checkpoints, use fewer replicas or train with"
            " more workers",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(
    shares: list[MemoryServerBudget], policy: CheckpointPolicy, text: str
) -> None:
    budget = judge_by_tightest_node(shares, policy, 1)
    assert (budget.fits_in_memory, budget.reason, budget.message) == (False, "MemoryTierTooSmall", text)


def test_what_fits_names_the_node_that_has_the_least_left() -> None:
    budget = judge_by_tightest_node(
        [share("node-a", limit_bytes=20 * GIB), share(limit_bytes=15_000_000_000)], POLICY, 2
    )
    assert (budget.fits_in_memory, budget.reason) == (True, "Fits")
    assert (
        budget.message == "node-b stores up to 3 checkpoints of 4 ranks at 1.20 GB each = 14.4 GB; it may use 15.0 GB"
    )


def test_the_last_byte_decides_and_a_holder_without_a_limit_has_room_for_anything() -> None:
    exact = share(limit_bytes=14_400_000_000)
    assert judge_by_tightest_node([exact], POLICY, 1).fits_in_memory
    assert not judge_by_tightest_node([replace(exact, limit_bytes=14_399_999_999)], POLICY, 1).fits_in_memory
    assert judge_by_tightest_node([share(limit_bytes=None)], POLICY, 1).fits_in_memory


@pytest.mark.parametrize(("limit", "reason"), [(14_400_000_000, "Fits"), (14_399_999_999, "TooLargeAfterShrink")])
def test_what_would_not_fit_in_the_smallest_world_is_told_ahead(limit: int, reason: str) -> None:
    # two copies of 4.8 GB on four nodes now, on two then: 2.4 GB of a checkpoint each, and 4.8 GB
    now = [share(f"node-{n}", ranks=2, save_bytes=2_400_000_000, limit_bytes=limit) for n in range(4)]
    budget = judge_by_tightest_node(now, POLICY, 2)
    assert (budget.fits_in_memory, budget.reason) == (True, reason)
    told = "; with 2 workers a node would have to store 14.4 GB, more than the 14.4 GB that one has"
    assert budget.message.endswith(told) == (reason == "TooLargeAfterShrink")
    assert judge_by_tightest_node(now, POLICY, 4).reason == "Fits"


def test_a_server_has_its_part_of_its_nodes_memory_and_people_are_told_of_the_nodes() -> None:
    small = share(ranks=2, save_bytes=2_400_000_000, limit_bytes=4 * GIB, servers=2, server=1)
    budget = judge_by_tightest_node([replace(small, server=0, save_bytes=1000), small], POLICY, 1)
    assert (budget.fits_in_memory, budget.message) == (
        False,
        "node-b (server 1) would have to store 3 checkpoints of 2 ranks at 1.20 GB each = 7.20 GB; its part of the node's memory"
        " tier has 4.29 GB: raise the memory tier's maxMemory to 14.4 GB or more, keep fewer checkpoints, use fewer"
        " replicas or train with more workers",
    )
    # two copies on two nodes now, one node then: what a node holds is not split further by its servers
    now = [replace(small, node=f"node-{n}", server=s, limit_bytes=7_200_000_000) for n in range(2) for s in range(2)]
    assert judge_by_tightest_node(now, POLICY, 1).reason == "Fits"


def test_ranks_of_a_worker_are_spread_over_a_nodes_servers() -> None:
    seen = running(nproc_per_node=4)
    assert seen.status.membership is not None
    status = replace(seen.status, membership=replace(seen.status.membership, world_size=12))
    more = tuple(
        replace(h, endpoint=endpoint(h.endpoint.instance.node, "i1", server=1), entries=()) for h in seen.servers
    )
    holders = (*seen.servers, *more)
    status = replace(status, assigned_servers=tuple(h.endpoint for h in holders))
    budget = judge_memory_budget(build_facts(saying(replace(seen, status=status, servers=holders), 102_400, 10**9)))
    assert budget is not None
    assert {(s.node, s.server): s.ranks for s in budget.shares} == {(f"n{n}", s): 4 for n in range(3) for s in range(2)}
    assert {s.save_bytes for s in budget.shares} == {4 * 25_700}
    assert {s.servers for s in budget.shares} == {2}


def test_what_agents_say_is_placed_as_their_saves_are() -> None:
    # three workers make one group: each saves beside itself and at the next
    budget = judge_memory_budget(build_facts(saying(running(), 25_600, 10**9)))
    assert budget is not None
    assert {s.node: s.ranks for s in budget.shares} == {"n0": 2, "n1": 2, "n2": 2}
    assert {s.save_bytes for s in budget.shares} == {2 * 25_700}
    assert {s.needed_bytes for s in budget.shares} == {3 * 2 * 25_700}


def test_nothing_is_judged_before_every_member_has_said_what_it_needs() -> None:
    seen = saying(running(), 1000, 10)
    assert judge_memory_budget(build_facts(with_session(seen, 1, save_bytes=0))) is None
    kept = plan_maintenance(with_session(seen, 1, save_bytes=0))
    assert condition(kept) is None


def test_only_what_cannot_be_this_job_s_is_taken_for_others() -> None:
    seen = saying(running(), 25_600, 10**6)
    entries = tuple(replace(manifest(1, 40, r, 3), stream_bytes=25_600, values_bytes=0) for r in (0, 2))
    for used, others in ((2 * 25_700, 0), (4 * 25_700, 0), (4 * 25_700 + 7, 7)):
        budget = judge_memory_budget(build_facts(with_holder(seen, "n0", entries=entries, used_bytes=used)))
        assert budget is not None
        assert next(s.others_bytes for s in budget.shares if s.node == "n0") == others


def test_it_is_told_once_when_it_stops_fitting_and_once_when_it_fits_again() -> None:
    seen = saying(running(), 25_600, 100_000)
    kept = plan_maintenance(seen)
    first = condition(kept)
    assert first is not None
    assert (first.status, first.reason) == ("False", "MemoryTierTooSmall")
    assert [(e.reason, e.warning) for e in kept.events] == [("CheckpointsTooLarge", True)]
    assert kept.actions == plan_maintenance(running()).actions

    again = plan_maintenance(replace(seen, status=kept.status, now_seconds=seen.now_seconds + 1))
    assert again.events == ()
    assert condition(again) == first

    room = saying(replace(seen, status=kept.status), 25_600, 300_000)
    fits = plan_maintenance(room)
    second = condition(fits)
    assert second is not None
    assert (second.status, second.reason) == ("True", "Fits")
    assert [(e.reason, e.warning) for e in fits.events] == [("CheckpointsFit", False)]
    assert plan_maintenance(saying(running(), 25_600, 300_000)).events == ()


def test_a_worker_without_staging_memory_is_told_although_the_tier_has_room() -> None:
    why = (
        "2 slots of 3.00 GB for 1 rank, 6.00 GB of staging memory, do not fit: the container's memory limit is 4.00 GB"
    )
    seen = with_session(saying(running(), 25_600, 10**9), 1, no_staging_reason=why)
    kept = plan_maintenance(seen)
    found = condition(kept)
    assert found is not None
    assert (found.status, found.reason) == ("False", "StagingMemoryTooSmall")
    assert found.message == f"worker 1 on n1 makes no saves, training continues: {why}"
    assert len(kept.memory_budgets) == 3
    back = plan_maintenance(replace(with_session(seen, 1, no_staging_reason=""), status=kept.status))
    assert [e.reason for e in back.events] == ["CheckpointsFit"]
    unlimited = plan_maintenance(replace(saying(running(), 25_600, None), status=kept.status))
    assert [e.reason for e in unlimited.events] == ["CheckpointsFit"]


def test_a_job_that_is_not_protected_says_why_it_cannot_be() -> None:
    seen = saying(running(step=5), 25_600, 100_000)
    seen = replace(seen, servers=tuple(replace(h, entries=()) for h in seen.servers))
    seen = replace(seen, status=plan_maintenance(seen).status)
    for _ in range(2):
        seen = replace(seen, status=plan(seen).status, now_seconds=seen.now_seconds + 1)
    found = {c.type: c for c in seen.status.conditions}
    protected, fit = found["CheckpointProtected"], found["CheckpointsFit"]
    assert protected.status == "False"
    assert protected.message.count("; checkpoints do not fit: ") == 1
    assert protected.message.endswith(fit.message)
    assert fit.last_transition_seconds == BEGAN + 100
