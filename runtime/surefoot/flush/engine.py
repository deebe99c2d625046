"""Carries out the commands of `state_machine` for one arena, in threads.

The agent has one Drain per arena, library mode one in the training process. One control thread carries out commands
and fires callbacks; one writer a target makes digests and sends. Memory in use is the arena, one
digest table and the plain values of each slot: chunks are sent from where they lie.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary

from surefoot import metrics
from surefoot.errors import (
    ChunkMissing,
    CopyUnsupported,
    Corrupt,
    Fenced,
    ProtocolError,
    SaveExists,
    SurefootError,
    TierFull,
    TierUnavailable,
)
from surefoot.flush.bandwidth import TokenBucket
from surefoot.flush.state_machine import (
    Acknowledged,
    Command,
    CommitOn,
    CopyReport,
    Event,
    FlushClosed,
    FlushState,
    FreeSlot,
    FreeSlotState,
    GenerationStarted,
    RejectStaged,
    Retargeted,
    RetryLimits,
    SaveAbandoned,
    SaveWritten,
    SlotStaged,
    StagedSave,
    StopTransfer,
    TargetFailed,
    Tick,
    TransferFenced,
    TransferStopped,
    WriteTo,
    step,
)
from surefoot.format.layouts import DIGEST_BYTES, Stream, block_digests, read_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.bounds import MAX_PART_BYTES
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.tiers import SupportsChunkCopy, SupportsPipelinedWrites, Tier

log = logging.getLogger(__name__)


# ---- save work -------------------------------------------------------------------------------------------------------
# Holds one sealed save for its writers: memory, layout and digest table. All writers of one Drain share it. Whichever
# comes to a chunk first makes its digests, then sends it while its bytes are still near the core; no writer waits for
# what another one's target does.


class SaveWork:
    """Reads and digests one slot's save for all its writers."""

    def __init__(self, sealed: StagedSave, layout: Stream, memory: memoryview) -> None:
        if sealed.values_bytes > MAX_PART_BYTES:  # no reader would take it for a save
            raise ProtocolError(
                f"{sealed.save} has plain values of {sealed.values_bytes} bytes, and at most {MAX_PART_BYTES} are read again:"
                " keep large data in tensors, which are saved in chunks"
            )
        end = sealed.stream_bytes + sealed.values_bytes
        if sealed.stream_bytes != layout.layout.stream_bytes or end > memory.nbytes:
            raise ProtocolError(
                f"{sealed.save}: {sealed.stream_bytes} + {sealed.values_bytes} bytes were staged into a slot of"
                f" {memory.nbytes} with a layout of {layout.layout.stream_bytes}: the save is not written"
            )
        self.staged = sealed
        self.layout = layout
        self.chunk_lengths = layout.layout.chunk_lengths()
        self.stream = memory[: sealed.stream_bytes]
        self.values = bytes(memory[sealed.stream_bytes : end])
        self.table = b""
        self._manifest: RankManifest | None = None
        self._digests: dict[int, bytes] = {}
        self._begun: set[int] = set()
        """Chunks whose digests somebody makes or has made."""
        self._digested = threading.Event()
        self._stopped: set[MemoryServerInstance] = set()
        self._lock = threading.Condition()
        if not self.chunk_lengths:
            self._describe()

    def digest(self, index: int) -> None:
        """Makes the digests of a chunk once for all writers.

        Unless another writer does or did; behind the last of all, the manifest.
        """
        with self._lock:
            if index in self._begun:
                return
            self._begun.add(index)
        try:
            found = block_digests(self.stream, self.layout.edges, self.layout.blocks_of_chunk(index))
            with self._lock:
                self._digests[index] = found
                self._lock.notify_all()
                last = len(self._digests) == len(self.chunk_lengths)
            if last:
                self._describe()
        except BaseException:
            with self._lock:
                self._digested.set()  # without a manifest the writers give the save up
                self._lock.notify_all()
            raise

    def digests(self, index: int) -> bytes:
        """The digests of a chunk on which some writer has begun.

        Empty where they could not be made.
        """
        with self._lock:
            self._lock.wait_for(lambda: index in self._digests or self._digested.is_set())
            return self._digests.get(index, b"")

    def _describe(self) -> None:
        self.table = b"".join(self._digests[index] for index in range(len(self.chunk_lengths)))
        sealed, tables = self.staged, (self.table, self.values)
        self._manifest = build_manifest(
            sealed.save, sealed.world_size, sealed.incarnation, self.layout, tables, saved_at=time.time()
        )
        self._digested.set()

    def manifest(self, target: MemoryServerInstance) -> RankManifest | None:
        """Waits for the manifest, which every chunk has part in.

        None if the leg to `target` was stopped meanwhile.
        """
        while not self._digested.wait(0.1):
            if self.is_stopped(target):
                return None
        return self._manifest

    def chunk(self, index: int) -> memoryview:
        start = self.layout.layout.chunk_starts[index]
        return self.stream[start : start + self.chunk_lengths[index]]

    def start(self, target: MemoryServerInstance) -> None:
        with self._lock:
            self._stopped.discard(target)

    def stop(self, target: MemoryServerInstance) -> None:
        with self._lock:
            self._stopped.add(target)

    def is_stopped(self, target: MemoryServerInstance) -> bool:
        with self._lock:
            return target in self._stopped

    def release(self) -> None:
        """Lets go of the arena's memory; no thread reads it any more."""
        self.stream.release()


