"""Plans which byte ranges a rank reads and where they go.

Pure. `reader` passes the boxes of tensors that the rank wants and the layouts of the checkpoint's ranks. The plan consists
of whole blocks, so that every byte used can be verified against a digest. It includes only blocks with wanted elements,
apart from small gaps between two wanted blocks, which are cheaper to read than to skip.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from surefoot.errors import StateMismatch
from surefoot.format.layouts import PlacedPiece, Stream, digest
from surefoot.geometry import Box
from surefoot.geometry.box import BlockRun, Tiling, box_of
from surefoot.geometry.sharding import Grid
from surefoot.protocol.checkpoints.records import Layout, RankManifest

# ---- segments --------------------------------------------------------------------------------------------------------
# Groups blocks into segments, and segments into ranged reads. A read never crosses the end of a chunk; reads separated
# by a small gap are merged. `fetch` reads the ranges and places the segments in tensors.


@dataclass(frozen=True, slots=True)
class Segment:
    """A grid of `rows` × `count` blocks of equal shape, with the wanted part of each, that one copy can place.

    The `count` blocks of a row are adjacent along the tensor's last dimension. The rows are contiguous in the stream, and
    adjacent along one other dimension of the tensor (`count_per_row`). If a row has several blocks, the last dimension
    is wanted in full.
    """

    first_block: int
    """Index of the first block in the rank save's digest table."""
    count: int
    """Number of blocks in each row."""
    start: int
    """Byte offset of the first block in the stream."""
    block_shape: tuple[int, ...]
    """Shape of each block."""
    wanted_part: Box
    """The wanted part of a block, in the block's own coordinates."""
    location: Box
    """The destination of all wanted parts, in the tensor's coordinates."""
    box_index: int
    """Index of the `WantedBox` that it belongs to."""
    rows: int = 1
    """Number of rows."""
    row_dimension: int = -1
    """Dimension of the tensor along which the rows are adjacent; -1: there is one row."""

    @property
    def blocks(self) -> range:
        """Indexes of the blocks in the rank save's digest table."""
        return range(self.first_block, self.first_block + self.count * self.rows)


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A read of contiguous bytes within one chunk of a rank save."""

    rank: int
    """Rank that saved them."""
    chunk: int
    """Index of the chunk."""
    offset: int
    """Byte offset in the chunk."""
    length: int
    """Number of bytes."""
    stream_start: int
    """Byte offset in the stream."""
    segments: tuple[Segment, ...]
    """The segments to place from these bytes."""


def plan_rank_reads(
    rank: int, segments: Iterable[Segment], layout: Layout, itemsizes: Sequence[int], gap_bytes: int
) -> Iterator[RangeRead]:
    """Cuts segments at chunk boundaries, sorts them and merges near ones into reads."""
    starts = layout.chunk_starts
    cut_segments = [part for s in segments for part in _cut_at_chunks(s, starts, itemsizes[s.box_index])]
    cut_segments.sort(key=lambda s: (s.start, s.box_index))
    group: list[Segment] = []
    chunk, stop = -1, 0
    for segment in cut_segments:
        segment_chunk = bisect_right(starts, segment.start) - 1
        if group and (segment_chunk != chunk or segment.start > stop + gap_bytes):
            yield _range_read(rank, chunk, starts[chunk], stop, group)
            group = []
        if not group:
            chunk, stop = segment_chunk, 0
        group.append(segment)
        stop = max(stop, segment.start + _segment_bytes(segment, itemsizes[segment.box_index]))
    if group:
        yield _range_read(rank, chunk, starts[chunk], stop, group)


def _range_read(rank: int, chunk: int, chunk_start: int, stop: int, group: Sequence[Segment]) -> RangeRead:
    start = group[0].start
    return RangeRead(rank, chunk, start - chunk_start, stop - start, start, tuple(group))


def _segment_bytes(segment: Segment, itemsize: int) -> int:
    return segment.count * segment.rows * prod(segment.block_shape) * itemsize


def _cut_at_chunks(segment: Segment, starts: Sequence[int], itemsize: int) -> Iterator[Segment]:
    """Cuts a segment between blocks, after whole rows and within a row, as no block crosses a chunk boundary."""
    size = prod(segment.block_shape) * itemsize
    while segment.count * segment.rows > 1:
        chunk = bisect_right(starts, segment.start)
        if chunk == len(starts) or segment.start + segment.count * segment.rows * size <= starts[chunk]:
            break
        blocks_before_cut = (starts[chunk] - segment.start) // size
        rows = blocks_before_cut // segment.count
        if rows:
            yield _rows_of(segment, 0, rows, size)
            segment = _rows_of(segment, rows, segment.rows - rows, size)
            continue
        # The boundary is within the first row: cut that row, then continue with its remainder and the other rows.
        row = _rows_of(segment, 0, 1, size)
        yield _blocks_of(row, 0, blocks_before_cut, size)
        row_remainder = _blocks_of(row, blocks_before_cut, row.count - blocks_before_cut, size)
        if segment.rows == 1:
            segment = row_remainder
            continue
        yield from _cut_at_chunks(row_remainder, starts, itemsize)
        segment = _rows_of(segment, 1, segment.rows - 1, size)
    yield segment


def _rows_of(segment: Segment, skip: int, rows: int, size: int) -> Segment:
    """Returns the part of a segment with `rows` rows after the first `skip`."""
    if segment.rows == rows:
        return segment
    dimension, height = segment.row_dimension, segment.wanted_part.lengths[segment.row_dimension]
    offsets, lengths = list(segment.location.offsets), list(segment.location.lengths)
    offsets[dimension] += skip * height
    lengths[dimension] = rows * height
    blocks = skip * segment.count
    return Segment(
        segment.first_block + blocks,
        segment.count,
        segment.start + blocks * size,
        segment.block_shape,
        segment.wanted_part,
        Box(tuple(offsets), tuple(lengths)),
        segment.box_index,
        rows,
        dimension if rows > 1 else -1,
    )


def _blocks_of(segment: Segment, skip: int, count: int, size: int) -> Segment:
    """Returns the part of a segment of one row with `count` blocks after the first `skip`."""
    width = segment.wanted_part.lengths[-1]
    location = segment.location
    return Segment(
        segment.first_block + skip,
        count,
        segment.start + skip * size,
        segment.block_shape,
        segment.wanted_part,
        Box((*location.offsets[:-1], location.offsets[-1] + skip * width), (*location.lengths[:-1], count * width)),
        segment.box_index,
    )


# ---- read plan -------------------------------------------------------------------------------------------------------

GAP_BYTES = 8 * 1024
"""Largest gap between two wanted ranges of a chunk that are read as one, because a request costs more than these bytes.
Smaller than a tile of a large tensor: otherwise reads along a dimension that was not split would read unwanted tiles."""


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A box of a tensor that the rank reads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    itemsize: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All reads of a restore, in stream order for each rank save."""

    ranges: tuple[RangeRead, ...]
    wanted_bytes: int
    """Bytes of the wanted boxes."""

    @property
    def read_bytes(self) -> int:
        """Bytes to read, including unwanted ones in blocks and gaps."""
        return sum(r.length for r in self.ranges)


