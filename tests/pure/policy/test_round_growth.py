"""A round after one more heartbeat costs in proportion to the workers from ten on, and what did not change costs nothing."""

from __future__ import annotations

from dataclasses import replace

from support.builders import running
from support.operations import counted
from surefoot_operator.job_snapshot import NodeSeen, Observed
from surefoot_operator.policy.core import facts
from surefoot_operator.policy.core.facts import MOST_KEPT, gather, kept_while_same
from surefoot_operator.policy.maintenance.maintenance_plan import maintain
from surefoot_operator.policy.membership.workers import reconcile_workers
from surefoot_operator.policy.planning.plan import plan
from surefoot_operator.policy.planning.plan_invariants import check
from surefoot_operator.reconcile.reconciler import SteadyParts

FEW, MANY = 10, 400
A_WORKER = 2_250
"""Bytecode instructions of a whole round for each worker, with a tenth of room; 5,600 when each round made its indexes anew."""


def spoken(seen: Observed) -> Observed:
    first, *others = seen.sessions
    return replace(seen, sessions=(replace(first, heard_seconds=first.heard_seconds), *others))


def a_round(seen: Observed) -> None:
    decided = plan(seen)
    check(decided, seen)
    maintain(replace(seen, status=decided.status))


def test_a_round_costs_few_instructions_a_worker_at_any_size() -> None:
    costs = {}
    for workers in (FEW, MANY):
        seen = replace(running(workers=workers), free_nodes=1)
        a_round(seen)  # indexes are made
        costs[workers] = counted(lambda seen=seen: a_round(spoken(seen)))  # type: ignore[misc]
    a_worker = (costs[MANY] - costs[FEW]) / (MANY - FEW)
    assert costs[MANY] / MANY <= costs[FEW] / FEW * 1.2
    assert a_worker <= A_WORKER, f"{a_worker:.0f} instructions"


def test_nodes_in_doubt_cost_a_job_nothing_that_asks_for_no_worker() -> None:
    costs, began = {}, running(workers=3)
    for count in (FEW, MANY):
        doubted = tuple(NodeSeen(f"m{n}", f"m{n}", ready=True, doubt="not renewed") for n in range(count))
        facts = gather(replace(began, nodes=(*began.nodes, *doubted)))
        reconcile_workers(facts, frozenset(range(3)))  # indexes are made
        again = gather(replace(facts.seen, now=facts.now + 1.0))
        costs[count] = counted(lambda facts=again: reconcile_workers(facts, frozenset(range(3))))  # type: ignore[misc]
    assert costs[MANY] <= costs[FEW] * 1.2


def test_where_nodes_stand_is_read_once_for_all_jobs() -> None:
    """More jobs than are kept each read every node in each of their rounds."""
    costs = {}
    for count in (FEW, MANY):
        nodes = tuple(NodeSeen(f"m{n}", f"m{n}", ready=True, path=("zone", f"rack-{n}")) for n in range(count))
        first = facts.topology_of(nodes, "uid-0")
        jobs = [f"uid-{job}" for job in range(1, 3 * MOST_KEPT)]
        costs[count] = counted(lambda nodes=nodes, jobs=jobs: [facts.topology_of(nodes, job) for job in jobs])  # type: ignore[misc]
        assert facts.topology_of(nodes, "uid-0").paths is first.paths
    assert costs[MANY] <= costs[FEW] * 1.2


def test_equal_parts_stay_the_same_objects_and_others_do_not() -> None:
    steady, seen = SteadyParts(), running(workers=3)
    first = steady.of(seen)
    again = steady.of(replace(seen, workers=(*seen.workers,), nodes=tuple(seen.nodes), holders=(*seen.holders,)))
    assert (again.workers, again.nodes, again.holders) == (seen.workers, seen.nodes, seen.holders)
    assert again.workers is first.workers
    assert again.nodes is first.nodes
    assert again.holders is first.holders
    gone = replace(seen, holders=seen.holders[1:])
    assert steady.of(gone).holders == seen.holders[1:]


def test_an_index_is_made_once_for_one_tuple_and_anew_for_another() -> None:
    seen = running(workers=3)
    once = facts.holders_by_id(seen.holders)
    assert facts.holders_by_id(seen.holders) is once
    other = tuple(replace(h, state="Silent") for h in seen.holders)
    assert {h.state for h in facts.holders_by_id(other).values()} == {"Silent"}


def test_what_is_kept_is_bounded_and_told_by_its_arguments() -> None:
    asked: list[int] = []

    @kept_while_same
    def length(source: tuple[int, ...], more: int) -> int:
        asked.append(more)
        return len(source) + more

    source = (1, 2, 3)
    assert [length(source, 1), length(source, 1), length(source, 2)] == [4, 4, 5]
    assert asked == [1, 2]
    for number in range(MOST_KEPT):
        length((number,) * 5, 0)
    assert length(source, 1) == 4
    assert asked.count(1) == 2