# ---- unchanged chunks ------------------------------------------------------------------------------------------------
# Finds chunks that are equal to those of the save before. Pure. A target copies such a chunk within itself: of a model
# whose weights are mostly frozen (LoRA, embeddings) next to nothing is sent. The digests that are made anyway decide.

MAX_COPY_DEPTH = 16
"""Saves in a row of which a chunk may be a copy; then all is sent. A bit that a target lost would live on for ever."""


@dataclass(frozen=True, slots=True)
class WrittenSave:
    """Describes a save that its target has whole."""

    save: RankSave
    layout: str
    table: bytes
    """Digests of its blocks."""
    copy_depth: int = 0
    """Saves since the last one of which every byte was sent."""

    def has(self, stream: Stream, index: int, digests: bytes) -> bool:
        """Whether chunk `index` is equal, by the digests of its blocks.

        Of a save of the same layout.
        """
        blocks = stream.blocks_of_chunk(index)
        return self.table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES] == digests

    def has_all(self, stream: Stream, indexes: Iterable[int], table: bytes) -> bool:
        """Whether several chunks are equal, by a whole table."""
        found = ((index, stream.blocks_of_chunk(index)) for index in indexes)
        return all(self.has(stream, i, table[b.start * DIGEST_BYTES : b.stop * DIGEST_BYTES]) for i, b in found)


def base_of(written: WrittenSave | None, save: RankSave, layout: str) -> WrittenSave | None:
    """Chooses the save to copy from; None: everything is to be sent."""
    if written is None or written.save == save or written.save.rank != save.rank or written.layout != layout:
        return None
    return written if written.copy_depth + 1 < MAX_COPY_DEPTH else None


def successor(base: WrittenSave | None, save: RankSave, layout: str, table: bytes) -> WrittenSave:
    """Describes a save that was written with the help of `base`."""
    return WrittenSave(save, layout, table, 0 if base is None else base.copy_depth + 1)


# ---- turns of targets ------------------------------------------------------------------------------------------------
# Lets an agent's ranks write to a target one after another. Shared by the drains of one agent. Ranks that send to one
# server at once take its single thread from each other, and their chunks from the processor's cache: with four of them
# a gigabyte cost half as much CPU again and took longer. First come, first served, so that no rank's next save goes
# before another one's last.

POLL_SECONDS = 0.05
"""How soon whoever waits sees that its order was called off."""

Outcome = Literal["turn", "stopped", "unavailable"]


