"""Excludes nodes on which this job fails repeatedly, and replaces stragglers.

Pure; called by `plan`. A node may be bad for one job alone, without any signal of its own, and would cost it restarts again
and again. The job moves its workers off the node by a planned change, as it does for nodes with an evacuation signal.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import comb

from surefoot_operator.api.status import ExcludedNode, Incident, JobStatus, ReplacedStraggler, Straggler
from surefoot_operator.policy.core.availability import nodes_to_evacuate
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    NodeFacts,
    cached_per_snapshot,
    seconds_per_step,
)
from surefoot_operator.policy.failure import restart_budget
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.spare_workers import spare_agents
from surefoot_operator.policy.failure.stragglers import group_rank_of
from surefoot_operator.policy.membership.expected_cost import incident_history_of, startup_seconds

MIN_REPEATED_FAILURES = 2
"""Failures on one node, within the window of the restart budget, that are no longer taken for chance."""

PROGRAM_FAILURE_KINDS = ("trainer-failed", "hang")
"""Kinds of incidents in which the program failed, not the node."""

MAX_CHANCE_PROBABILITY = 0.01
"""A node is excluded on the job's own figures only if chance alone is less probable than this (0 to 1)."""

_MIN_INCIDENTS_ELSEWHERE = 3
"""Failures on one node from which on the node may be to blame."""


@cached_per_snapshot
def suspect_nodes(facts: JobFacts) -> Mapping[str, str]:
    """Returns nodes on which most of this job's programs failed, each with the reason to prefer a spare.

    A program that failed twice on a node may fail there again, at the cost of an incident. With a warm spare, the restart
    elsewhere costs no more. If the program is at fault, the failure follows its rank, and no node has most of the failures.
    """
    failures = [i for i in facts.status.incidents if i.kind in PROGRAM_FAILURE_KINDS and i.node is not None]
    if len(failures) < MIN_REPEATED_FAILURES:
        return {}
    startup_times = [seconds for i in failures if (seconds := startup_seconds(i)) is not None]
    cost_clause = f", and costs {statistics.median(startup_times):.1f} s each time" if startup_times else ""
    counts = Counter(str(i.node) for i in failures)
    return {
        node: f"{times} of this job's {len(failures)} failures were on node {node}{cost_clause}: starting a spare costs no more than starting there again"
        for node, times in counts.items()
        if times >= MIN_REPEATED_FAILURES and 2 * times > len(failures)
    }


def exclude_nodes(facts: MembershipNodeFacts, failure: Failure) -> tuple[ExcludedNode, ...]:
    """Returns the nodes to exclude after this failure, newest last.

    As many as `maxExcludedNodes` allows. If it is not set, one at a time, and only if evacuating it costs less than staying.
    """
    policy = facts.spec.failure_policy
    max_nodes, until_seconds = policy.max_excluded_nodes, facts.now + policy.eval_period_seconds
    excluded = [e for e in facts.status.excluded_nodes if e.until_seconds > facts.now]
    # Without maxExcludedNodes the costs decide, for one node at a time.
    if max_nodes is None:
        costly = None if excluded or failure.expected else find_exclusion_reason(facts, failure)
        if costly is not None and failure.node is not None:
            excluded.append(ExcludedNode(failure.node, costly.reason, until_seconds, costly.share))
        return tuple(excluded)
    if failure.node is not None:
        failure_count = sum(i.node == failure.node for i in _recent_failures(facts)) + 1
        if failure_count >= MIN_REPEATED_FAILURES:
            excluded = [e for e in excluded if e.name != failure.node]
            reason = f"{failure_count} failures of this job within {policy.eval_period_seconds:g} s, the last: {failure.reason}"
            excluded.append(ExcludedNode(failure.node, reason, until_seconds))
    return tuple(excluded[-max_nodes:]) if max_nodes else ()


