"""Reads one checkpoint into memory, every byte verified, at any world size. One reader a rank and restore.

`values` and `read` raise Unreadable only after every copy answered and failed; a silent tier is waited for. `heal`
afterwards rewrites what was found damaged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from surefoot import metrics
from surefoot.drain import verified
from surefoot.errors import Corrupt
from surefoot.format.layouts import Stream
from surefoot.protocol.identities import Checkpoint
from surefoot.protocol.records import RankManifest
from surefoot.restore.catalogue import Catalogue
from surefoot.restore.copies import Copies
from surefoot.restore.heal import heal
from surefoot.restore.place import Destination, Placer
from surefoot.restore.plan import RangeRead, ReadPlan, Segment, plan
from surefoot.tiers import Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`reader` is the rank that reads: readers balance over copies by it."""

    reader: int = 0
    threads: int = 4
    patience_seconds: float | None = None
    """How long to wait for tiers that do not answer; None waits until this process is killed (the operator decides)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a read took. `source`: memory, persistent or mixed."""

    wanted_bytes: int
    read_bytes: int
    by_kind: Mapping[str, int]
    seconds: float
    fallbacks: int

    @property
    def source(self) -> str:
        kinds = [kind for kind, size in self.by_kind.items() if size]
        return kinds[0] if len(kinds) == 1 else "mixed" if kinds else "none"


class CheckpointReader:
    """One checkpoint, open for reading. Closes its connections at the end of the `with`."""

    def __init__(self, checkpoint: Checkpoint, catalogue: Catalogue, options: ReadOptions | None = None) -> None:
        self._options = options or ReadOptions()
        self._copies = Copies(checkpoint, catalogue, self._options.reader, self._options.patience_seconds)
        self._streams: dict[int, Stream] | None = None
        self._tables: dict[int, bytes] = {}
        self._tables_lock = threading.Lock()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._copies.stop()
        self._copies.connections.close()

    @property
    def world(self) -> int:
        """Ranks of the world that saved it."""
        return self._copies.world

    def manifest(self, rank: int) -> RankManifest:
        return self._copies.manifest(rank)

    def streams(self) -> Mapping[int, Stream]:
        """Every rank's layout, read once; equal ones are one object."""
        if self._streams is None:
            known: dict[str, Stream] = {}
            found: dict[int, Stream] = {}
            for rank in range(self._copies.world):
                name = self._copies.manifest(rank).layout
                if name not in known:
                    known[name], _ = self._copies.first_good(rank, "layout", verified.stream_from)
                found[rank] = known[name]
            self._streams = found
        return self._streams

    def values(self, rank: int) -> bytes:
        """The blob of plain values of one rank."""
        values, number = self._copies.first_good(rank, "values", verified.values_from)
        metrics.restore_bytes.labels(self._copies.sources[number].kind).inc(len(values))
        return values

    def plan(self, destinations: Sequence[Destination]) -> ReadPlan:
        """What `read` would read. Raises StateMismatch where the checkpoint has not what is wanted."""
        return plan([d.wanted() for d in destinations], self.streams())

    def read(self, destinations: Sequence[Destination]) -> Restored:
        """Fills the destinations. Raises the first error of any thread; what was placed by then is undefined."""
        began = time.monotonic()
        planned = self.plan(destinations)
        self._copies.balance(planned.bytes_by_rank())
        work = _Reading(_interleaved(planned.ranges, self._copies.first_source), [Placer(d) for d in destinations])
        threads = max(1, min(self._options.threads, len(planned.ranges)))
        with ThreadPoolExecutor(threads, thread_name_prefix="surefoot-restore") as pool:
            for future in [pool.submit(self._drain_queue, work) for _ in range(threads)]:
                future.result()
        seconds = time.monotonic() - began
        for kind, size in work.by_kind.items():
            metrics.restore_bytes.labels(kind).inc(size)
        damaged = len(self._copies.damages())
        restored = Restored(planned.wanted_bytes, planned.read_bytes, dict(work.by_kind), seconds, damaged)
        metrics.restore_seconds.labels(restored.source).observe(seconds)
        return restored

    def heal(self, writer_epoch: int) -> list[str]:
        """Rewrites what was found damaged, from good copies; a sentence for each damage found. Never raises."""
        return heal(self._copies, self.streams, writer_epoch)

    def _drain_queue(self, work: _Reading) -> None:
        finished = False
        try:
            while not work.failed.is_set():
                try:
                    r = work.ranges.popleft()
                except IndexError:
                    break
                self._read_range(r, work)
            finished = True
        finally:
            if not finished:  # the others must not wait for what can no longer become whole
                work.failed.set()
                self._copies.stop()

    def _read_range(self, r: RangeRead, work: _Reading) -> None:
        stream, table = self.streams()[r.rank], self._table(r.rank)
        read = partial(_verified_range, r=r, stream=stream, table=table)
        data, number = self._copies.first_good(r.rank, f"chunk {r.chunk}", read)
        for segment in r.segments:
            work.placers[segment.wanted].place(segment, _bytes_of(segment, r, stream, data))
        with work.lock:
            work.by_kind[self._copies.sources[number].kind] += r.length

    def _table(self, rank: int) -> bytes:
        with self._tables_lock:
            if rank not in self._tables:
                self._tables[rank], _ = self._copies.first_good(rank, "digest table", verified.table_from)
            return self._tables[rank]


class _Reading:
    """What the threads of one read share; the queue is as long as the plan."""

    def __init__(self, ranges: Iterable[RangeRead], placers: Sequence[Placer]) -> None:
        self.ranges = deque(ranges)
        self.placers = placers
        self.by_kind: dict[str, int] = defaultdict(int)
        self.failed = threading.Event()
        self.lock = threading.Lock()


def _verified_range(tier: Tier, manifest: RankManifest, r: RangeRead, stream: Stream, table: bytes) -> memoryview:
    data = memoryview(tier.read_chunk(manifest.save, r.chunk, r.offset, r.length))
    if data.nbytes != r.length:
        raise Corrupt(f"chunk {r.chunk} of {manifest.save} at {tier.name} came with {data.nbytes} of {r.length} bytes")
    for segment in r.segments:
        blocks = range(segment.first, segment.first + segment.count)
        part = _bytes_of(segment, r, stream, data)
        verified.check_blocks(part, manifest, stream, table, (tier.name, r.chunk, blocks))
    return data


def _bytes_of(segment: Segment, r: RangeRead, stream: Stream, data: memoryview) -> memoryview:
    begin = segment.start - r.stream_start
    end = stream.edges[segment.first + segment.count] - r.stream_start
    return data[begin:end]


def _interleaved(ranges: Iterable[RangeRead], source: Callable[[int], int]) -> list[RangeRead]:
    """Turn by turn from each source, so that all of them are busy at once."""
    by_source: dict[int, list[RangeRead]] = defaultdict(list)
    for r in ranges:
        by_source[source(r.rank)].append(r)
    order = [(place / len(group), number, r) for number, group in by_source.items() for place, r in enumerate(group)]
    return [r for _, _, r in sorted(order, key=lambda entry: entry[:2])]
