"""Reads a plan's ranges in threads: requests them ahead, verifies them and places them in tensors.

Used by `reader`, with one `Fetch` per read. A thread reads from one source at a time into two buffers: while it verifies
and places the data of one, the source fills the other. Data that arrives damaged, or not at all, is read again from
another copy with `CopySelector.read_first_intact`.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from surefoot import metrics
from surefoot.errors import ChunkMissing, Corrupt, SurefootError
from surefoot.format.layouts import Stream, itemsize
from surefoot.geometry import Box
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, RankManifest
from surefoot.restore.copy_choice import CopySelector
from surefoot.restore.read_plan import RangeRead, Segment, WantedBox
from surefoot.tiers import SupportsPipelinedReads, Tier, tier

log = logging.getLogger(__name__)


# ---- placing ---------------------------------------------------------------------------------------------------------
# Copies verified blocks into the caller's strided memory, without torch. Elements are moved as integers of their size,
# so numpy need not support bfloat16 and float8. Memory that the host cannot write (a device's) is filled box by box
# through a buffer, so that a tensor is never completely in both places.

_ELEMENT_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class BoxReceiver(Protocol):
    """Writes a destination that the host cannot write, in parts. Several threads use it."""

    def part_buffer(self, size_bytes: int) -> memoryview:
        """Returns memory for one part, at most a chunk. It belongs to the calling thread until its next call."""
        ...

    def write_part(self, part: Box) -> None:
        """Copies the part that was written to `room` (row-major) to its place; then that memory may be reused."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one box of a tensor is to be written. The boxes of a tensor's destinations may overlap."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    memory: memoryview | BoxReceiver
    """Writable memory of the box, or a receiver that takes the box in parts."""
    strides: tuple[int, ...] | None = None
    """Strides of the memory in bytes; None: row-major without gaps."""

    def wanted_box(self) -> WantedBox:
        return WantedBox(self.name, self.dtype, self.shape, self.box, itemsize(self.dtype))


class Placer:
    """Copies segments into one destination; thread-safe, since segments of a plan never share an element."""

    def __init__(self, destination: Destination, memory: memoryview) -> None:
        self._element_dtype = _ELEMENT_DTYPES[itemsize(destination.dtype)]
        self._box, self._memory_strides = destination.box, destination.strides
        self._origin = destination.box.offsets
        self._memory = memory.cast("B") if memory.nbytes else memory

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        array: npt.NDArray[Any] = np.ndarray(
            self._box.lengths, self._element_dtype, self._memory, strides=self._memory_strides
        )
        return array.strides

    def place(self, segment: Segment, data: memoryview) -> None:
        """Copies the wanted part of a segment's blocks from its bytes."""
        if self._memory_strides is None and segment.wanted_part.lengths == segment.block_shape == self._box.lengths:
            self._memory[:] = data  # one block is the whole box: the general case below would cost more than the copy
            return
        blocks = np.frombuffer(data, self._element_dtype).reshape(segment.rows, segment.count, *segment.block_shape)
        source = blocks[(slice(None), slice(None), *_slices(segment.wanted_part))]
        strides = self._strides
        start = sum(
            (offset - origin) * stride
            for offset, origin, stride in zip(segment.location.offsets, self._origin, strides, strict=True)
        )
        # View the destination so that a dimension along which blocks are adjacent is split into (block, element).
        shape: list[int] = []
        steps: list[int] = []
        order: list[int] = []
        for d, (length, stride) in enumerate(zip(segment.wanted_part.lengths, strides, strict=True)):
            if d == segment.row_dimension or d == len(strides) - 1:
                order.append(0 if d == segment.row_dimension else 1)
                shape.append(segment.rows if d == segment.row_dimension else segment.count)
                steps.append(length * stride)
            order.append(2 + d)
            shape.append(length)
            steps.append(stride)
        if segment.row_dimension < 0:
            source, order = source[0], [axis - 1 for axis in order]
        if not strides:
            source = source[0]
            order = []
        target: npt.NDArray[Any] = np.ndarray(shape, self._element_dtype, self._memory, start, steps)
        target[...] = source.transpose(order)


class RelayPlacer:
    """Copies segments into one destination through its receiver's buffers."""

    def __init__(self, destination: Destination, receiver: BoxReceiver) -> None:
        self._destination, self._receiver = destination, receiver
        self._itemsize = itemsize(destination.dtype)

    def place(self, segment: Segment, data: memoryview) -> None:
        """Passes the wanted part of a segment's blocks to the receiver."""
        part = replace(self._destination, box=segment.location)
        buffer = self._receiver.part_buffer(segment.location.volume * self._itemsize)
        Placer(part, buffer).place(segment, data)
        self._receiver.write_part(segment.location.relative_to(self._destination.box.offsets))


AnyPlacer = Placer | RelayPlacer


def placer_of(destination: Destination) -> AnyPlacer:
    """Returns the placer for a destination's kind of memory."""
    memory = destination.memory
    return Placer(destination, memory) if isinstance(memory, memoryview) else RelayPlacer(destination, memory)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


