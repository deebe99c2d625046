"""Plans which byte ranges a rank reads and where they go.

Pure. Called by `reader` with what the rank wants (boxes of tensors) and the layouts of the checkpoint's
ranks. The result names blocks, so that every byte used can be verified against its digest, and no block is read that
holds nothing wanted (apart from small gaps between two wanted ones, which are cheaper to read than to skip).
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
# Groups blocks into segments, and segments into ranged reads. A read ends where a chunk ends; reads with only a small
# gap between them are joined. `fetch` reads the ranges and places the segments in tensors.


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
    location: Box
    wanted: int
    """Index of the Wanted it belongs to."""
    rows: int = 1
    count_per_row: int = -1

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
    d, height = segment.count_per_row, segment.take.lengths[segment.count_per_row]
    offsets, lengths = list(segment.location.offsets), list(segment.location.lengths)
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
    place = segment.location
    return Segment(
        segment.first + skip,
        count,
        segment.start + skip * size,
        segment.block,
        segment.take,
        Box((*place.offsets[:-1], place.offsets[-1] + skip * width), (*place.lengths[:-1], count * width)),
        segment.wanted,
    )


# ---- read plan -------------------------------------------------------------------------------------------------------

GAP_BYTES = 8 * 1024
"""Two wanted ranges of a chunk that lie this near are read as one: a request costs more than these bytes. Less than a
tile of a large tensor, or reads along another dimension than the saved one would take whole tiles for nothing."""


@dataclass(frozen=True, slots=True)
class WantedBox:
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


def plan(wanted: Sequence[WantedBox], streams: Mapping[int, Stream], gap_bytes: int = GAP_BYTES) -> ReadPlan:
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


def _homes(wanted: Sequence[WantedBox], streams: Mapping[int, Stream]) -> dict[str, list[tuple[int, PlacedPiece]]]:
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
    for like in _segments_of_piece(part.tiling) if alike else _pattern(part.tiling, shared.relative_to(piece.offsets)):
        yield Segment(
            part.first_block + like.first,
            like.count,
            piece.stream_offset + like.start,
            like.block,
            like.take,
            _shifted(like.location, piece.offsets),
            number,
            like.rows,
            like.count_per_row,
        )


@lru_cache(maxsize=4096)
def _pattern(tiling: Tiling, inside: Box) -> tuple[Segment, ...]:
    """The segments of `inside`, as if its piece were all there is. A model has many tensors of one shape."""
    return tuple(segment for run in tiling.runs(inside) for segment in _segments_of(run, tiling, inside))


@lru_cache(maxsize=4096)
def _segments_of_piece(tiling: Tiling) -> tuple[Segment, ...]:
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
            location=_widened(shared, count, rows, along),
            wanted=0,
            rows=rows,
            count_per_row=along if rows > 1 else -1,
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


# ---- reads shared among ranks ----------------------------------------------------------------------------------------
# Decides which rank of a group reads each shared segment. Every member of a group works this out alone and must come to
# the same: the groups from the program's own replicas, the division from the plan over the same manifests and from the
# cards in which members say what lies in their staging memory. Cards that do not fit together are a doubt, and a doubt
# means that everybody reads directly. Used by `exchange` and by `checkpointer.restoring`.

MAX_MEMBERS = 16
"""More replicas share in parts of at most so many: each member has a buffer for each other, and waits for the slowest."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Lists this rank's destinations that all `members` have in this order."""

    members: tuple[int, ...]
    numbers: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadProposal:
    """States a member's planned reads and the saves in its staging memory."""

    plan: str
    staged: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps({"plan": self.plan, "staged": list(self.staged)})

    @classmethod
    def from_text(cls, text: str) -> ReadProposal | None:
        """Parses a card; None for one that was withdrawn or is malformed."""
        try:
            body = json.loads(text)
            return cls(str(body["plan"]), tuple(int(rank) for rank in body["staged"]))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class ReadAgreement:
    """Assigns each read a member; None: everybody reads alone.

    `doubt`: the members should have agreed and did not.
    """

    owners: tuple[int, ...] | None
    reason: str
    doubt: bool = False


