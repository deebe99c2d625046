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

from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.timeouts import Backoff

# ---- slots -----------------------------------------------------------------------------------------------------------
# Defines the states, events and commands of staging slots. Pure values, on which the functions below decide.

Phase = Literal["writing", "committing", "resting", "stopping", "done", "refused", "lost"]
RUNNING_PHASES: frozenset[Phase] = frozenset({"writing", "committing", "stopping"})
"""Phases in which a thread may be reading the slot's memory."""


@dataclass(frozen=True, slots=True)
class StagedSave:
    """Describes what lies in a sealed slot.

    A stream of `stream_bytes`, and behind it the JSON of the plain values.
    """

    save: RankSave
    world_size: int
    incarnation: str
    layout: str
    stream_bytes: int
    values_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The way of one save to one target."""

    target: MemoryServerInstance
    phase: Phase = "writing"
    failures: int = 0
    retry_at: float = 0.0
    abandoned: bool = False
    """It used its tries up. It rests for another only while the save would else be nowhere."""


@dataclass(frozen=True, slots=True)
class FreeSlotState:
    """Names a slot that the trainer may write to, or writes to.

    Nothing of it is known before it is sealed.
    """


@dataclass(frozen=True, slots=True)
class StagedSlot:
    """Staged, and no target is known to write it to."""

    staged: StagedSave
    since_seconds: float


@dataclass(frozen=True, slots=True)
class Flushing:
    """A sealed save on its way, with one leg per target."""

    staged: StagedSave
    since_seconds: float
    transfers: tuple[Transfer, ...]
    commit_sent: bool = False
    """Some target was asked to commit it: it may be there, whatever became of the answer."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Decided (`ok` unless it was refused or given up), and waiting for the last reader to leave the memory."""

    staged: StagedSave
    ok: bool
    transfers: tuple[Transfer, ...]
    commit_sent: bool = False


Slot = FreeSlotState | StagedSlot | Flushing | Committed


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """When to try again and when to give up."""

    attempts: int = 5
    """Tries of one leg. A target that used them all up gets one try a save until it takes one again."""
    retry_seconds: float = 0.1
    """Wait before the second try; doubles each time, less up to half by the event's `drawn`."""
    max_retry_seconds: float = 2.0
    """Longest wait before another try, of a save that is kept though its targets were given up."""
    no_target_timeout_seconds: float = 30.0
    """How long a save waits while no target is named at all, or none of them takes it and no newer save is there."""


@dataclass(frozen=True, slots=True)
class FlushState:
    """Holds the state of one arena.

    `targets`: where saves go, the local one first. `holders`: all whose copies count (⊇ targets).
    """

    slots: tuple[Slot, ...]
    incarnation: str
    targets: tuple[MemoryServerInstance, ...] = ()
    servers: frozenset[MemoryServerInstance] = frozenset()
    replicas: int = 1
    unreachable: frozenset[MemoryServerInstance] = frozenset()
    limits: RetryLimits = field(default_factory=RetryLimits)

    @property
    def effective_replicas(self) -> int:
        """Counts the acknowledgements that free a slot.

        As many as there are targets, at most R, never none.
        """
        return max(1, min(self.replicas, len(self.targets)))

    def pending(self) -> tuple[Checkpoint, ...]:
        """Checkpoints staged here and not yet decided, oldest first."""
        found = {s.staged.save.checkpoint for s in self.slots if isinstance(s, StagedSlot | Flushing)}
        return tuple(sorted(found))

    def busy(self) -> bool:
        return any(not isinstance(slot, FreeSlotState) for slot in self.slots)

    def is_running(self, target: MemoryServerInstance) -> bool:
        """Whether an order to `target` has not been answered yet."""
        legs = [leg for slot in self.slots if isinstance(slot, Flushing | Committed) for leg in slot.transfers]
        return any(leg.target == target and leg.phase in RUNNING_PHASES for leg in legs)

    def next_tick(self) -> float | None:
        """The earliest time at which a Tick would do something."""
        times = []
        for slot in self.slots:
            legs = slot.transfers if isinstance(slot, Flushing) else ()
            times += [leg.retry_at for leg in legs if leg.phase == "resting"]
            if isinstance(slot, StagedSlot | Flushing) and not self.targets:
                times.append(slot.since_seconds + self.limits.no_target_timeout_seconds)
        return min(times, default=None)


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotStaged:
    slot: int
    staged: StagedSave
    now: float


