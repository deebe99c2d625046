"""Leaves nodes on which one job fails repeatedly.

Pure; called by `plan`. A node may be bad for this job alone, with no signal of its own, and would cost it a restart again and
again. The job vacates it by a planned change, as it does for nodes that others mark.
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
    NodeFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    seconds_per_step,
)
from surefoot_operator.policy.failure import restart_budget
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.spare_workers import spare_agents
from surefoot_operator.policy.failure.stragglers import group_rank_of
from surefoot_operator.policy.membership.expected_cost import record_of, startup_seconds

REPEATS = 2
"""So many failures on one node, within the budget's window, are no chance any more."""

FAILED_KINDS = ("trainer-failed", "hang")

MAX_CHANCE_PROBABILITY = 0.01
"""A node is left on the job's own figures only where chance alone would say the same so seldom."""

_MIN_INCIDENTS_ELSEWHERE = 3
"""Failures on one node, before anybody says that it is the node."""


@cached_per_snapshot
def suspect_nodes(facts: JobFacts) -> Mapping[str, str]:
    """Nodes on which most of this job's programs failed, and the sums.

    Who failed twice at one place may fail there again, and that costs an incident. Where a spare is warm the restart costs the
    same there. If the program is at fault the failure follows its rank, and then no node has most of them.
    """
    failed = [i for i in facts.status.incidents if i.kind in FAILED_KINDS and i.node is not None]
    if len(failed) < REPEATS:
        return {}
    standing = [seconds for i in failed if (seconds := startup_seconds(i)) is not None]
    cost = f", and costs {statistics.median(standing):.1f} s each time" if standing else ""
    counts = Counter(str(i.node) for i in failed)
    return {
        node: f"{times} of this job's {len(failed)} failures were on node {node}{cost}: a spare costs no more than to start there again"
        for node, times in counts.items()
        if times >= REPEATS and 2 * times > len(failed)
    }


def exclude_nodes(facts: WorldNodeFacts, failure: Failure) -> tuple[ExcludedNode, ...]:
    """Lists the nodes to be left after this loss, newest last.

    As many as the job's number allows; without a number one at a time, where leaving it costs less than staying.
    """
    policy = facts.spec.failure_policy
    most, until = policy.max_excluded_nodes, facts.now + policy.eval_period_seconds
    kept = [e for e in facts.status.excluded_nodes if e.until_seconds > facts.now]
    if most is None:
        left = None if kept or failure.expected else is_exclusion_worth_it(facts, failure)
        if left is not None and failure.node is not None:
            kept.append(ExcludedNode(failure.node, left.reason, until, left.share))
        return tuple(kept)
    if failure.node is not None:
        failures = sum(i.node == failure.node for i in _past(facts)) + 1
        if failures >= REPEATS:
            kept = [e for e in kept if e.name != failure.node]
            reason = (
                f"{failures} failures of this job within {policy.eval_period_seconds:g} s, the last: {failure.reason}"
            )
            kept.append(ExcludedNode(failure.node, reason, until))
    return tuple(kept[-most:]) if most else ()


@dataclass(frozen=True, slots=True)
class CostlyNode:
    """Why a node is left for what its failures cost.

    `share`: of the job's time, from the first of them until now.
    """

    reason: str
    share: float


def is_exclusion_worth_it(facts: WorldNodeFacts, failure: Failure) -> CostlyNode | None:
    """Decides whether leaving this loss's node costs less than staying there.

    Of what may go on failing as many failures are expected as there were (ski rental, as in `expected_cost`). None: it costs
    more, chance may have chosen the node, the failure follows its rank, or no other place is free.
    """
    past = _past(facts)
    here = [i for i in past if i.node == failure.node]
    nodes = len({member.node for member in facts.membership.members})
    times, of_all = len(here) + 1, sum(i.node is not None for i in past) + 1
    chance = chance_probability(times, of_all, nodes)
    if (
        failure.node is None
        or times < _MIN_INCIDENTS_ELSEWHERE
        or chance > MAX_CHANCE_PROBABILITY
        or _follows_rank(facts, failure, past)
    ):
        return None
    if facts.free_nodes == 0 and not spare_agents(facts):
        return None
    costs = [seconds for i in here if (seconds := _cost_seconds(facts, i)) is not None]
    if not costs:
        return None
    each = statistics.median(costs)
    change = record_of(facts).change_seconds
    change = each if change is None else change
    staying = (1.0 - chance) * times * each
    if staying <= change:
        return None
    window = facts.spec.failure_policy.eval_period_seconds
    return CostlyNode(
        f"{times} of this job's {of_all} failures within {window:g} s were there, which chance alone does to one of {nodes} nodes"
        f" in {chance:.1%} of jobs; as many again would cost {staying:.1f} s, and leaving it {change:.1f} s; the last: {failure.reason}",
        float(f"{min(1.0, times * each / max(facts.now - here[0].detected_seconds, each)):.2g}"),
    )


