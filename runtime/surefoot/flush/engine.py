"""Carries out the commands of `state_machine` for one arena, in threads.

The agent has one Drain per arena, library mode one in the training process. One control thread carries out commands
and fires callbacks; one writer a target makes digests and sends. Memory in use is the arena, one
digest table and the plain values of each slot: chunks are sent from where they lie.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot import metrics
from surefoot.errors import Corrupt, ProtocolError
from surefoot.flush.save_work import SaveWork
from surefoot.flush.slots import (
    Command,
    CommitOn,
    Complain,
    CopyReport,
    DrainClosed,
    DrainState,
    EpochBegun,
    Event,
    Free,
    FreeSlot,
    GaveUp,
    Retargeted,
    RetryLimits,
    SealedSave,
    SlotStaged,
    StopLeg,
    Tick,
    WriteTo,
)
from surefoot.flush.state_machine import step
from surefoot.flush.target_turns import TargetTurns
from surefoot.flush.target_writer import Probe, TargetWriter, WriterOrder
from surefoot.flush.token_bucket import TokenBucket
from surefoot.format.layouts import Stream, read_layout
from surefoot.protocol.identities import Checkpoint, HolderId, RankSave
from surefoot.tiers import Tier

log = logging.getLogger(__name__)

LAYOUTS_KEPT = 4
"""Layout records remembered by digest; a program has one or two in its life."""


@dataclass(frozen=True, slots=True)
class DrainArena:
    """Describes staging memory: `slots` of `slot_bytes` each.

    Mapped by whoever owns the Drain, and unmapped after its close.
    """

    memory: memoryview
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class DrainWatcher:
    """Hears of freed slots, copies and notices.

    Called from the control thread, one at a time; must return at once.
    """

    on_freed: Callable[[int, int, bool], None]
    """(slot, step, ok): the trainer may write there again."""
    on_saved: Callable[[RankSave, int], None]
    """(save, copies): once more each time another holder has it."""
    on_notice: Callable[[str, str], None]
    """(reason, text): something a person should hear of."""
    on_lost: Callable[[RankSave], None] = lambda _: None
    """(save): its slot is freed, and no target was ever asked to commit it: nobody will find it anywhere."""
    on_full: Callable[[RankSave], None] = lambda _: None
    """(save): a target has no room for it; it is kept until a newer one is there."""


def no_probe(stage: str) -> None:
    """Ignores the stages; the default probe."""


@dataclass(frozen=True, slots=True)
class DrainOptions:
    limits: RetryLimits = field(default_factory=RetryLimits)
    probe: Probe = no_probe
    pace: TokenBucket = field(default_factory=TokenBucket)
    """Of copies that leave `node`; shared by all that leave it."""
    node: str = ""
    turns: TargetTurns = field(default_factory=TargetTurns)
    """Of the targets; shared by the drains of one agent."""


class Drain:
    """Drains one arena to its targets until closed."""

    def __init__(
        self,
        arena: DrainArena,
        incarnation: str,
        open_tier: Callable[[HolderId], Tier],
        watcher: DrainWatcher,
        options: DrainOptions | None = None,
    ) -> None:
        self._arena = arena
        self._open = open_tier
        self._watcher = watcher
        self._options = options or DrainOptions()
        slots = tuple(Free() for _ in range(arena.slots))
        self._state = DrainState(slots, incarnation, limits=self._options.limits)
        self._changed = threading.Condition()
        self._outbox: deque[Command] = deque()  # bounded by slots x targets: every order waits for its answer
        self._work: dict[int, SaveWork] = {}
        self._layouts: dict[str, Stream] = {}
        self._writers: dict[HolderId, TargetWriter] = {}
        self._retired: list[TargetWriter] = []
        self._closing = False
        self._carrying = False
        """Whether the control thread is at a command it has taken from the outbox."""
        self._control = threading.Thread(target=self._run, name="surefoot-drain", daemon=True)
        self._control.start()

    # ---- called by the owner ------------------------------------------------------------------------------------

    def stage(self, slot: int, sealed: SealedSave, layout_json: str | None) -> None:
        """Drains a slot that was sealed.

        What cannot be drained is freed with ok=False and a notice; nothing is raised.
        """
        with self._changed:
            try:
                work = SaveWork(sealed, self._layout(sealed.layout, layout_json), self._slot(slot))
            except (ProtocolError, Corrupt) as problem:
                self._outbox.append(Complain(str(problem)))
                if isinstance(self._state.slots[slot], Free):
                    self._outbox.append(FreeSlot(slot, sealed.save, False, 0, lost=True))
                self._changed.notify_all()
                return
            if isinstance(self._state.slots[slot], Free):
                self._work[slot] = work
            self._apply(SlotStaged(slot, sealed, time.monotonic()))
        self._options.probe("staged")

    def retarget(self, targets: tuple[HolderId, ...], holders: frozenset[HolderId], replicas: int) -> None:
        """Sets the holders that saves go to.

        The local one first, and every holder that is there.
        """
        self._apply(Retargeted(targets, holders, replicas, time.monotonic()))

    def begin(self, epoch: int) -> None:
        """Gives up what older epochs staged, before trainers of `epoch` start.

        Saves that no holder takes any more would otherwise keep every slot from the new epoch's.
        """
        self._apply(EpochBegun(epoch))

    def pending(self) -> tuple[Checkpoint, ...]:
        """Checkpoints staged here and not yet on their holders."""
        with self._changed:
            return self._state.pending()

    def flush(self, wait_seconds: float) -> bool:
        """Waits until every slot is free again.

        Returns:
            Whether they are, and their callbacks were called.
        """
        with self._changed:
            return self._changed.wait_for(self._idle, wait_seconds)

    def close(self, wait_seconds: float = 5.0) -> bool:
        """Gives up unwritten saves and joins every thread.

        Returns:
            Whether all ended in time.
        """
        self._apply(DrainClosed())
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + wait_seconds
        self._control.join(max(0.0, deadline - time.monotonic()))
        writers = [*self._writers.values(), *self._retired]
        ended = [writer.join(max(0.0, deadline - time.monotonic())) for writer in writers]
        return all(ended) and not self._control.is_alive()

    def _idle(self) -> bool:
        """Whether no save is under way and no result unreported, also of one that was refused and never began."""
        return not self._state.busy() and not self._work and not self._outbox and not self._carrying

    # ---- events and commands ------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        with self._changed:
            self._state, commands = step(self._state, event)
            self._outbox += commands
            self._changed.notify_all()

    def _run(self) -> None:
        while (command := self._next()) is not None:
            self._carry_out(command)
            with self._changed:
                self._carrying = False
                self._retire_writers()
                self._changed.notify_all()
        for writer in self._writers.values():
            writer.end()

    def _next(self) -> Command | None:
        """The next command; None once closed and idle. Ticks come from here."""
        with self._changed:
            while not self._outbox:
                if self._closing and not self._state.busy():
                    return None
                tick, now = self._state.next_tick(), time.monotonic()
                if tick is not None and tick <= now:
                    self._state, commands = step(self._state, Tick(now))
                    self._outbox += commands
                    if commands:
                        continue
                self._changed.wait(None if tick is None else max(0.02, tick - now))
            self._carrying = True
            return self._outbox.popleft()

    def _carry_out(self, command: Command) -> None:
        match command:
            case WriteTo(slot, target):
                work = self._work[slot]
                work.start(target)
                self._writer(target).order(WriterOrder(slot, work, "write"))
            case CommitOn(slot, target):
                self._writer(target).order(WriterOrder(slot, self._work[slot], "commit"))
            case StopLeg(slot, target):
                self._work[slot].stop(target)
            case FreeSlot():
                self._free(command)
            case CopyReport(save, copies):
                metrics.checkpoint_step.labels("memory").set(save.step)
                self._tell(lambda: self._watcher.on_saved(save, copies))
            case GaveUp(save, target, cause, detail):
                metrics.fallbacks.labels("drain_gave_up").inc()
                why = detail or cause
                text = f"{save} was not written to {target} ({why}); it has fewer copies until it is repaired"
                self._tell(lambda: self._watcher.on_notice("SaveIncomplete", text))
                if cause == "full":
                    self._tell(lambda: self._watcher.on_full(save))
            case Complain(text):
                log.error("%s", text)
                self._tell(lambda: self._watcher.on_notice("SaveRefused", text))

    def _free(self, command: FreeSlot) -> None:
        work = self._work.get(command.slot)
        if work is not None:
            work.release()
        self._options.probe("freed")
        self._tell(lambda: self._watcher.on_freed(command.slot, command.save.step, command.ok))
        if command.lost:
            self._tell(lambda: self._watcher.on_lost(command.save))
        with self._changed:
            if work is not None and self._work.get(command.slot) is work:
                del self._work[command.slot]
            self._changed.notify_all()

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            metrics.fallbacks.labels("drain_callback_failed").inc()
            log.exception("a callback of the drain failed; draining goes on")

    # ---- what it keeps ------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> memoryview:
        begin = slot * self._arena.slot_bytes
        return self._arena.memory[begin : begin + self._arena.slot_bytes]

    def _layout(self, digest: str, text: str | None) -> Stream:
        known = self._layouts.pop(digest, None)
        if known is None:
            if text is None:
                raise ProtocolError(f"layout {digest} was never sent to this drain: the save cannot be described")
            known = read_layout(digest, text)
        self._layouts[digest] = known  # newest last
        while len(self._layouts) > LAYOUTS_KEPT:
            del self._layouts[next(iter(self._layouts))]
        return known

    def _writer(self, target: HolderId) -> TargetWriter:
        writer = self._writers.get(target)
        if writer is None:
            pace = TokenBucket() if target.node == self._options.node else self._options.pace
            paced, turn = (pace, self._options.probe), self._options.turns.of(target)
            writer = TargetWriter(target, self._open, self._apply, self._arena.slots, paced, turn)
            self._writers[target] = writer
        return writer

    def _retire_writers(self) -> None:
        """Ends the threads of holders that are gone, once nothing of theirs is under way."""
        self._retired = [writer for writer in self._retired if not writer.join(0)]
        for target in [t for t in self._writers if t not in self._state.holders]:
            if self._state.is_running(target):
                continue
            writer = self._writers.pop(target)
            writer.end()
            self._retired.append(writer)