class TargetWriteLock:
    """Orders those who write to one target."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._failures = 0

    @contextmanager
    def acquired(self, is_stopped: Callable[[], bool]) -> Iterator[Outcome]:
        """Waits for the turn, and holds it for the block.

        Yields `unavailable` at once where the target failed those before: each would wait for the same silence anew,
        and hold its slot meanwhile.
        """
        outcome, ticket = self._wait(is_stopped)
        try:
            yield outcome
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def fail(self) -> None:
        """Tells whoever waits behind this turn that the target does not answer."""
        with self._changed:
            self._failures += 1
            self._changed.notify_all()

    def _wait(self, is_stopped: Callable[[], bool]) -> tuple[Outcome, object]:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            failures = self._failures
            while True:
                if is_stopped():
                    return "stopped", ticket
                if self._failures != failures:
                    return "unavailable", ticket
                if self._waiting[0] is ticket:
                    return "turn", ticket
                self._changed.wait(POLL_SECONDS)


class TargetWriteLocks:
    """Keeps one turn a target, as long as somebody writes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[MemoryServerInstance, TargetWriteLock] = WeakValueDictionary()

    def of(self, target: MemoryServerInstance) -> TargetWriteLock:
        """Returns the turn that all writers to `target` share."""
        with self._lock:
            turn = self._turns.get(target)
            if turn is None:
                turn = self._turns[target] = TargetWriteLock()
            return turn


# ---- target writer ---------------------------------------------------------------------------------------------------
# Writes saves to one target in a thread that owns the connection. Each order is answered once, in the target's turn.
# Started and joined by `engine.Drain`. Whatever a tier raises becomes an answer; nothing reaches the trainer.

Answer = SaveWritten | Acknowledged | TransferFenced | TargetFailed | TransferStopped
StageHook = Callable[[str], None]
"""Told each stage of a save as it is reached; tests die in it. Stages: staged, chunk, written, committed, freed."""


@dataclass(frozen=True, slots=True)
class WriterCommand:
    """Write every part of the slot's save, or commit it."""

    slot: int
    work: SaveWork
    verb: Literal["write", "commit"]