@dataclass(frozen=True, slots=True)
class SaveWritten:
    """Tells that every part of a save is on `target`.

    Only the index entry is missing. Answers WriteTo.
    """

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """`target` has the index entry. Answers CommitOn."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class TransferFenced:
    """`target` is fenced: a newer epoch rules. Answers WriteTo or CommitOn."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """Tells that a target did not take a save.

    It is away, full, or (missing) restarted meanwhile. Answers WriteTo or CommitOn.
    """

    slot: int
    target: MemoryServerInstance
    cause: Literal["unavailable", "full", "missing"]
    now: float
    jitter: float = 0.0
    """Jitter in [0, 1)."""
    detail: str = ""
    """The error, for people."""


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """The leg left the memory without finishing. Answers Stop (as does any other answer of that leg)."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class Retargeted:
    """An epoch was committed, or holders came or went."""

    targets: tuple[MemoryServerInstance, ...]
    servers: frozenset[MemoryServerInstance]
    replicas: int
    now: float


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """Trainers of `epoch` are about to start.

    Holders refuse whatever an older one saved.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class FlushClosed:
    """The worker must go: what is not yet there is given up."""


Answer = SaveWritten | Acknowledged | TransferFenced | TargetFailed | TransferStopped
Event = Answer | SlotStaged | Retargeted | GenerationStarted | Tick | FlushClosed

# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Orders all of a slot's save written, again from its beginning."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class CommitOn:
    """Orders a slot's save committed on `target`.

    The writer's epoch is that of the save.
    """

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class StopTransfer:
    """Leave the slot's memory; answer when out of it."""

    slot: int
    target: MemoryServerInstance


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
class SaveAbandoned:
    save: RankSave
    target: MemoryServerInstance
    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RejectStaged:
    """Something was staged that may not be."""

    text: str


Command = WriteTo | CommitOn | StopTransfer | FreeSlot | CopyReport | SaveAbandoned | RejectStaged


# ---- state machine ---------------------------------------------------------------------------------------------------


def step(state: FlushState, event: Event) -> tuple[FlushState, tuple[Command, ...]]:
    """Computes the next state and what to do.

    Events that no longer fit (a late answer) change nothing.
    """
    commands: list[Command] = []
    now: float | None = None
    match event:
        case SlotStaged(now=now):
            state = _staged(state, event, commands)
        case SaveWritten() | Acknowledged() | TransferFenced() | TargetFailed() | TransferStopped():
            state = _answered(state, event, commands)
            now = event.now if isinstance(event, TargetFailed) else None
        case Retargeted(targets, holders, replicas, now):
            state = replace(state, targets=targets, servers=holders | set(targets), replicas=replicas)
            state = replace(state, unreachable=state.unreachable & state.servers)
        case Tick(now):
            state = _retry_due(state, now, commands)
        case GenerationStarted(epoch):
            for index, slot in enumerate(state.slots):
                if not isinstance(slot, FreeSlotState) and slot.staged.save.generation < epoch:
                    state = _put(state, index, _is_abandoned(index, slot, commands))
        case FlushClosed():
            for index, slot in enumerate(state.slots):
                state = _put(state, index, _is_abandoned(index, slot, commands))
    for index in range(len(state.slots)):
        state = _advance_slot(state, index, now, commands)
    return state, tuple(commands)


def _staged(state: FlushState, event: SlotStaged, commands: list[Command]) -> FlushState:
    save = event.staged.save
    if not isinstance(state.slots[event.slot], FreeSlotState):
        commands.append(RejectStaged(f"{save} was staged into slot {event.slot}, which is still draining: ignored"))
        return state
    if event.staged.incarnation != state.incarnation:
        commands.append(
            RejectStaged(f"{save} was staged by another incarnation ({event.staged.incarnation}): not drained")
        )
        commands.append(FreeSlot(event.slot, save, False, 0, lost=True))
        return state
    return _put(state, event.slot, StagedSlot(event.staged, event.now))


