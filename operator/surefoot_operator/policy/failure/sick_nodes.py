"""Decides which nodes are sick from what agents found on them.

Pure; called by `plan`. Only evidence of the node's own hardware moves anybody; what names a program, or is merely odd,
people are told by the agents themselves. What most nodes of a job tell at once has a cause that they share (a driver, a
switch, a file server), and leaving them all would leave the job with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from surefoot.protocol.plain import listed
from surefoot_operator import names
from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.policy.actions import Event
from surefoot_operator.policy.facts import Facts, derived_once, soonest

SICK_SECONDS = 3600.0
"""How long a node that was found sick is avoided: its agent leaves with its worker, and nobody looks there any more."""

SETTLE_SECONDS = 15.0
"""A finding is acted upon after so long: by then other nodes have told whether they see the same."""

MOST_KEPT = 64


@derived_once
def found_sick(facts: Facts) -> Mapping[str, str]:
    """Why nodes are sick by what their own agents found, by name."""
    if facts.spec.health_policy.node_findings != "Leave":
        return {}
    told: dict[str, dict[str, str]] = {}
    for session in facts.sessions.values():
        for one in session.findings:
            if one.blame == "node":
                told.setdefault(one.reason, {}).setdefault(session.node, one.text)
    sick: dict[str, str] = {}
    for reason, nodes in sorted(told.items()):
        if not _is_shared(len(nodes), len(facts.told_on)):
            for node, text in sorted(nodes.items()):
                sick.setdefault(node, f"{reason}: {text}")
    return sick


def shared_findings(facts: Facts) -> str:
    """Says what most nodes find of themselves at once; empty: nothing."""
    told: dict[str, set[str]] = {}
    for session in facts.sessions.values():
        for one in session.findings:
            if one.blame == "node":
                told.setdefault(one.reason, set()).add(session.node)
    shared = {reason: nodes for reason, nodes in told.items() if _is_shared(len(nodes), len(facts.told_on))}
    if not shared or facts.spec.health_policy.node_findings != "Leave":
        return ""
    what = "; ".join(f"{reason} on {listed(sorted(nodes))}" for reason, nodes in sorted(shared.items()))
    return (
        f"most nodes find the same of themselves ({what}): the cause is one that they share, and no node is left for it"
    )


def sick_since(facts: Facts, name: str) -> float | None:
    """When this node was found sick; None: it was not."""
    known = next((one for one in facts.status.sick_nodes if one.name == name and one.until_seconds > facts.now), None)
    return None if known is None else known.until_seconds - SICK_SECONDS


def _is_shared(nodes: int, heard: int) -> bool:
    return nodes > 1 and 2 * nodes > heard


def with_sick_found(facts: Facts) -> tuple[tuple[ExcludedNode, ...], tuple[Event, ...], float | None]:
    """Returns sick nodes for the status, events, and when to look again."""
    kept = {one.name: one for one in facts.status.sick_nodes if one.until_seconds > facts.now}
    events, due = [], []
    for name, reason in found_sick(facts).items():
        known = kept.get(name)
        settled = _since(facts, name) + SETTLE_SECONDS
        if known is None and facts.now < settled:
            due.append(settled)
        elif known is None:
            kept[name] = ExcludedNode(name, reason, facts.now + SICK_SECONDS)
            text = f"node {name} is sick ({reason}): workers leave it, and it is avoided for {SICK_SECONDS:g} s"
            events.append(Event(names.NODE_SICK, text, warning=True))
        elif known.until_seconds < facts.now + SICK_SECONDS / 2:  # still so: seldom written, and never let go of
            kept[name] = replace(known, until_seconds=facts.now + SICK_SECONDS)
    found = tuple(sorted(kept.values(), key=lambda one: (one.until_seconds, one.name)))[-MOST_KEPT:]
    return found, tuple(events), soonest(due)


def _since(facts: Facts, name: str) -> float:
    return min((s.findings_seconds for s in facts.sessions.values() if s.node == name and s.findings), default=0.0)
