"""Executes the commands of `state_machine` for one arena, in threads.

The agent has one `Flusher` per arena, library mode one in the training process. One control thread executes commands
and calls the listener; one writer per target computes digests and sends. Besides the arena it needs memory only for the
digest table and the plain values of each slot, as chunks are sent directly from staging memory.
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
    apply_event,
)
from surefoot.format.layouts import DIGEST_BYTES, Stream, block_digests, read_layout
from surefoot.format.manifests import build_manifest
from surefoot.protocol.bounds import MAX_PART_BYTES
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.identities import Checkpoint, MemoryServerInstance, RankSave
from surefoot.tiers import SupportsChunkCopy, SupportsPipelinedWrites, Tier

log = logging.getLogger(__name__)


# ---- save work -------------------------------------------------------------------------------------------------------
# Memory, layout and digest table of one staged save, shared by all writers of a Flusher. The writer that reaches a
# chunk first computes its digests, then sends it while its bytes are still in the CPU cache. No writer waits for
# another writer's target.


class SaveWork:
    """A staged save: gives its writers the chunks, the digests and the manifest."""

    def __init__(self, staged: StagedSave, layout: Stream, memory: memoryview) -> None:
        if staged.values_bytes > MAX_PART_BYTES:  # every reader would reject it
            raise ProtocolError(
                f"{staged.save} has plain values of {staged.values_bytes} bytes, but a restore reads at most"
                f" {MAX_PART_BYTES}: keep large data in tensors, which are saved in chunks"
            )
        end = staged.stream_bytes + staged.values_bytes
        if staged.stream_bytes != layout.layout.stream_bytes or end > memory.nbytes:
            raise ProtocolError(
                f"{staged.save} is not written: {staged.stream_bytes} + {staged.values_bytes} bytes were staged into a"
                f" slot of {memory.nbytes}, with a layout of {layout.layout.stream_bytes}"
            )
        self.staged = staged
        self.layout = layout
        self.chunk_lengths = layout.layout.chunk_lengths()
        self.stream = memory[: staged.stream_bytes]
        self.values = bytes(memory[staged.stream_bytes : end])
        self.digest_table = b""
        self._manifest: RankManifest | None = None
        self._digests: dict[int, bytes] = {}
        self._claimed_chunks: set[int] = set()
        """Chunks whose digests a writer has computed or is computing."""
        self._digests_ended = threading.Event()
        self._stopped: set[MemoryServerInstance] = set()
        self._lock = threading.Condition()
        if not self.chunk_lengths:
            self._build_manifest()

    def compute_digests(self, index: int) -> None:
        """Computes a chunk's digests, unless another writer does or did; after the last chunk also the manifest."""
        with self._lock:
            if index in self._claimed_chunks:
                return
            self._claimed_chunks.add(index)
        try:
            digests = block_digests(self.stream, self.layout.edges, self.layout.blocks_of_chunk(index))
            with self._lock:
                self._digests[index] = digests
                self._lock.notify_all()
                all_digested = len(self._digests) == len(self.chunk_lengths)
            if all_digested:
                self._build_manifest()
        except BaseException:
            with self._lock:
                self._digests_ended.set()  # wakes the other writers: without a manifest they stop writing the save
                self._lock.notify_all()
            raise

    def wait_for_digests(self, index: int) -> bytes:
        """Waits for the digests of a chunk that a writer has begun; empty if they could not be computed."""
        with self._lock:
            self._lock.wait_for(lambda: index in self._digests or self._digests_ended.is_set())
            return self._digests.get(index, b"")

    def _build_manifest(self) -> None:
        self.digest_table = b"".join(self._digests[index] for index in range(len(self.chunk_lengths)))
        staged, tables = self.staged, (self.digest_table, self.values)
        self._manifest = build_manifest(
            staged.save, staged.world_size, staged.incarnation, self.layout, tables, saved_at=time.time()
        )
        self._digests_ended.set()

    def wait_for_manifest(self, target: MemoryServerInstance) -> RankManifest | None:
        """Waits for the manifest, which needs every chunk's digests; None if the transfer to `target` was stopped."""
        while not self._digests_ended.wait(0.1):
            if self.is_stopped(target):
                return None
        return self._manifest

    def chunk_view(self, index: int) -> memoryview:
        start = self.layout.layout.chunk_starts[index]
        return self.stream[start : start + self.chunk_lengths[index]]

    def start_transfer(self, target: MemoryServerInstance) -> None:
        with self._lock:
            self._stopped.discard(target)

    def stop_transfer(self, target: MemoryServerInstance) -> None:
        with self._lock:
            self._stopped.add(target)

    def is_stopped(self, target: MemoryServerInstance) -> bool:
        with self._lock:
            return target in self._stopped

    def release(self) -> None:
        """Releases the view of the arena's memory; called once no thread reads it."""
        self.stream.release()


