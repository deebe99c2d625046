"""Judges the numbers that a world's ranks tell of their steps.

Pure; read by `rollback` and `status_conditions`. Each rank judges every step against those before it (`protocol.progress`); here it is
weighed over ranks and steps. A single rank's batch may be far from the others', and one such step harms nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.protocol.checkpoints.retention import SoundSteps
from surefoot.protocol.text import listed
from surefoot_operator.api.spec import NumericsAction
from surefoot_operator.job_snapshot import SessionSeen
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    derived_once,
    member_sessions,
)


@dataclass(frozen=True, slots=True)
class UnsoundLoss:
    """An odd loss, and what the policy does about it.

    `since_step`: the first step of it.
    """

    kind: Literal["not-finite", "spike"]
    since_step: int
    reason: str
    action: NumericsAction


@derived_once
def unsound_loss(facts: WorldFacts) -> UnsoundLoss | None:
    """What is odd about the newest steps; None: nothing."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    told = _told(facts)
    # before its first step an epoch is as odd as what it restored: a job that ends there would keep it
    begun = facts.world.begun_step
    odd = [s for s in told if s.progress.odd_step and s.progress.odd_step >= max(s.progress.step, begun)]
    broken = sorted((s for s in odd if s.progress.odd_kind == "not-finite"), key=_first)
    if broken:
        return UnsoundLoss("not-finite", _since(broken), _sentence(broken), policy.on_not_finite)
    # a step that is far out on every rank is the model's; on one of them it is that rank's batch
    spiking = [s for s in odd if s.progress.odd_step - s.progress.odd_since + 1 >= policy.spike_steps]
    if not spiking or 2 * len(spiking) < len(told):
        return None
    spiking.sort(key=_first)
    return UnsoundLoss("spike", _since(spiking), _sentence(spiking), policy.on_spike)


@derived_once
def sound_steps(facts: WorldFacts) -> SoundSteps | None:
    """Summarises the epoch's steps for `proven`; None: nobody asks."""
    policy = facts.spec.health_policy.numerics
    if policy is None:
        return None
    told = _told(facts)
    step = min((s.progress.step for s in told), default=0) if len(told) == len(facts.world.members) else 0
    return SoundSteps(step, max((s.progress.odd_step for s in told), default=0), policy.good_after_steps)


def _told(facts: WorldFacts) -> list[SessionSeen]:
    epoch = facts.world.epoch
    return [s for _, s in member_sessions(facts) if s is not None and s.epoch == epoch]


def _first(session: SessionSeen) -> tuple[int, int]:
    return session.progress.odd_since, session.index


def _since(odd: list[SessionSeen]) -> int:
    return min(s.progress.odd_since for s in odd)


def _sentence(odd: list[SessionSeen]) -> str:
    first, workers = odd[0], listed(sorted(s.index for s in odd))
    return f"{first.progress.odd_text} (worker{'s' if len(odd) > 1 else ''} {workers}, since step {_since(odd)})"