def _answered(state: FlushState, event: Answer, commands: list[Command]) -> FlushState:
    slot = state.slots[event.slot]
    if not isinstance(slot, Flushing | Committed):
        return state
    leg = next((leg for leg in slot.transfers if leg.target == event.target and leg.phase in RUNNING_PHASES), None)
    if leg is None:
        return state
    if leg.phase == "stopping" and isinstance(event, SaveWritten | TargetFailed | TransferStopped):
        # It left without a result: forgotten, so that the target may be tried anew if it is named again.
        return _put(
            state, event.slot, replace(slot, transfers=tuple(kept for kept in slot.transfers if kept is not leg))
        )
    match event:
        case SaveWritten() if leg.phase == "writing":
            leg = replace(leg, phase="committing")
            commands.append(CommitOn(event.slot, event.target))
        case SaveWritten() | TransferStopped():
            leg = replace(leg, phase="lost")
        case Acknowledged():
            leg = replace(leg, phase="done")
            state = replace(state, unreachable=state.unreachable - {leg.target})
        case TransferFenced():
            leg = replace(leg, phase="refused")
        case TargetFailed():
            state, leg = _failed(state, slot, leg, event, commands)
    slot = replace(
        slot, transfers=_with(slot.transfers, leg), commit_sent=slot.commit_sent or leg.phase == "committing"
    )
    if leg.phase == "done":
        commands.append(CopyReport(slot.staged.save, _copies(state, slot.transfers)))
    return _put(state, event.slot, slot)


def _failed(
    state: FlushState, slot: Flushing | Committed, leg: Transfer, event: TargetFailed, commands: list[Command]
) -> tuple[FlushState, Transfer]:
    """Another try later, or none: after all its tries, or after one if it was away before."""
    failures = leg.failures + 1
    wait = Backoff(state.limits.retry_seconds, state.limits.max_retry_seconds).seconds(failures, event.jitter)
    leg = replace(leg, failures=failures, retry_at=event.now + wait)
    if failures < (1 if leg.target in state.unreachable else state.limits.attempts):
        return state, replace(leg, phase="resting")
    if not leg.abandoned:
        commands.append(SaveAbandoned(slot.staged.save, leg.target, event.cause, event.detail))
    return replace(state, unreachable=state.unreachable | {leg.target}), replace(leg, phase="lost", abandoned=True)


def _retry_due(state: FlushState, now: float, commands: list[Command]) -> FlushState:
    for index, slot in enumerate(state.slots):
        if not isinstance(slot, Flushing):
            continue
        legs = []
        for leg in slot.transfers:
            if leg.phase == "resting" and leg.retry_at <= now:
                commands.append(WriteTo(index, leg.target))
                legs.append(replace(leg, phase="writing"))
            else:
                legs.append(leg)
        state = _put(state, index, replace(slot, transfers=tuple(legs)))
    return state


def _advance_slot(state: FlushState, index: int, now: float | None, commands: list[Command]) -> FlushState:
    """What follows for one slot from how things stand: legs that begin or end, a decision, freedom."""
    slot = state.slots[index]
    if isinstance(slot, StagedSlot) and state.targets:
        slot = Flushing(slot.staged, slot.since_seconds, ())
    elif isinstance(slot, StagedSlot) and _has_no_target(state, slot, now):
        slot = Committed(slot.staged, False, ())
    if isinstance(slot, Flushing):
        slot = _decided(state, index, slot, now, commands)
    if isinstance(slot, Committed) and not any(leg.phase in RUNNING_PHASES for leg in slot.transfers):
        copies = _copies(state, slot.transfers)
        commands.append(FreeSlot(index, slot.staged.save, slot.ok and copies > 0, copies, lost=not slot.commit_sent))
        slot = FreeSlotState()
    return _put(state, index, slot)


def _has_no_target(state: FlushState, slot: StagedSlot | Flushing, now: float | None) -> bool:
    return now is not None and now >= slot.since_seconds + state.limits.no_target_timeout_seconds


