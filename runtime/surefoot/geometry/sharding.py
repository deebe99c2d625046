"""Describes how a tensor is sharded or replicated over a grid.

Pure. The same arithmetic answers both questions: which boxes a rank has, and which ranks have a box. With the second, a
reader of a large checkpoint contacts only the few ranks that it needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import ceil, prod
from typing import Literal

from surefoot.geometry.box import Box, flat_boxes, flat_hull

# ---- grids of ranks --------------------------------------------------------------------------------------------------
# Describes sets of ranks as grids, small for any number of ranks. A device mesh and a data-parallel group are grids.


@dataclass(frozen=True, slots=True)
class Grid:
    """Arranges ranks in a grid.

    The rank at a coordinate is `base` + Σ coordinate × stride. Ranks that follow no such rule are `listed` in row-major
    order.
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> Grid:
        """Builds the grid of these ranks, given in row-major order of `sizes` (default: one dimension)."""
        grid_sizes = tuple(sizes) if sizes is not None else (len(ranks),)
        if not ranks or prod(grid_sizes) != len(ranks):
            raise ValueError(f"{len(ranks)} ranks do not fill a grid of {grid_sizes}")
        steps = [prod(grid_sizes[d + 1 :]) for d in range(len(grid_sizes))]
        strides = tuple(ranks[s] - ranks[0] if n > 1 else 0 for s, n in zip(steps, grid_sizes, strict=True))
        regular = cls(ranks[0], grid_sizes, strides)
        if regular._has_unique_coordinates() and all(a == b for a, b in zip(regular.ranks(), ranks, strict=True)):
            return regular
        return cls(0, grid_sizes, (), tuple(ranks))

    @classmethod
    def world_size(cls, size: int) -> Grid:
        return cls(0, (size,), (1 if size > 1 else 0,))

    @classmethod
    def alone(cls, rank: int) -> Grid:
        return cls(rank, (), ())

    @property
    def count(self) -> int:
        return prod(self.sizes)

    def ranks(self) -> Iterator[int]:
        """Yields all ranks of the grid, in row-major order."""
        if self.listed:
            yield from self.listed
            return
        for coordinate in product(*map(range, self.sizes)):
            yield self.rank(coordinate)

    def rank(self, coordinate: Sequence[int]) -> int:
        if self.listed:
            return self.listed[self._number(coordinate)]
        return self.base + sum(c * s for c, s in zip(coordinate, self.strides, strict=True))

    def at(self, number: int) -> int:
        """Returns the rank at this index of the row-major order."""
        return self.rank(self._coordinate(number))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Returns a rank's coordinates; None if it is not in the grid."""
        if self.listed:
            return self._coordinate(self.listed.index(rank)) if rank in self.listed else None
        remainder, coordinates = rank - self.base, [0] * len(self.sizes)
        for d in sorted(range(len(self.sizes)), key=lambda d: -self.strides[d]):
            if self.strides[d]:
                coordinates[d], remainder = divmod(remainder, self.strides[d])
                if not 0 <= coordinates[d] < self.sizes[d]:
                    return None
        return tuple(coordinates) if remainder == 0 else None

    def number(self, rank: int) -> int | None:
        """Returns a rank's index in the row-major order; None if it is not in the grid."""
        coordinate = self.coordinate(rank)
        return None if coordinate is None else self._number(coordinate)

    def only(self, fixed: Mapping[int, int]) -> Grid:
        """Returns the subgrid at the given coordinates (dimension → coordinate)."""
        free_dimensions = [d for d in range(len(self.sizes)) if d not in fixed]
        if not self.listed:
            base = self.base + sum(c * self.strides[d] for d, c in fixed.items())
            return Grid(
                base,
                *_merge_dimensions([(self.sizes[d], self.strides[d]) for d in free_dimensions if self.sizes[d] > 1]),
            )
        spans = [(fixed[d],) if d in fixed else range(n) for d, n in enumerate(self.sizes)]
        return Grid.of([self.rank(c) for c in product(*spans)])

    def _has_unique_coordinates(self) -> bool:
        """Returns whether repeated division finds each rank's only coordinates."""
        order = sorted((s, n) for s, n in zip(self.strides, self.sizes, strict=True) if n > 1)
        reach = 0
        for stride, size in order:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
        return True

    def _number(self, coordinate: Sequence[int]) -> int:
        number = 0
        for c, n in zip(coordinate, self.sizes, strict=True):
            number = number * n + c
        return number

    def _coordinate(self, number: int) -> tuple[int, ...]:
        coordinates = []
        for n in reversed(self.sizes):
            number, c = divmod(number, n)
            coordinates.append(c)
        return tuple(reversed(coordinates))