@dataclass(frozen=True, slots=True)
class CostlyNode:
    """The reason why a node's failures cost more than excluding it."""

    reason: str
    share: float
    """Share of the job's time since the first of them that the failures cost (0 to 1)."""


def find_exclusion_reason(facts: MembershipNodeFacts, failure: Failure) -> CostlyNode | None:
    """Returns why excluding the failure's node costs less than staying on it; None: it does not.

    As many failures are expected as there were (ski rental, as in `expected_cost`). None if staying is cheaper, chance may have
    picked the node, the failure follows its rank, or no other place is free.
    """
    past = _recent_failures(facts)
    on_this_node = [i for i in past if i.node == failure.node]
    nodes = len({member.node for member in facts.membership.members})
    count, total = len(on_this_node) + 1, sum(i.node is not None for i in past) + 1
    probability = chance_probability(count, total, nodes)
    if (
        failure.node is None
        or count < _MIN_INCIDENTS_ELSEWHERE
        or probability > MAX_CHANCE_PROBABILITY
        or _follows_rank(facts, failure, past)
    ):
        return None
    # Without another place, exclusion would shrink the job.
    if facts.free_nodes == 0 and not spare_agents(facts):
        return None
    costs = [seconds for i in on_this_node if (seconds := _cost_seconds(facts, i)) is not None]
    if not costs:
        return None
    seconds_each = statistics.median(costs)
    change_seconds = incident_history_of(facts).change_seconds
    change_seconds = seconds_each if change_seconds is None else change_seconds
    staying_seconds = (1.0 - probability) * count * seconds_each
    if staying_seconds <= change_seconds:
        return None
    window_seconds = facts.spec.failure_policy.eval_period_seconds
    return CostlyNode(
        f"{count} of this job's {total} failures within {window_seconds:g} s were on this node, which chance alone does to one of {nodes} nodes"
        f" in {probability:.1%} of jobs; as many again would cost {staying_seconds:.1f} s, and excluding it {change_seconds:.1f} s; the last: {failure.reason}",
        float(
            f"{min(1.0, count * seconds_each / max(facts.now - on_this_node[0].detected_seconds, seconds_each)):.2g}"
        ),
    )


def chance_probability(count: int, total: int, nodes: int) -> float:
    """Bounds the probability (0 to 1) that chance puts at least `count` of `total` failures on any one node.

    The bound is the sum of each node's binomial tail (Bonferroni), for failures that are equally likely on all nodes.
    """
    if nodes < 2:
        return 1.0
    ways = sum(comb(total, k) * int(nodes - 1) ** (total - k) for k in range(count, total + 1))
    return min(1.0, float(nodes * ways / nodes**total))


def _recent_failures(facts: JobFacts) -> list[Incident]:
    """Lists the unplanned incidents within the window of the restart budget."""
    window_start_seconds = facts.now - facts.spec.failure_policy.eval_period_seconds
    return [i for i in facts.status.incidents if i.kind != "planned" and i.detected_seconds >= window_start_seconds]


def _follows_rank(facts: JobFacts, failure: Failure, past: Iterable[Incident]) -> bool:
    """Whether the same rank also failed on another node: then the program or its data is at fault."""
    world_size = facts.membership.world_size
    return failure.rank is not None and any(
        i.rank == failure.rank and i.world_size_before == world_size and i.node not in (None, failure.node)
        for i in past
    )


def _cost_seconds(facts: MembershipFacts, incident: Incident) -> float | None:
    """Returns the training time that an incident cost, with the steps made again; None: not over."""
    startup = startup_seconds(incident)
    return None if startup is None else startup + (incident.steps_lost or 0) * (seconds_per_step(facts) or 0.0)


# ---- straggler replacement -------------------------------------------------------------------------------------------
# Moves a straggler off its node, if the job asks for that. The worker moves as from any node to evacuate: at a saved step,
# once another worker is warm. A rank that is slow wherever it runs is slow by its program or its data: it is moved only
# once, because moving it again would cost time and change nothing.

