"""Separates memory servers that are only unreachable for the operator from servers that are dead.

Pure; called by `restore_point` before a memory server is declared lost, and by `status_conditions`. An operator whose password
was changed, or that a network policy cuts off, would else declare every checkpoint of a healthy job lost. The job waits for
such servers, and reports which they are and how to restore access.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.protocol.identities import ENDPOINT_ORDER, MemoryServerEndpoint
from surefoot.protocol.text import join_names
from surefoot_operator.job_snapshot import ObservedMemoryServer
from surefoot_operator.policy.core.availability import is_node_lost
from surefoot_operator.policy.core.facts import (
    Facts,
    NodeFacts,
    TierFacts,
    cached_per_snapshot,
    is_responsive,
)

MIN_REPORTED_SECONDS = 3.0
"""Unreachability that lasts shorter is not reported."""


def unreachable_servers(facts: TierFacts) -> list[MemoryServerEndpoint]:
    """Lists assigned memory servers that do not answer and may still have saves.

    A server in whose place another instance runs is not listed: its memory is gone.
    """
    unreachable = []
    for endpoint in facts.status.assigned_servers:
        server = facts.servers.get(endpoint.instance)
        if (
            server is None or server.state == "Unreachable"
        ) and endpoint.instance.run_id not in facts.status.lost_servers:
            unreachable.append(endpoint)
    return _without_restarted(facts, unreachable)


def may_still_have_data(facts: TierFacts) -> list[MemoryServerEndpoint]:
    """Lists unreachable memory servers that may still have saves, including those declared lost before.

    A server is declared lost for its saves beyond the restore point. If the restore point itself is lost, even its copy counts.
    """
    lost_run_ids = frozenset(facts.status.lost_servers)
    lost_but_unreachable = [
        h.endpoint for h in facts.server_list if h.state == "Unreachable" and h.endpoint.instance.run_id in lost_run_ids
    ]
    return [*unreachable_servers(facts), *_without_restarted(facts, lost_but_unreachable)]


@dataclass(frozen=True, slots=True)
class UsableMemoryServers:
    """The memory servers that agents may save to."""

    endpoints: tuple[MemoryServerEndpoint, ...] = ()
    are_reachable: bool = True
    """False if the operator reaches none of the assigned servers and lists them unseen."""


def usable_servers(
    servers: Sequence[ObservedMemoryServer], assigned: Sequence[MemoryServerEndpoint], generation: int
) -> UsableMemoryServers:
    """Returns the memory servers that agents may save to.

    These answer and are fenced at `generation` or later. If none of the assigned servers does, the unreachable ones are
    included: an operator that is cut off would else take every target from agents that reach them.
    """
    assigned_instances = {endpoint.instance for endpoint in assigned}
    ready = tuple(h.endpoint for h in servers if h.state == "Ready" and h.fence is not None and h.fence >= generation)
    if any(endpoint.instance in assigned_instances for endpoint in ready):
        return UsableMemoryServers(ready)
    unreachable = tuple(
        h.endpoint for h in servers if h.state == "Unreachable" and h.endpoint.instance in assigned_instances
    )
    return UsableMemoryServers((*ready, *unreachable), are_reachable=not unreachable)


def awaited_servers(facts: TierFacts, worth_seconds: float) -> list[MemoryServerEndpoint]:
    """Lists unreachable memory servers to wait for.

    `worth_seconds`: training time that their saves are worth; infinite if nothing can be restored without them.
    """
    return may_still_have_data(facts) if worth_seconds == math.inf else unreachable_servers(facts)


def _without_restarted(facts: TierFacts, unreachable: list[MemoryServerEndpoint]) -> list[MemoryServerEndpoint]:
    """Leaves out servers in whose place another instance answers: their memory is gone."""
    if not unreachable:
        return []
    ready_instances = {h.endpoint.server_id: h.endpoint.instance for h in facts.server_list if h.state == "Ready"}
    return [e for e in unreachable if ready_instances.get(e.server_id, e.instance) == e.instance]


def describe_why_alive(facts: Facts, endpoint: MemoryServerEndpoint, worth_seconds: float) -> str:
    """Returns why an unreachable memory server is probably alive; empty: it may as well be dead.

    If most servers are unreachable at once, the operator's own network is the likely cause. Before a job fails or starts over
    because of one server, it suffices that its node is healthy: had the server died there, it would have been restarted, or
    removed, and then not be waited for.
    """
    server = facts.servers.get(endpoint.instance)
    last_error = server.last_error if server is not None and server.last_error else "it never answered this leader"
    if server is not None and server.rejects_operator:
        return (
            f"it rejects the operator ({last_error}); give the operator the current"
            " password and certificate authority of the memory tier"
        )
    node = endpoint.instance.node
    # Without this server the job would fail or start over, so a healthy node suffices as a sign of life.
    is_decisive = worth_seconds == math.inf and facts.spec.checkpoint.on_total_loss != "Wait"
    if endpoint not in unreachable_majority(facts) and not (is_decisive and _is_node_healthy(facts, node)):
        return ""
    return (
        f"its node is healthy, but the operator cannot reach it ({last_error}); allow connections from the operator to the"
        " memory tier's port"
    )


def _is_node_healthy(facts: NodeFacts, name: str) -> bool:
    """Whether an agent on the node is responsive, or the platform reports the node healthy."""
    node = facts.nodes.get(name)
    return bool(facts.connected_nodes.get(name)) or (node is not None and node.ready and not node.unconfirmed_failure)


@cached_per_snapshot
def unreachable_majority(facts: Facts) -> frozenset[MemoryServerEndpoint]:
    """Returns the unreachable servers that are probably alive if they are a majority; else an empty set.

    Such a server rejects the operator, or a responsive agent runs on its node. Most of them at once points to the operator's own
    network or credentials. Cached: it reads every server, and is called for each.
    """
    unreachable = unreachable_servers(facts)
    half_of_servers = len(facts.status.assigned_servers) // 2
    # Fewer are more likely dead than cut off from the operator.
    if len(unreachable) <= half_of_servers:
        return frozenset()
    nodes_with_agents = {
        s.node for s in facts.sessions.values() if is_responsive(facts, s) and not is_node_lost(facts, s.node)
    }
    probably_alive = frozenset(
        e for e in unreachable if e.instance.node in nodes_with_agents or _rejects_operator(facts, e)
    )
    return probably_alive if len(probably_alive) > half_of_servers else frozenset()


def _rejects_operator(facts: TierFacts, endpoint: MemoryServerEndpoint) -> bool:
    """Whether this server answers but rejects the operator's password or certificate."""
    server = facts.servers.get(endpoint.instance)
    return server is not None and server.rejects_operator


def unreachable_message(facts: Facts) -> str:
    """Returns the message while the operator cannot reach most memory servers; empty while it can."""
    # In a fixed order: a message that named the error of another server each time would be written again and again.
    unreachable = sorted(unreachable_majority(facts), key=ENDPOINT_ORDER)
    unreachable_states = [facts.servers[e.instance] for e in unreachable if e.instance in facts.servers]
    # Short interruptions are normal, and not worth a message.
    if not unreachable_states or facts.now < max(h.since_seconds for h in unreachable_states) + MIN_REPORTED_SECONDS:
        return ""
    last_error = next((h.last_error for h in unreachable_states if h.rejects_operator), "") or next(
        (h.last_error for h in unreachable_states), ""
    )
    error_clause = f" ({last_error})" if last_error else ""
    assigned, names = facts.status.assigned_servers, join_names([e.instance for e in unreachable])
    remaining_targets = "them" if not any(h.state == "Ready" for h in facts.server_list) else "the others"
    return (
        f"the operator cannot reach {len(unreachable)} of {len(assigned)} memory servers, {names}{error_clause}; agents still save to"
        f" {remaining_targets} and none is declared lost: check the operator's network, its password for the memory tier and its"
        " certificate authority"
    )
