"""Decides how the saves staged in one arena are flushed to their targets.

Pure: `apply_event(state, event) -> (state, commands)`, and `engine.Flusher` executes the commands. Time and jitter are
fields of events, so the simulator and the property tests run exactly this code. The rules are the protocol's:

* A slot is flushed only once it is staged, and only by the incarnation that staged it.
* The writer generation is the save's own, even if a newer one is known. A flush therefore continues when trainers die
  or a newer generation is claimed, until a memory server rejects it.
* The slot is freed after R_eff acknowledgements, after a rejection, or when no remaining target can take the save. The
  number of copies that exist is reported then.
* A save that every target failed to take is kept and retried while it is the newest of the arena and has no copy: its
  slot is not needed, and a memory server may restart, or be replaced, a moment later (`_update_retries`).
* Memory is never returned while a thread still reads it (`Committed` waits for the last transfer to stop).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.protocol.timeouts import Backoff

# ---- slots -----------------------------------------------------------------------------------------------------------
# Defines the states, events and commands of staging slots: pure values from which the functions below decide.

Phase = Literal["writing", "committing", "resting", "stopping", "done", "refused", "lost"]
RUNNING_PHASES: frozenset[Phase] = frozenset({"writing", "committing", "stopping"})
"""Phases of a transfer in which a thread may be reading the slot's memory."""


@dataclass(frozen=True, slots=True)
class StagedSave:
    """Describes the save in a staged slot: the tensor stream, followed by the JSON of the plain values."""

    save: RankSave
    world_size: int
    incarnation: str
    """The trainer process that staged it."""
    layout: str
    """Digest of the layout record."""
    stream_bytes: int
    """Length of the tensor stream, which begins at the start of the slot."""
    values_bytes: int
    """Length of the plain values' JSON, which follows the stream."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A save on its way to one target."""

    target: MemoryServerInstance
    phase: Phase = "writing"
    failures: int = 0
    """Failed attempts so far."""
    retry_at: float = 0.0
    """Monotonic time of the next attempt, in phase `resting`."""
    abandoned: bool = False
    """All attempts are used up. It is retried only while the save would otherwise have no copy."""


@dataclass(frozen=True, slots=True)
class FreeSlotState:
    """A slot that the trainer may write to, or is writing to; its content is unknown until it is staged."""


@dataclass(frozen=True, slots=True)
class StagedSlot:
    """A slot whose save is staged while no target is known."""

    staged: StagedSave
    since_seconds: float
    """Monotonic time at which it was staged."""


@dataclass(frozen=True, slots=True)
class Flushing:
    """A slot whose save is being sent, with one transfer per target."""

    staged: StagedSave
    since_seconds: float
    """Monotonic time at which it was staged."""
    transfers: tuple[Transfer, ...]
    commit_sent: bool = False
    """A target was asked to commit the save, so it may exist there even if no answer came."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A slot whose outcome is decided; it is freed when the last transfer no longer reads its memory."""

    staged: StagedSave
    ok: bool
    """False if the save was rejected, or abandoned without a copy."""
    transfers: tuple[Transfer, ...]
    commit_sent: bool = False