def plan_reads(boxes: Sequence[WantedBox], streams: Mapping[int, Stream], gap_bytes: int = GAP_BYTES) -> ReadPlan:
    """Plans the reads of the wanted boxes.

    Args:
        wanted: The boxes to read.
        streams: Layout of each rank's save; at least those that cover the boxes.
        gap_bytes: Largest gap between wanted ranges that are read as one.

    Raises:
        StateMismatch: The layouts do not have exactly the wanted elements, dtypes or shapes.
    """
    segments_by_rank: dict[int, list[Segment]] = defaultdict(list)
    pieces = _pieces_by_tensor(boxes, streams)
    for number, want in enumerate(boxes):
        covered = 0
        for rank, part in pieces.get(want.name, ()):
            piece, box = part.piece, want.box
            is_same_box = box.lengths == piece.lengths and box.offsets == piece.offsets and 0 not in box.lengths
            shared = box if is_same_box else box.intersect(box_of(piece))
            if shared is not None:
                covered += shared.volume
                segments_by_rank[rank] += _segments_of_wanted(number, shared, part)
        if covered != want.box.volume:
            raise StateMismatch(
                f"the checkpoint has {covered} of {want.box.volume} elements of {want.box} of tensor {want.name}"
            )
    ranges = [
        r
        for rank, segments in sorted(segments_by_rank.items())
        for r in plan_rank_reads(rank, segments, streams[rank].layout, [w.itemsize for w in boxes], gap_bytes)
    ]
    return ReadPlan(tuple(ranges), sum(w.box.volume * w.itemsize for w in boxes))


