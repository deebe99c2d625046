"""Decides whether the training loss that a generation's ranks report is anomalous.

Pure; read by `rollback` and `status_conditions`. Each rank compares every step's loss with those before it (`protocol.progress`);
this module combines the results over ranks and steps. One rank's batch may differ much from the others', and a single such
step does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.text import join_names
from surefoot_operator.api.spec import NumericsAction
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    cached_per_snapshot,
    member_sessions,
)


@dataclass(frozen=True, slots=True)
class LossAnomaly:
    """A loss that is not finite or a spike, and the action that the policy sets for it."""

    kind: Literal["not-finite", "spike"]
    since_step: int
    """First step of the anomaly on any rank."""
    reason: str
    """Sentence for events and conditions: which loss, on which workers, since which step."""
    action: NumericsAction
    """The job's `onNonFinite` or `onSpike`."""


@cached_per_snapshot
def find_loss_anomaly(facts: MembershipFacts) -> LossAnomaly | None:
    """Returns the loss anomaly of the newest steps; None: there is none, or the job has no numerics policy."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    sessions = _sessions_of_generation(facts)
    # before its first step, a generation has the anomaly of the checkpoint it restored: a job that ends there would keep it
    start_step = facts.membership.start_step
    anomalous = [
        s for s in sessions if s.progress.anomaly_step and s.progress.anomaly_step >= max(s.progress.step, start_step)
    ]
    non_finite = sorted((s for s in anomalous if s.progress.anomaly_kind == "not-finite"), key=_anomaly_order)
    if non_finite:
        return LossAnomaly(
            "not-finite", _first_anomalous_step(non_finite), _describe_anomaly(non_finite), policy.on_non_finite
        )
    # a step that is far off on every rank is the model's; on one of them it is that rank's batch
    spiking = [
        s for s in anomalous if s.progress.anomaly_step - s.progress.anomaly_since_step + 1 >= policy.spike_steps
    ]
    if not spiking or 2 * len(spiking) < len(sessions):
        return None
    spiking.sort(key=_anomaly_order)
    return LossAnomaly("spike", _first_anomalous_step(spiking), _describe_anomaly(spiking), policy.on_spike)


@cached_per_snapshot
def summarize_loss_history(facts: MembershipFacts) -> LossHistory | None:
    """Summarises the generation's loss history; None without a numerics policy."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    sessions = _sessions_of_generation(facts)
    common_step = (
        min((s.progress.step for s in sessions), default=0) if len(sessions) == len(facts.membership.members) else 0
    )
    return LossHistory(
        common_step, max((s.progress.anomaly_step for s in sessions), default=0), policy.good_after_steps
    )


def _sessions_of_generation(facts: MembershipFacts) -> list[ObservedSession]:
    """Lists the members' sessions that report on the present generation."""
    generation = facts.membership.generation
    return [s for _, s in member_sessions(facts) if s is not None and s.generation == generation]


def _anomaly_order(session: ObservedSession) -> tuple[int, int]:
    return session.progress.anomaly_since_step, session.index


def _first_anomalous_step(sessions: list[ObservedSession]) -> int:
    return min(s.progress.anomaly_since_step for s in sessions)


def _describe_anomaly(sessions: list[ObservedSession]) -> str:
    """Describes the anomaly of the first of these sessions, and on which workers it was seen."""
    earliest, workers = sessions[0], join_names(sorted(s.index for s in sessions))
    return f"{earliest.progress.anomaly_text} (worker{'s' if len(sessions) > 1 else ''} {workers}, since step {_first_anomalous_step(sessions)})"
