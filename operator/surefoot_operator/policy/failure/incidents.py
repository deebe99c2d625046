"""Records each failure from its first sign to the first new step.

Pure; at most ten are kept, newest last.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.protocol.checkpoints.save_state import join_sources
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.api.status import Incident
from surefoot_operator.policy.core.availability import is_usable, node_lost
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    WorldNodeFacts,
    has_stepped,
    member_sessions,
    sessions_in_generation,
    step_of,
)
from surefoot_operator.policy.failure.failure_detection import Failure
from surefoot_operator.policy.failure.spare_workers import newest_attempts

MAX_KEPT = 10

WORKER_LOSS_KINDS = ("node-lost", "agent-lost", "worker-silent")
"""Incidents after which somebody else has to come. A trainer that failed is started again where it was."""

MAX_DETAIL_CHARACTERS = 8000
"""Characters of what workers had to say, of the newest incident."""

MAX_OLD_DETAIL_CHARACTERS = 500

Incidents = tuple[Incident, ...]


def append_incident(facts: WorldFacts, loss: Failure, last_step: int) -> Incidents:
    """Adds the failure that ends the present epoch."""
    incident = Incident(
        kind=loss.kind,
        reason=loss.reason,
        worker=loss.worker,
        node=loss.node,
        generation=facts.membership.generation,
        detected_seconds=loss.first_sign_seconds,
        claimed_seconds=facts.now,
        last_step=last_step,
        world_size_before=facts.membership.world_size,
        rank=loss.rank,
        unexplained=loss.unexplained,
        detail=_detail(facts, facts.membership.generation),
    )
    before = (replace(i, detail=i.detail[:MAX_OLD_DETAIL_CHARACTERS]) for i in facts.status.incidents)
    return (*before, incident)[-MAX_KEPT:]


def end_with_incident(facts: WorldFacts, loss: Failure, last_step: int) -> Incidents:
    """Adds the failure that ends the job; no claim follows it."""
    before, last = (found := append_incident(facts, loss, last_step))[:-1], found[-1]
    return (*before, replace(last, claimed_seconds=None))


def open_incident(incidents: Incidents) -> Incident | None:
    """The newest incident, until its first new step."""
    return incidents[-1] if incidents and incidents[-1].first_step_seconds is None else None


def record_phases(facts: WorldNodeFacts, known: Incidents, stopped: bool, sealed: bool) -> Incidents:
    """Records when trainers had stopped and when everything was read.

    A lost line becomes a lost node once the fabric reports it.
    """
    incident = open_incident(known)
    if incident is None:
        return known
    if stopped and incident.stopped_seconds is None:
        incident = replace(incident, stopped_seconds=facts.now)
    if sealed and incident.fenced_seconds is None:
        incident = replace(incident, fenced_seconds=facts.now)
    detail = _detail(facts, incident.generation)
    if len(detail) > len(incident.detail):
        incident = replace(incident, detail=detail)  # each worker says its part when it has stopped its trainers
    if incident.kind in ("agent-lost", "worker-silent") and node_lost(facts, incident.node):
        incident = replace(incident, kind="node-lost", reason=f"node {incident.node} is gone: {incident.reason}")
    return (*known[:-1], incident)


def record_replacement(facts: WorldNodeFacts, known: Incidents) -> Incidents:
    """Records when as many workers as before a loss were warm again.

    How long capacity takes to come decides whether the next loss waits for it; a world that grows late, or not at all, would
    not tell.
    """
    waiting = [
        i for i in known if i.kind in WORKER_LOSS_KINDS and i.claimed_seconds is not None and i.replaced_seconds is None
    ]
    if not waiting or facts.status.membership is None or facts.spec.suspend:
        return known
    claimed = facts.membership.state == "Claimed"
    warm = sum(
        s.warm and is_usable(facts, s)
        for s in newest_attempts(facts)
        if not claimed or s.stopped >= facts.membership.generation
    )
    ranks = warm * facts.spec.nproc_per_node
    return tuple(
        replace(i, replaced_seconds=facts.now) if i in waiting and ranks >= i.world_size_before else i for i in known
    )


def _detail(facts: WorldFacts, epoch: int) -> str:
    """What the workers of this epoch said beside their causes, in their order."""
    told = [
        s.exit for _, s in member_sessions(facts) if s is not None and s.exit is not None and s.exit.generation == epoch
    ]
    return "\n".join(e.detail for e in told if e.detail)[:MAX_DETAIL_CHARACTERS]


def record_commit(facts: WorldFacts, incidents: Incidents, parent: Checkpoint | None, size: int) -> Incidents:
    """Records the commit that ends the incident's claim."""
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
        world_size_after=size,
    )
    return (*incidents[:-1], incident)


def close_incident(facts: WorldFacts) -> Incidents:
    """Closes the incident at the epoch's first new step.

    Records where its state was restored from.
    """
    incident = open_incident(facts.status.incidents)
    epoch = facts.membership.generation
    if incident is None or incident.committed_seconds is None or not has_stepped(facts, epoch):
        return facts.status.incidents
    first = [s.step_at_seconds for s in sessions_in_generation(facts, epoch) if s.step_at_seconds is not None]
    sources = join_sources(
        s.progress.restored_from for s in sessions_in_generation(facts, epoch) if s.progress.restored_from
    )
    incident = replace(
        incident,
        first_step_seconds=min(first, default=facts.now),
        restored_from=sources,
    )
    return (*facts.status.incidents[:-1], incident)