MAX_REPLACED_STRAGGLERS = 8
"""Replaced stragglers kept in the status."""

WARMUP_SECONDS = 180.0
"""Time after a restart in which no straggler is moved: a new worker has empty caches."""

MOVING_ACTION = "its worker is moved to another node"


def decide_straggler_actions(facts: MembershipNodeFacts, status: JobStatus) -> JobStatus:
    """Records for each straggler whether its worker is moved, or why not, and starts to move at most one.

    The next one is moved only when the exclusion of the last one's node has ended.
    """
    if facts.spec.health_policy.on_straggler != "Replace" or not status.stragglers:
        return status
    stragglers = list[Straggler]()
    for straggler in status.stragglers:
        is_evacuated = _is_being_evacuated(facts, status, straggler.node)
        reason_to_stay = "" if is_evacuated else _reason_to_stay(facts, status, straggler)
        if not is_evacuated and not reason_to_stay:
            status = _start_replacement(facts, status, straggler)
        stragglers.append(replace(straggler, action=reason_to_stay or MOVING_ACTION))
    return replace(status, stragglers=tuple(stragglers))


def _reason_to_stay(facts: MembershipNodeFacts, status: JobStatus, straggler: Straggler) -> str:
    """Returns why the worker stays on its node; empty: it is to be moved."""
    # The first reason that applies is reported.
    if straggler.divergent_line is not None:
        return "it stays, because it would be as slow on another node"
    group_rank = group_rank_of(facts.membership, straggler.rank)
    earlier = next(
        (replacement for replacement in reversed(status.replaced_stragglers) if replacement.group_rank == group_rank),
        None,
    )
    if earlier is not None:
        return f"it stays, because its group rank was slow on node {earlier.node} too: the program or its data is the cause"
    active = [replacement for replacement in status.replaced_stragglers if replacement.until_seconds > facts.now]
    if active:
        return f"it stays for now: rank {active[-1].rank} was replaced, and stragglers are replaced one at a time"
    if not restart_budget.is_within_budget(facts):
        max_restarts = facts.spec.failure_policy.max_restarts
        return f"it stays for now: the last of maxRestarts ({max_restarts}) is reserved for a failure"
    if facts.free_nodes == 0 and all(s.node in suspect_nodes(facts) for s in spare_agents(facts)):
        return "it stays for now: no other node is free"
    if facts.membership.state != "Committed" or facts.spec.suspend or open_incident(status.incidents) is not None:
        return "it stays until the job trains"
    if any(facts.now - (i.first_step_seconds or 0.0) < WARMUP_SECONDS for i in status.incidents):
        return f"it stays for now: training restarted less than {WARMUP_SECONDS:g} s ago, and a new worker may be slower at first"
    return ""


def _is_being_evacuated(facts: NodeFacts, status: JobStatus, node: str) -> bool:
    """Whether workers are already being moved off this node."""
    is_replaced = any(
        replacement.node == node and replacement.until_seconds > facts.now for replacement in status.replaced_stragglers
    )
    return is_replaced or node in nodes_to_evacuate(facts)


def _start_replacement(facts: MembershipFacts, status: JobStatus, straggler: Straggler) -> JobStatus:
    """Returns the status with the straggler's node excluded and the restart counted."""
    until_seconds = facts.now + facts.spec.failure_policy.eval_period_seconds
    step_seconds = seconds_per_step(facts)
    wait_share = min(1.0, straggler.wait_seconds / step_seconds) if step_seconds else 0.0
    group_rank = group_rank_of(facts.membership, straggler.rank)
    replacement = ReplacedStraggler(
        straggler.rank, group_rank, straggler.node, facts.now, until_seconds, float(f"{wait_share:.2g}")
    )
    return replace(
        status,
        replaced_stragglers=(*status.replaced_stragglers, replacement)[-MAX_REPLACED_STRAGGLERS:],
        recent_restarts=restart_budget.add_planned_restart(facts),
    )
