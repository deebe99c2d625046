"""Records each failure as an incident, from its first sign to the first new step.

Pure; the status keeps the newest ten, newest last.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.checkpoints.save_state import join_sources
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident
from surefoot_operator.policy.core.availability import is_node_lost, is_usable
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    MembershipNodeFacts,
    has_stepped,
    member_sessions,
    sessions_in_generation,
    step_of,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.spare_workers import newest_responsive_sessions

MAX_INCIDENTS = 10
"""Incidents kept in the status."""

WORKER_LOSS_KINDS = ("node-lost", "agent-lost", "worker-silent")
"""Kinds of incidents that need a replacement worker. A trainer that failed is started again in the same worker."""

MAX_DETAIL_CHARACTERS = 8000
"""Characters of the workers' details that the newest incident keeps."""

MAX_OLD_DETAIL_CHARACTERS = 500
"""Characters of detail that each older incident keeps."""

Incidents = tuple[Incident, ...]


def append_incident(facts: MembershipFacts, failure: Failure, last_step: int) -> Incidents:
    """Returns the incidents with the failure that ends the present generation."""
    incident = Incident(
        kind=failure.kind,
        reason=failure.reason,
        worker=failure.worker,
        node=failure.node,
        generation=facts.membership.generation,
        detected_seconds=failure.first_sign_seconds,
        claimed_seconds=facts.now,
        last_step=last_step,
        world_size_before=facts.membership.world_size,
        rank=failure.rank,
        unexplained=failure.unexplained,
        detail=_join_exit_details(facts, facts.membership.generation),
    )
    older_incidents = (replace(i, detail=i.detail[:MAX_OLD_DETAIL_CHARACTERS]) for i in facts.status.incidents)
    return (*older_incidents, incident)[-MAX_INCIDENTS:]


def end_with_incident(facts: MembershipFacts, failure: Failure, last_step: int) -> Incidents:
    """Returns the incidents with the failure that ends the job, for which no claim follows."""
    older_incidents, last_incident = (incidents := append_incident(facts, failure, last_step))[:-1], incidents[-1]
    return (*older_incidents, replace(last_incident, claimed_seconds=None))


def open_incident(incidents: Incidents) -> Incident | None:
    """Returns the newest incident if no new step was made since it; else None."""
    return incidents[-1] if incidents and incidents[-1].first_step_seconds is None else None


def record_phases(facts: MembershipNodeFacts, incidents: Incidents, stopped: bool, fenced: bool) -> Incidents:
    """Records when trainers had stopped and when the memory servers were fenced and read.

    A broken connection becomes a lost node once the platform reports the node lost.
    """
    incident = open_incident(incidents)
    if incident is None:
        return incidents
    if stopped and incident.stopped_seconds is None:
        incident = replace(incident, stopped_seconds=facts.now)
    if fenced and incident.fenced_seconds is None:
        incident = replace(incident, fenced_seconds=facts.now)
    detail = _join_exit_details(facts, incident.generation)
    if len(detail) > len(incident.detail):
        incident = replace(incident, detail=detail)  # each worker adds its detail once it has stopped its trainers
    # The platform may report the node's loss only after the connection broke.
    if incident.kind in ("agent-lost", "worker-silent") and is_node_lost(facts, incident.node):
        incident = replace(incident, kind="node-lost", reason=f"node {incident.node} is lost: {incident.reason}")
    return (*incidents[:-1], incident)


def record_replacement(facts: MembershipNodeFacts, incidents: Incidents) -> Incidents:
    """Records when as many workers as before the loss were warm again.

    The time shows how fast capacity returns, which decides whether the next loss waits for a replacement. The time at which
    the membership grows would not show it: it may grow late, or not at all.
    """
    unreplaced = [
        i
        for i in incidents
        if i.kind in WORKER_LOSS_KINDS and i.claimed_seconds is not None and i.replaced_seconds is None
    ]
    if not unreplaced or facts.status.membership is None or facts.spec.suspend:
        return incidents
    is_claimed = facts.membership.state == "Claimed"
    warm_workers = sum(
        s.warm and is_usable(facts, s)
        for s in newest_responsive_sessions(facts)
        if not is_claimed or s.stopped >= facts.membership.generation
    )
    warm_ranks = warm_workers * facts.spec.nproc_per_node
    return tuple(
        replace(i, replaced_seconds=facts.now) if i in unreplaced and warm_ranks >= i.world_size_before else i
        for i in incidents
    )


def _join_exit_details(facts: MembershipFacts, generation: int) -> str:
    """Joins the details that workers of one generation reported with their exits, in the order of the members."""
    exit_reports = [
        s.exit
        for _, s in member_sessions(facts)
        if s is not None and s.exit is not None and s.exit.generation == generation
    ]
    return "\n".join(e.detail for e in exit_reports if e.detail)[:MAX_DETAIL_CHARACTERS]


def record_commit(
    facts: MembershipFacts, incidents: Incidents, parent: Checkpoint | None, world_size: int
) -> Incidents:
    """Records the commit that ends the incident's claim: the restored step, the steps lost and the new world size."""
    incident = open_incident(incidents)
    if incident is None:
        return incidents
    parent_step = parent.step if parent else 0
    last_step = max(incident.last_step, step_of(facts, incident.generation))
    incident = replace(
        incident,
        committed_seconds=facts.now,
        last_step=last_step,
        restored_step=parent_step,
        steps_lost=max(0, last_step - parent_step),
        world_size_after=world_size,
    )
    return (*incidents[:-1], incident)


def close_incident(facts: MembershipFacts) -> Incidents:
    """Closes the incident at the generation's first new step, with the tiers that its state was restored from."""
    incident = open_incident(facts.status.incidents)
    generation = facts.membership.generation
    if incident is None or incident.committed_seconds is None or not has_stepped(facts, generation):
        return facts.status.incidents
    first_step_times = [
        s.step_at_seconds for s in sessions_in_generation(facts, generation) if s.step_at_seconds is not None
    ]
    sources = join_sources(
        s.progress.restored_from for s in sessions_in_generation(facts, generation) if s.progress.restored_from
    )
    incident = replace(
        incident,
        first_step_seconds=min(first_step_times, default=facts.now),
        restored_from=sources,
    )
    return (*facts.status.incidents[:-1], incident)
