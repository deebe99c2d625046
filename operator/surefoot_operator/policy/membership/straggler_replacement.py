"""Has a straggler's node left, where the job asks for that.

Pure; called by `plan`. The worker moves as from any node that is to be left: at a saved step, once another one stands warm. A
rank that is slow wherever it runs is slow by its program or its data: moving it again and again would cost, and help nobody.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.api.status import JobStatus, ReplacedStraggler, Straggler
from surefoot_operator.policy.core.availability import vacated_nodes
from surefoot_operator.policy.core.facts import Facts, seconds_per_step
from surefoot_operator.policy.failure import restart_budget
from surefoot_operator.policy.failure.incidents import open_incident
from surefoot_operator.policy.failure.spare_workers import spare_agents
from surefoot_operator.policy.failure.stragglers import place_of
from surefoot_operator.policy.membership.node_exclusion import suspect_nodes

MOST_REMEMBERED = 8

YOUNG_SECONDS = 180.0
"""Behind a restart nobody is moved: who has just come to its node reads and compiles what the others have had for long."""

LEAVES = "its worker leaves that node"


def answered(facts: Facts, status: JobStatus) -> JobStatus:
    """Says of each straggler what is done about it, and begins that.

    One node at a time, for as long as it is avoided.
    """
    if facts.spec.health_policy.on_straggler != "Replace" or not status.stragglers:
        return status
    named = list[Straggler]()
    for one in status.stragglers:
        leaves = _is_left(facts, status, one.node)
        why_not = "" if leaves else _why_not(facts, status, one)
        if not leaves and not why_not:
            status = _begun(facts, status, one)
        named.append(replace(one, answer=why_not or LEAVES))
    return replace(status, stragglers=tuple(named))


def _why_not(facts: Facts, status: JobStatus, one: Straggler) -> str:
    """Why the worker stays where it is; empty: it leaves."""
    if one.own_line is not None:
        return "on another node it would do the same, and it stays"
    place = place_of(facts.world, one.rank)
    before = next((old for old in reversed(status.replaced_stragglers) if old.place == place), None)
    if before is not None:
        return f"its place was slow on node {before.node} too: it is the program or its data, and it stays"
    lasting = [old for old in status.replaced_stragglers if old.until_seconds > facts.now]
    if lasting:
        return f"it stays for now: rank {lasting[-1].rank} was replaced, and one is at a time"
    if not restart_budget.may_spend(facts):
        most = facts.spec.failure_policy.max_restarts
        return f"it stays for now: the last of maxRestarts ({most}) is kept for a failure"
    if facts.seen.free_nodes == 0 and all(s.node in suspect_nodes(facts) for s in spare_agents(facts)):
        return "it stays for now: no other node is free"
    if facts.world.state != "Committed" or facts.spec.suspend or open_incident(status.incidents) is not None:
        return "it stays until the world runs"
    if any(facts.now - (i.first_step_seconds or 0.0) < YOUNG_SECONDS for i in status.incidents):
        return f"it stays for now: the world was begun less than {YOUNG_SECONDS:g} s ago, and who is new may take longer at first"
    return ""


def _is_left(facts: Facts, status: JobStatus, node: str) -> bool:
    own = any(one.node == node and one.until_seconds > facts.now for one in status.replaced_stragglers)
    return own or node in vacated_nodes(facts)


def _begun(facts: Facts, status: JobStatus, one: Straggler) -> JobStatus:
    until = facts.now + facts.spec.failure_policy.eval_period_seconds
    step_seconds = seconds_per_step(facts)
    share = min(1.0, one.wait_seconds / step_seconds) if step_seconds else 0.0
    place = place_of(facts.world, one.rank)
    left = ReplacedStraggler(one.rank, place, one.node, facts.now, until, float(f"{share:.2g}"))
    return replace(
        status,
        replaced_stragglers=(*status.replaced_stragglers, left)[-MOST_REMEMBERED:],
        recent_restarts=restart_budget.spent(facts),
    )
