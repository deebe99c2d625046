"""Decides which nodes are sick from what agents found on them.

Pure; called by `plan`. Only evidence of the node's own hardware moves anybody; what names a program, or is merely odd,
people are told by the agents themselves. What most nodes of a job tell at once has a cause that they share (a driver, a
switch, a file server), and leaving them all would leave the job with none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from surefoot.protocol.messages import TRIED
from surefoot.protocol.text import join_names
from surefoot_operator import reasons
from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.policy.core.actions import Event
from surefoot_operator.policy.core.facts import (
    JobFacts,
    NodeFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    earliest,
    worker_id,
)

UNHEALTHY_SECONDS = 3600.0
"""How long a node that was found sick is avoided: its agent leaves with its worker, and nobody looks there any more."""

CONFIRM_SECONDS = 15.0
"""A finding is acted upon after so long: by then other nodes have told whether they see the same."""

MAX_KEPT = 64


@cached_per_snapshot
def unhealthy_nodes(facts: WorldNodeFacts) -> Mapping[str, str]:
    """Why nodes are sick by what their own agents found, by name."""
    sick: dict[str, str] = {}
    for reason, nodes in sorted(_findings_by_reason(facts).items()):
        if not _is_shared(*_nodes_with_same_finding(facts, reason, nodes)):
            for node, text in sorted(nodes.items()):
                sick.setdefault(node, f"{reason}: {text}")
    return sick


def shared_findings(facts: WorldNodeFacts) -> str:
    """Says what most nodes find of themselves at once; empty: nothing."""
    shared = []
    for reason, nodes in sorted(_findings_by_reason(facts).items()):
        alike, heard = _nodes_with_same_finding(facts, reason, nodes)
        if _is_shared(alike, heard):
            shared.append(f"{reason} on {join_names(sorted(alike))}")
    if not shared:
        return ""
    what = "; ".join(shared)
    return (
        f"most nodes find the same of themselves ({what}): the cause is one that they share, and no node is left for it"
    )


def _findings_by_reason(facts: WorldFacts) -> Mapping[str, Mapping[str, str]]:
    """What agents find of their own nodes' hardware: sentences by node, by reason.

    An agent that went with its worker says nothing any more once a later one on its node has looked: the node may have
    been started anew.
    """
    told: dict[str, dict[str, str]] = {}
    if facts.spec.health_policy.on_unhealthy_node != "Leave":
        return told
    telling = [s for s in facts.sessions.values() if s.findings]
    if not telling:
        return told
    present = [s for s in facts.sessions.values() if worker_id(s) in facts.workers]
    looked = {session.node: session.since_seconds for session in sorted(present, key=lambda s: s.since_seconds)}
    for session in telling:
        gone = worker_id(session) not in facts.workers
        past = gone and looked.get(session.node, 0.0) > session.last_message_seconds
        for one in () if past else session.findings:
            if one.blame == "node":
                told.setdefault(one.reason, {}).setdefault(session.node, one.text)
    return told


def _nodes_with_same_finding(facts: NodeFacts, reason: str, nodes: Iterable[str]) -> tuple[set[str], set[str]]:
    """(nodes that tell the same, nodes that were heard). What a trial found on nodes that were left for it counts still.

    A trial that fails wherever it is made would else have a small job leave one node after the other.
    """
    before = {
        one.name
        for one in facts.status.unhealthy_nodes
        if reason in TRIED and one.until_seconds > facts.now and one.reason.partition(":")[0] == reason
    }
    return {*nodes, *before}, {*facts.last_message_seconds, *before}


def unhealthy_since(facts: JobFacts, name: str) -> float | None:
    """When this node was found sick; None: it was not."""
    known = next(
        (one for one in facts.status.unhealthy_nodes if one.name == name and one.until_seconds > facts.now), None
    )
    return None if known is None else known.until_seconds - UNHEALTHY_SECONDS


def _is_shared(alike: Collection[str], heard: Collection[str]) -> bool:
    return len(alike) > 1 and 2 * len(alike) > len(heard)


def update_unhealthy_nodes(facts: WorldNodeFacts) -> tuple[tuple[ExcludedNode, ...], tuple[Event, ...], float | None]:
    """Returns sick nodes for the status, events, and when to look again."""
    kept = {one.name: one for one in facts.status.unhealthy_nodes if one.until_seconds > facts.now}
    sessions = facts.sessions.values()
    events, due = [], []
    for name, reason in unhealthy_nodes(facts).items():
        known = kept.get(name)
        settled = min(s.findings_seconds for s in sessions if s.node == name and s.findings) + CONFIRM_SECONDS
        if known is None and facts.now < settled:
            due.append(settled)
        elif known is None:
            kept[name] = ExcludedNode(name, reason, facts.now + UNHEALTHY_SECONDS)
            text = f"node {name} is sick ({reason}): workers leave it, and it is avoided for {UNHEALTHY_SECONDS:g} s"
            events.append(Event(reasons.NODE_UNHEALTHY, text, warning=True))
        elif known.until_seconds < facts.now + UNHEALTHY_SECONDS / 2:  # still so: seldom written, and never let go of
            kept[name] = replace(known, until_seconds=facts.now + UNHEALTHY_SECONDS)
    found = tuple(sorted(kept.values(), key=lambda one: (one.until_seconds, one.name)))[-MAX_KEPT:]
    return found, tuple(events), earliest(due)