Slot = FreeSlotState | StagedSlot | Flushing | Committed


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Limits how often and how long a save is retried."""

    attempts: int = 5
    """Attempts per transfer. A target that used them all up gets one attempt per save until one succeeds."""
    retry_seconds: float = 0.1
    """Backoff before the second attempt. It doubles each time, and jitter shortens it by up to half."""
    max_retry_seconds: float = 2.0
    """Longest backoff between two attempts."""
    no_target_timeout_seconds: float = 30.0
    """How long a save without a copy is kept while there is no target, or no target takes it."""


@dataclass(frozen=True, slots=True)
class FlushState:
    """The state of one arena's flush."""

    slots: tuple[Slot, ...]
    incarnation: str
    """The trainer process whose saves are accepted."""
    targets: tuple[MemoryServerInstance, ...] = ()
    """Where saves are sent, the local memory server first."""
    servers: frozenset[MemoryServerInstance] = frozenset()
    """All memory servers whose copies count; includes the targets."""
    replicas: int = 1
    """Configured number of copies (R)."""
    unreachable: frozenset[MemoryServerInstance] = frozenset()
    """Targets that failed all attempts of a transfer and have not acknowledged a save since."""
    limits: RetryLimits = field(default_factory=RetryLimits)

    @property
    def effective_replicas(self) -> int:
        """Number of acknowledgements that free a slot: one per target, at least 1 and at most R."""
        return max(1, min(self.replicas, len(self.targets)))

    def pending_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Returns the checkpoints that are staged here and not yet decided, oldest first."""
        checkpoints = {s.staged.save.checkpoint for s in self.slots if isinstance(s, StagedSlot | Flushing)}
        return tuple(sorted(checkpoints))

    def is_busy(self) -> bool:
        return any(not isinstance(slot, FreeSlotState) for slot in self.slots)

    def has_running_transfer(self, target: MemoryServerInstance) -> bool:
        """Whether a command to `target` has not been answered yet."""
        transfers = [
            transfer for slot in self.slots if isinstance(slot, Flushing | Committed) for transfer in slot.transfers
        ]
        return any(transfer.target == target and transfer.phase in RUNNING_PHASES for transfer in transfers)

    def next_tick(self) -> float | None:
        """The earliest monotonic time at which a Tick has an effect; None: a Tick has none."""
        times = []
        for slot in self.slots:
            transfers = slot.transfers if isinstance(slot, Flushing) else ()
            times += [transfer.retry_at for transfer in transfers if transfer.phase == "resting"]
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
    """Every part of a save is on `target`, except the index entry. Answers WriteTo."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """`target` has the index entry. Answers CommitOn."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class TransferFenced:
    """`target` rejects the save because it is fenced for a newer generation. Answers WriteTo or CommitOn."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """A target did not take a save. Answers WriteTo or CommitOn."""

    slot: int
    target: MemoryServerInstance
    cause: Literal["unavailable", "full", "missing"]
    """`missing`: parts written earlier are gone, because the target restarted in between."""
    now: float
    jitter: float = 0.0
    """Random number in [0, 1) for the backoff."""
    detail: str = ""
    """The error message, for the event."""


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """A transfer ended unfinished and no longer reads the memory. Answers StopTransfer, as any other answer does."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class Retargeted:
    """The targets changed: a generation was committed, or memory servers were added or removed."""

    targets: tuple[MemoryServerInstance, ...]
    servers: frozenset[MemoryServerInstance]
    replicas: int
    now: float


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """Trainers of `generation` are about to start; memory servers reject saves of older generations."""

    generation: int


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class FlushClosed:
    """The worker must end: saves that are not written yet are abandoned."""


Answer = SaveWritten | Acknowledged | TransferFenced | TargetFailed | TransferStopped
Event = Answer | SlotStaged | Retargeted | GenerationStarted | Tick | FlushClosed

# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteTo:
    """Write the whole save of a slot to `target`, from its beginning."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class CommitOn:
    """Commit a slot's save on `target`, with the save's own generation as writer generation."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class StopTransfer:
    """Stop reading the slot's memory, and answer when that is done."""

    slot: int
    target: MemoryServerInstance


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Return a slot's memory to the trainer."""

    slot: int
    save: RankSave
    ok: bool
    """Whether the save has a copy and was not rejected."""
    copies: int
    """Number of memory servers that have the save."""
    lost: bool = False
    """No target was ever asked to commit the save: no copy exists, and none will appear."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Report that the save is on `copies` memory servers, one more than before."""

    save: RankSave
    copies: int


@dataclass(frozen=True, slots=True)
class SaveAbandoned:
    """Report that a target used up its attempts without taking the save."""

    save: RankSave
    target: MemoryServerInstance
    cause: str
    detail: str = ""
    """The last error message; empty: only the cause is known."""


