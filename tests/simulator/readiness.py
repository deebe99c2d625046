"""Who could be a member by what a leader sees, in words of the watches' own: whoever is ready, and found nothing on its node."""

from __future__ import annotations

from surefoot_operator.job_snapshot import JobSnapshot, ObservedSession


def ready_at(seen: JobSnapshot, session: ObservedSession, epoch: int) -> bool:
    """Whether nothing speaks against this agent as a member."""
    return session.connected and session.warm and session.stopped >= epoch and _well(seen, session)


def _well(seen: JobSnapshot, session: ObservedSession) -> bool:
    silence = seen.job.spec.health_policy.heartbeat_timeout_seconds
    pod = next((w for w in seen.workers if (w.index, w.attempt) == (session.index, session.attempt)), None)
    node = next((n for n in seen.nodes if n.name == session.node), None)
    if (
        pod is None
        or pod.phase in ("Succeeded", "Failed")
        or pod.deleting
        or pod.disruption_announced
        or session.terminating
    ):
        return False
    if pod.uid in seen.deletion_uids:
        return False  # whoever was asked to delete it may still do so
    if node is None or not node.ready or node.unconfirmed_failure or node.evacuation_reason:
        return False
    newest = max((s.attempt for s in seen.sessions if s.index == session.index and s.connected), default=0)
    return session.attempt == newest and seen.now_seconds - session.last_message_seconds <= silence


def fails(seen: JobSnapshot, session: ObservedSession) -> bool:
    """Whether this agent found its own node at fault, and not most others theirs, or nodes that were left, the same."""
    own = {one.reason for one in session.findings if one.blame == "node"}
    return any(not _is_common(seen, reason) for reason in own)


def _is_common(seen: JobSnapshot, reason: str) -> bool:
    left = {one.name for one in seen.status.unhealthy_nodes if one.reason.startswith(f"{reason}:")}
    told = {s.node for s in seen.sessions if any((f.reason, f.blame) == (reason, "node") for f in s.findings)} | left
    return len(told) > 1 and 2 * len(told) > len({s.node for s in seen.sessions} | left)
