"""Judges the numbers that a world's ranks tell of their steps.

Pure; read by `rollback` and `status_conditions`. Each rank judges every step against those before it (`protocol.progress`); here it is
weighed over ranks and steps. A single rank's batch may be far from the others', and one such step harms nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.protocol.checkpoints.retention import LossHistory
from surefoot.protocol.text import join_names
from surefoot_operator.api.spec import NumericsAction
from surefoot_operator.job_snapshot import ObservedSession
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    cached_per_snapshot,
    member_sessions,
)


@dataclass(frozen=True, slots=True)
class LossAnomaly:
    """An odd loss, and what the policy does about it.

    `since_step`: the first step of it.
    """

    kind: Literal["not-finite", "spike"]
    since_step: int
    reason: str
    action: NumericsAction


@cached_per_snapshot
def unsound_loss(facts: WorldFacts) -> LossAnomaly | None:
    """What is odd about the newest steps; None: nothing."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    told = _sessions_of_generation(facts)
    # before its first step an epoch is as odd as what it restored: a job that ends there would keep it
    begun = facts.membership.start_step
    odd = [s for s in told if s.progress.anomaly_step and s.progress.anomaly_step >= max(s.progress.step, begun)]
    broken = sorted((s for s in odd if s.progress.anomaly_kind == "not-finite"), key=_first)
    if broken:
        return LossAnomaly("not-finite", _since(broken), _sentence(broken), policy.on_non_finite)
    # a step that is far out on every rank is the model's; on one of them it is that rank's batch
    spiking = [s for s in odd if s.progress.anomaly_step - s.progress.anomaly_since_step + 1 >= policy.spike_steps]
    if not spiking or 2 * len(spiking) < len(told):
        return None
    spiking.sort(key=_first)
    return LossAnomaly("spike", _since(spiking), _sentence(spiking), policy.on_spike)


@cached_per_snapshot
def sound_steps(facts: WorldFacts) -> LossHistory | None:
    """Summarises the epoch's steps for `proven`; None: nobody asks."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    told = _sessions_of_generation(facts)
    step = min((s.progress.step for s in told), default=0) if len(told) == len(facts.membership.members) else 0
    return LossHistory(step, max((s.progress.anomaly_step for s in told), default=0), policy.good_after_steps)


def _sessions_of_generation(facts: WorldFacts) -> list[ObservedSession]:
    epoch = facts.membership.generation
    return [s for _, s in member_sessions(facts) if s is not None and s.generation == epoch]


def _first(session: ObservedSession) -> tuple[int, int]:
    return session.progress.anomaly_since_step, session.index


def _since(odd: list[ObservedSession]) -> int:
    return min(s.progress.anomaly_since_step for s in odd)


def _sentence(odd: list[ObservedSession]) -> str:
    first, workers = odd[0], join_names(sorted(s.index for s in odd))
    return f"{first.progress.anomaly_text} (worker{'s' if len(odd) > 1 else ''} {workers}, since step {_since(odd)})"
