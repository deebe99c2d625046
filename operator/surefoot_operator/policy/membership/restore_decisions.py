"""Defines the outcomes of choosing a restore point, and requests listings.

Pure; see `restore_point`.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocol.identities import Checkpoint, HolderEndpoint, OlderJob
from surefoot_operator.observed_tiers import PersistentSeen
from surefoot_operator.policy.core.actions import Action, ListPersistentTier
from surefoot_operator.policy.core.facts import Facts, is_responsive
from surefoot_operator.policy.core.indexes import worker_id

LISTING_SECONDS = 60.0
"""How long one agent may be at a listing before another one is asked too; the first may still answer."""

LIST_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """No decision yet; look again at `until_seconds` at the latest."""

    reason: str
    actions: tuple[Action, ...] = ()
    until_seconds: float | None = None
    stopped: bool = True
    lost: str = ""
    """What people are told where everything is lost; empty: it is not."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The parent, and the holders that were given up."""

    parent: Checkpoint | None
    given_up: tuple[HolderEndpoint, ...] = ()
    unlisted: bool = False
    """The persistent tier did not answer, and the parent is good enough without it."""
    older_job: OlderJob | None = None
    """Whose the parent is, if it is not this job's."""


@dataclass(frozen=True, slots=True)
class TotalLoss:
    """Every recorded checkpoint is lost, and the job fails."""

    reason: str


@dataclass(frozen=True, slots=True)
class NothingToTakeUp:
    """The older job lacks the checkpoint to start from."""

    reason: str


@dataclass(frozen=True, slots=True)
class FurtherOn:
    """Moves a rollback on, as what it goes back to is lost."""

    to_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class FloorGone:
    """The newest stored checkpoint is gone from its tier.

    An older one can be read.
    """

    floor: Checkpoint
    reason: str


Choice = Waiting | Chosen | FurtherOn | FloorGone | TotalLoss | NothingToTakeUp


def listing(facts: Facts, seen: PersistentSeen, older: OlderJob | None = None) -> Waiting:
    """Asks an agent for a listing, and another where none comes.

    A machine that lost its power never breaks its line: who is not heard any more is not waited for.
    """
    what = "the persistent tier" if older is None else str(older)
    asked, failed = seen.asked_seconds, seen.error is not None
    again = asked + (LIST_AGAIN_SECONDS if failed else LISTING_SECONDS) if asked is not None else facts.now
    heard = {worker_id(s) for s in facts.sessions.values() if is_responsive(facts, s)}
    unheard = bool(seen.asked_of) and not heard & seen.asked_of
    if facts.now < again and not (unheard and heard):
        trouble = f" (last answer: {seen.error})" if failed else ""
        return Waiting(f"waiting for the listing of {what}{trouble}", until_seconds=again)
    asked_of = min(heard - seen.asked_of or heard, default=None)
    if asked_of is None:
        return Waiting(f"no agent is connected that could list {what}")
    action = ListPersistentTier(facts.world.epoch, asked_of.index, older)
    return Waiting(f"listing {what} through worker {asked_of.index}", (action,), max(again, facts.now) + 1.0)
