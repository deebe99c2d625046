"""Groups blocks into segments and segments into ranged reads.

Pure. Cut where chunks end, joined where they nearly touch. Made by `read_plan`; `fetch` reads and `placer` places them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from surefoot.geometry import Box
from surefoot.protocol.checkpoints.records import Layout


@dataclass(frozen=True, slots=True)
class Segment:
    """Describes `rows` × `count` blocks of equal shape, and what is wanted.

    The `count` blocks of a row follow each other along the last dimension. `take` is the wanted part of one block, in
    the block's own coordinates; with more than one block all of the last dimension is wanted. `place` is where it all
    goes, in the tensor's coordinates. Rows follow each other in the stream, and along dimension `along` of the tensor:
    one copy moves them all.
    """

    first: int
    """Index of the first block in the rank save's digest table."""
    count: int
    start: int
    """Where the first block begins in the stream."""
    block: tuple[int, ...]
    take: Box
    place: Box
    wanted: int
    """Index of the Wanted it belongs to."""
    rows: int = 1
    along: int = -1

    @property
    def blocks(self) -> range:
        """Their numbers in the rank save's digest table."""
        return range(self.first, self.first + self.count * self.rows)


@dataclass(frozen=True, slots=True)
class RangeRead:
    """Reads `length` bytes from `offset` of one chunk of a rank save.

    `stream_start` is their offset in the stream.
    """

    rank: int
    chunk: int
    offset: int
    length: int
    stream_start: int
    segments: tuple[Segment, ...]


def ranges_of(
    rank: int, segments: Iterable[Segment], layout: Layout, itemsizes: Sequence[int], gap_bytes: int
) -> Iterator[RangeRead]:
    """Cuts segments at chunks, sorts them and joins near ones to reads."""
    starts = layout.chunk_starts
    cut = [part for s in segments for part in _cut_at_chunks(s, starts, itemsizes[s.wanted])]
    cut.sort(key=lambda s: (s.start, s.wanted))
    group: list[Segment] = []
    chunk, stop = -1, 0
    for segment in cut:
        at = bisect_right(starts, segment.start) - 1
        if group and (at != chunk or segment.start > stop + gap_bytes):
            yield _range(rank, chunk, starts[chunk], stop, group)
            group = []
        if not group:
            chunk, stop = at, 0
        group.append(segment)
        stop = max(stop, segment.start + _bytes(segment, itemsizes[segment.wanted]))
    if group:
        yield _range(rank, chunk, starts[chunk], stop, group)


def _range(rank: int, chunk: int, chunk_start: int, stop: int, group: Sequence[Segment]) -> RangeRead:
    begin = group[0].start
    return RangeRead(rank, chunk, begin - chunk_start, stop - begin, begin, tuple(group))


def _bytes(segment: Segment, itemsize: int) -> int:
    return segment.count * segment.rows * prod(segment.block) * itemsize


def _cut_at_chunks(segment: Segment, starts: Sequence[int], itemsize: int) -> Iterator[Segment]:
    """No block straddles a chunk, so a segment is cut between blocks: after whole rows, and within one."""
    size = prod(segment.block) * itemsize
    while segment.count * segment.rows > 1:
        chunk = bisect_right(starts, segment.start)
        if chunk == len(starts) or segment.start + segment.count * segment.rows * size <= starts[chunk]:
            break
        room = (starts[chunk] - segment.start) // size
        rows = room // segment.count
        if rows:
            yield _rows_of(segment, 0, rows, size)
            segment = _rows_of(segment, rows, segment.rows - rows, size)
            continue
        row = _rows_of(segment, 0, 1, size)
        yield _part(row, 0, room, size)
        rest = _part(row, room, row.count - room, size)
        if segment.rows == 1:
            segment = rest
            continue
        yield from _cut_at_chunks(rest, starts, itemsize)
        segment = _rows_of(segment, 1, segment.rows - 1, size)
    yield segment


def _rows_of(segment: Segment, skip: int, rows: int, size: int) -> Segment:
    """`rows` of its rows, behind the first `skip`."""
    if segment.rows == rows:
        return segment
    d, height = segment.along, segment.take.lengths[segment.along]
    offsets, lengths = list(segment.place.offsets), list(segment.place.lengths)
    offsets[d] += skip * height
    lengths[d] = rows * height
    blocks = skip * segment.count
    return Segment(
        segment.first + blocks,
        segment.count,
        segment.start + blocks * size,
        segment.block,
        segment.take,
        Box(tuple(offsets), tuple(lengths)),
        segment.wanted,
        rows,
        d if rows > 1 else -1,
    )


def _part(segment: Segment, skip: int, count: int, size: int) -> Segment:
    """`count` blocks of its one row, behind the first `skip`."""
    width = segment.take.lengths[-1]
    place = segment.place
    return Segment(
        segment.first + skip,
        count,
        segment.start + skip * size,
        segment.block,
        segment.take,
        Box((*place.offsets[:-1], place.offsets[-1] + skip * width), (*place.lengths[:-1], count * width)),
        segment.wanted,
    )