def _merge_dimensions(dimensions: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (sizes, strides) with contiguous dimensions merged, so that equal sets compare equal."""
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged)


# ---- shares of ranks -------------------------------------------------------------------------------------------------
# Divides tensors that several ranks have in common into equal shares to save. Every rank computes its share alone, and
# all must agree, so the result depends only on the arguments. ByteCheckpoint (NSDI'25) and DCP assign whole tensors to
# the least loaded rank; here the shared tensors are laid end to end and cut at equal distances. A cut is moved to the
# nearest row, and small tensors are never cut. So computing a rank's share costs two searches for any number of ranks.

WHOLE_BYTES = 256 * 1024
"""Tensors below this size are saved by one rank."""

UNIT_BYTES = 64 * 1024
"""Cuts fall between rows of at most this size, or between as many elements."""

MANY = 64
MIN_BYTES = 64 * 1024 * 1024
"""More than MANY ranks share only if each gets at least this many bytes: smaller shares cost more than they save."""


def torch_chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Computes start and length of a part as `torch.chunk` does.

    All parts are equal, except that the last ones may be smaller or empty.
    """
    size = ceil(length / parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def shard_box(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    """Computes the box of rank `index` of `parts` of a tensor sharded along one dimension.

    The layout is that of FSDP2 and `Shard`.
    """
    start, length = torch_chunk_range(shape[dimension], parts, index)
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dimension], lengths[dimension] = start, length
    return Box(tuple(offsets), tuple(lengths))


@dataclass(frozen=True, slots=True)
class ShareShape:
    """Contains the shape and item size of a tensor whose saving is shared."""

    lengths: tuple[int, ...]
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    @property
    def unit(self) -> int:
        """Number of elements between two places where the tensor may be cut; all of a small tensor."""
        if self.size_bytes < WHOLE_BYTES:
            return prod(self.lengths)
        unit = 1
        for n in reversed(self.lengths):
            if unit * n * self.itemsize > UNIT_BYTES:
                return unit * max(1, UNIT_BYTES // (unit * self.itemsize))
            unit *= n
        return unit


class Shares:
    """Divides the saving of tensors among the ranks that have them.

    All members pass the tensors in the same order. The first member already saves `reserved` bytes of other tensors.
    """

    def __init__(self, tensors: Sequence[ShareShape], members: int, reserved: int = 0) -> None:
        self._tensors = tensors
        self._members = members
        self._reserved = reserved
        self._ends = list(accumulate(t.size_bytes for t in tensors))
        self._total = self._ends[-1] if self._ends else 0
        self.sharers = min(members, max(MANY, (self._total + reserved) // MIN_BYTES))
        """How many of the members save anything."""

    def of(self, member: int) -> list[tuple[int, Box]]:
        """Returns the boxes that a member saves: (number of the tensor, box), in order."""
        sharer = self._sharer_of(member)
        if sharer is None:
            return []
        (first_tensor, first_element), (last_tensor, last_stop) = (
            self._share_start(sharer),
            self._share_start(sharer + 1),
        )
        boxes = []
        for tensor_number in range(first_tensor, min(last_tensor + 1, len(self._tensors))):
            lengths = self._tensors[tensor_number].lengths
            stop = last_stop if tensor_number == last_tensor else prod(lengths)
            boxes += [
                (tensor_number, box)
                for box in flat_boxes(lengths, first_element if tensor_number == first_tensor else 0, stop)
            ]
        return boxes

    def members(self, number: int, box: Box) -> list[int]:
        """Returns the members that save elements of `box` of a tensor.

        A few may save only elements between those of the box.
        """
        low, high = flat_hull(self._tensors[number].lengths, box)
        first = bisect_right(range(self.sharers + 1), (number, low), key=self._share_start) - 1
        last = bisect_left(range(self.sharers + 1), (number, high), key=self._share_start)
        sharers = range(max(0, first), min(last, self.sharers))
        return [self._member_of(sharer) for sharer in sharers]

    def _member_of(self, sharer: int) -> int:
        """Returns a sharer's member; sharers are spread, so that a node's ranks do not all save or all idle."""
        return sharer * self._members // self.sharers

    def _sharer_of(self, member: int) -> int | None:
        sharer = -(-member * self.sharers // self._members)
        return sharer if sharer < self.sharers and self._member_of(sharer) == member else None

    def _share_start(self, sharer: int) -> tuple[int, int]:
        """Returns where a share begins: (number of the tensor, element of it)."""
        position = self._ideal_start(sharer)
        number = bisect_right(self._ends, position)
        if number == len(self._tensors):
            return number, 0
        tensor = self._tensors[number]
        unit = tensor.unit * tensor.itemsize
        within = position - (self._ends[number] - tensor.size_bytes)
        element = (within + unit // 2) // unit * tensor.unit
        return (number, element) if element < prod(tensor.lengths) else (number + 1, 0)

    def _ideal_start(self, sharer: int) -> int:
        """Returns the byte at which a share would begin if cuts could fall anywhere."""
        even_bytes = (self._total + self._reserved) // self.sharers
        if sharer == 0 or self._total == 0:
            return 0 if sharer == 0 else self._total
        if sharer >= self.sharers:
            return self._total
        if self._reserved < even_bytes:
            return (self._total + self._reserved) * sharer // self.sharers - self._reserved
        return self._total * (sharer - 1) // (self.sharers - 1)


# ---- sharding --------------------------------------------------------------------------------------------------------

Cut = tuple[int, int]
"""(dimension of the tensor, number of parts that later grid dimensions have cut it into already; 1: none).

These are torch's `Shard` and `_StridedShard`: FSDP over tensor parallelism cuts rows that the latter has cut."""

Span = tuple[int, int]
"""Start and length along one dimension."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """Maps `box` of the tensor to offsets `local` in a rank's part."""

    box: Box
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Describes how a tensor is sharded over a grid of ranks.

    `cuts` has one entry per dimension of the grid; None: the ranks along it are replicas.
    """

    grid: Grid
    cuts: tuple[Cut | None, ...]

    @classmethod
    def replicated(cls, grid: Grid) -> ShardingRule:
        return cls(grid, (None,) * len(grid.sizes))

    def same(self, rank: int) -> Grid:
        """Returns the ranks with the same part as `rank`, including itself."""
        coordinate = self._coordinate(rank)
        return self.grid.only({d: c for d, c in enumerate(coordinate) if self.cuts[d] is not None})

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's own part."""
        return tuple(sum(n for _, n in spans) for spans in self._spans(shape, rank))

    def parts(self, shape: tuple[int, ...], rank: int) -> list[PlacedBox]:
        """Computes the boxes of a rank's part: one, none, or several if nested cuts leave gaps."""
        boxes = []
        positioned_spans = [list(_with_positions(spans)) for spans in self._spans(shape, rank)]
        for chosen in product(*positioned_spans):
            offsets, lengths, local = (tuple(c[i] for c in chosen) for i in range(3))
            boxes.append(PlacedBox(Box(offsets, lengths), local))
        return boxes

    def servers(self, shape: tuple[int, ...], wanted: Box) -> Iterator[Grid]:
        """Yields the groups of ranks with elements of `wanted`; the ranks of one group have the same part."""
        if wanted.volume == 0:
            return
        choices = []
        for dimension, n in enumerate(shape):
            cutting_dimensions = [d for d, cut in enumerate(self.cuts) if cut is not None and cut[0] == dimension]
            span = (wanted.offsets[dimension], wanted.lengths[dimension])
            choices.append(list(self._coordinates_meeting([(0, n)], cutting_dimensions, span)))
        for chosen in product(*choices):
            yield self.grid.only({d: c for fixed in chosen for d, c in fixed.items()})

    def _coordinates_meeting(
        self, spans: list[Span], grid_dimensions: Sequence[int], wanted: Span
    ) -> Iterator[dict[int, int]]:
        """Yields coordinates along `grid_dimensions` whose part of `spans` intersects `wanted`."""
        if not grid_dimensions:
            yield {}
            return
        grid_dimension, *inner_dimensions = grid_dimensions
        cut = self.cuts[grid_dimension]
        assert cut is not None, "the caller chose dimensions that cut"
        parts = self.grid.sizes[grid_dimension]
        for c in _parts_meeting(spans, parts, cut[1], wanted):
            for deeper in self._coordinates_meeting(_part_of_spans(spans, parts, cut[1], c), inner_dimensions, wanted):
                yield {grid_dimension: c, **deeper}

    def _spans(self, shape: tuple[int, ...], rank: int) -> list[list[Span]]:
        coordinate = self._coordinate(rank)
        spans_by_dimension: list[list[Span]] = [[(0, n)] for n in shape]
        for d, cut in enumerate(self.cuts):
            if cut is not None:
                spans_by_dimension[cut[0]] = _part_of_spans(
                    spans_by_dimension[cut[0]], self.grid.sizes[d], cut[1], coordinate[d]
                )
        return spans_by_dimension

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        coordinate = self.grid.coordinate(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not one of {self.grid}")
        return coordinate


def _part_of_spans(spans: list[Span], parts: int, factor: int, index: int) -> list[Span]:
    """Returns part `index` of each of `factor` equal stretches of the spans."""
    total = sum(n for _, n in spans)
    part: list[Span] = []
    for stretch in range(factor):
        begin, length = torch_chunk_range(total, factor, stretch)
        start, size = torch_chunk_range(length, parts, index)
        part += _slice_spans(spans, begin + start, begin + start + size)
    return _join_spans(part)


def _parts_meeting(spans: list[Span], parts: int, factor: int, wanted: Span) -> list[int]:
    """Returns the numbers of the parts that intersect `wanted`."""
    total, position = sum(n for _, n in spans), 0
    part_numbers: set[int] = set()
    ranges = []
    for start, n in spans:
        low, high = max(start, wanted[0]), min(start + n, wanted[0] + wanted[1])
        if low < high:
            ranges.append((position + low - start, position + high - start))
        position += n
    for stretch in range(factor):
        begin, length = torch_chunk_range(total, factor, stretch)
        size = -(-length // parts)
        for low, high in ranges:
            first, last = max(low - begin, 0), min(high - begin, length)
            if first < last:
                part_numbers.update(range(first // size, (last - 1) // size + 1))
    return sorted(part_numbers)


def _slice_spans(spans: list[Span], begin: int, end: int) -> Iterator[Span]:
    """Yields positions `begin` to `end` of the concatenated spans."""
    position = 0
    for start, n in spans:
        low, high = max(begin, position), min(end, position + n)
        if low < high:
            yield start + low - position, high - low
        position += n


def _join_spans(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, n in spans:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + n)
        else:
            joined.append((start, n))
    return joined


def _with_positions(spans: list[Span]) -> Iterator[tuple[int, int, int]]:
    position = 0
    for start, n in spans:
        yield start, n, position
        position += n


# ---- save division ---------------------------------------------------------------------------------------------------
# Decides which boxes one rank saves: its own, and its shares. A rank that plans a save computes this for itself; a
# reader computes it for any rank, to find where a box was saved.

Sharing = Literal["split", "lowest"]
"""How ranks with the same box share its saving: in parts, or all of it by the first of them."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Describes one box of a tensor that a rank has.

    `same`: all ranks that have it; None: other ranks save it, and this one only reads it.
    """

    name: str
    box: Box
    itemsize: int
    same: Grid | None
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Sharers:
    """Contains the numbers of the holdings that one group of ranks shares, and their division."""

    numbers: tuple[int, ...]
    shares: Shares


def saved_boxes(
    holdings: Sequence[HeldBox], rank: int, groups: Mapping[Grid, Sharers] | None = None
) -> list[tuple[int, Box]]:
    """Computes the boxes that a rank saves.

    Returns pairs of an index in `holdings` and a box in the tensor's coordinates. `groups`: the result of `shared` for
    `holdings`, if the caller already has it.
    """
    boxes = []
    for number, holding in enumerate(holdings):
        if holding.same is None or holding.box.volume == 0:
            continue
        if holding.same.count == 1 or (holding.sharing == "lowest" and holding.same.at(0) == rank):
            boxes.append((number, holding.box))
    for group, sharers in (shared(holdings) if groups is None else groups).items():
        member = group.number(rank)
        if member is None:
            raise ValueError(f"rank {rank} is not one of {group}, which are said to hold what it holds")
        for position, box in sharers.shares.of(member):
            number = sharers.numbers[position]
            boxes.append((number, _shift(box, holdings[number].box.offsets)))
    return boxes


def shared(holdings: Sequence[HeldBox]) -> dict[Grid, Sharers]:
    """Divides the holdings that several ranks have in common, for each group of ranks.

    The order of the holdings is the same on all members of a group.
    """
    numbers_by_group: dict[Grid, list[int]] = defaultdict(list)
    reserved: dict[Grid, int] = defaultdict(int)
    for number, holding in enumerate(holdings):
        if holding.same is None or holding.same.count == 1 or holding.box.volume == 0:
            continue
        if holding.sharing == "split":
            numbers_by_group[holding.same].append(number)
        else:
            reserved[holding.same] += holding.box.volume * holding.itemsize
    sharers_by_group = {}
    for group, numbers in numbers_by_group.items():
        numbers.sort(key=lambda n: (holdings[n].name, holdings[n].box.offsets))
        shapes = [ShareShape(holdings[n].box.lengths, holdings[n].itemsize) for n in numbers]
        sharers_by_group[group] = Sharers(tuple(numbers), Shares(shapes, group.count, reserved[group]))
    return sharers_by_group


def _shift(box: Box, by: tuple[int, ...]) -> Box:
    return Box(tuple(o + c for o, c in zip(box.offsets, by, strict=True)), box.lengths)