class TargetWriter:
    """One target, one connection, one thread."""

    def __init__(
        self,
        target: MemoryServerInstance,
        open_tier: Callable[[MemoryServerInstance], Tier],
        answer: Callable[[Answer], None],
        slots: int,
        paced: tuple[TokenBucket, StageHook],
        turn: TargetWriteLock,
    ) -> None:
        self.target = target
        self._kind = "memory" if target.run_id else "persistent"  # library mode drains to the persistent tier
        self._open = open_tier
        self._answer = answer
        self._pace, self._stage_hook = paced
        self._turn = turn
        self._orders: queue.Queue[WriterCommand | None] = queue.Queue(
            maxsize=slots + 1
        )  # one order a slot, and the end
        self._tier: Tier | None = None
        self._written: WrittenSave | None = None
        """The last save that the target acknowledged."""
        self._logged_unsupported = False
        self._failures = ("", 0)
        """The last error, and how often it came since a save was acknowledged."""
        self._thread = threading.Thread(target=self._run, name=f"surefoot-writer-{target.node}", daemon=True)
        self._thread.start()

    def order(self, order: WriterCommand) -> None:
        """Hands an order over; each is answered exactly once."""
        self._orders.put_nowait(order)

    def end(self) -> None:
        """Ends the thread after the orders before this."""
        self._orders.put_nowait(None)

    def join(self, wait_seconds: float) -> bool:
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            began = time.monotonic()
            answer = self._in_turn(order)
            if isinstance(answer, SaveWritten | Acknowledged):
                phase = "replicate" if order.verb == "write" else "commit"
                metrics.checkpoint_seconds.labels(self._kind, phase).observe(time.monotonic() - began)
            del order  # the slot's memory must not be held while waiting
            self._answer(answer)
        self._disconnect()

    def _in_turn(self, order: WriterCommand) -> Answer:
        with self._turn.acquired(lambda: order.work.is_stopped(self.target)) as outcome:
            if outcome == "turn":
                answer = self._carry_out(order)
                if isinstance(answer, TargetFailed) and answer.cause == "unavailable":
                    self._turn.fail()
                return answer
            if outcome == "stopped":
                return TransferStopped(order.slot, self.target)
            silent = TierUnavailable(f"{self.target} did not answer another rank of this worker")
            return self._failed(order, "unavailable", silent)

    def _carry_out(self, order: WriterCommand) -> Answer:
        try:
            return self._write(order) if order.verb == "write" else self._commit(order)
        except Fenced as refusal:
            log.info("%s refused a save, a newer epoch rules: %s", self.target, refusal, extra=self._keys(order))
            metrics.checkpoint_failures.labels(self._kind, "fenced").inc()
            return TransferFenced(order.slot, self.target)
        except SaveExists as taken:
            log.error("%s", taken, extra=self._keys(order))
            metrics.checkpoint_failures.labels(self._kind, "exists").inc()
            return TransferFenced(order.slot, self.target)
        except ChunkMissing as missing:
            return self._failed(order, "missing", missing)
        except TierFull as full:
            self._disconnect()  # an answer may still be due
            return self._failed(order, "full", full)
        except SurefootError as away:
            self._disconnect()
            return self._failed(order, "unavailable", away)
        except Exception as unexpected:  # a thread that dies silently would hold its slots for ever
            log.exception("writing to %s failed in an unexpected way", self.target)
            self._disconnect()
            return self._failed(order, "unavailable", unexpected)

    def _keys(self, order: WriterCommand) -> dict[str, object]:
        save = order.work.staged.save
        return {"memory_server": str(self.target), "rank": save.rank, "generation": save.generation}

    def _failed(
        self, order: WriterCommand, cause: Literal["unavailable", "full", "missing"], error: Exception
    ) -> TargetFailed:
        self._written = None  # whatever it was: the next try sends everything
        save = order.work.staged.save
        text = str(error)
        self._failures = (text, self._failures[1] + 1 if self._failures[0] == text else 1)
        if self._failures[1].bit_count() == 1:  # an outage tries hundreds of times: one line each time that doubles
            again = f" ({self._failures[1]} times)" if self._failures[1] > 1 else ""
            log.warning(
                "%s of %s on %s failed%s: %s", order.verb, save, self.target, again, error, extra=self._keys(order)
            )
        metrics.checkpoint_failures.labels(self._kind, cause).inc()
        return TargetFailed(order.slot, self.target, cause, time.monotonic(), random.random(), text)

    def _write(self, order: WriterCommand) -> Answer:
        work, save = order.work, order.work.staged.save
        tier = self._connect()
        # with every save: a record that was damaged since would make every later save unreadable too
        tier.put_layout(work.layout.digest, work.layout.text)
        ahead = tier if isinstance(tier, SupportsPipelinedWrites) else None
        put = tier.put_chunk if ahead is None else ahead.send_chunk
        base, sent = self._base(work, tier), 0
        for index, length in enumerate(work.chunk_lengths):
            if work.is_stopped(self.target):
                self._disconnect()  # with whatever answers are still due
                return TransferStopped(order.slot, self.target)
            work.digest(index)
            try:
                if base is not None and self._copied(tier, base, work, index):
                    continue
            except CopyUnsupported as refusal:
                base = None
                self._log_copy_unsupported(refusal)
            if not self._pace.take(length):
                self._disconnect()
                return TransferStopped(order.slot, self.target)
            put(save, index, work.chunk(index))
            sent += length
            self._stage_hook("chunk")
        if ahead is not None:
            ahead.wait_stored()
        manifest = work.manifest(self.target)
        if manifest is None:
            return TransferStopped(order.slot, self.target)
        tier.put_digests(save, work.table)
        tier.put_values(save, work.values)
        metrics.checkpoint_bytes.labels(self._kind).inc(sent)
        metrics.unchanged_bytes.labels(self._kind).inc(work.staged.stream_bytes - sent)
        self._stage_hook("written")
        return SaveWritten(order.slot, self.target)

    def _commit(self, order: WriterCommand) -> Answer:
        work = order.work
        manifest = work.manifest(self.target)
        if manifest is None or work.is_stopped(self.target):
            return TransferStopped(order.slot, self.target)
        tier = self._connect()
        tier.commit(manifest, work.staged.save.generation, work.chunk_lengths)
        base = self._base(work, tier)
        self._written = successor(base, work.staged.save, work.layout.digest, work.table)
        self._failures = ("", 0)
        self._stage_hook("committed")
        return Acknowledged(order.slot, self.target)

    def _base(self, work: SaveWork, tier: Tier) -> WrittenSave | None:
        """What unchanged chunks of a save are copied from; None: all of it is sent."""
        if not isinstance(tier, SupportsChunkCopy):
            return None
        return base_of(self._written, work.staged.save, work.layout.digest)

    def _copied(self, tier: Tier, base: WrittenSave, work: SaveWork, index: int) -> bool:
        """Whether the target made a chunk of its own copy of the same bytes."""
        if not isinstance(tier, SupportsChunkCopy) or not base.has(work.layout, index, work.digests(index)):
            return False
        return tier.copy_chunk(base.save, work.staged.save, index)

    def _log_copy_unsupported(self, refusal: CopyUnsupported) -> None:
        metrics.fallbacks.labels("copy_denied").inc()
        if not self._logged_unsupported:
            log.warning("what is unchanged is sent to %s too: %s", self.target, refusal)
        self._logged_unsupported = True

    def _connect(self) -> Tier:
        if self._tier is None:
            self._tier = self._open(self.target)
        return self._tier

    def _disconnect(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()


# ---- engine ----------------------------------------------------------------------------------------------------------

MAX_CACHED_LAYOUTS = 4
"""Layout records remembered by digest; a program has one or two in its life."""


@dataclass(frozen=True, slots=True)
class FlushArena:
    """Describes staging memory: `slots` of `slot_bytes` each.

    Mapped by whoever owns the Drain, and unmapped after its close.
    """

    memory: memoryview
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class FlushListener:
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


def no_stage_hook(stage: str) -> None:
    """Ignores the stages; the default probe."""


@dataclass(frozen=True, slots=True)
class FlushOptions:
    limits: RetryLimits = field(default_factory=RetryLimits)
    stage_hook: StageHook = no_stage_hook
    pace: TokenBucket = field(default_factory=TokenBucket)
    """Of copies that leave `node`; shared by all that leave it."""
    node: str = ""
    turns: TargetWriteLocks = field(default_factory=TargetWriteLocks)
    """Of the targets; shared by the drains of one agent."""


class Flusher:
    """Drains one arena to its targets until closed."""

    def __init__(
        self,
        arena: FlushArena,
        incarnation: str,
        open_tier: Callable[[MemoryServerInstance], Tier],
        watcher: FlushListener,
        options: FlushOptions | None = None,
    ) -> None:
        self._arena = arena
        self._open = open_tier
        self._watcher = watcher
        self._options = options or FlushOptions()
        slots = tuple(FreeSlotState() for _ in range(arena.slots))
        self._state = FlushState(slots, incarnation, limits=self._options.limits)
        self._changed = threading.Condition()
        self._outbox: deque[Command] = deque()  # bounded by slots x targets: every order waits for its answer
        self._work: dict[int, SaveWork] = {}
        self._layouts: dict[str, Stream] = {}
        self._writers: dict[MemoryServerInstance, TargetWriter] = {}
        self._retired: list[TargetWriter] = []
        self._closing = False
        self._carrying = False
        """Whether the control thread is at a command it has taken from the outbox."""
        self._control = threading.Thread(target=self._run, name="surefoot-drain", daemon=True)
        self._control.start()

    # ---- called by the owner ------------------------------------------------------------------------------------

    def add_staged(self, slot: int, sealed: StagedSave, layout_json: str | None) -> None:
        """Drains a slot that was sealed.

        What cannot be drained is freed with ok=False and a notice; nothing is raised.
        """
        with self._changed:
            try:
                work = SaveWork(sealed, self._layout(sealed.layout, layout_json), self._slot(slot))
            except (ProtocolError, Corrupt) as problem:
                self._outbox.append(RejectStaged(str(problem)))
                if isinstance(self._state.slots[slot], FreeSlotState):
                    self._outbox.append(FreeSlot(slot, sealed.save, False, 0, lost=True))
                self._changed.notify_all()
                return
            if isinstance(self._state.slots[slot], FreeSlotState):
                self._work[slot] = work
            self._apply(SlotStaged(slot, sealed, time.monotonic()))
        self._options.stage_hook("staged")

    def set_targets(
        self, targets: tuple[MemoryServerInstance, ...], holders: frozenset[MemoryServerInstance], replicas: int
    ) -> None:
        """Sets the holders that saves go to.

        The local one first, and every holder that is there.
        """
        self._apply(Retargeted(targets, holders, replicas, time.monotonic()))

    def drop_older_generations(self, epoch: int) -> None:
        """Gives up what older epochs staged, before trainers of `epoch` start.

        Saves that no holder takes any more would otherwise keep every slot from the new epoch's.
        """
        self._apply(GenerationStarted(epoch))

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
        self._apply(FlushClosed())
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
                self._writer(target).order(WriterCommand(slot, work, "write"))
            case CommitOn(slot, target):
                self._writer(target).order(WriterCommand(slot, self._work[slot], "commit"))
            case StopTransfer(slot, target):
                self._work[slot].stop(target)
            case FreeSlot():
                self._free(command)
            case CopyReport(save, copies):
                metrics.checkpoint_step.labels("memory").set(save.step)
                self._run_callback(lambda: self._watcher.on_saved(save, copies))
            case SaveAbandoned(save, target, cause, detail):
                metrics.fallbacks.labels("save_abandoned").inc()
                why = detail or cause
                text = f"{save} was not written to {target} ({why}); it has fewer copies until it is repaired"
                self._run_callback(lambda: self._watcher.on_notice("SaveUnderReplicated", text))
                if cause == "full":
                    self._run_callback(lambda: self._watcher.on_full(save))
            case RejectStaged(text):
                log.error("%s", text)
                self._run_callback(lambda: self._watcher.on_notice("SaveRejected", text))

    def _free(self, command: FreeSlot) -> None:
        work = self._work.get(command.slot)
        if work is not None:
            work.release()
        self._options.stage_hook("freed")
        self._run_callback(lambda: self._watcher.on_freed(command.slot, command.save.step, command.ok))
        if command.lost:
            self._run_callback(lambda: self._watcher.on_lost(command.save))
        with self._changed:
            if work is not None and self._work.get(command.slot) is work:
                del self._work[command.slot]
            self._changed.notify_all()

    def _run_callback(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            metrics.fallbacks.labels("flush_callback_failed").inc()
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
        while len(self._layouts) > MAX_CACHED_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return known

    def _writer(self, target: MemoryServerInstance) -> TargetWriter:
        writer = self._writers.get(target)
        if writer is None:
            pace = TokenBucket() if target.node == self._options.node else self._options.pace
            paced, turn = (pace, self._options.stage_hook), self._options.turns.of(target)
            writer = TargetWriter(target, self._open, self._apply, self._arena.slots, paced, turn)
            self._writers[target] = writer
        return writer

    def _retire_writers(self) -> None:
        """Ends the threads of holders that are gone, once nothing of theirs is under way."""
        self._retired = [writer for writer in self._retired if not writer.join(0)]
        for target in [t for t in self._writers if t not in self._state.servers]:
            if self._state.is_running(target):
                continue
            writer = self._writers.pop(target)
            writer.end()
            self._retired.append(writer)
