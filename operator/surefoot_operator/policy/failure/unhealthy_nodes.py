"""Decides which nodes are unhealthy from what agents found on them.

Pure; called by `plan`. Only evidence about the node's own hardware moves workers; a finding that points to a program, or is
merely unusual, is reported by the agent itself. A finding that most nodes of a job report at once has a shared cause (a
driver, a switch, a file server), and excluding them all would leave the job without nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.messages import NODE_TEST_REASONS
from surefoot.protocol.text import join_names
from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    NodeFacts,
    cached_per_snapshot,
    earliest,
    worker_id,
)

UNHEALTHY_SECONDS = 3600.0
"""How long an unhealthy node is avoided: its agent ends with its worker, and nothing checks the node afterwards."""

CONFIRM_SECONDS = 15.0
"""Delay before a finding is acted on: by then other nodes have reported whether they have the same."""

MAX_UNHEALTHY_NODES = 64
"""Unhealthy nodes kept in the status."""


@cached_per_snapshot
def unhealthy_nodes(facts: MembershipNodeFacts) -> Mapping[str, str]:
    """Returns the unhealthy nodes, each with the reason that its own agents found."""
    problems_by_node: dict[str, str] = {}
    for reason, nodes in sorted(_findings_by_reason(facts).items()):
        if not _is_shared(*_nodes_with_same_finding(facts, reason, nodes)):
            for node, text in sorted(nodes.items()):
                problems_by_node.setdefault(node, f"{reason}: {text}")
    return problems_by_node


def describe_shared_findings(facts: MembershipNodeFacts) -> str:
    """Returns a message about findings that most nodes report at once; empty: there are none."""
    shared_reasons = []
    for reason, nodes in sorted(_findings_by_reason(facts).items()):
        nodes_with_finding, reporting_nodes = _nodes_with_same_finding(facts, reason, nodes)
        if _is_shared(nodes_with_finding, reporting_nodes):
            shared_reasons.append(f"{reason} on {join_names(sorted(nodes_with_finding))}")
    if not shared_reasons:
        return ""
    reasons_text = "; ".join(shared_reasons)
    return f"most nodes report the same problem ({reasons_text}): its cause is shared, so no node is excluded for it"


def _findings_by_reason(facts: MembershipFacts) -> Mapping[str, Mapping[str, str]]:
    """Returns what agents found on their own nodes' hardware: texts by node, by reason.

    Findings of an agent whose worker is gone no longer count once a later agent started on the node: the node may have been
    rebooted.
    """
    findings: dict[str, dict[str, str]] = {}
    if facts.spec.health_policy.on_unhealthy_node != "Replace":
        return findings
    sessions_with_findings = [s for s in facts.sessions.values() if s.findings]
    if not sessions_with_findings:
        return findings
    # The start of the newest session on each node: older findings of a gone worker do not count.
    current_sessions = [s for s in facts.sessions.values() if worker_id(s) in facts.workers]
    newest_session_seconds = {
        session.node: session.since_seconds for session in sorted(current_sessions, key=lambda s: s.since_seconds)
    }
    for session in sessions_with_findings:
        is_worker_gone = worker_id(session) not in facts.workers
        is_superseded = is_worker_gone and newest_session_seconds.get(session.node, 0.0) > session.last_message_seconds
        for finding in () if is_superseded else session.findings:
            if finding.blame == "node":
                findings.setdefault(finding.reason, {}).setdefault(session.node, finding.text)
    return findings


def _nodes_with_same_finding(facts: NodeFacts, reason: str, nodes: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns the nodes with this finding, and all nodes that report.

    Nodes excluded after the same failed node test still count: a test that fails on every node would else make a small job
    exclude one node after the other.
    """
    excluded_before = {
        node.name
        for node in facts.status.unhealthy_nodes
        if reason in NODE_TEST_REASONS and node.until_seconds > facts.now and node.reason.partition(":")[0] == reason
    }
    return {*nodes, *excluded_before}, {*facts.last_message_seconds, *excluded_before}


def unhealthy_since(facts: JobFacts, name: str) -> float | None:
    """Returns when this node was found unhealthy (Unix time); None: it is not."""
    exclusion = next(
        (node for node in facts.status.unhealthy_nodes if node.name == name and node.until_seconds > facts.now), None
    )
    return None if exclusion is None else exclusion.until_seconds - UNHEALTHY_SECONDS


def _is_shared(nodes_with_finding: Collection[str], reporting_nodes: Collection[str]) -> bool:
    """Whether more than one, and more than half, of the reporting nodes have the finding."""
    return len(nodes_with_finding) > 1 and 2 * len(nodes_with_finding) > len(reporting_nodes)


def update_unhealthy_nodes(
    facts: MembershipNodeFacts,
) -> tuple[tuple[ExcludedNode, ...], tuple[Event, ...], float | None]:
    """Returns the unhealthy nodes for the status, events for new ones, and when to recheck."""
    nodes_by_name = {node.name: node for node in facts.status.unhealthy_nodes if node.until_seconds > facts.now}
    sessions = facts.sessions.values()
    events, recheck_times = [], []
    for name, reason in unhealthy_nodes(facts).items():
        recorded = nodes_by_name.get(name)
        confirmed_seconds = min(s.findings_seconds for s in sessions if s.node == name and s.findings) + CONFIRM_SECONDS
        if recorded is None and facts.now < confirmed_seconds:
            recheck_times.append(confirmed_seconds)
        elif recorded is None:
            nodes_by_name[name] = ExcludedNode(name, reason, facts.now + UNHEALTHY_SECONDS)
            text = f"node {name} is unhealthy ({reason}): its workers are moved off, and it is avoided for {UNHEALTHY_SECONDS:g} s"
            events.append(Event("NodeUnhealthy", text, warning=True))
        elif recorded.until_seconds < facts.now + UNHEALTHY_SECONDS / 2:  # still unhealthy: extended with few writes
            nodes_by_name[name] = replace(recorded, until_seconds=facts.now + UNHEALTHY_SECONDS)
    nodes = tuple(sorted(nodes_by_name.values(), key=lambda node: (node.until_seconds, node.name)))[
        -MAX_UNHEALTHY_NODES:
    ]
    return nodes, tuple(events), earliest(recheck_times)
