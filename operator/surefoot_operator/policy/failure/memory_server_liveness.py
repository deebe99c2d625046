"""Tells holders that are unreachable for the operator from holders that are dead.

Pure; called by `restore_point` before a holder is given up, and by `status_conditions`. An operator whose password was
changed, or that a network policy cuts off, would otherwise take every checkpoint of a healthy job for lost. The job
waits for such holders, and says which they are and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.identities import MemoryServerEndpoint
from surefoot.protocol.text import join_names
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.core.availability import node_lost
from surefoot_operator.policy.core.facts import (
    Facts,
    NodeFacts,
    TierFacts,
    cached_per_snapshot,
    is_responsive,
)

NOTED_SECONDS = 3.0
"""People are told of no shorter silence."""


def unreachable_servers(facts: TierFacts) -> list[MemoryServerEndpoint]:
    """Named holders that do not answer and may still have saves.

    One in whose place another instance runs is gone.
    """
    silent = []
    for endpoint in facts.status.assigned_servers:
        holder = facts.servers.get(endpoint.instance)
        if (
            holder is None or holder.state == "Unreachable"
        ) and endpoint.instance.run_id not in facts.status.lost_servers:
            silent.append(endpoint)
    return _not_restarted(facts, silent)


def may_still_have_data(facts: TierFacts) -> list[MemoryServerEndpoint]:
    """Silent holders that may still have saves, those given up before included.

    A holder is given up for what it may have beyond the restore point. Where that itself is lost, its copy is looked for again.
    """
    given_up = frozenset(facts.status.lost_servers)
    back = [
        h.endpoint for h in facts.holder_list if h.state == "Unreachable" and h.endpoint.instance.run_id in given_up
    ]
    return [*unreachable_servers(facts), *_not_restarted(facts, back)]


@dataclass(frozen=True, slots=True)
class UsableMemoryServers:
    """Holders that agents may save to. `seen`: the operator reaches them."""

    endpoints: tuple[MemoryServerEndpoint, ...] = ()
    reachable: bool = True


def usable_servers(
    holders: Sequence[ObservedMemoryServer], named: Sequence[MemoryServerEndpoint], epoch: int
) -> UsableMemoryServers:
    """Lists holders that agents may save to.

    Those that answer and are sealed against epochs older than `epoch`; where none does, the named ones that are silent: an
    operator that lost sight of all would take every target from agents that reach them.
    """
    wanted = {endpoint.instance for endpoint in named}
    ready = tuple(h.endpoint for h in holders if h.state == "Ready" and h.fence is not None and h.fence >= epoch)
    if any(endpoint.instance in wanted for endpoint in ready):
        return UsableMemoryServers(ready)
    silent = tuple(h.endpoint for h in holders if h.state == "Unreachable" and h.endpoint.instance in wanted)
    return UsableMemoryServers((*ready, *silent), reachable=not silent)


def awaited_servers(facts: TierFacts, worth_seconds: float) -> list[MemoryServerEndpoint]:
    """Silent holders that are waited for.

    `worth_seconds`: of what they may have; endless where nothing is left without them.
    """
    return may_still_have_data(facts) if worth_seconds == math.inf else unreachable_servers(facts)


def _not_restarted(facts: TierFacts, silent: list[MemoryServerEndpoint]) -> list[MemoryServerEndpoint]:
    if not silent:
        return []
    restarted = {h.endpoint.server_id: h.endpoint.instance for h in facts.holder_list if h.state == "Ready"}
    return [e for e in silent if restarted.get(e.server_id, e.instance) == e.instance]


def why_alive(facts: Facts, endpoint: MemoryServerEndpoint, worth_seconds: float) -> str:
    """Says why an unreachable holder is taken to be alive; empty: it may as well be dead.

    That it is one of most at once speaks for the operator's own network. Before a job ends or begins anew for it, it is
    enough that its node is well: a holder that dies there is started anew, or gone, and then not waited for.
    """
    holder = facts.servers.get(endpoint.instance)
    trouble = holder.last_error if holder is not None and holder.last_error else "nothing was heard of it in this term"
    if holder is not None and holder.rejects_operator:
        return (
            f"it refuses the operator ({trouble}); give the operator the current"
            " password and certificate authority of the memory tier"
        )
    node = endpoint.instance.node
    is_decisive = worth_seconds == math.inf and facts.spec.checkpoint.on_total_loss != "Wait"
    if endpoint not in mostly_unreachable(facts) and not (is_decisive and _is_well(facts, node)):
        return ""
    return f"its node is well, and the operator does not reach it ({trouble}); let the operator connect to the memory tier's port"


def _is_well(facts: NodeFacts, name: str) -> bool:
    node = facts.nodes.get(name)
    return bool(facts.connected_nodes.get(name)) or (node is not None and node.ready and not node.unconfirmed_failure)


@cached_per_snapshot
def mostly_unreachable(facts: Facts) -> frozenset[MemoryServerEndpoint]:
    """Silent holders beside an agent that is heard, or that refuse the operator, where they are most of all.

    Empty otherwise. That points to the operator's own network or credentials. Derived once: it reads every holder, and is
    asked for of each.
    """
    silent = unreachable_servers(facts)
    most = len(facts.status.assigned_servers) // 2
    if len(silent) <= most:
        return frozenset()
    beside = {s.node for s in facts.sessions.values() if is_responsive(facts, s) and not node_lost(facts, s.node)}
    spoken_for = frozenset(e for e in silent if e.instance.node in beside or _is_refusing(facts, e))
    return spoken_for if len(spoken_for) > most else frozenset()


def _is_refusing(facts: TierFacts, endpoint: MemoryServerEndpoint) -> bool:
    holder = facts.servers.get(endpoint.instance)
    return holder is not None and holder.rejects_operator


def unreachable_message(facts: Facts) -> str:
    """The message while the operator cannot reach most holders; empty: it can."""
    unseen = mostly_unreachable(facts)
    silences = [facts.servers[e.instance] for e in unseen if e.instance in facts.servers]
    if not silences or facts.now < max(h.since_seconds for h in silences) + NOTED_SECONDS:
        return ""
    trouble = next((h.last_error for h in silences if h.rejects_operator), "") or next(
        (h.last_error for h in silences), ""
    )
    said = f" ({trouble})" if trouble else ""
    named, names = facts.status.assigned_servers, join_names(sorted(e.instance for e in unseen))
    where = "them" if not any(h.state == "Ready" for h in facts.holder_list) else "the others"
    return (
        f"the operator cannot reach {len(unseen)} of {len(named)} holders, {names}{said}; agents still save to {where}"
        " and nothing is given up: check the operator's network, its password for the memory tier and its certificate authority"
    )