# ---- unchanged chunks ------------------------------------------------------------------------------------------------
# Finds chunks that are equal to those of the previous save. Pure. A target copies such a chunk within itself, so almost
# nothing is sent for a model whose weights are mostly frozen (LoRA, embeddings). Equality is decided by the digests,
# which are computed anyway.

MAX_COPY_DEPTH = 16
"""Saves in a row that may copy chunks; then everything is sent, so that a bit flipped on a target does not persist."""


@dataclass(frozen=True, slots=True)
class WrittenSave:
    """A complete save on a target, from which unchanged chunks of the next one can be copied."""

    save: RankSave
    layout_digest: str
    """Digest of its layout record."""
    digest_table: bytes
    """Digests of its blocks, in stream command."""
    copy_depth: int = 0
    """Number of saves since the last one that was sent in full."""

    def has_equal_chunk(self, stream: Stream, index: int, digests: bytes) -> bool:
        """Whether chunk `index` has these block digests. Both saves have the same layout, `stream`."""
        blocks = stream.blocks_of_chunk(index)
        return self.digest_table[blocks.start * DIGEST_BYTES : blocks.stop * DIGEST_BYTES] == digests

    def has_equal_chunks(self, stream: Stream, indexes: Iterable[int], table: bytes) -> bool:
        """Whether several chunks have the block digests that `table`, of the other save, gives for them."""
        blocks = ((index, stream.blocks_of_chunk(index)) for index in indexes)
        return all(
            self.has_equal_chunk(stream, i, table[b.start * DIGEST_BYTES : b.stop * DIGEST_BYTES]) for i, b in blocks
        )


def choose_copy_base(written: WrittenSave | None, save: RankSave, layout: str) -> WrittenSave | None:
    """Returns `written` if chunks of `save` may be copied from it; None: send everything."""
    if written is None or written.save == save or written.save.rank != save.rank or written.layout_digest != layout:
        return None
    return written if written.copy_depth + 1 < MAX_COPY_DEPTH else None


def describe_written_save(base: WrittenSave | None, save: RankSave, layout: str, table: bytes) -> WrittenSave:
    """Describes a save after it was written, with chunks copied from `base` if there is one."""
    return WrittenSave(save, layout, table, 0 if base is None else base.copy_depth + 1)


# ---- target write locks ----------------------------------------------------------------------------------------------
# Let an agent's ranks write to a target one after another; shared by the flushers of one agent. Ranks that send to one
# server at once compete for its single thread and evict each other's chunks from the CPU cache: four of them needed 1.5
# times the CPU per gigabyte and took longer. First come, first served, so that no rank's next save overtakes another
# rank's current one.

POLL_SECONDS = 0.05
"""How soon a waiting writer notices that its transfer was stopped."""

Outcome = Literal["turn", "stopped", "unavailable"]