@dataclass(frozen=True, slots=True)
class RejectStaged:
    """Report that something was staged that cannot be flushed."""

    text: str


Command = WriteTo | CommitOn | StopTransfer | FreeSlot | CopyReport | SaveAbandoned | RejectStaged


# ---- state machine ---------------------------------------------------------------------------------------------------


def apply_event(state: FlushState, event: Event) -> tuple[FlushState, tuple[Command, ...]]:
    """Computes the next state and the commands to execute.

    An event that no longer applies (a late answer) changes nothing.
    """
    commands: list[Command] = []
    now: float | None = None
    # First apply the event itself; slots that it completes are advanced below.
    match event:
        case SlotStaged(now=now):
            state = _apply_staged(state, event, commands)
        case SaveWritten() | Acknowledged() | TransferFenced() | TargetFailed() | TransferStopped():
            state = _apply_answer(state, event, commands)
            now = event.now if isinstance(event, TargetFailed) else None
        case Retargeted(targets, servers, replicas, now):
            state = replace(state, targets=targets, servers=servers | set(targets), replicas=replicas)
            state = replace(state, unreachable=state.unreachable & state.servers)
        case Tick(now):
            state = _retry_due_transfers(state, now, commands)
        case GenerationStarted(generation):
            for index, slot in enumerate(state.slots):
                if not isinstance(slot, FreeSlotState) and slot.staged.save.generation < generation:
                    state = _with_slot(state, index, _abandon_save(index, slot, commands))
        case FlushClosed():
            for index, slot in enumerate(state.slots):
                state = _with_slot(state, index, _abandon_save(index, slot, commands))
    # Any event can change what another slot needs (targets, unreachable ones), so every slot is advanced.
    for index in range(len(state.slots)):
        state = _advance_slot(state, index, now, commands)
    return state, tuple(commands)


def _apply_staged(state: FlushState, event: SlotStaged, commands: list[Command]) -> FlushState:
    save = event.staged.save
    if not isinstance(state.slots[event.slot], FreeSlotState):
        reason = f"{save} was staged into slot {event.slot}, whose previous save is still being flushed: ignored"
        commands.append(RejectStaged(reason))
        return state
    if event.staged.incarnation != state.incarnation:
        commands.append(
            RejectStaged(
                f"{save} was staged by another incarnation of the trainer ({event.staged.incarnation}): not flushed"
            )
        )
        commands.append(FreeSlot(event.slot, save, False, 0, lost=True))
        return state
    return _with_slot(state, event.slot, StagedSlot(event.staged, event.now))


def _apply_answer(state: FlushState, event: Answer, commands: list[Command]) -> FlushState:
    slot = state.slots[event.slot]
    if not isinstance(slot, Flushing | Committed):
        return state
    transfer = next(
        (
            transfer
            for transfer in slot.transfers
            if transfer.target == event.target and transfer.phase in RUNNING_PHASES
        ),
        None,
    )
    if transfer is None:
        return state
    if transfer.phase == "stopping" and isinstance(event, SaveWritten | TargetFailed | TransferStopped):
        # It ended without a result. Forget it, so that the target is tried again if it is named again.
        transfers = tuple(other for other in slot.transfers if other is not transfer)
        return _with_slot(state, event.slot, replace(slot, transfers=transfers))
    match event:
        case SaveWritten() if transfer.phase == "writing":
            transfer = replace(transfer, phase="committing")
            commands.append(CommitOn(event.slot, event.target))
        case SaveWritten() | TransferStopped():
            transfer = replace(transfer, phase="lost")
        case Acknowledged():
            transfer = replace(transfer, phase="done")
            state = replace(state, unreachable=state.unreachable - {transfer.target})
        case TransferFenced():
            transfer = replace(transfer, phase="refused")
        case TargetFailed():
            state, transfer = _apply_failure(state, slot, transfer, event, commands)
    slot = replace(
        slot,
        transfers=_replace_running(slot.transfers, transfer),
        commit_sent=slot.commit_sent or transfer.phase == "committing",
    )
    if transfer.phase == "done":
        commands.append(CopyReport(slot.staged.save, _count_copies(state, slot.transfers)))
    return _with_slot(state, event.slot, slot)


