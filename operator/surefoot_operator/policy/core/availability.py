"""Decides which nodes and workers can still be relied on.

Pure; used wherever workers are placed, kept or declared lost. A node is lost only by evidence. A node or worker that lives may
be about to end, because that was announced, or be excluded because it was costly for this job.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.protocol.identities import WorkerId
from surefoot_operator.api.status import Member, straggler_nodes
from surefoot_operator.job_snapshot import ObservedSession, ObservedWorker
from surefoot_operator.policy.core.facts import (
    JobFacts,
    MembershipFacts,
    MembershipNodeFacts,
    NodeFacts,
    cached_per_snapshot,
    ending_workers,
    is_responsive,
    progress_proof_end,
    signalled_nodes,
    worker_id,
)

NO_CONTACT_SECONDS = 30.0
"""Time before members that have not connected to a new leader are judged, and then only with a second observer."""


def is_node_lost(facts: MembershipNodeFacts, name: str | None) -> bool:
    """Whether the platform reports this node lost; silence alone is no evidence.

    False while an agent on it is responsive: then the platform's observer is cut off, and its workers must not be deleted.
    """
    if name is None or not facts.nodes:
        return False
    node = facts.nodes.get(name)
    if node is not None and node.ready and not node.unconfirmed_failure:
        return False
    if facts.connected_nodes.get(name):
        return False
    # Not ready and a suspected failure, or deleted: two signs from the platform suffice.
    if node is None or not (node.ready or node.unconfirmed_failure):
        return True
    # two independent observers are needed: the cluster, and our own connections to agents. A connection that broke a moment ago, or
    # has not been made to this leader yet, is no evidence: agents reconnect, and a cluster that suspects nodes may have been
    # cut off itself
    timeout_seconds = facts.spec.health_policy.heartbeat_timeout_seconds
    last_contact_seconds = max(facts.term_seconds, facts.retry_later_seconds)
    if facts.now - facts.last_message_seconds.get(
        name, last_contact_seconds
    ) <= timeout_seconds or _steps_while_disconnected(facts, name):
        return False
    if not node.ready:
        return True
    has_had_time = name in facts.connected_nodes or facts.now >= facts.term_seconds + NO_CONTACT_SECONDS
    return has_had_time and _observers_agree(facts)


def _steps_while_disconnected(facts: MembershipNodeFacts, name: str) -> bool:
    """Whether a step was made since the last message from this node: a step takes all ranks, so the node lives."""
    membership, last_message_seconds = facts.status.membership, facts.last_message_seconds.get(name)
    if (
        membership is None
        or membership.state != "Committed"
        or last_message_seconds is None
        or name not in _member_nodes(facts)
    ):
        return False
    return progress_proof_end(facts, last_message_seconds) is not None


@cached_per_snapshot
def _member_nodes(facts: MembershipFacts) -> frozenset[str]:
    """Names of the nodes that members run on."""
    return frozenset(member.node for member in facts.members.values())


@cached_per_snapshot
def _observers_agree(facts: NodeFacts) -> bool:
    """Whether some node is known to be alive, so that a suspected node is not merely the observer's own problem."""
    return any(facts.connected_nodes.values()) or any(n.ready and not n.unconfirmed_failure for n in facts.node_list)


def evacuation_reason(facts: NodeFacts, name: str | None) -> str:
    """Returns why workers should be moved off this live node; empty: they stay.

    Its end was announced, its own agent found it unhealthy, or it failed this job too often.
    """
    return nodes_to_evacuate(facts).get(name, "") if name is not None else ""


@cached_per_snapshot
def nodes_to_evacuate(facts: NodeFacts) -> Mapping[str, str]:
    """Returns the nodes to evacuate, each with the reason."""
    return {**_excluded_nodes(facts), **signalled_nodes(facts.node_list)}


@cached_per_snapshot
def _excluded_nodes(facts: JobFacts) -> Mapping[str, str]:
    """Returns the nodes excluded from this job now, each with the reason."""
    nodes = (*facts.status.unhealthy_nodes, *facts.status.excluded_nodes, *straggler_nodes(facts.status, facts.now))
    active = [e for e in nodes if e.until_seconds > facts.now]
    return {e.name: e.reason for e in reversed(active)}


@cached_per_snapshot
def costly_nodes(facts: NodeFacts) -> Mapping[str, float]:
    """Returns nodes excluded only for their cost, each with the share of time that it costs (0 to 1)."""
    excluded = facts.status.excluded_nodes
    if not straggler_nodes(facts.status, facts.now) and all(node.lost_time_ratio is None for node in excluded):
        return {}
    unfit_nodes = (*facts.status.unhealthy_nodes, *(node for node in excluded if node.lost_time_ratio is None))
    unfit_names = {e.name for e in unfit_nodes if e.until_seconds > facts.now} | set(signalled_nodes(facts.node_list))
    costs = (
        *((s.node, s.until_seconds, s.wait_ratio) for s in facts.status.replaced_stragglers),
        *((n.name, n.until_seconds, n.lost_time_ratio or 0.0) for n in excluded),
    )
    active = [
        (node, share) for node, until_seconds, share in costs if until_seconds > facts.now and node not in unfit_names
    ]
    return dict(sorted(active, key=lambda cost: cost[1]))  # if a node is listed twice, the higher cost counts


@cached_per_snapshot
def has_evacuation_or_termination(facts: MembershipNodeFacts) -> bool:
    """Whether any node is to be evacuated, or any worker's end was announced."""
    return bool(nodes_to_evacuate(facts) or _terminations(facts))


def termination_reason(facts: MembershipFacts, worker_like: Member | ObservedWorker | ObservedSession) -> str:
    """Returns why this live worker is about to be ended; empty: it is not."""
    announced_reason = announced_termination(facts, worker_like)
    worker = facts.workers.get(worker_id(worker_like)) if announced_reason else None
    return "" if worker is not None and worker.phase in ("Succeeded", "Failed") else announced_reason


def announced_termination(facts: MembershipFacts, worker_like: Member | ObservedWorker | ObservedSession) -> str:
    """Returns who announced this worker's end, whether or not it has ended; empty: the end was not announced."""
    reasons = _terminations(facts)
    return reasons.get(worker_id(worker_like), "") if reasons else ""


@cached_per_snapshot
def _terminations(facts: MembershipFacts) -> Mapping[WorkerId, str]:
    """Returns all announced ends; computed once, because few workers have one and every worker is checked."""
    asked_to_terminate = {
        worker: "was asked to terminate" for worker, session in facts.sessions.items() if session.terminating
    }
    return {**asked_to_terminate, **_requested_deletions(facts), **ending_workers(facts.worker_list)}


def _requested_deletions(facts: MembershipFacts) -> Mapping[WorkerId, str]:
    """Returns workers whose requested deletion is not confirmed yet.

    It may still be carried out: a worker that a suspended job did not need would else be selected when the job resumes, and
    then end.
    """
    if not facts.pending_deletions:
        return {}
    live_workers = (
        w for w in facts.worker_list if w.uid in facts.pending_deletions and w.phase in ("Pending", "Running")
    )
    return {worker_id(worker): "has a pending deletion" for worker in live_workers}


def is_usable(facts: MembershipNodeFacts, session: ObservedSession) -> bool:
    """Whether this agent's worker could be a member of the next generation."""
    worker = facts.workers.get(worker_id(session))
    if worker is None or worker.phase in ("Succeeded", "Failed") or termination_reason(facts, session):
        return False
    return is_responsive(facts, session) and not is_node_lost(facts, session.node)