def replicated_destinations(
    wanted: Sequence[WantedBox], same: Sequence[Grid | None], rank: int, least_bytes: int
) -> tuple[Replicated, ...]:
    """Groups of destinations that other ranks have too, at least `least_bytes` each.

    `same` are the ranks that hold what each is. All ranks take their groups in one order of them all, so that nobody
    waits in one group for somebody who waits in another.
    """
    parts: dict[Grid, tuple[int, ...]] = {}
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, grid in enumerate(same):
        if grid is None or grid.count < 2 or grid.number(rank) is None or wanted[number].box.volume == 0:
            continue
        if grid not in parts:
            parts[grid] = part_of(sorted(grid.ranks()), rank)
        if len(parts[grid]) > 1:
            together[parts[grid]].append(number)
    found = []
    for members, numbers in sorted(together.items()):
        size = sum(wanted[n].box.volume * wanted[n].itemsize for n in numbers)
        if size >= least_bytes:
            numbers.sort(key=lambda n: (wanted[n].name, wanted[n].box.offsets))
            found.append(Replicated(members, tuple(numbers), size))
    return tuple(found)


def part_of(ranks: Sequence[int], rank: int, most: int = MAX_MEMBERS) -> tuple[int, ...]:
    """The ranks that `rank` shares with: nearly equal parts, at most `most`.

    Raises ValueError for a rank that is not among `ranks`.
    """
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not one of {list(ranks)}, which are said to hold what it holds")
    parts = -(-len(ranks) // most)
    mine = ranks.index(rank) * parts // len(ranks)
    return tuple(r for i, r in enumerate(ranks) if i * parts // len(ranks) == mine)


def plan_name(
    checkpoint: str, wanted: Sequence[WantedBox], manifests: Mapping[int, RankManifest], ranges: Sequence[RangeRead]
) -> str:
    """Digests all inputs of a division.

    Members with the same digest make the same reads of the same bytes.
    """
    told = [checkpoint, *(f"{w.name} {w.dtype} {w.shape} {w.box}" for w in wanted)]
    told += [f"{rank} {m.layout} {m.digests_digest}" for rank, m in sorted(manifests.items())]
    numbers = array("Q")
    for r in ranges:
        numbers.extend((r.rank, r.chunk, r.offset, r.length, len(r.segments)))
    return digest("\n".join(told).encode() + b"\0" + numbers.tobytes())


def derive_agreement(cards: Sequence[ReadProposal | None], reads: Sequence[tuple[int, int]]) -> ReadAgreement:
    """Derives the agreement from all cards; `reads` as (saved rank, bytes)."""
    told = [card for card in cards if card is not None]
    if len(told) < len(cards):
        return ReadAgreement(None, f"{len(cards) - len(told)} of {len(cards)} members read alone", doubt=True)
    if len({card.plan for card in told}) > 1:
        return ReadAgreement(None, "members plan different reads", doubt=True)
    staged = [frozenset(card.staged) for card in told]
    if all(rank in mine for mine in staged for rank in {rank for rank, _ in reads}):
        return ReadAgreement(None, "every member has all of it in its own staging memory")
    return ReadAgreement(division(reads, staged), f"{len(reads)} reads are divided among {len(cards)} members")


def division(reads: Sequence[tuple[int, int]], staged: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """Assigns each read, given as (saved rank, bytes), to a member.

    `staged` are the saves that each member has in staging memory: those it reads itself. The rest goes to the member
    with the fewest bytes so far (greedy load balancing): as far as staging memory leaves a choice, no two members
    differ by more than one read.
    """
    load = [0] * len(staged)
    owners = [-1] * len(reads)
    having = {rank: [m for m, mine in enumerate(staged) if rank in mine] for rank, _ in reads}
    everybody = list(range(len(staged)))
    for number in sorted(range(len(reads)), key=lambda n: not having[reads[n][0]]):
        rank, size = reads[number]
        owner = min(having[rank] or everybody, key=lambda m: load[m])
        owners[number] = owner
        load[owner] += size
    return tuple(owners)
