"""Tells which nodes and workers can still be counted on.

Pure; used wherever workers are placed, kept or given up. A node is lost by evidence alone; a node or worker that lives
may be about to end, by somebody's announcement or for what it did to this job.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.protocol.identities import WorkerId
from surefoot_operator.api.status import Member, slow_nodes
from surefoot_operator.job_snapshot import ObservedSession, ObservedWorker
from surefoot_operator.policy.core.facts import (
    JobFacts,
    NodeFacts,
    WorldFacts,
    WorldNodeFacts,
    cached_per_snapshot,
    ending_workers,
    is_responsive,
    progressing_until,
    signalled_nodes,
    worker_id,
)

NO_CONTACT_SECONDS = 30.0
"""Workers not heard in this term are judged only after so long, and only with a witness."""


def node_lost(facts: WorldNodeFacts, name: str | None) -> bool:
    """Whether the fabric reports this node gone: evidence, unlike silence alone.

    Not while an agent there is heard: then the node's observer is cut off, and what runs there must not be deleted.
    """
    if name is None or not facts.nodes:
        return False
    node = facts.nodes.get(name)
    if node is not None and node.ready and not node.unconfirmed_failure:
        return False
    if facts.connected_nodes.get(name):
        return False
    if node is None or not (node.ready or node.unconfirmed_failure):
        return True
    # two witnesses that know nothing of each other: the cluster's, and our own ear, which hears others. A line that broke a
    # moment ago, or that none came over yet to this leader, is no witness: agents connect again, and a cluster that doubts
    # nodes may have been away itself
    silence = facts.spec.health_policy.heartbeat_timeout_seconds
    came = max(facts.term_seconds, facts.turned_away_seconds)
    if facts.now - facts.last_message_seconds.get(name, came) <= silence or _steps_while_disconnected(facts, name):
        return False
    if not node.ready:
        return True
    unheard = name in facts.connected_nodes or facts.now >= facts.term_seconds + NO_CONTACT_SECONDS
    return unheard and _observers_agree(facts)


def _steps_while_disconnected(facts: WorldNodeFacts, name: str) -> bool:
    """Whether a member there lives though its line is broken: the world made a step since, and steps take all of its ranks."""
    membership, told = facts.status.membership, facts.last_message_seconds.get(name)
    if membership is None or membership.state != "Committed" or told is None or name not in _member_nodes(facts):
        return False
    return progressing_until(facts, told) is not None


@cached_per_snapshot
def _member_nodes(facts: WorldFacts) -> frozenset[str]:
    return frozenset(member.node for member in facts.members.values())


@cached_per_snapshot
def _observers_agree(facts: NodeFacts) -> bool:
    """Whether some node is known to live: then another one that is doubted is not the observer's own trouble."""
    return any(facts.connected_nodes.values()) or any(n.ready and not n.unconfirmed_failure for n in facts.node_list)


def evacuation_reason(facts: NodeFacts, name: str | None) -> str:
    """Why workers should leave this live node; empty: they stay.

    Others announced its end, its own agent found it sick, or it failed this job too often.
    """
    return nodes_to_evacuate(facts).get(name, "") if name is not None else ""


@cached_per_snapshot
def nodes_to_evacuate(facts: NodeFacts) -> Mapping[str, str]:
    """Why nodes should be left, by name: few are."""
    return {**_excluded(facts), **signalled_nodes(facts.node_list)}


@cached_per_snapshot
def _excluded(facts: JobFacts) -> Mapping[str, str]:
    """Why nodes are excluded from this job now, by name."""
    told = (*facts.status.unhealthy_nodes, *facts.status.excluded_nodes, *slow_nodes(facts.status, facts.now))
    lasting = [e for e in told if e.until_seconds > facts.now]
    return {e.name: e.reason for e in reversed(lasting)}


@cached_per_snapshot
def costly_nodes(facts: NodeFacts) -> Mapping[str, float]:
    """Lists nodes left for a cost alone, with their part of time."""
    excluded = facts.status.excluded_nodes
    if not slow_nodes(facts.status, facts.now) and all(one.lost_time_ratio is None for one in excluded):
        return {}
    told = (*facts.status.unhealthy_nodes, *(one for one in excluded if one.lost_time_ratio is None))
    unfit = {e.name for e in told if e.until_seconds > facts.now} | set(signalled_nodes(facts.node_list))
    costs = (
        *((one.node, one.until_seconds, one.wait_ratio) for one in facts.status.replaced_stragglers),
        *((one.name, one.until_seconds, one.lost_time_ratio or 0.0) for one in excluded),
    )
    lasting = [(node, share) for node, until, share in costs if until > facts.now and node not in unfit]
    return dict(sorted(lasting, key=lambda one: one[1]))  # of two the larger counts


@cached_per_snapshot
def has_evacuation_or_termination(facts: WorldNodeFacts) -> bool:
    """Whether some node should be left, or somebody's end was announced."""
    return bool(nodes_to_evacuate(facts) or _terminations(facts))


def termination_reason(facts: WorldFacts, one: Member | ObservedWorker | ObservedSession) -> str:
    """Why this healthy worker is about to be ended; empty: not."""
    announced = announced_termination(facts, one)
    worker = facts.workers.get(worker_id(one)) if announced else None
    return "" if worker is not None and worker.phase in ("Succeeded", "Failed") else announced


def announced_termination(facts: WorldFacts, one: Member | ObservedWorker | ObservedSession) -> str:
    """Why somebody wanted this worker to end; empty: nobody did.

    Said whether it has ended or not.
    """
    departures = _terminations(facts)
    return departures.get(worker_id(one), "") if departures else ""


@cached_per_snapshot
def _terminations(facts: WorldFacts) -> Mapping[WorkerId, str]:
    """Announced departures: few have one, and every worker is asked about."""
    told = {worker: "was told to end" for worker, session in facts.sessions.items() if session.terminating}
    return {**told, **_requested_deletions(facts), **ending_workers(facts.worker_list)}


def _requested_deletions(facts: WorldFacts) -> Mapping[WorkerId, str]:
    """Workers whose deletion was asked for without an answer that it was done.

    It may still be carried out: one that a suspended job did not need would else be chosen when the job resumes, and end then.
    """
    if not facts.deletions:
        return {}
    live = (w for w in facts.worker_list if w.uid in facts.deletions and w.phase in ("Pending", "Running"))
    return {worker_id(worker): "was asked to be deleted" for worker in live}


def is_usable(facts: WorldNodeFacts, session: ObservedSession) -> bool:
    """Whether this agent's worker could be a member of a new world."""
    worker = facts.workers.get(worker_id(session))
    if worker is None or worker.phase in ("Succeeded", "Failed") or termination_reason(facts, session):
        return False
    return is_responsive(facts, session) and not node_lost(facts, session.node)