class TargetWriteLock:
    """A first-come-first-served lock for writing to one target, which also passes on that the target failed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: deque[object] = deque()
        self._failures = 0

    @contextmanager
    def acquire(self, is_stopped: Callable[[], bool]) -> Iterator[Outcome]:
        """Waits for the lock and keeps it for the block.

        Yields `unavailable` as soon as the target fails for a writer ahead: otherwise each waiting writer would run into
        the same timeout in turn and keep its slot occupied until then.
        """
        outcome, ticket = self._wait(is_stopped)
        try:
            yield outcome
        finally:
            with self._changed:
                self._tickets.remove(ticket)
                self._changed.notify_all()

    def report_unavailable(self) -> None:
        """Lets every waiting writer give way, because the target does not answer."""
        with self._changed:
            self._failures += 1
            self._changed.notify_all()

    def _wait(self, is_stopped: Callable[[], bool]) -> tuple[Outcome, object]:
        ticket = object()
        with self._changed:
            self._tickets.append(ticket)
            failures = self._failures
            while True:
                if is_stopped():
                    return "stopped", ticket
                if self._failures != failures:
                    return "unavailable", ticket
                if self._tickets[0] is ticket:
                    return "turn", ticket
                self._changed.wait(POLL_SECONDS)


class TargetWriteLocks:
    """Keeps a write lock per target for as long as it is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks_by_target: WeakValueDictionary[MemoryServerInstance, TargetWriteLock] = WeakValueDictionary()

    def lock_of(self, target: MemoryServerInstance) -> TargetWriteLock:
        """Returns the lock that all writers to `target` share."""
        with self._lock:
            lock = self._locks_by_target.get(target)
            if lock is None:
                lock = self._locks_by_target[target] = TargetWriteLock()
            return lock


# ---- target writer ---------------------------------------------------------------------------------------------------
# Writes saves to one target in a thread that owns the connection. Each command is answered exactly once. Started and
# joined by `Flusher`. Every error of a tier becomes an answer, so that none reaches the trainer.

Answer = SaveWritten | Acknowledged | TransferFenced | TargetFailed | TransferStopped
StageHook = Callable[[str], None]
"""Called at each stage of a save: staged, chunk, written, committed, freed. Tests kill the process in it."""


@dataclass(frozen=True, slots=True)
class WriterCommand:
    """Orders a writer to write every part of a slot's save, or to commit it."""

    slot: int
    work: SaveWork
    verb: Literal["write", "commit"]