def _decided(
    state: FlushState, index: int, slot: Flushing, now: float | None, commands: list[Command]
) -> Flushing | Committed:
    dropped = [leg for leg in slot.transfers if leg.target not in state.targets]
    legs = _stopped(index, slot.transfers, [leg.target for leg in dropped], commands)
    copies = _copies(state, legs)
    if any(leg.phase == "refused" for leg in legs):
        return Committed(slot.staged, False, _stopped(index, legs, state.targets, commands), slot.commit_sent)
    if copies >= state.effective_replicas:
        return Committed(slot.staged, True, _stopped(index, legs, state.targets, commands), slot.commit_sent)
    used = {leg.target for leg in legs}
    hoped = copies + sum(leg.phase in ("writing", "committing", "resting") for leg in legs)
    for target in [t for t in state.targets if t not in used][: state.effective_replicas - hoped]:
        legs = (*legs, Transfer(target))
        commands.append(WriteTo(index, target))
    legs = _with_retries(state, replace(slot, transfers=legs), copies, now)
    if any(leg.phase in RUNNING_PHASES or leg.phase == "resting" for leg in legs):
        return replace(slot, transfers=legs)
    if not state.targets and not copies and not _has_no_target(state, slot, now):
        return replace(slot, transfers=legs)
    return Committed(slot.staged, copies > 0, legs, slot.commit_sent)


def _with_retries(state: FlushState, slot: Flushing, copies: int, now: float | None) -> tuple[Transfer, ...]:
    """The legs, those that gave up resting for another try while the save would else be nowhere, or lost.

    A job's last save has no newer one behind it: freed after a second of tries it was gone for good, beside holders
    that came back a moment later.
    """
    others = [
        other.staged for other in state.slots if not isinstance(other, FreeSlotState) and other.staged != slot.staged
    ]
    newest = len(state.slots) > 1 and all(other.save.checkpoint < slot.staged.save.checkpoint for other in others)
    hoped = copies or any(
        (leg.phase in RUNNING_PHASES or leg.phase == "resting") and not leg.abandoned for leg in slot.transfers
    )
    wanted = newest and not hoped and not _has_no_target(state, slot, now)
    return tuple(_with_retry(leg, wanted and leg.target in state.targets) for leg in slot.transfers)


def _with_retry(leg: Transfer, wanted: bool) -> Transfer:
    if not leg.abandoned or leg.phase not in ("resting", "lost"):
        return leg
    return replace(leg, phase="resting" if wanted else "lost")


def _is_abandoned(index: int, slot: Slot, commands: list[Command]) -> Slot:
    match slot:
        case StagedSlot(sealed):
            return Committed(sealed, False, ())
        case Flushing(sealed, _, legs, asked):
            return Committed(sealed, True, _stopped(index, legs, [leg.target for leg in legs], commands), asked)
        case _:
            return slot


def _stopped(
    index: int, legs: Iterable[Transfer], targets: Iterable[MemoryServerInstance], commands: list[Command]
) -> tuple[Transfer, ...]:
    """The legs, those to `targets` told to end: forgotten if they rest, else once they have left the memory."""
    kept = []
    for leg in legs:
        if leg.target in targets and leg.phase in ("writing", "committing"):
            commands.append(StopTransfer(index, leg.target))
            kept.append(replace(leg, phase="stopping"))
        elif leg.target not in targets or leg.phase != "resting":
            kept.append(leg)
    return tuple(kept)


def _copies(state: FlushState, legs: Iterable[Transfer]) -> int:
    """True copies: acknowledged by holders that still count."""
    return sum(leg.phase == "done" and leg.target in state.servers for leg in legs)


def _with(legs: Iterable[Transfer], changed: Transfer) -> tuple[Transfer, ...]:
    return tuple(changed if leg.target == changed.target and leg.phase in RUNNING_PHASES else leg for leg in legs)


def _put(state: FlushState, index: int, slot: Slot) -> FlushState:
    return replace(state, slots=(*state.slots[:index], slot, *state.slots[index + 1 :]))