def order_copies(
    copies: Mapping[int, Sequence[int]],
    local: frozenset[int],
    last_sources: frozenset[int],
    sizes: Mapping[int, int],
    seed: int,
) -> dict[int, tuple[int, ...]]:
    """Orders the sources of each rank's save: local ones first, then the others with balanced load, then `last`.

    Args:
        copies: Indexes of the sources that have each rank's save.
        local: Sources on this node.
        last: Sources to use last: the persistent tier.
        sizes: Bytes to read from each rank's save.
        seed: The reader's rank. Readers balance independently, and different seeds let them start at different sources.
    """
    load: dict[int, int] = defaultdict(int)
    order: dict[int, tuple[int, ...]] = {}
    all_sources = sorted({source for sources in copies.values() for source in sources})
    tie_order = {source: (position - seed) % max(1, len(all_sources)) for position, source in enumerate(all_sources)}
    for rank in sorted(copies, key=lambda r: (-sizes.get(r, 0), r)):
        order[rank] = tuple(
            sorted(copies[rank], key=lambda s: (s in last_sources, s not in local, load[s], tie_order[s]))
        )
        if order[rank]:
            load[order[rank][0]] += sizes.get(rank, 0)
    return order


def balance_reads(
    sizes: Sequence[tuple[int, int]], sources_by_rank: Mapping[int, Sequence[int]], last_sources: frozenset[int]
) -> list[tuple[int, ...]]:
    """Orders the sources of each read, passed as (rank, bytes), so that sources of one tier share the bytes.

    `having` is each rank's order by `preference`. Of the sources in the first one's tier, the one with the fewest bytes so
    far comes first. A rank save with two copies is read from both, even if one is on this node: Redis replies with one
    thread, and two servers are faster. A thread whose source has no reads left takes over reads of another.
    """
    load: dict[int, int] = defaultdict(int)
    orders = []
    for rank, size in sizes:
        order = tuple(sources_by_rank.get(rank, ()))
        same_tier = [s for s in order if (s in last_sources) == (order[0] in last_sources)]
        if same_tier:
            first_source = min(same_tier, key=lambda s: load[s])
            load[first_source] += size
            order = (first_source, *(s for s in order if s != first_source))
        orders.append(order)
    return orders


def _pieces_by_tensor(
    boxes: Sequence[WantedBox], streams: Mapping[int, Stream]
) -> dict[str, list[tuple[int, PlacedPiece]]]:
    """Returns (rank, piece) of each wanted tensor; raises StateMismatch if its shape or dtype differs, or it is missing."""
    boxes_by_name = {w.name: w for w in boxes}
    pieces: dict[str, list[tuple[int, PlacedPiece]]] = defaultdict(list)
    for rank, stream in sorted(streams.items()):
        for tensor in stream.layout.tensors:
            want = boxes_by_name.get(tensor.name)
            if want is not None and (tensor.dtype, tensor.shape) != (want.dtype, want.shape):
                raise StateMismatch(
                    f"tensor {tensor.name} is {want.dtype} {list(want.shape)} in the program and"
                    f" {tensor.dtype} {list(tensor.shape)} in the checkpoint"
                )
        for part in stream.pieces:
            if part.tensor.name in boxes_by_name:
                pieces[part.tensor.name].append((rank, part))
    missing = sorted(set(boxes_by_name) - {t.name for stream in streams.values() for t in stream.layout.tensors})
    if missing:
        raise StateMismatch(
            f"tensor {missing[0]} is not in the checkpoint ({len(missing)} tensors of the program are missing)"
        )
    return pieces


def _segments_of_wanted(number: int, shared: Box, part: PlacedPiece) -> Iterator[Segment]:
    """Yields the segments of a piece that contain `shared`, from the cached pattern of pieces with its tiling."""
    piece = part.piece
    is_whole_piece = shared.lengths == piece.lengths
    patterns = (
        _segments_of_piece(part.tiling)
        if is_whole_piece
        else _segment_pattern(part.tiling, shared.relative_to(piece.offsets))
    )
    for pattern in patterns:
        yield Segment(
            part.first_block + pattern.first_block,
            pattern.count,
            piece.stream_offset + pattern.start,
            pattern.block_shape,
            pattern.wanted_part,
            _shift(pattern.location, piece.offsets),
            number,
            pattern.rows,
            pattern.row_dimension,
        )


@lru_cache(maxsize=4096)
def _segment_pattern(tiling: Tiling, inside: Box) -> tuple[Segment, ...]:
    """Returns the segments of `inside` relative to the piece; cached, as a model has many tensors of one shape."""
    return tuple(segment for run in tiling.runs(inside) for segment in _segments_of(run, tiling, inside))


@lru_cache(maxsize=4096)
def _segments_of_piece(tiling: Tiling) -> tuple[Segment, ...]:
    """Returns the segments of a whole piece, relative to it."""
    return _segment_pattern(tiling, Box.whole(tiling.lengths))