class TargetWriter:
    """Writes saves to one target over one connection, in one thread."""

    def __init__(
        self,
        target: MemoryServerInstance,
        open_tier: Callable[[MemoryServerInstance], Tier],
        answer: Callable[[Answer], None],
        slots: int,
        pacing: tuple[TokenBucket, StageHook],
        lock: TargetWriteLock,
    ) -> None:
        self.target = target
        self._tier_label = "memory" if target.run_id else "persistent"  # library mode flushes to the persistent tier
        self._open = open_tier
        self._answer = answer
        self._pace, self._stage_hook = pacing
        self._write_lock = lock
        self._commands: queue.Queue[WriterCommand | None] = queue.Queue(
            maxsize=slots + 1
        )  # one command per slot, and the end
        self._tier: Tier | None = None
        self._written: WrittenSave | None = None
        """The last save that the target acknowledged."""
        self._logged_unsupported = False
        self._failures = ("", 0)
        """The last error, and how often it occurred since a save was acknowledged."""
        self._thread = threading.Thread(target=self._run, name=f"surefoot-writer-{target.node}", daemon=True)
        self._thread.start()

    def queue_command(self, command: WriterCommand) -> None:
        """Queues a command; each is answered exactly once."""
        self._commands.put_nowait(command)

    def stop(self) -> None:
        """Ends the thread after the commands queued so far."""
        self._commands.put_nowait(None)

    def join(self, wait_seconds: float) -> bool:
        """Waits for the thread; True once it has ended."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            start = time.monotonic()
            answer = self._execute_in_turn(command)
            if isinstance(answer, SaveWritten | Acknowledged):
                phase = "replicate" if command.verb == "write" else "commit"
                metrics.checkpoint_seconds.labels(self._tier_label, phase).observe(time.monotonic() - start)
            del command  # it refers to the slot's memory, which must not stay referenced while this thread waits
            self._answer(answer)
        self._disconnect()

    def _execute_in_turn(self, command: WriterCommand) -> Answer:
        with self._write_lock.acquire(lambda: command.work.is_stopped(self.target)) as outcome:
            if outcome == "turn":
                answer = self._execute(command)
                if isinstance(answer, TargetFailed) and answer.cause == "unavailable":
                    self._write_lock.report_unavailable()
                return answer
            if outcome == "stopped":
                return TransferStopped(command.slot, self.target)
            silent = TierUnavailable(f"{self.target} did not answer another rank of this worker")
            return self._report_failure(command, "unavailable", silent)

    def _execute(self, command: WriterCommand) -> Answer:
        try:
            return self._write(command) if command.verb == "write" else self._commit(command)
        except Fenced as refusal:
            log.info(
                "%s rejected a save because it is fenced for a newer generation: %s",
                self.target,
                refusal,
                extra=self._log_fields(command),
            )
            metrics.checkpoint_failures.labels(self._tier_label, "fenced").inc()
            return TransferFenced(command.slot, self.target)
        except SaveExists as conflict:
            log.error("%s", conflict, extra=self._log_fields(command))
            metrics.checkpoint_failures.labels(self._tier_label, "exists").inc()
            return TransferFenced(command.slot, self.target)
        except ChunkMissing as missing:
            return self._report_failure(command, "missing", missing)
        except TierFull as full:
            self._disconnect()  # an answer may still be on its way, and would be taken for that of the next request
            return self._report_failure(command, "full", full)
        except SurefootError as problem:
            self._disconnect()
            return self._report_failure(command, "unavailable", problem)
        except Exception as unexpected:  # a thread that died silently would keep its slots occupied for ever
            log.exception("unexpected error while writing to %s; the transfer will be retried", self.target)
            self._disconnect()
            return self._report_failure(command, "unavailable", unexpected)

    def _log_fields(self, command: WriterCommand) -> dict[str, object]:
        save = command.work.staged.save
        return {"memory_server": str(self.target), "rank": save.rank, "generation": save.generation}

    def _report_failure(
        self, command: WriterCommand, cause: Literal["unavailable", "full", "missing"], error: Exception
    ) -> TargetFailed:
        self._written = None  # the target's content is uncertain: the next attempt sends everything
        save = command.work.staged.save
        text = str(error)
        self._failures = (text, self._failures[1] + 1 if self._failures[0] == text else 1)
        if self._failures[1].bit_count() == 1:  # log at 1, 2, 4, 8, …: an outage means hundreds of attempts
            repeats = f" ({self._failures[1]} times)" if self._failures[1] > 1 else ""
            log.warning(
                "%s of %s on %s failed%s: %s",
                command.verb,
                save,
                self.target,
                repeats,
                error,
                extra=self._log_fields(command),
            )
        metrics.checkpoint_failures.labels(self._tier_label, cause).inc()
        return TargetFailed(command.slot, self.target, cause, time.monotonic(), random.random(), text)

    def _write(self, command: WriterCommand) -> Answer:
        work, save = command.work, command.work.staged.save
        tier = self._connect()
        # Written with every save: if the record were damaged, every later save would be unreadable too.
        tier.put_layout(work.layout.digest, work.layout.text)
        pipelined_tier = tier if isinstance(tier, SupportsPipelinedWrites) else None
        put = tier.put_chunk if pipelined_tier is None else pipelined_tier.send_chunk
        base, sent = self._copy_base(work, tier), 0
        for index, length in enumerate(work.chunk_lengths):
            if work.is_stopped(self.target):
                self._disconnect()  # answers may still be on their way
                return TransferStopped(command.slot, self.target)
            work.compute_digests(index)
            try:
                if base is not None and self._try_copy_chunk(tier, base, work, index):
                    continue
            except CopyUnsupported as refusal:
                base = None
                self._log_copy_unsupported(refusal)
            if not self._pace.wait_for(length):
                self._disconnect()
                return TransferStopped(command.slot, self.target)
            put(save, index, work.chunk_view(index))
            sent += length
            self._stage_hook("chunk")
        # The last parts need every chunk's digests, and are written only once all chunks are stored.
        if pipelined_tier is not None:
            pipelined_tier.wait_stored()
        manifest = work.wait_for_manifest(self.target)
        if manifest is None:
            return TransferStopped(command.slot, self.target)
        tier.put_digests(save, work.digest_table)
        tier.put_values(save, work.values)
        metrics.checkpoint_bytes.labels(self._tier_label).inc(sent)
        metrics.unchanged_bytes.labels(self._tier_label).inc(work.staged.stream_bytes - sent)
        self._stage_hook("written")
        return SaveWritten(command.slot, self.target)

    def _commit(self, command: WriterCommand) -> Answer:
        work = command.work
        manifest = work.wait_for_manifest(self.target)
        if manifest is None or work.is_stopped(self.target):
            return TransferStopped(command.slot, self.target)
        tier = self._connect()
        tier.commit(manifest, work.staged.save.generation, work.chunk_lengths)
        base = self._copy_base(work, tier)
        self._written = describe_written_save(base, work.staged.save, work.layout.digest, work.digest_table)
        self._failures = ("", 0)
        self._stage_hook("committed")
        return Acknowledged(command.slot, self.target)

    def _copy_base(self, work: SaveWork, tier: Tier) -> WrittenSave | None:
        """The save from which the target can copy unchanged chunks; None: send everything."""
        if not isinstance(tier, SupportsChunkCopy):
            return None
        return choose_copy_base(self._written, work.staged.save, work.layout.digest)

    def _try_copy_chunk(self, tier: Tier, base: WrittenSave, work: SaveWork, index: int) -> bool:
        """Has the target copy an unchanged chunk from `base`; False if the chunk must be sent."""
        if not isinstance(tier, SupportsChunkCopy) or not base.has_equal_chunk(
            work.layout, index, work.wait_for_digests(index)
        ):
            return False
        return tier.copy_chunk(base.save, work.staged.save, index)

    def _log_copy_unsupported(self, refusal: CopyUnsupported) -> None:
        metrics.fallbacks.labels("copy_denied").inc()
        if not self._logged_unsupported:
            log.warning("%s cannot copy unchanged chunks, so they are sent as well: %s", self.target, refusal)
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
"""Layout records that are cached by digest; a program uses one or two in its life."""


@dataclass(frozen=True, slots=True)
class FlushArena:
    """The staging memory of one trainer, mapped by the owner of the `Flusher` and unmapped after its `close`."""

    memory: memoryview
    slot_count: int
    """Number of slots."""
    slot_bytes: int
    """Size of each slot."""


@dataclass(frozen=True, slots=True)
class FlushListener:
    """Callbacks about slots and saves, called one at a time from the control thread. They must return at once."""

    on_slot_freed: Callable[[int, int, bool], None]
    """(slot, step, ok): the trainer may write to the slot again; ok: the save has a copy."""
    on_copied: Callable[[RankSave, int], None]
    """(save, copies): called each time one more target has the save."""
    on_notice: Callable[[str, str], None]
    """(reason, text): an event to publish."""
    on_save_lost: Callable[[RankSave], None] = lambda _: None
    """(save): its slot is freed, and no target was ever asked to commit the save, so no copy exists."""
    on_target_full: Callable[[RankSave], None] = lambda _: None
    """(save): a target has no space for the save."""


def no_stage_hook(stage: str) -> None:
    """Does nothing; the default stage hook."""


@dataclass(frozen=True, slots=True)
class FlushOptions:
    """Settings of a `Flusher`."""

    limits: RetryLimits = field(default_factory=RetryLimits)
    stage_hook: StageHook = no_stage_hook
    rate_limit: TokenBucket = field(default_factory=TokenBucket)
    """Bandwidth limit of copies to other nodes, shared by all flushers of the worker."""
    node: str = ""
    """Name of this worker's node; copies to its own memory server are not limited."""
    write_locks: TargetWriteLocks = field(default_factory=TargetWriteLocks)
    """Write locks of the targets, shared by the flushers of one agent."""


