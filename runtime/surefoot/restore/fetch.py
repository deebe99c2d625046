"""Fetches a plan's ranges in threads: read ahead, verified, placed.

One `Fetch` a read; used by `reader`. A thread has one source's reads at a time and two buffers: while it verifies and
places what one holds, the source fills the other. What comes damaged, or not at all, is read again through
`Copies.first_good`, from another copy.
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
from surefoot.protocol.checkpoints.records import CHUNK_BYTES, RankManifest
from surefoot.restore.copy_choice import CopySelector
from surefoot.restore.read_plan import RangeRead, Segment, WantedBox
from surefoot.tiers import SupportsPipelinedReads, Tier, tier

log = logging.getLogger(__name__)


# ---- placing of what was read ----------------------------------------------------------------------------------------
# Copies verified blocks into the caller's strided memory, without torch. Elements are moved as whole numbers of their
# size, so bfloat16 and float8 need no support by numpy. Memory that the host does not write, a device's, gets them box
# by box through a buffer: never is all of a tensor in both places.

_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class BoxReceiver(Protocol):
    """Takes a destination that the host cannot write, in parts.

    Several threads use it.
    """

    def room(self, size_bytes: int) -> memoryview:
        """Gives memory for one part, of a chunk at most.

        It is this thread's until it asks again.
        """
        ...

    def take(self, part: Box) -> None:
        """Copies what was written to `room`, row-major, to its place.

        Returns when that memory may be written again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Describes where one box of a tensor goes.

    `memory` is writable, or takes the box in parts; `strides` are in bytes (None: row-major without gaps). A tensor may
    have several destinations, and their boxes may overlap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    memory: memoryview | BoxReceiver
    strides: tuple[int, ...] | None = None

    def wanted_box(self) -> WantedBox:
        return WantedBox(self.name, self.dtype, self.shape, self.box, itemsize(self.dtype))


class Placer:
    """Places segments into one destination from any thread.

    Segments of a plan never share elements of it, so no lock is needed.
    """

    def __init__(self, destination: Destination, memory: memoryview) -> None:
        self._carrier = _CARRIERS[itemsize(destination.dtype)]
        self._box, self._given = destination.box, destination.strides
        self._origin = destination.box.offsets
        self._memory = memory.cast("B") if memory.nbytes else memory

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        whole: npt.NDArray[Any] = np.ndarray(self._box.lengths, self._carrier, self._memory, strides=self._given)
        return whole.strides

    def place(self, segment: Segment, data: memoryview) -> None:
        """Copies the wanted part of a segment's blocks from its bytes."""
        if self._given is None and segment.take.lengths == segment.block == self._box.lengths:
            self._memory[:] = data  # one block is all of it: what follows would take longer than the copy
            return
        blocks = np.frombuffer(data, self._carrier).reshape(segment.rows, segment.count, *segment.block)
        taken = blocks[(slice(None), slice(None), *_slices(segment.take))]
        strides = self._strides
        start = sum(
            (o - begin) * stride
            for o, begin, stride in zip(segment.location.offsets, self._origin, strides, strict=True)
        )
        # over the same memory: a dimension along which blocks lie side by side becomes (block, element)
        shape: list[int] = []
        steps: list[int] = []
        order: list[int] = []
        for d, (length, stride) in enumerate(zip(segment.take.lengths, strides, strict=True)):
            if d == segment.count_per_row or d == len(strides) - 1:
                order.append(0 if d == segment.count_per_row else 1)
                shape.append(segment.rows if d == segment.count_per_row else segment.count)
                steps.append(length * stride)
            order.append(2 + d)
            shape.append(length)
            steps.append(stride)
        if segment.count_per_row < 0:
            taken, order = taken[0], [axis - 1 for axis in order]
        if not strides:
            taken = taken[0]
            order = []
        into: npt.NDArray[Any] = np.ndarray(shape, self._carrier, self._memory, start, steps)
        into[...] = taken.transpose(order)


class RelayPlacer:
    """Places segments into one destination by way of its receiver's buffers."""

    def __init__(self, destination: Destination, receiver: BoxReceiver) -> None:
        self._destination, self._receiver = destination, receiver
        self._itemsize = itemsize(destination.dtype)

    def place(self, segment: Segment, data: memoryview) -> None:
        """Hands the wanted part of a segment's blocks over."""
        part = replace(self._destination, box=segment.location)
        room = self._receiver.room(segment.location.volume * self._itemsize)
        Placer(part, room).place(segment, data)
        self._receiver.take(segment.location.relative_to(self._destination.box.offsets))


