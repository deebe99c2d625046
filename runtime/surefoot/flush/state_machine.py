"""Decides how the saves staged in one arena are drained.

Pure. `engine.Drain` carries the commands out.
`step(state, event) -> (state, commands)`; time and chance are fields of events, so the simulator and the property
tests run exactly this. The rules are the protocol's:

* a slot is drained only once sealed, and only if this incarnation sealed it;
* the writer's epoch is the slot's own, whatever epoch was heard of since, so a drain goes on when trainers die or a
  newer epoch is claimed, until a holder refuses it;
* the slot is free after R_eff acknowledgements, after a refusal, or when no target is left that could take it; then
  it says how many copies there truly are;
* a save that every target gave up is kept and tried on while it is the arena's newest and without a copy: its slot
  is not needed, and a holder that restarts, or another in its place, may be a moment away (`_kept`);
* memory is never handed back while anything still reads it (`Committed` waits for stragglers to leave).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.protocol.identities import Checkpoint, HolderId, RankSave
from surefoot.protocol.timeouts import Backoff

# ---- slots -----------------------------------------------------------------------------------------------------------
# Defines the states, events and commands of staging slots. Pure values, on which the functions below decide.

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


# ---- state machine ---------------------------------------------------------------------------------------------------


def step(state: DrainState, event: Event) -> tuple[DrainState, tuple[Command, ...]]:
    """Computes the next state and what to do.

    Events that no longer fit (a late answer) change nothing.
    """
    commands: list[Command] = []
    now: float | None = None
    match event:
        case SlotStaged(now=now):
            state = _staged(state, event, commands)
        case SaveWritten() | Acknowledged() | LegRefused() | TargetFailed() | LegEnded():
            state = _answered(state, event, commands)
            now = event.now if isinstance(event, TargetFailed) else None
        case Retargeted(targets, holders, replicas, now):
            state = replace(state, targets=targets, holders=holders | set(targets), replicas=replicas)
            state = replace(state, away=state.away & state.holders)
        case Tick(now):
            state = _woken(state, now, commands)
        case EpochBegun(epoch):
            for index, slot in enumerate(state.slots):
                if not isinstance(slot, Free) and slot.sealed.save.epoch < epoch:
                    state = _put(state, index, _given_up(index, slot, commands))
        case DrainClosed():
            for index, slot in enumerate(state.slots):
                state = _put(state, index, _given_up(index, slot, commands))
    for index in range(len(state.slots)):
        state = _settled(state, index, now, commands)
    return state, tuple(commands)


def _staged(state: DrainState, event: SlotStaged, commands: list[Command]) -> DrainState:
    save = event.sealed.save
    if not isinstance(state.slots[event.slot], Free):
        commands.append(Complain(f"{save} was staged into slot {event.slot}, which is still draining: ignored"))
        return state
    if event.sealed.incarnation != state.incarnation:
        commands.append(Complain(f"{save} was staged by another incarnation ({event.sealed.incarnation}): not drained"))
        commands.append(FreeSlot(event.slot, save, False, 0, lost=True))
        return state
    return _put(state, event.slot, SealedSlot(event.sealed, event.now))


def _answered(state: DrainState, event: Answer, commands: list[Command]) -> DrainState:
    slot = state.slots[event.slot]
    if not isinstance(slot, Draining | Committed):
        return state
    leg = next((leg for leg in slot.legs if leg.target == event.target and leg.phase in RUNNING), None)
    if leg is None:
        return state
    if leg.phase == "stopping" and isinstance(event, SaveWritten | TargetFailed | LegEnded):
        # It left without a result: forgotten, so that the target may be tried anew if it is named again.
        return _put(state, event.slot, replace(slot, legs=tuple(kept for kept in slot.legs if kept is not leg)))
    match event:
        case SaveWritten() if leg.phase == "writing":
            leg = replace(leg, phase="committing")
            commands.append(CommitOn(event.slot, event.target))
        case SaveWritten() | LegEnded():
            leg = replace(leg, phase="lost")
        case Acknowledged():
            leg = replace(leg, phase="done")
            state = replace(state, away=state.away - {leg.target})
        case LegRefused():
            leg = replace(leg, phase="refused")
        case TargetFailed():
            state, leg = _failed(state, slot, leg, event, commands)
    slot = replace(slot, legs=_with(slot.legs, leg), asked=slot.asked or leg.phase == "committing")
    if leg.phase == "done":
        commands.append(CopyReport(slot.sealed.save, _copies(state, slot.legs)))
    return _put(state, event.slot, slot)


def _failed(
    state: DrainState, slot: Draining | Committed, leg: Leg, event: TargetFailed, commands: list[Command]
) -> tuple[DrainState, Leg]:
    """Another try later, or none: after all its tries, or after one if it was away before."""
    failures = leg.failures + 1
    wait = Backoff(state.limits.retry_seconds, state.limits.longest_retry_seconds).seconds(failures, event.drawn)
    leg = replace(leg, failures=failures, retry_at=event.now + wait)
    if failures < (1 if leg.target in state.away else state.limits.attempts):
        return state, replace(leg, phase="resting")
    if not leg.given_up:
        commands.append(GaveUp(slot.sealed.save, leg.target, event.cause, event.detail))
    return replace(state, away=state.away | {leg.target}), replace(leg, phase="lost", given_up=True)


def _woken(state: DrainState, now: float, commands: list[Command]) -> DrainState:
    for index, slot in enumerate(state.slots):
        if not isinstance(slot, Draining):
            continue
        legs = []
        for leg in slot.legs:
            if leg.phase == "resting" and leg.retry_at <= now:
                commands.append(WriteTo(index, leg.target))
                legs.append(replace(leg, phase="writing"))
            else:
                legs.append(leg)
        state = _put(state, index, replace(slot, legs=tuple(legs)))
    return state


def _settled(state: DrainState, index: int, now: float | None, commands: list[Command]) -> DrainState:
    """What follows for one slot from how things stand: legs that begin or end, a decision, freedom."""
    slot = state.slots[index]
    if isinstance(slot, SealedSlot) and state.targets:
        slot = Draining(slot.sealed, slot.since, ())
    elif isinstance(slot, SealedSlot) and _homeless(state, slot, now):
        slot = Committed(slot.sealed, False, ())
    if isinstance(slot, Draining):
        slot = _decided(state, index, slot, now, commands)
    if isinstance(slot, Committed) and not any(leg.phase in RUNNING for leg in slot.legs):
        copies = _copies(state, slot.legs)
        commands.append(FreeSlot(index, slot.sealed.save, slot.ok and copies > 0, copies, lost=not slot.asked))
        slot = Free()
    return _put(state, index, slot)


def _homeless(state: DrainState, slot: SealedSlot | Draining, now: float | None) -> bool:
    return now is not None and now >= slot.since + state.limits.homeless_seconds


def _decided(
    state: DrainState, index: int, slot: Draining, now: float | None, commands: list[Command]
) -> Draining | Committed:
    dropped = [leg for leg in slot.legs if leg.target not in state.targets]
    legs = _stopped(index, slot.legs, [leg.target for leg in dropped], commands)
    copies = _copies(state, legs)
    if any(leg.phase == "refused" for leg in legs):
        return Committed(slot.sealed, False, _stopped(index, legs, state.targets, commands), slot.asked)
    if copies >= state.replicas_effective:
        return Committed(slot.sealed, True, _stopped(index, legs, state.targets, commands), slot.asked)
    used = {leg.target for leg in legs}
    hoped = copies + sum(leg.phase in ("writing", "committing", "resting") for leg in legs)
    for target in [t for t in state.targets if t not in used][: state.replicas_effective - hoped]:
        legs = (*legs, Leg(target))
        commands.append(WriteTo(index, target))
    legs = _kept(state, replace(slot, legs=legs), copies, now)
    if any(leg.phase in RUNNING or leg.phase == "resting" for leg in legs):
        return replace(slot, legs=legs)
    if not state.targets and not copies and not _homeless(state, slot, now):
        return replace(slot, legs=legs)
    return Committed(slot.sealed, copies > 0, legs, slot.asked)


def _kept(state: DrainState, slot: Draining, copies: int, now: float | None) -> tuple[Leg, ...]:
    """The legs, those that gave up resting for another try while the save would else be nowhere, or lost.

    A job's last save has no newer one behind it: freed after a second of tries it was gone for good, beside holders
    that came back a moment later.
    """
    others = [other.sealed for other in state.slots if not isinstance(other, Free) and other.sealed != slot.sealed]
    newest = len(state.slots) > 1 and all(other.save.checkpoint < slot.sealed.save.checkpoint for other in others)
    hoped = copies or any((leg.phase in RUNNING or leg.phase == "resting") and not leg.given_up for leg in slot.legs)
    wanted = newest and not hoped and not _homeless(state, slot, now)
    return tuple(_kept_leg(leg, wanted and leg.target in state.targets) for leg in slot.legs)


def _kept_leg(leg: Leg, wanted: bool) -> Leg:
    if not leg.given_up or leg.phase not in ("resting", "lost"):
        return leg
    return replace(leg, phase="resting" if wanted else "lost")


def _given_up(index: int, slot: Slot, commands: list[Command]) -> Slot:
    match slot:
        case SealedSlot(sealed):
            return Committed(sealed, False, ())
        case Draining(sealed, _, legs, asked):
            return Committed(sealed, True, _stopped(index, legs, [leg.target for leg in legs], commands), asked)
        case _:
            return slot


def _stopped(index: int, legs: Iterable[Leg], targets: Iterable[HolderId], commands: list[Command]) -> tuple[Leg, ...]:
    """The legs, those to `targets` told to end: forgotten if they rest, else once they have left the memory."""
    kept = []
    for leg in legs:
        if leg.target in targets and leg.phase in ("writing", "committing"):
            commands.append(StopLeg(index, leg.target))
            kept.append(replace(leg, phase="stopping"))
        elif leg.target not in targets or leg.phase != "resting":
            kept.append(leg)
    return tuple(kept)


def _copies(state: DrainState, legs: Iterable[Leg]) -> int:
    """True copies: acknowledged by holders that still count."""
    return sum(leg.phase == "done" and leg.target in state.holders for leg in legs)


def _with(legs: Iterable[Leg], changed: Leg) -> tuple[Leg, ...]:
    return tuple(changed if leg.target == changed.target and leg.phase in RUNNING else leg for leg in legs)


def _put(state: DrainState, index: int, slot: Slot) -> DrainState:
    return replace(state, slots=(*state.slots[:index], slot, *state.slots[index + 1 :]))