class Flusher:
    """Flushes the saves of one arena to their targets until closed."""

    def __init__(
        self,
        arena: FlushArena,
        incarnation: str,
        open_tier: Callable[[MemoryServerInstance], Tier],
        listener: FlushListener,
        options: FlushOptions | None = None,
    ) -> None:
        self._arena = arena
        self._open = open_tier
        self._listener = listener
        self._options = options or FlushOptions()
        slots = tuple(FreeSlotState() for _ in range(arena.slot_count))
        self._state = FlushState(slots, incarnation, limits=self._options.limits)
        self._changed = threading.Condition()
        self._outbox: deque[Command] = deque()  # bounded by slots x targets: every command waits for its answer
        self._work: dict[int, SaveWork] = {}
        self._layouts: dict[str, Stream] = {}
        self._writers: dict[MemoryServerInstance, TargetWriter] = {}
        self._ending_writers: list[TargetWriter] = []
        self._closing = False
        self._executing = False
        """Whether the control thread is executing a command that it took from the outbox."""
        self._control = threading.Thread(target=self._run, name="surefoot-flush", daemon=True)
        self._control.start()

    # ---- called by the owner ------------------------------------------------------------------------------------

    def add_staged(self, slot: int, staged: StagedSave, layout_json: str | None) -> None:
        """Starts flushing a staged slot.

        A save that cannot be flushed is reported with `on_notice`, and its slot is freed with ok=False; nothing is raised.

        Args:
            slot: Index of the slot.
            staged: What the slot contains.
            layout_json: The layout record; None if it was passed with an earlier save.
        """
        with self._changed:
            try:
                work = SaveWork(staged, self._layout_of(staged.layout, layout_json), self._slot_memory(slot))
            except (ProtocolError, Corrupt) as problem:
                self._outbox.append(RejectStaged(str(problem)))
                if isinstance(self._state.slots[slot], FreeSlotState):
                    self._outbox.append(FreeSlot(slot, staged.save, False, 0, lost=True))
                self._changed.notify_all()
                return
            if isinstance(self._state.slots[slot], FreeSlotState):
                self._work[slot] = work
            self._apply(SlotStaged(slot, staged, time.monotonic()))
        self._options.stage_hook("staged")

    def set_targets(
        self, targets: tuple[MemoryServerInstance, ...], servers: frozenset[MemoryServerInstance], replicas: int
    ) -> None:
        """Sets the memory servers that saves are sent to (the local one first), and all whose copies count."""
        self._apply(Retargeted(targets, servers, replicas, time.monotonic()))

    def drop_older_generations(self, generation: int) -> None:
        """Abandons saves of older generations before trainers of `generation` start.

        Memory servers reject those saves, so they would only occupy the slots that the new trainers need.
        """
        self._apply(GenerationStarted(generation))

    def pending_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Returns the checkpoints that are staged here and not yet on their memory servers."""
        with self._changed:
            return self._state.pending_checkpoints()

    def wait_until_idle(self, wait_seconds: float) -> bool:
        """Waits until every slot is free; returns whether that is so and all callbacks were called."""
        with self._changed:
            return self._changed.wait_for(self._idle, wait_seconds)

    def close(self, wait_seconds: float = 5.0) -> bool:
        """Abandons unwritten saves and joins every thread; returns whether all ended in time."""
        self._apply(FlushClosed())
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + wait_seconds
        self._control.join(max(0.0, deadline - time.monotonic()))
        writers = [*self._writers.values(), *self._ending_writers]
        ended = [writer.join(max(0.0, deadline - time.monotonic())) for writer in writers]
        return all(ended) and not self._control.is_alive()

    def _idle(self) -> bool:
        """Whether no save is in progress and every result is reported, also those of rejected saves."""
        return not self._state.is_busy() and not self._work and not self._outbox and not self._executing

    # ---- events and commands ------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        with self._changed:
            self._state, commands = apply_event(self._state, event)
            self._outbox += commands
            self._changed.notify_all()

    def _run(self) -> None:
        while (command := self._next_command()) is not None:
            self._execute(command)
            with self._changed:
                self._executing = False
                self._end_removed_writers()
                self._changed.notify_all()
        for writer in self._writers.values():
            writer.stop()

    def _next_command(self) -> Command | None:
        """Waits for the next command, applying due ticks; None once closed and idle."""
        with self._changed:
            while not self._outbox:
                if self._closing and not self._state.is_busy():
                    return None
                tick_time, now = self._state.next_tick(), time.monotonic()
                if tick_time is not None and tick_time <= now:
                    self._state, commands = apply_event(self._state, Tick(now))
                    self._outbox += commands
                    if commands:
                        continue
                self._changed.wait(None if tick_time is None else max(0.02, tick_time - now))
            self._executing = True
            return self._outbox.popleft()

    def _execute(self, command: Command) -> None:
        match command:
            case WriteTo(slot, target):
                work = self._work[slot]
                work.start_transfer(target)
                self._writer_to(target).queue_command(WriterCommand(slot, work, "write"))
            case CommitOn(slot, target):
                self._writer_to(target).queue_command(WriterCommand(slot, self._work[slot], "commit"))
            case StopTransfer(slot, target):
                self._work[slot].stop_transfer(target)
            case FreeSlot():
                self._free_slot(command)
            case CopyReport(save, copies):
                metrics.checkpoint_step.labels("memory").set(save.step)
                self._run_callback(lambda: self._listener.on_copied(save, copies))
            case SaveAbandoned(save, target, cause, detail):
                metrics.fallbacks.labels("save_abandoned").inc()
                reason = detail or cause
                text = f"{save} was not written to {target} ({reason}); it has fewer copies until it is repaired"
                self._run_callback(lambda: self._listener.on_notice("SaveUnderReplicated", text))
                if cause == "full":
                    self._run_callback(lambda: self._listener.on_target_full(save))
            case RejectStaged(text):
                log.error("%s", text)
                self._run_callback(lambda: self._listener.on_notice("SaveRejected", text))

    def _free_slot(self, command: FreeSlot) -> None:
        work = self._work.get(command.slot)
        if work is not None:
            work.release()
        self._options.stage_hook("freed")
        self._run_callback(lambda: self._listener.on_slot_freed(command.slot, command.save.step, command.ok))
        if command.lost:
            self._run_callback(lambda: self._listener.on_save_lost(command.save))
        with self._changed:
            if work is not None and self._work.get(command.slot) is work:
                del self._work[command.slot]
            self._changed.notify_all()

    def _run_callback(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            metrics.fallbacks.labels("flush_callback_failed").inc()
            log.exception("a callback of the flusher failed; flushing continues")

    # ---- slots, layouts and writers -----------------------------------------------------------------------------

    def _slot_memory(self, slot: int) -> memoryview:
        start = slot * self._arena.slot_bytes
        return self._arena.memory[start : start + self._arena.slot_bytes]

    def _layout_of(self, digest: str, text: str | None) -> Stream:
        stream = self._layouts.pop(digest, None)
        if stream is None:
            if text is None:
                raise ProtocolError(
                    f"layout {digest} was never sent to this flusher, so its save cannot be described and is not written"
                )
            stream = read_layout(digest, text)
        self._layouts[digest] = stream  # newest last
        while len(self._layouts) > MAX_CACHED_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return stream

    def _writer_to(self, target: MemoryServerInstance) -> TargetWriter:
        writer = self._writers.get(target)
        if writer is None:
            pace = TokenBucket() if target.node == self._options.node else self._options.rate_limit
            pacing, lock = (pace, self._options.stage_hook), self._options.write_locks.lock_of(target)
            writer = TargetWriter(target, self._open, self._apply, self._arena.slot_count, pacing, lock)
            self._writers[target] = writer
        return writer

    def _end_removed_writers(self) -> None:
        """Ends the writers of memory servers that were removed, once no command to them is unanswered."""
        self._ending_writers = [writer for writer in self._ending_writers if not writer.join(0)]
        for target in [t for t in self._writers if t not in self._state.servers]:
            if self._state.has_running_transfer(target):
                continue
            writer = self._writers.pop(target)
            writer.stop()
            self._ending_writers.append(writer)