def chance_probability(times: int, of_all: int, nodes: int) -> float:
    """Bounds the odds that chance gives some node so many failures.

    `times` of `of_all`, which strike nodes alike: the sum of each node's binomial tail (Bonferroni), at most 1.
    """
    if nodes < 2:
        return 1.0
    ways = sum(comb(of_all, k) * int(nodes - 1) ** (of_all - k) for k in range(times, of_all + 1))
    return min(1.0, float(nodes * ways / nodes**of_all))


def _past(facts: JobFacts) -> list[Incident]:
    since = facts.now - facts.spec.failure_policy.eval_period_seconds
    return [i for i in facts.status.incidents if i.kind != "planned" and i.detected_seconds >= since]


def _follows_rank(facts: JobFacts, failure: Failure, past: Iterable[Incident]) -> bool:
    """Whether the same rank failed on another node too: then it is the program or its data."""
    size = facts.membership.world_size
    return failure.rank is not None and any(
        i.rank == failure.rank and i.world_size_before == size and i.node not in (None, failure.node) for i in past
    )


def _cost_seconds(facts: WorldFacts, incident: Incident) -> float | None:
    """What an incident cost: the world stood, and made steps again."""
    standing = startup_seconds(incident)
    return None if standing is None else standing + (incident.steps_lost or 0) * (seconds_per_step(facts) or 0.0)


# ---- straggler replacement -------------------------------------------------------------------------------------------
# Has a straggler's node left, where the job asks for that. The worker moves as from any node that is to be left: at a
# saved step, once another one stands warm. A rank that is slow wherever it runs is slow by its program or its data:
# moving it again and again would cost, and help nobody.

MAX_REMEMBERED = 8

YOUNG_SECONDS = 180.0
"""Behind a restart nobody is moved: who has just come to its node reads and compiles what the others have had for long."""

LEAVES = "its worker leaves that node"


def decide_straggler_actions(facts: WorldNodeFacts, status: JobStatus) -> JobStatus:
    """Says of each straggler what is done about it, and begins that.

    One node at a time, for as long as it is avoided.
    """
    if facts.spec.health_policy.on_straggler != "Replace" or not status.stragglers:
        return status
    named = list[Straggler]()
    for one in status.stragglers:
        leaves = _is_being_evacuated(facts, status, one.node)
        why_not = "" if leaves else _reason_to_stay(facts, status, one)
        if not leaves and not why_not:
            status = _start_replacement(facts, status, one)
        named.append(replace(one, action=why_not or LEAVES))
    return replace(status, stragglers=tuple(named))


def _reason_to_stay(facts: WorldNodeFacts, status: JobStatus, one: Straggler) -> str:
    """Why the worker stays where it is; empty: it leaves."""
    if one.divergent_line is not None:
        return "on another node it would do the same, and it stays"
    place = group_rank_of(facts.membership, one.rank)
    before = next((old for old in reversed(status.replaced_stragglers) if old.group_rank == place), None)
    if before is not None:
        return f"its place was slow on node {before.node} too: it is the program or its data, and it stays"
    lasting = [old for old in status.replaced_stragglers if old.until_seconds > facts.now]
    if lasting:
        return f"it stays for now: rank {lasting[-1].rank} was replaced, and one is at a time"
    if not restart_budget.is_within_budget(facts):
        most = facts.spec.failure_policy.max_restarts
        return f"it stays for now: the last of maxRestarts ({most}) is kept for a failure"
    if facts.free_nodes == 0 and all(s.node in suspect_nodes(facts) for s in spare_agents(facts)):
        return "it stays for now: no other node is free"
    if facts.membership.state != "Committed" or facts.spec.suspend or open_incident(status.incidents) is not None:
        return "it stays until the world runs"
    if any(facts.now - (i.first_step_seconds or 0.0) < YOUNG_SECONDS for i in status.incidents):
        return f"it stays for now: the world was begun less than {YOUNG_SECONDS:g} s ago, and who is new may take longer at first"
    return ""


def _is_being_evacuated(facts: NodeFacts, status: JobStatus, node: str) -> bool:
    own = any(one.node == node and one.until_seconds > facts.now for one in status.replaced_stragglers)
    return own or node in nodes_to_evacuate(facts)


def _start_replacement(facts: WorldFacts, status: JobStatus, one: Straggler) -> JobStatus:
    until = facts.now + facts.spec.failure_policy.eval_period_seconds
    step_seconds = seconds_per_step(facts)
    share = min(1.0, one.wait_seconds / step_seconds) if step_seconds else 0.0
    place = group_rank_of(facts.membership, one.rank)
    left = ReplacedStraggler(one.rank, place, one.node, facts.now, until, float(f"{share:.2g}"))
    return replace(
        status,
        replaced_stragglers=(*status.replaced_stragglers, left)[-MAX_REMEMBERED:],
        recent_restarts=restart_budget.planned_restart_counted(facts),
    )