AnyPlacer = Placer | RelayPlacer


def placer_of(destination: Destination) -> AnyPlacer:
    """What places segments into a destination."""
    memory = destination.memory
    return Placer(destination, memory) if isinstance(memory, memoryview) else RelayPlacer(destination, memory)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


# ---- fetch -----------------------------------------------------------------------------------------------------------

STAGING = -2
"""The number of no source: the staging memory of this machine."""

AHEAD = 2
"""Reads that a thread has asked for or is working on."""


class StagedStream(Protocol):
    """Gives a stream in staging memory; `ipc.backend.ReusableSave` is one."""

    @property
    def stream(self) -> memoryview: ...
    @property
    def layout(self) -> str: ...
    @property
    def own(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Shares one rank save's layout and digests among threads."""

    stream: Stream
    table: bytes
    staged: memoryview | None = None
    """Its stream in this machine's staging memory, if it lies there."""
    own: bool = True
    """Nobody but this process' own saves ever writes there."""


@dataclass(slots=True)
class _PendingRead:
    read: RangeRead
    source: int
    tier: SupportsPipelinedReads | None
    """None where it is to be read in the ordinary way. Else it is counted in the source's window."""
    buffer: memoryview

    @property
    def is_ordinary(self) -> bool:
        return self.tier is None and self.source != STAGING

    @property
    def data(self) -> memoryview:
        return self.buffer[: self.read.length]


class Fetch:
    """Carries out the reads of one plan in threads."""

    def __init__(
        self,
        copies: CopySelector,
        parts: Mapping[int, SavedPart],
        placers: Sequence[AnyPlacer],
        reads: Sequence[RangeRead],
    ) -> None:
        self._copies, self._parts, self._placers = copies, parts, placers
        self._queues: dict[int, deque[RangeRead]] = defaultdict(deque)
        here = [r for r in reads if parts[r.rank].staged is not None]
        if here:
            self._queues[STAGING].extend(here)
        away = [r for r in reads if parts[r.rank].staged is None]
        for read, source in zip(away, copies.spread([(r.rank, r.length) for r in away]), strict=True):
            self._queues[source].append(read)
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self.by_kind: dict[str, int] = defaultdict(int)

    def run(self, most: int) -> None:
        """Reads everything, with a thread per source and at most `most`.

        Each thread reads ahead; one source alone gets two. Raises the first error of any thread; what was placed by
        then is undefined.
        """
        if not self._queues:
            return
        threads = min(most, max(2, len(self._queues)))
        with ThreadPoolExecutor(threads, thread_name_prefix="surefoot-restore") as pool:
            for future in [pool.submit(self._work, number) for number in range(threads)]:
                future.result()

    def _work(self, number: int) -> None:
        finished = False
        # mapped, not bytearrays: turn by turn with those a restore took 4 % less CPU
        buffers = deque(memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(AHEAD))
        under_way: deque[_PendingRead] = deque()
        try:
            while not self._failed.is_set():
                while buffers and (chosen := self._next(number, under_way)) is not None:
                    under_way.append(self._start_read(*chosen, buffers.popleft()))
                if not under_way:
                    break
                asked = under_way.popleft()
                self._finish(asked, under_way)
                buffers.append(asked.buffer)
            finished = True
        finally:
            if not finished:  # the others must not wait for what can no longer become whole
                self._failed.set()
                self._copies.stop()

    def _next(self, number: int, under_way: Sequence[_PendingRead]) -> tuple[RangeRead, int] | None:
        """A read of this thread's own source; when that has none left, of the one that has most.

        None also where the source takes no more at a time, or what is under way must be read before.
        """
        if under_way and under_way[-1].is_ordinary:
            return None
        with self._lock:
            sources = sorted(self._queues)
            mine = sources[number % len(sources)]
            source = mine if self._queues[mine] else max(sources, key=lambda s: len(self._queues[s]))
            if not self._queues[source] or (under_way and not self._copies.windows.has_room(source)):
                return None
            return self._queues[source].popleft(), source

    def _start_read(self, read: RangeRead, source: int, buffer: memoryview) -> _PendingRead:
        if source >= 0 and self._copies.windows.try_enter(source):
            try:
                tier = self._copies.connections.connection_to(source)
                if isinstance(tier, SupportsPipelinedReads):
                    tier.request_chunk(self._copies.manifest(read.rank).save, read.chunk, read.offset, read.length)
                    return _PendingRead(read, source, tier, buffer)
            except SurefootError:
                self._copies.connections.drop(source)  # `first_good` asks it once more, and says what is wrong
            self._copies.windows.leave(source)
        return _PendingRead(read, source, None, buffer)

    def _finish(self, asked: _PendingRead, under_way: Sequence[_PendingRead]) -> None:
        read = asked.read
        found = self._receive_verified(asked)
        if found is None:
            self._abandon(under_way)
        data, source = found if found is not None else self._read(read, asked)
        stream = self._parts[read.rank].stream
        for segment in read.segments:
            self._placers[segment.wanted].place(segment, _bytes_of(segment.blocks, read, stream, data))
        with self._lock:
            kind = "staging" if source == STAGING else self._copies.sources[source].kind
            self.by_kind[kind] += read.length

    def _receive_verified(self, asked: _PendingRead) -> tuple[memoryview, int] | None:
        """Takes and verifies what was asked for; None if it did not come whole."""
        manifest = self._copies.manifest(asked.read.rank)
        if asked.source == STAGING:
            return self._staged(asked, manifest)
        if asked.tier is None:
            return None
        try:
            asked.tier.receive_chunk(manifest.save, asked.read.chunk, asked.data)
        except ChunkMissing:
            self._copies.connections.drop(asked.source)
            return None
        except SurefootError:
            self._copies.connections.drop(asked.source)
            self._copies.pause_after_cut(asked.source)
            return None
        finally:
            self._copies.windows.leave(asked.source)
        try:
            self._check(asked.read, manifest, asked.data, self._copies.sources[asked.source].name)
        except Corrupt:
            return None
        self._copies.record_answer(asked.source)
        return asked.data, asked.source

    def _abandon(self, under_way: Sequence[_PendingRead]) -> None:
        """Gives up what this thread asked for: an ordinary read closes the connection that it would come by, and may
        wait for its turn at the source."""
        for pending in under_way:
            if pending.tier is not None:
                pending.tier = None
                self._copies.connections.drop(pending.source)
                self._copies.windows.leave(pending.source)

    def _staged(self, asked: _PendingRead, manifest: RankManifest) -> tuple[memoryview, int] | None:
        """Reads from staging memory, in a copy where others write too: what was verified must be what is placed."""
        read, part = asked.read, self._parts[asked.read.rank]
        assert part.staged is not None, "the queue has only such"
        data = part.staged[read.stream_start : read.stream_start + read.length]
        if not part.own:
            asked.data[:] = data
            data = asked.data
        try:
            self._check(read, manifest, data, "staging memory")
        except Corrupt as changed:
            metrics.restore_fallbacks.labels("staging").inc()
            log.info("%s: it was written to since; a holder is asked", changed)
            return None
        return data, STAGING

    def _read(self, read: RangeRead, asked: _PendingRead) -> tuple[memoryview, int]:
        """Reads from the assigned copy, then from every other; damage is noted, silence waited for."""
        if asked.tier is not None:
            metrics.restore_fallbacks.labels("again").inc()
        ordinary = partial(self._verified, read)
        return self._copies.first_good(read.rank, f"chunk {read.chunk}", ordinary, begin=asked.source)

    def _verified(self, read: RangeRead, tier: Tier, manifest: RankManifest) -> memoryview:
        data = memoryview(tier.read_chunk(manifest.save, read.chunk, read.offset, read.length))
        self._check(read, manifest, data, tier.name)
        return data

    def _check(self, read: RangeRead, manifest: RankManifest, data: memoryview, where: str) -> None:
        if data.nbytes != read.length:
            raise Corrupt(
                f"chunk {read.chunk} of {manifest.save} at {where} came with {data.nbytes} of {read.length} bytes"
            )
        stream, table = self._parts[read.rank].stream, self._parts[read.rank].table
        for blocks in _joined(read.segments):
            part = _bytes_of(blocks, read, stream, data)
            tier.check_blocks(part, manifest, stream, table, (where, read.chunk, blocks))


def _joined(segments: Sequence[Segment]) -> Iterator[range]:
    """Blocks of segments in the stream's order, as few runs as there are: each is checked once."""
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
