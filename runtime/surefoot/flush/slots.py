"""Defines the states, events and commands of staging slots.

Pure values, which `state_machine` decides on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from surefoot.protocol.identities import Checkpoint, HolderId, RankSave

Phase = Literal["writing", "committing", "resting", "stopping", "done", "refused", "lost"]
RUNNING: frozenset[Phase] = frozenset({"writing", "committing", "stopping"})
"""Phases in which a thread may be reading the slot's memory."""


@dataclass(frozen=True, slots=True)
class SealedSave:
    """Describes what lies in a sealed slot.

    A stream of `stream_bytes`, and behind it the JSON of the plain values.
    """

    save: RankSave
    world: int
    incarnation: str
    layout: str
    stream_bytes: int
    values_bytes: int


@dataclass(frozen=True, slots=True)
class Leg:
    """The way of one save to one target."""

    target: HolderId
    phase: Phase = "writing"
    failures: int = 0
    retry_at: float = 0.0
    given_up: bool = False
    """It used its tries up. It rests for another only while the save would else be nowhere."""


@dataclass(frozen=True, slots=True)
class Free:
    """Names a slot that the trainer may write to, or writes to.

    Nothing of it is known before it is sealed.
    """


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """Staged, and no target is known to write it to."""

    sealed: SealedSave
    since: float


@dataclass(frozen=True, slots=True)
class Draining:
    """A sealed save on its way, with one leg per target."""

    sealed: SealedSave
    since: float
    legs: tuple[Leg, ...]
    asked: bool = False
    """Some target was asked to commit it: it may be there, whatever became of the answer."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Decided (`ok` unless it was refused or given up), and waiting for the last reader to leave the memory."""

    sealed: SealedSave
    ok: bool
    legs: tuple[Leg, ...]
    asked: bool = False


Slot = Free | SealedSlot | Draining | Committed


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """When to try again and when to give up."""

    attempts: int = 5
    """Tries of one leg. A target that used them all up gets one try a save until it takes one again."""
    retry_seconds: float = 0.1
    """Wait before the second try; doubles each time, less up to half by the event's `drawn`."""
    longest_retry_seconds: float = 2.0
    """Longest wait before another try, of a save that is kept though its targets were given up."""
    homeless_seconds: float = 30.0
    """How long a save waits while no target is named at all, or none of them takes it and no newer save is there."""


@dataclass(frozen=True, slots=True)
class DrainState:
    """Holds the state of one arena.

    `targets`: where saves go, the local one first. `holders`: all whose copies count (⊇ targets).
    """

    slots: tuple[Slot, ...]
    incarnation: str
    targets: tuple[HolderId, ...] = ()
    holders: frozenset[HolderId] = frozenset()
    replicas: int = 1
    away: frozenset[HolderId] = frozenset()
    limits: RetryLimits = field(default_factory=RetryLimits)

    @property
    def replicas_effective(self) -> int:
        """Counts the acknowledgements that free a slot.

        As many as there are targets, at most R, never none.
        """
        return max(1, min(self.replicas, len(self.targets)))

    def pending(self) -> tuple[Checkpoint, ...]:
        """Checkpoints staged here and not yet decided, oldest first."""
        found = {s.sealed.save.checkpoint for s in self.slots if isinstance(s, SealedSlot | Draining)}
        return tuple(sorted(found))

    def busy(self) -> bool:
        return any(not isinstance(slot, Free) for slot in self.slots)

    def is_running(self, target: HolderId) -> bool:
        """Whether an order to `target` has not been answered yet."""
        legs = [leg for slot in self.slots if isinstance(slot, Draining | Committed) for leg in slot.legs]
        return any(leg.target == target and leg.phase in RUNNING for leg in legs)

    def next_tick(self) -> float | None:
        """The earliest time at which a Tick would do something."""
        times = []
        for slot in self.slots:
            legs = slot.legs if isinstance(slot, Draining) else ()
            times += [leg.retry_at for leg in legs if leg.phase == "resting"]
            if isinstance(slot, SealedSlot | Draining) and not self.targets:
                times.append(slot.since + self.limits.homeless_seconds)
        return min(times, default=None)


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotStaged:
    slot: int
    sealed: SealedSave
    now: float


@dataclass(frozen=True, slots=True)
class SaveWritten:
    """Tells that every part of a save is on `target`.

    Only the index entry is missing. Answers WriteTo.
    """

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """`target` has the index entry. Answers CommitOn."""

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class LegRefused:
    """`target` is fenced: a newer epoch rules. Answers WriteTo or CommitOn."""

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """Tells that a target did not take a save.

    It is away, full, or (missing) restarted meanwhile. Answers WriteTo or CommitOn.
    """

    slot: int
    target: HolderId
    cause: Literal["unavailable", "full", "missing"]
    now: float
    drawn: float = 0.0
    """Jitter in [0, 1)."""
    detail: str = ""
    """The error, for people."""


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The leg left the memory without finishing. Answers Stop (as does any other answer of that leg)."""

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class Retargeted:
    """An epoch was committed, or holders came or went."""

    targets: tuple[HolderId, ...]
    holders: frozenset[HolderId]
    replicas: int
    now: float


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """Trainers of `epoch` are about to start.

    Holders refuse whatever an older one saved.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class DrainClosed:
    """The worker must go: what is not yet there is given up."""


Answer = SaveWritten | Acknowledged | LegRefused | TargetFailed | LegEnded
Event = Answer | SlotStaged | Retargeted | EpochBegun | Tick | DrainClosed

# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Orders all of a slot's save written, again from its beginning."""

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class CommitOn:
    """Orders a slot's save committed on `target`.

    The writer's epoch is that of the save.
    """

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class StopLeg:
    """Leave the slot's memory; answer when out of it."""

    slot: int
    target: HolderId


@dataclass(frozen=True, slots=True)
class FreeSlot:
    slot: int
    save: RankSave
    ok: bool
    copies: int
    lost: bool = False
    """No target was ever asked to commit it: it is nowhere, and will be nowhere."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The save is on `copies` holders, one more than before."""

    save: RankSave
    copies: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    save: RankSave
    target: HolderId
    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Complain:
    """Something was staged that may not be."""

    text: str


Command = WriteTo | CommitOn | StopLeg | FreeSlot | CopyReport | GaveUp | Complain