def _apply_failure(
    state: FlushState, slot: Flushing | Committed, transfer: Transfer, event: TargetFailed, commands: list[Command]
) -> tuple[FlushState, Transfer]:
    """Schedules another attempt, or abandons the transfer after its last (one if the target was unreachable)."""
    failures = transfer.failures + 1
    wait = Backoff(state.limits.retry_seconds, state.limits.max_retry_seconds).wait_seconds(failures, event.jitter)
    transfer = replace(transfer, failures=failures, retry_at=event.now + wait)
    if failures < (1 if transfer.target in state.unreachable else state.limits.attempts):
        return state, replace(transfer, phase="resting")
    if not transfer.abandoned:
        commands.append(SaveAbandoned(slot.staged.save, transfer.target, event.cause, event.detail))
    return replace(state, unreachable=state.unreachable | {transfer.target}), replace(
        transfer, phase="lost", abandoned=True
    )


def _retry_due_transfers(state: FlushState, now: float, commands: list[Command]) -> FlushState:
    for index, slot in enumerate(state.slots):
        if not isinstance(slot, Flushing):
            continue
        transfers = []
        for transfer in slot.transfers:
            if transfer.phase == "resting" and transfer.retry_at <= now:
                commands.append(WriteTo(index, transfer.target))
                transfers.append(replace(transfer, phase="writing"))
            else:
                transfers.append(transfer)
        state = _with_slot(state, index, replace(slot, transfers=tuple(transfers)))
    return state


def _advance_slot(state: FlushState, index: int, now: float | None, commands: list[Command]) -> FlushState:
    """Starts and stops one slot's transfers, decides its outcome and frees it, as the state permits."""
    slot = state.slots[index]
    if isinstance(slot, StagedSlot) and state.targets:
        slot = Flushing(slot.staged, slot.since_seconds, ())
    elif isinstance(slot, StagedSlot) and _has_timed_out(state, slot, now):
        slot = Committed(slot.staged, False, ())
    if isinstance(slot, Flushing):
        slot = _decide_slot(state, index, slot, now, commands)
    if isinstance(slot, Committed) and not any(transfer.phase in RUNNING_PHASES for transfer in slot.transfers):
        copies = _count_copies(state, slot.transfers)
        commands.append(FreeSlot(index, slot.staged.save, slot.ok and copies > 0, copies, lost=not slot.commit_sent))
        slot = FreeSlotState()
    return _with_slot(state, index, slot)


def _has_timed_out(state: FlushState, slot: StagedSlot | Flushing, now: float | None) -> bool:
    return now is not None and now >= slot.since_seconds + state.limits.no_target_timeout_seconds


def _decide_slot(
    state: FlushState, index: int, slot: Flushing, now: float | None, commands: list[Command]
) -> Flushing | Committed:
    """Starts the transfers that a save still needs, or decides its outcome."""
    removed_targets = [transfer.target for transfer in slot.transfers if transfer.target not in state.targets]
    transfers = _stop_transfers(index, slot.transfers, removed_targets, commands)
    copies = _count_copies(state, transfers)
    # Decided: a rejection, or enough copies. Transfers that still run are stopped.
    if any(transfer.phase == "refused" for transfer in transfers):
        return Committed(
            slot.staged, False, _stop_transfers(index, transfers, state.targets, commands), slot.commit_sent
        )
    if copies >= state.effective_replicas:
        return Committed(
            slot.staged, True, _stop_transfers(index, transfers, state.targets, commands), slot.commit_sent
        )
    # Not decided: as many further targets as copies may be missing. Each target is used once.
    used_targets = {transfer.target for transfer in transfers}
    expected_copies = copies + sum(transfer.phase in ("writing", "committing", "resting") for transfer in transfers)
    unused_targets = [t for t in state.targets if t not in used_targets]
    for target in unused_targets[: state.effective_replicas - expected_copies]:
        transfers = (*transfers, Transfer(target))
        commands.append(WriteTo(index, target))
    transfers = _update_retries(state, replace(slot, transfers=transfers), copies, now)
    # Nothing runs, nothing will be retried and no target may appear: decide with the copies that exist.
    if any(transfer.phase in RUNNING_PHASES or transfer.phase == "resting" for transfer in transfers):
        return replace(slot, transfers=transfers)
    if not state.targets and not copies and not _has_timed_out(state, slot, now):
        return replace(slot, transfers=transfers)
    return Committed(slot.staged, copies > 0, transfers, slot.commit_sent)


