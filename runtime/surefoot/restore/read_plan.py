"""Plans which byte ranges a rank reads and where they go.

Pure. Called by `checkpoint_layouts` with what the rank wants (boxes of tensors) and the layouts of the checkpoint's
ranks. The result names blocks, so that every byte used can be verified against its digest, and no block is read that
holds nothing wanted (apart from small gaps between two wanted ones, which are cheaper to read than to skip).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from surefoot.errors import StateMismatch
from surefoot.format.layouts import PlacedPiece, Stream
from surefoot.geometry import Box
from surefoot.geometry.box import box_of
from surefoot.geometry.tiling import BlockRun, Tiling
from surefoot.restore.segments import RangeRead as RangeRead
from surefoot.restore.segments import Segment as Segment
from surefoot.restore.segments import ranges_of

GAP_BYTES = 8 * 1024
"""Two wanted ranges of a chunk that lie this near are read as one: a request costs more than these bytes. Less than a
tile of a large tensor, or reads along another dimension than the saved one would take whole tiles for nothing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Describes one box of a tensor that the rank reads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    itemsize: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Lists all reads, in one pass through each rank save."""

    ranges: tuple[RangeRead, ...]
    wanted_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(r.length for r in self.ranges)


def plan(wanted: Sequence[Wanted], streams: Mapping[int, Stream], gap_bytes: int = GAP_BYTES) -> ReadPlan:
    """Plans the reads of the wanted boxes.

    Raises StateMismatch where the checkpoint does not have exactly what is wanted.
    """
    found: dict[int, list[Segment]] = defaultdict(list)
    homes = _homes(wanted, streams)
    for number, want in enumerate(wanted):
        covered = 0
        for rank, part in homes.get(want.name, ()):
            piece, box = part.piece, want.box
            whole = box.lengths == piece.lengths and box.offsets == piece.offsets and 0 not in box.lengths
            shared = box if whole else box.intersect(box_of(piece))
            if shared is not None:
                covered += shared.volume
                found[rank] += _segments(number, shared, part)
        if covered != want.box.volume:
            raise StateMismatch(
                f"tensor {want.name}: {covered} of {want.box.volume} elements of {want.box} are in the checkpoint"
            )
    ranges = [
        r
        for rank, segments in sorted(found.items())
        for r in ranges_of(rank, segments, streams[rank].layout, [w.itemsize for w in wanted], gap_bytes)
    ]
    return ReadPlan(tuple(ranges), sum(w.box.volume * w.itemsize for w in wanted))


def preference(
    copies: Mapping[int, Sequence[int]],
    local: frozenset[int],
    last: frozenset[int],
    sizes: Mapping[int, int],
    seed: int,
) -> dict[int, tuple[int, ...]]:
    """Orders each rank's copies: local first, others balanced, `last` at the end.

    `copies` maps rank to source numbers; `last` is the persistent tier. `seed` (the reader's rank) makes readers that
    balance alone begin at different sources.
    """
    load: dict[int, int] = defaultdict(int)
    order: dict[int, tuple[int, ...]] = {}
    numbers = sorted({source for sources in copies.values() for source in sources})
    turn = {source: (position - seed) % max(1, len(numbers)) for position, source in enumerate(numbers)}
    for rank in sorted(copies, key=lambda r: (-sizes.get(r, 0), r)):
        order[rank] = tuple(sorted(copies[rank], key=lambda s: (s in last, s not in local, load[s], turn[s])))
        if order[rank]:
            load[order[rank][0]] += sizes.get(rank, 0)
    return order


def spread(
    sizes: Sequence[tuple[int, int]], having: Mapping[int, Sequence[int]], last: frozenset[int]
) -> list[tuple[int, ...]]:
    """Orders the sources of each read, given as (rank, bytes).

    `having` is each rank's order of `preference`. Sources of the first one's tier share the reads; the one with the
    fewest bytes so far begins. A rank save with two copies is read from both, even if one is on this node: a Redis
    answers with one thread, and two are faster. A thread that is done with its source takes over reads of another.
    """
    load: dict[int, int] = defaultdict(int)
    found = []
    for rank, size in sizes:
        order = tuple(having.get(rank, ()))
        near = [s for s in order if (s in last) == (order[0] in last)]
        if near:
            begin = min(near, key=lambda s: load[s])
            load[begin] += size
            order = (begin, *(s for s in order if s != begin))
        found.append(order)
    return found


def _homes(wanted: Sequence[Wanted], streams: Mapping[int, Stream]) -> dict[str, list[tuple[int, PlacedPiece]]]:
    """Rank and piece, by name of the wanted tensors; refuses tensors of another shape or dtype by name."""
    wants = {w.name: w for w in wanted}
    homes: dict[str, list[tuple[int, PlacedPiece]]] = defaultdict(list)
    for rank, stream in sorted(streams.items()):
        for tensor in stream.layout.tensors:
            want = wants.get(tensor.name)
            if want is not None and (tensor.dtype, tensor.shape) != (want.dtype, want.shape):
                raise StateMismatch(
                    f"tensor {tensor.name} is {want.dtype} {list(want.shape)} in the program and"
                    f" {tensor.dtype} {list(tensor.shape)} in the checkpoint"
                )
        for part in stream.pieces:
            if part.tensor.name in wants:
                homes[part.tensor.name].append((rank, part))
    missing = sorted(set(wants) - {t.name for stream in streams.values() for t in stream.layout.tensors})
    if missing:
        raise StateMismatch(f"tensor {missing[0]} is not in the checkpoint ({len(missing)} such tensors)")
    return homes


def _segments(number: int, shared: Box, part: PlacedPiece) -> Iterator[Segment]:
    """The blocks of a piece that hold `shared`: those of its like, moved to where this piece lies."""
    piece = part.piece
    alike = shared.lengths == piece.lengths
    for like in _whole(part.tiling) if alike else _pattern(part.tiling, shared.relative_to(piece.offsets)):
        yield Segment(
            part.first_block + like.first,
            like.count,
            piece.stream_offset + like.start,
            like.block,
            like.take,
            _shifted(like.place, piece.offsets),
            number,
            like.rows,
            like.along,
        )


@lru_cache(maxsize=4096)
def _pattern(tiling: Tiling, inside: Box) -> tuple[Segment, ...]:
    """The segments of `inside`, as if its piece were all there is. A model has many tensors of one shape."""
    return tuple(segment for run in tiling.runs(inside) for segment in _segments_of(run, tiling, inside))


@lru_cache(maxsize=4096)
def _whole(tiling: Tiling) -> tuple[Segment, ...]:
    """The segments of all of a piece."""
    return _pattern(tiling, Box.whole(tiling.lengths))


def _segments_of(run: BlockRun, tiling: Tiling, inside: Box) -> Iterator[Segment]:
    """The blocks of a run, cut where a row of tiles ends, a block is clipped, or only part of one is wanted."""
    counts = tiling.tiles
    along = max((d for d, n in enumerate(counts[:-1]) if n > 1), default=-1)
    index, start = run.first, run.start
    while index < run.first + run.count:
        box = tiling.block_box(index)
        shared = box.intersect(inside)
        if shared is None:
            raise AssertionError(f"block {index} of a run holds nothing of {inside}")
        left = run.first + run.count - index
        count = min(_alike(box, inside, tiling), left)
        rows = min(_alike_rows(box, inside, tiling, along), left // count) if counts and count == counts[-1] else 1
        yield Segment(
            first=index,
            count=count,
            start=start,
            block=box.lengths,
            take=shared.relative_to(box.offsets),
            place=_widened(shared, count, rows, along),
            wanted=0,
            rows=rows,
            along=along if rows > 1 else -1,
        )
        index += count * rows
        start += count * rows * box.volume * tiling.itemsize


def _alike(box: Box, inside: Box, tiling: Tiling) -> int:
    """How many blocks from `box` on have its shape and are wanted to their full width."""
    if not box.lengths or box.lengths[-1] != tiling.tile[-1]:
        return 1
    width = tiling.tile[-1]
    if box.offsets[-1] < inside.offsets[-1]:
        return 1
    stop = min(inside.stops[-1], tiling.lengths[-1] // width * width)
    return max(1, (stop - box.offsets[-1]) // width)


def _alike_rows(box: Box, inside: Box, tiling: Tiling, along: int) -> int:
    """How many rows of tiles from `box` on, one beside the other along a dimension, are whole and wanted whole."""
    if along < 0 or box.lengths[along] != tiling.tile[along] or box.offsets[along] < inside.offsets[along]:
        return 1
    height = tiling.tile[along]
    stop = min(inside.stops[along], tiling.lengths[along] // height * height)
    return max(1, (stop - box.offsets[along]) // height)


def _widened(box: Box, count: int, rows: int, along: int) -> Box:
    if count == rows == 1:
        return box
    lengths = list(box.lengths)
    lengths[-1] *= count
    if rows > 1:
        lengths[along] *= rows
    return Box(box.offsets, tuple(lengths))


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    if not any(by):
        return box
    return Box(tuple(o + d for o, d in zip(box.offsets, by, strict=True)), box.lengths)
