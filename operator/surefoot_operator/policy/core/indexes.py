"""Indexes the parts of a snapshot that seldom change.

Pure; called by `facts`. Each is made once for one and the same tuple: a round in which one agent spoke looks at what it
said, and not at two thousand nodes and holders again.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.protocol.checkpoints.completeness import TierReading
from surefoot.protocol.checkpoints.placement import Topology
from surefoot.protocol.identities import HolderEndpoint, HolderId, WorkerId
from surefoot_operator.api.status import Member
from surefoot_operator.job_snapshot import NodeSeen, SessionSeen, WorkerSeen
from surefoot_operator.observed_tiers import HolderSeen
from surefoot_operator.policy.core.kept import kept_while_same


def worker_id(one: Member | SessionSeen | WorkerSeen) -> WorkerId:
    return WorkerId(one.index, one.attempt)


@kept_while_same
def workers_by_id(workers: tuple[WorkerSeen, ...]) -> Mapping[WorkerId, WorkerSeen]:
    return {worker_id(worker): worker for worker in workers}


@kept_while_same
def sessions_by_id(sessions: tuple[SessionSeen, ...]) -> Mapping[WorkerId, SessionSeen]:
    """Of several of one worker the last that connected."""
    found: dict[WorkerId, SessionSeen] = {}
    for session in sessions:
        worker = worker_id(session)
        other = found.get(worker)
        if other is None or _latest(session) >= _latest(other):
            found[worker] = session
    return found


def _latest(session: SessionSeen) -> tuple[bool, float, str]:
    return session.connected, session.since_seconds, session.incarnation


@kept_while_same
def nodes_by_name(nodes: tuple[NodeSeen, ...]) -> Mapping[str, NodeSeen]:
    return {node.name: node for node in nodes}


@kept_while_same
def doubtful_nodes(nodes: tuple[NodeSeen, ...]) -> frozenset[str]:
    """Names of nodes that may be lost: few are."""
    return frozenset(node.name for node in nodes if not node.ready or node.doubt)


@kept_while_same
def holders_by_id(holders: tuple[HolderSeen, ...]) -> Mapping[HolderId, HolderSeen]:
    return {one.endpoint.holder: one for one in holders}


@kept_while_same
def members_by_id(members: tuple[Member, ...]) -> Mapping[WorkerId, Member]:
    return {worker_id(member): member for member in members}


@kept_while_same
def signalled_nodes(nodes: tuple[NodeSeen, ...]) -> Mapping[str, str]:
    return {node.name: node.signal for node in nodes if node.signal}


@kept_while_same
def ending_workers(workers: tuple[WorkerSeen, ...]) -> Mapping[WorkerId, str]:
    return {worker_id(worker): _announced(worker) for worker in workers if worker.deleting or worker.disrupted}


def _announced(worker: WorkerSeen) -> str:
    return f"is being deleted ({worker.message})" if worker.message else "is being deleted"


@kept_while_same
def sealed_at(holders: tuple[HolderSeen, ...], epoch: int) -> tuple[HolderSeen, ...]:
    read = (h for h in holders if h.state in ("Ready", "Proxied") and h.read_epoch == epoch)
    return tuple(h for h in read if h.fence is not None and h.fence >= epoch)


@kept_while_same
def sealed_endpoints(holders: tuple[HolderSeen, ...], epoch: int) -> Mapping[HolderId, HolderEndpoint]:
    return {h.endpoint.holder: h.endpoint for h in sealed_at(holders, epoch)}


@kept_while_same
def holders_reading(holders: tuple[HolderSeen, ...], epoch: int) -> TierReading:
    return TierReading({h.endpoint.holder: h.entries for h in sealed_at(holders, epoch)}, None)


@kept_while_same
def topology_of(nodes: tuple[NodeSeen, ...], job_uid: str) -> Topology:
    """Where nodes stand, for the placement of one job's copies."""
    return Topology(job_uid, _paths(nodes))


@kept_while_same
def _paths(nodes: tuple[NodeSeen, ...]) -> dict[str, tuple[str, ...]]:
    """Shared by all jobs: made for each, the nodes of a thousand jobs would be read in each of their rounds."""
    return {node.name: node.path for node in nodes if node.path}


@kept_while_same
def holder_domains(holders: tuple[HolderSeen, ...]) -> dict[HolderId, str]:
    return {h.endpoint.holder: h.endpoint.domain for h in holders}