def _update_retries(state: FlushState, slot: Flushing, copies: int, now: float | None) -> tuple[Transfer, ...]:
    """Lets abandoned transfers retry while the save would otherwise be lost, and ends them when it would not.

    A job's last save is followed by none. If it were freed after a second of attempts, it would be lost although its
    memory servers may be back a moment later.
    """
    others = [
        other.staged for other in state.slots if not isinstance(other, FreeSlotState) and other.staged != slot.staged
    ]
    is_newest = len(state.slots) > 1 and all(other.save.checkpoint < slot.staged.save.checkpoint for other in others)
    is_expected = copies or any(
        (transfer.phase in RUNNING_PHASES or transfer.phase == "resting") and not transfer.abandoned
        for transfer in slot.transfers
    )
    should_retry = is_newest and not is_expected and not _has_timed_out(state, slot, now)
    return tuple(
        _update_retry(transfer, should_retry and transfer.target in state.targets) for transfer in slot.transfers
    )


def _update_retry(transfer: Transfer, should_retry: bool) -> Transfer:
    if not transfer.abandoned or transfer.phase not in ("resting", "lost"):
        return transfer
    return replace(transfer, phase="resting" if should_retry else "lost")


def _abandon_save(index: int, slot: Slot, commands: list[Command]) -> Slot:
    """Stops a save's transfers and decides it; the slot is freed once none of them reads its memory."""
    match slot:
        case StagedSlot(staged):
            return Committed(staged, False, ())
        case Flushing(staged, _, transfers, commit_sent):
            targets = [transfer.target for transfer in transfers]
            return Committed(staged, True, _stop_transfers(index, transfers, targets, commands), commit_sent)
        case _:
            return slot


def _stop_transfers(
    index: int, transfers: Iterable[Transfer], targets: Iterable[MemoryServerInstance], commands: list[Command]
) -> tuple[Transfer, ...]:
    """Stops the transfers to `targets`; those waiting for a retry are removed at once. Returns the remaining ones."""
    remaining = []
    for transfer in transfers:
        if transfer.target in targets and transfer.phase in ("writing", "committing"):
            commands.append(StopTransfer(index, transfer.target))
            remaining.append(replace(transfer, phase="stopping"))
        elif transfer.target not in targets or transfer.phase != "resting":
            remaining.append(transfer)
    return tuple(remaining)


def _count_copies(state: FlushState, transfers: Iterable[Transfer]) -> int:
    """Counts the acknowledged copies on memory servers that still exist."""
    return sum(transfer.phase == "done" and transfer.target in state.servers for transfer in transfers)


def _replace_running(transfers: Iterable[Transfer], changed: Transfer) -> tuple[Transfer, ...]:
    return tuple(
        changed if transfer.target == changed.target and transfer.phase in RUNNING_PHASES else transfer
        for transfer in transfers
    )


def _with_slot(state: FlushState, index: int, slot: Slot) -> FlushState:
    return replace(state, slots=(*state.slots[:index], slot, *state.slots[index + 1 :]))
