"""A pretended worker and its agent, as `fake_world` moves them."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot_operator.job_snapshot import ObservedSession, ObservedWorker


@dataclass
class Agent:
    incarnation: str
    born: float
    seen: ObservedSession
    started: set[int] = field(default_factory=set)


@dataclass
class Worker:
    seen: ObservedWorker
    agent: Agent | None = None
    parts: float | None = None
    """Until when it trains on, deleted as it is, for its world to be left in order."""