# ---- fetch -----------------------------------------------------------------------------------------------------------

STAGING = -2
"""Source index of the staging memory of this machine."""

MAX_READS_AHEAD = 2
"""Reads that a thread has requested or is processing."""


class StagedStream(Protocol):
    """A save's stream in staging memory; `ipc.backend.ReusableSave` implements it."""

    @property
    def stream(self) -> memoryview: ...
    @property
    def layout_digest(self) -> str: ...
    @property
    def is_own(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SavedPart:
    """The layout and digests of a rank save, which threads share."""

    stream: Stream
    digest_table: bytes
    """Digests of the save's blocks, in stream order."""
    staged_stream: memoryview | None = None
    """The save's stream in this machine's staging memory; None: it is not there."""
    is_own: bool = True
    """Whether only this process writes to that staging memory."""


@dataclass(slots=True)
class _PendingRead:
    """A read that a thread has started."""

    read: RangeRead
    source: int
    tier: SupportsPipelinedReads | None
    """The connection on which the chunk was requested, counted in the source's window; None: read it synchronously."""
    buffer: memoryview

    @property
    def is_synchronous(self) -> bool:
        return self.tier is None and self.source != STAGING

    @property
    def data(self) -> memoryview:
        return self.buffer[: self.read.length]


class Fetch:
    """Executes the reads of one plan in threads."""

    def __init__(
        self,
        copies: CopySelector,
        parts: Mapping[int, SavedPart],
        placers: Sequence[AnyPlacer],
        reads: Sequence[RangeRead],
    ) -> None:
        self._copies, self._parts, self._placers = copies, parts, placers
        self._queues: dict[int, deque[RangeRead]] = defaultdict(deque)
        staged_reads = [r for r in reads if parts[r.rank].staged_stream is not None]
        if staged_reads:
            self._queues[STAGING].extend(staged_reads)
        tier_reads = [r for r in reads if parts[r.rank].staged_stream is None]
        for read, source in zip(
            tier_reads, copies.assign_sources([(r.rank, r.length) for r in tier_reads]), strict=True
        ):
            self._queues[source].append(read)
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self.bytes_by_kind: dict[str, int] = defaultdict(int)

    def run(self, max_threads: int) -> None:
        """Executes all reads, with one thread per source but at most `max_threads`; a single source gets two.

        Raises the first error of any thread; the content of the destinations is undefined then.
        """
        if not self._queues:
            return
        threads = min(max_threads, max(2, len(self._queues)))
        with ThreadPoolExecutor(threads, thread_name_prefix="surefoot-restore") as pool:
            for future in [pool.submit(self._work, number) for number in range(threads)]:
                future.result()

    def _work(self, number: int) -> None:
        """Executes reads in one thread until none is left."""
        finished = False
        # Mapped memory instead of bytearrays: a restore took 4 % less CPU with it.
        buffers = deque(memoryview(mmap.mmap(-1, MAX_CHUNK_BYTES)) for _ in range(MAX_READS_AHEAD))
        outstanding: deque[_PendingRead] = deque()
        try:
            while not self._failed.is_set():
                while buffers and (chosen := self._take_read(number, outstanding)) is not None:
                    outstanding.append(self._start_read(*chosen, buffers.popleft()))
                if not outstanding:
                    break
                pending_read = outstanding.popleft()
                self._finish_read(pending_read, outstanding)
                buffers.append(pending_read.buffer)
            finished = True
        finally:
            if not finished:  # the restore has failed, so the other threads must not wait any longer
                self._failed.set()
                self._copies.stop()

    def _take_read(self, number: int, outstanding: Sequence[_PendingRead]) -> tuple[RangeRead, int] | None:
        """Takes a read from the queue of this thread's source, or of the source with the most reads left.

        None: no read is left, the source accepts no further one now, or outstanding reads must be finished first.
        """
        if outstanding and outstanding[-1].is_synchronous:
            return None
        with self._lock:
            sources = sorted(self._queues)
            assigned = sources[number % len(sources)]
            source = assigned if self._queues[assigned] else max(sources, key=lambda s: len(self._queues[s]))
            if not self._queues[source] or (outstanding and not self._copies.windows.has_room(source)):
                return None
            return self._queues[source].popleft(), source

    def _start_read(self, read: RangeRead, source: int, buffer: memoryview) -> _PendingRead:
        """Requests a read from a source ahead of time if the source supports that and has room."""
        if source >= 0 and self._copies.windows.try_start_read(source):
            try:
                tier = self._copies.connections.connection_to(source)
                if isinstance(tier, SupportsPipelinedReads):
                    tier.request_chunk(self._copies.manifest_of(read.rank).save, read.chunk, read.offset, read.length)
                    return _PendingRead(read, source, tier, buffer)
            except SurefootError:
                self._copies.connections.close_connection(
                    source
                )  # `read_first_intact` tries it once more and reports the error
            self._copies.windows.finish_read(source)
        return _PendingRead(read, source, None, buffer)

    def _finish_read(self, pending_read: _PendingRead, outstanding: Sequence[_PendingRead]) -> None:
        """Receives, verifies and places a read; if its copy fails, reads another one."""
        read = pending_read.read
        received = self._receive_verified(pending_read)
        if received is None:
            self._abandon_outstanding(outstanding)
        data, source = received if received is not None else self._read_any_copy(read, pending_read)
        stream = self._parts[read.rank].stream
        for segment in read.segments:
            self._placers[segment.box_index].place(segment, _bytes_of(segment.blocks, read, stream, data))
        with self._lock:
            kind = "staging" if source == STAGING else self._copies.sources[source].kind
            self.bytes_by_kind[kind] += read.length

    def _receive_verified(self, pending_read: _PendingRead) -> tuple[memoryview, int] | None:
        """Receives and verifies the requested data, and returns it with its source; None if it is not intact."""
        manifest = self._copies.manifest_of(pending_read.read.rank)
        if pending_read.source == STAGING:
            return self._read_staged(pending_read, manifest)
        if pending_read.tier is None:
            return None
        try:
            pending_read.tier.receive_chunk(manifest.save, pending_read.read.chunk, pending_read.data)
        except ChunkMissing:
            self._copies.connections.close_connection(pending_read.source)
            return None
        except SurefootError:
            self._copies.connections.close_connection(pending_read.source)
            self._copies.pause_after_cut(pending_read.source)
            return None
        finally:
            self._copies.windows.finish_read(pending_read.source)
        try:
            self._verify(pending_read.read, manifest, pending_read.data, self._copies.sources[pending_read.source].name)
        except Corrupt:
            return None
        self._copies.record_answer(pending_read.source)
        return pending_read.data, pending_read.source

    def _abandon_outstanding(self, outstanding: Sequence[_PendingRead]) -> None:
        """Abandons this thread's outstanding requests, before it reads synchronously.

        A synchronous read may close the connection on which they would arrive, and waits for room at the source.
        """
        for pending in outstanding:
            if pending.tier is not None:
                pending.tier = None
                self._copies.connections.close_connection(pending.source)
                self._copies.windows.finish_read(pending.source)

    def _read_staged(self, pending_read: _PendingRead, manifest: RankManifest) -> tuple[memoryview, int] | None:
        """Reads from staging memory; None if it was overwritten. Memory that others write is copied before the check,
        so that the verified bytes are the ones that are placed."""
        read, part = pending_read.read, self._parts[pending_read.read.rank]
        assert part.staged_stream is not None, "only staged saves are in this queue"
        data = part.staged_stream[read.stream_start : read.stream_start + read.length]
        if not part.is_own:
            pending_read.data[:] = data
            data = pending_read.data
        try:
            self._verify(read, manifest, data, "staging memory")
        except Corrupt as problem:
            metrics.restore_fallbacks.labels("staging").inc()
            log.info("staging memory was overwritten; reading this chunk from another copy: %s", problem)
            return None
        return data, STAGING

    def _read_any_copy(self, read: RangeRead, pending_read: _PendingRead) -> tuple[memoryview, int]:
        """Reads from the assigned copy, then from the others; records damage, and waits for unanswered sources."""
        if pending_read.tier is not None:
            metrics.restore_fallbacks.labels("again").inc()
        read_verified = partial(self._read_verified, read)
        return self._copies.read_first_intact(
            read.rank, f"chunk {read.chunk}", read_verified, begin=pending_read.source
        )

    def _read_verified(self, read: RangeRead, tier: Tier, manifest: RankManifest) -> memoryview:
        data = memoryview(tier.read_chunk(manifest.save, read.chunk, read.offset, read.length))
        self._verify(read, manifest, data, tier.name)
        return data

    def _verify(self, read: RangeRead, manifest: RankManifest, data: memoryview, where: str) -> None:
        if data.nbytes != read.length:
            raise Corrupt(f"chunk {read.chunk} of {manifest.save} at {where} has {data.nbytes} of {read.length} bytes")
        stream, table = self._parts[read.rank].stream, self._parts[read.rank].digest_table
        for blocks in _merge_block_runs(read.segments):
            part = _bytes_of(blocks, read, stream, data)
            tier.check_blocks(part, manifest, stream, table, (where, read.chunk, blocks))


def _merge_block_runs(segments: Sequence[Segment]) -> Iterator[range]:
    """Merges the blocks of segments into as few runs as possible, in stream order, so that each is checked once."""
    run = range(0)
    for blocks in (segment.blocks for segment in segments):
        if run and blocks.start <= run.stop:
            run = range(run.start, max(run.stop, blocks.stop))
            continue
        if run:
            yield run
        run = blocks
    if run:
        yield run


def _bytes_of(blocks: range, read: RangeRead, stream: Stream, data: memoryview) -> memoryview:
    return data[stream.edges[blocks.start] - read.stream_start : stream.edges[blocks.stop] - read.stream_start]