def _segments_of(run: BlockRun, tiling: Tiling, inside: Box) -> Iterator[Segment]:
    """Cuts a run of blocks where a row of tiles ends, a block is clipped, or only a part of a block is wanted."""
    counts = tiling.tiles
    along = max((d for d, n in enumerate(counts[:-1]) if n > 1), default=-1)
    index, start = run.first, run.start
    while index < run.first + run.count:
        box = tiling.block_box(index)
        shared = box.intersect(inside)
        if shared is None:
            raise AssertionError(f"block {index} of a run has no element of {inside}")
        remaining = run.first + run.count - index
        count = min(_equal_blocks_from(box, inside, tiling), remaining)
        is_full_row = counts and count == counts[-1]
        rows = min(_equal_rows_from(box, inside, tiling, along), remaining // count) if is_full_row else 1
        yield Segment(
            first_block=index,
            count=count,
            start=start,
            block_shape=box.lengths,
            wanted_part=shared.relative_to(box.offsets),
            location=_widen(shared, count, rows, along),
            box_index=0,
            rows=rows,
            row_dimension=along if rows > 1 else -1,
        )
        index += count * rows
        start += count * rows * box.volume * tiling.itemsize


def _equal_blocks_from(box: Box, inside: Box, tiling: Tiling) -> int:
    """Counts the adjacent blocks from `box` on that have its shape and are wanted in their full width."""
    if not box.lengths or box.lengths[-1] != tiling.tile[-1]:
        return 1
    width = tiling.tile[-1]
    if box.offsets[-1] < inside.offsets[-1]:
        return 1
    stop = min(inside.stops[-1], tiling.lengths[-1] // width * width)
    return max(1, (stop - box.offsets[-1]) // width)


def _equal_rows_from(box: Box, inside: Box, tiling: Tiling, along: int) -> int:
    """Counts the rows of tiles from `box` on, adjacent along a dimension, that are unclipped and wanted in full."""
    if along < 0 or box.lengths[along] != tiling.tile[along] or box.offsets[along] < inside.offsets[along]:
        return 1
    height = tiling.tile[along]
    stop = min(inside.stops[along], tiling.lengths[along] // height * height)
    return max(1, (stop - box.offsets[along]) // height)


def _widen(box: Box, count: int, rows: int, along: int) -> Box:
    if count == rows == 1:
        return box
    lengths = list(box.lengths)
    lengths[-1] *= count
    if rows > 1:
        lengths[along] *= rows
    return Box(box.offsets, tuple(lengths))


def _shift(box: Box, by: tuple[int, ...]) -> Box:
    if not any(by):
        return box
    return Box(tuple(o + d for o, d in zip(box.offsets, by, strict=True)), box.lengths)


# ---- reads shared among ranks ----------------------------------------------------------------------------------------
# Decides which rank of a group makes each shared read. Every member computes this independently and must get the same
# result: the groups follow from the program's replicas, the division from the plan over the same manifests and from the
# proposals, in which members list the saves in their staging memory. If proposals are inconsistent, every member reads
# directly. Used by `exchange` and by `checkpointer.restoring`.

MAX_MEMBERS = 16
"""Largest group; more replicas form several groups. Each member has a buffer for every other, and waits for the slowest."""


@dataclass(frozen=True, slots=True)
class ReplicatedDestinations:
    """This rank's destinations that all members of a group have."""

    members: tuple[int, ...]
    """Ranks of the group."""
    destination_indexes: tuple[int, ...]
    """Indexes of the destinations, in the order that all members use."""
    size_bytes: int
    """Bytes of these destinations."""


@dataclass(frozen=True, slots=True)
class ReadProposal:
    """A member's planned reads and the saves in its staging memory, which it sends to the others."""

    plan_digest: str
    """Digest of the planned reads (`plan_name`)."""
    staged_ranks: tuple[int, ...] = ()
    """Ranks whose saves are in the member's staging memory."""

    def to_text(self) -> str:
        return json.dumps({"plan": self.plan_digest, "staged": list(self.staged_ranks)})

    @classmethod
    def from_text(cls, text: str) -> ReadProposal | None:
        """Parses a proposal; None if it was withdrawn or is malformed."""
        try:
            record = json.loads(text)
            return cls(str(record["plan"]), tuple(int(rank) for rank in record["staged"]))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class ReadAgreement:
    """How the members of a group share their reads."""

    owners: tuple[int, ...] | None
    """Index of the member that makes each read; None: every member reads directly."""
    reason: str
    """The decision in words, for the log."""
    is_inconsistent: bool = False
    """The members were to agree and did not."""


def group_shared_destinations(
    boxes: Sequence[WantedBox], owner_grids: Sequence[Grid | None], rank: int, min_bytes: int
) -> tuple[ReplicatedDestinations, ...]:
    """Groups this rank's destinations by the ranks that have them too.

    All ranks process their groups in the same global order, so that no two ranks wait for each other in different groups.

    Args:
        wanted: Box of each destination.
        same: The ranks that have each destination too, including this one; None: unknown.
        rank: This rank.
        least_bytes: Smallest size of a group; smaller ones are omitted.
    """
    parts: dict[Grid, tuple[int, ...]] = {}
    numbers_by_members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, grid in enumerate(owner_grids):
        if grid is None or grid.count < 2 or grid.number(rank) is None or boxes[number].box.volume == 0:
            continue
        if grid not in parts:
            parts[grid] = sharing_group_of(sorted(grid.ranks()), rank)
        if len(parts[grid]) > 1:
            numbers_by_members[parts[grid]].append(number)
    groups = []
    for members, numbers in sorted(numbers_by_members.items()):
        size = sum(boxes[n].box.volume * boxes[n].itemsize for n in numbers)
        if size >= min_bytes:
            numbers.sort(key=lambda n: (boxes[n].name, boxes[n].box.offsets))
            groups.append(ReplicatedDestinations(members, tuple(numbers), size))
    return tuple(groups)


def sharing_group_of(ranks: Sequence[int], rank: int, max_members: int = MAX_MEMBERS) -> tuple[int, ...]:
    """Divides ranks into nearly equal groups of at most `most`, and returns the group of `rank`.

    Raises ValueError for a rank that is not among `ranks`.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not among the ranks {list(ranks)} that have the same tensors")
    group_count = -(-len(ranks) // max_members)
    own_group = ranks.index(rank) * group_count // len(ranks)
    return tuple(r for i, r in enumerate(ranks) if i * group_count // len(ranks) == own_group)


def digest_plan(
    checkpoint: str, boxes: Sequence[WantedBox], manifests: Mapping[int, RankManifest], ranges: Sequence[RangeRead]
) -> str:
    """Computes a digest of all inputs of a division; members with the same digest read the same bytes."""
    lines = [checkpoint, *(f"{w.name} {w.dtype} {w.shape} {w.box}" for w in boxes)]
    lines += [f"{rank} {m.layout} {m.digests_digest}" for rank, m in sorted(manifests.items())]
    numbers = array("Q")
    for r in ranges:
        numbers.extend((r.rank, r.chunk, r.offset, r.length, len(r.segments)))
    return digest("\n".join(lines).encode() + b"\0" + numbers.tobytes())


def derive_agreement(
    received_proposals: Sequence[ReadProposal | None], reads: Sequence[tuple[int, int]]
) -> ReadAgreement:
    """Derives the agreement from all members' proposals; `reads` are (saved rank, bytes)."""
    proposals = [proposal for proposal in received_proposals if proposal is not None]
    if len(proposals) < len(received_proposals):
        return ReadAgreement(
            None,
            f"{len(received_proposals) - len(proposals)} of {len(received_proposals)} members read alone",
            is_inconsistent=True,
        )
    if len({proposal.plan_digest for proposal in proposals}) > 1:
        return ReadAgreement(None, "members plan different reads", is_inconsistent=True)
    staged = [frozenset(proposal.staged_ranks) for proposal in proposals]
    if all(rank in staged_ranks for staged_ranks in staged for rank in {rank for rank, _ in reads}):
        return ReadAgreement(None, "every member has all saves in its own staging memory")
    return ReadAgreement(
        divide_reads(reads, staged), f"{len(reads)} reads are divided among {len(received_proposals)} members"
    )


def divide_reads(reads: Sequence[tuple[int, int]], staged_ranks: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """Assigns each read, passed as (saved rank, bytes), to a member; returns the members' indexes.

    `staged` are the ranks whose saves each member has in staging memory; a member makes these reads itself. Each other
    read is assigned to the member with the fewest bytes so far (greedy load balancing), so that two members differ by
    at most one read as far as staging memory leaves a choice.
    """
    load = [0] * len(staged_ranks)
    owners = [-1] * len(reads)
    members_by_rank = {
        rank: [m for m, staged_ranks in enumerate(staged_ranks) if rank in staged_ranks] for rank, _ in reads
    }
    all_members = list(range(len(staged_ranks)))
    for number in sorted(range(len(reads)), key=lambda n: not members_by_rank[reads[n][0]]):
        rank, size = reads[number]
        owner = min(members_by_rank[rank] or all_members, key=lambda m: load[m])
        owners[number] = owner
        load[owner] += size
    return tuple(owners)
