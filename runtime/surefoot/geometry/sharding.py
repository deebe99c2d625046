"""Describes how a tensor is sharded or replicated over a grid.

Pure. The same arithmetic answers both ways: which boxes a rank holds, and which ranks hold a box. The second is what
lets a reader of a large checkpoint look at the few ranks that it needs and at no other.
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

    Those at `base` + Σ coordinate × stride; or, where they follow no such rule, `listed` in row-major order.
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> Grid:
        """The grid of these ranks, given in row-major order of `sizes` (default: one dimension)."""
        extents = tuple(sizes) if sizes is not None else (len(ranks),)
        if not ranks or prod(extents) != len(ranks):
            raise ValueError(f"{len(ranks)} ranks do not fill a grid of {extents}")
        steps = [prod(extents[d + 1 :]) for d in range(len(extents))]
        strides = tuple(ranks[s] - ranks[0] if n > 1 else 0 for s, n in zip(steps, extents, strict=True))
        regular = cls(ranks[0], extents, strides)
        if regular._nested() and all(a == b for a, b in zip(regular.ranks(), ranks, strict=True)):
            return regular
        return cls(0, extents, (), tuple(ranks))

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
        """All ranks of the grid, in row-major order."""
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
        """The rank at that place of the row-major order."""
        return self.rank(self._coordinate(number))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """A rank's coordinates; None if it is not in the grid."""
        if self.listed:
            return self._coordinate(self.listed.index(rank)) if rank in self.listed else None
        rest, found = rank - self.base, [0] * len(self.sizes)
        for d in sorted(range(len(self.sizes)), key=lambda d: -self.strides[d]):
            if self.strides[d]:
                found[d], rest = divmod(rest, self.strides[d])
                if not 0 <= found[d] < self.sizes[d]:
                    return None
        return tuple(found) if rest == 0 else None

    def number(self, rank: int) -> int | None:
        """A rank's place in the row-major order."""
        coordinate = self.coordinate(rank)
        return None if coordinate is None else self._number(coordinate)

    def only(self, fixed: Mapping[int, int]) -> Grid:
        """The subgrid at the given coordinates (dimension → coordinate)."""
        left = [d for d in range(len(self.sizes)) if d not in fixed]
        if not self.listed:
            base = self.base + sum(c * self.strides[d] for d, c in fixed.items())
            return Grid(base, *_merged([(self.sizes[d], self.strides[d]) for d in left if self.sizes[d] > 1]))
        spans = [(fixed[d],) if d in fixed else range(n) for d, n in enumerate(self.sizes)]
        return Grid.of([self.rank(c) for c in product(*spans)])

    def _nested(self) -> bool:
        """Whether each rank has one coordinate that repeated division finds."""
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
        found = []
        for n in reversed(self.sizes):
            number, c = divmod(number, n)
            found.append(c)
        return tuple(reversed(found))


def _merged(dimensions: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides) with dimensions joined that follow each other without a step: equal sets look equal."""
    found: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(size for size, _ in found), tuple(stride for _, stride in found)


# ---- shares of ranks -------------------------------------------------------------------------------------------------
# Divides what several ranks hold alike into equal shares to save. Every rank computes its own share alone, and all must
# come to the same answer, so nothing here depends on anything but its arguments. ByteCheckpoint (NSDI'25) and DCP
# assign whole tensors to the least loaded rank; here what is shared is laid end to end and cut at equal distances. A
# cut is moved to the nearest row, and small tensors are never cut. So a rank's share costs two searches, however many
# ranks there are.

WHOLE_BYTES = 256 * 1024
"""Tensors below this size are saved by one rank."""

UNIT_BYTES = 64 * 1024
"""Cuts fall between rows of at most this size, or between as many elements."""

MANY = 64
MIN_BYTES = 64 * 1024 * 1024
"""More than MANY ranks share only as long as each gets this much: smaller shares cost more than they save."""


def torch_chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Computes start and length of a part as `torch.chunk` does.

    Equal parts, the last ones less.
    """
    size = ceil(length / parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def shard_box(shape: tuple[int, ...], dimension: int, parts: int, index: int) -> Box:
    """Computes what a rank holds of a tensor sharded along one dimension.

    Rank `index` of `parts`, in FSDP2's and `Shard`'s layout.
    """
    start, length = torch_chunk_range(shape[dimension], parts, index)
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dimension], lengths[dimension] = start, length
    return Box(tuple(offsets), tuple(lengths))


@dataclass(frozen=True, slots=True)
class ShareShape:
    """A tensor, as far as sharing it out needs to know it."""

    lengths: tuple[int, ...]
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    @property
    def unit(self) -> int:
        """Counts elements between two places where a tensor may be cut.

        All of them for a small tensor.
        """
        if self.size_bytes < WHOLE_BYTES:
            return prod(self.lengths)
        unit = 1
        for n in reversed(self.lengths):
            if unit * n * self.itemsize > UNIT_BYTES:
                return unit * max(1, UNIT_BYTES // (unit * self.itemsize))
            unit *= n
        return unit


class Shares:
    """Divides tensors that several ranks hold among them.

    In an order that all `members` know.

    `reserved` bytes are already the first member's own task.
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
        """The boxes a member saves: (number of the tensor, box), in order."""
        sharer = self._sharer(member)
        if sharer is None:
            return []
        (first, begin), (last, end) = self._cut(sharer), self._cut(sharer + 1)
        found = []
        for number in range(first, min(last + 1, len(self._tensors))):
            lengths = self._tensors[number].lengths
            stop = end if number == last else prod(lengths)
            found += [(number, box) for box in flat_boxes(lengths, begin if number == first else 0, stop)]
        return found

    def members(self, number: int, box: Box) -> list[int]:
        """Members that save elements of `box` of that tensor (and perhaps a few that save only what lies between
        them)."""
        low, high = flat_hull(self._tensors[number].lengths, box)
        first = bisect_right(range(self.sharers + 1), (number, low), key=self._cut) - 1
        last = bisect_left(range(self.sharers + 1), (number, high), key=self._cut)
        found = range(max(0, first), min(last, self.sharers))
        return [self._member(sharer) for sharer in found]

    def _member(self, sharer: int) -> int:
        """Sharers are spread over the members, so that neighbours on a node do not all save or all idle."""
        return sharer * self._members // self.sharers

    def _sharer(self, member: int) -> int | None:
        sharer = -(-member * self.sharers // self._members)
        return sharer if sharer < self.sharers and self._member(sharer) == member else None

    def _cut(self, sharer: int) -> tuple[int, int]:
        """Where a share begins: (number of the tensor, element of it)."""
        position = self._position(sharer)
        number = bisect_right(self._ends, position)
        if number == len(self._tensors):
            return number, 0
        tensor = self._tensors[number]
        unit = tensor.unit * tensor.itemsize
        within = position - (self._ends[number] - tensor.size_bytes)
        element = (within + unit // 2) // unit * tensor.unit
        return (number, element) if element < prod(tensor.lengths) else (number + 1, 0)

    def _position(self, sharer: int) -> int:
        """The byte at which a share would begin if cuts could fall anywhere."""
        even = (self._total + self._reserved) // self.sharers
        if sharer == 0 or self._total == 0:
            return 0 if sharer == 0 else self._total
        if sharer >= self.sharers:
            return self._total
        if self._reserved < even:
            return (self._total + self._reserved) * sharer // self.sharers - self._reserved
        return self._total * (sharer - 1) // (self.sharers - 1)


# ---- sharding --------------------------------------------------------------------------------------------------------

Cut = tuple[int, int]
"""(dimension of the tensor, parts that later grid dimensions have cut it into already; 1: none). torch's `Shard` and
`_StridedShard`: FSDP over tensor parallelism cuts rows that tensor parallelism has cut before it."""

Span = tuple[int, int]
"""Start and length along one dimension."""


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """Maps `box` of the tensor to offsets `local` in a rank's part."""

    box: Box
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Describes how a tensor is spread over a grid of ranks.

    One entry of `cuts` per dimension of the grid: None where its ranks hold the same.
    """

    grid: Grid
    cuts: tuple[Cut | None, ...]

    @classmethod
    def replicated(cls, grid: Grid) -> ShardingRule:
        return cls(grid, (None,) * len(grid.sizes))

    def same(self, rank: int) -> Grid:
        """The ranks that hold what `rank` holds, itself among them."""
        coordinate = self._coordinate(rank)
        return self.grid.only({d: c for d, c in enumerate(coordinate) if self.cuts[d] is not None})

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of a rank's own part."""
        return tuple(sum(n for _, n in spans) for spans in self._spans(shape, rank))

    def parts(self, shape: tuple[int, ...], rank: int) -> list[PlacedBox]:
        """Computes the boxes that a rank holds.

        One, or none, or several where cuts within cuts leave gaps.
        """
        found = []
        placed = [list(_with_positions(spans)) for spans in self._spans(shape, rank)]
        for chosen in product(*placed):
            offsets, lengths, local = (tuple(c[i] for c in chosen) for i in range(3))
            found.append(PlacedBox(Box(offsets, lengths), local))
        return found

    def servers(self, shape: tuple[int, ...], wanted: Box) -> Iterator[Grid]:
        """Groups ranks that hold the same elements of `wanted`."""
        if wanted.volume == 0:
            return
        choices = []
        for dimension, n in enumerate(shape):
            mine = [d for d, cut in enumerate(self.cuts) if cut is not None and cut[0] == dimension]
            span = (wanted.offsets[dimension], wanted.lengths[dimension])
            choices.append(list(self._reaching([(0, n)], mine, span)))
        for chosen in product(*choices):
            yield self.grid.only({d: c for fixed in chosen for d, c in fixed.items()})

    def _reaching(self, spans: list[Span], left: Sequence[int], wanted: Span) -> Iterator[dict[int, int]]:
        """Coordinates along the grid's dimensions `left` whose part of `spans` meets `wanted`."""
        if not left:
            yield {}
            return
        grid_dimension, *rest = left
        cut = self.cuts[grid_dimension]
        assert cut is not None, "the caller chose dimensions that cut"
        parts = self.grid.sizes[grid_dimension]
        for c in _meeting(spans, parts, cut[1], wanted):
            for deeper in self._reaching(_part_of_spans(spans, parts, cut[1], c), rest, wanted):
                yield {grid_dimension: c, **deeper}

    def _spans(self, shape: tuple[int, ...], rank: int) -> list[list[Span]]:
        coordinate = self._coordinate(rank)
        found: list[list[Span]] = [[(0, n)] for n in shape]
        for d, cut in enumerate(self.cuts):
            if cut is not None:
                found[cut[0]] = _part_of_spans(found[cut[0]], self.grid.sizes[d], cut[1], coordinate[d])
        return found

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        coordinate = self.grid.coordinate(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not one of {self.grid}")
        return coordinate


def _part_of_spans(spans: list[Span], parts: int, factor: int, index: int) -> list[Span]:
    """Part `index` of each of `factor` equal stretches of what the spans hold."""
    total = sum(n for _, n in spans)
    found: list[Span] = []
    for stretch in range(factor):
        begin, length = torch_chunk_range(total, factor, stretch)
        start, size = torch_chunk_range(length, parts, index)
        found += _between(spans, begin + start, begin + start + size)
    return _joined(found)


def _meeting(spans: list[Span], parts: int, factor: int, wanted: Span) -> list[int]:
    """Parts that intersect `wanted`."""
    total, position = sum(n for _, n in spans), 0
    found: set[int] = set()
    reached = []
    for start, n in spans:
        low, high = max(start, wanted[0]), min(start + n, wanted[0] + wanted[1])
        if low < high:
            reached.append((position + low - start, position + high - start))
        position += n
    for stretch in range(factor):
        begin, length = torch_chunk_range(total, factor, stretch)
        size = -(-length // parts)
        for low, high in reached:
            first, last = max(low - begin, 0), min(high - begin, length)
            if first < last:
                found.update(range(first // size, (last - 1) // size + 1))
    return sorted(found)


def _between(spans: list[Span], begin: int, end: int) -> Iterator[Span]:
    """Positions `begin` to `end` of the spans laid one behind the other."""
    position = 0
    for start, n in spans:
        low, high = max(begin, position), min(end, position + n)
        if low < high:
            yield start + low - position, high - low
        position += n


def _joined(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for start, n in spans:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + n)
        else:
            found.append((start, n))
    return found


def _with_positions(spans: list[Span]) -> Iterator[tuple[int, int, int]]:
    position = 0
    for start, n in spans:
        yield start, n, position
        position += n


# ---- save division ---------------------------------------------------------------------------------------------------
# Decides which boxes one rank saves: its own, and its shares. Asked twice: by a rank of itself, when it plans a save,
# and by a reader of any rank, to know where a box was saved.

Sharing = Literal["split", "lowest"]
"""How ranks that hold the same box share its saving: in parts, or all of it by the first of them."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """Describes one box that a rank holds of a tensor.

    `same`: all that hold it; None: others save it, and it is only read.
    """

    name: str
    box: Box
    itemsize: int
    same: Grid | None
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Sharers:
    """Names the holdings that one group of ranks shares.

    By their numbers, with the shares.
    """

    numbers: tuple[int, ...]
    shares: Shares


def saved_boxes(
    holdings: Sequence[HeldBox], rank: int, groups: Mapping[Grid, Sharers] | None = None
) -> list[tuple[int, Box]]:
    """Computes what a rank saves of its holdings.

    Pairs of a holding's number and a box in the tensor's coordinates. `groups`: what `shared` says of these holdings,
    if the caller has asked it before.
    """
    found = []
    for number, held in enumerate(holdings):
        if held.same is None or held.box.volume == 0:
            continue
        if held.same.count == 1 or (held.sharing == "lowest" and held.same.at(0) == rank):
            found.append((number, held.box))
    for group, sharers in (shared(holdings) if groups is None else groups).items():
        member = group.number(rank)
        if member is None:
            raise ValueError(f"rank {rank} is not one of {group}, which are said to hold what it holds")
        for place, box in sharers.shares.of(member):
            number = sharers.numbers[place]
            found.append((number, _moved(box, holdings[number].box.offsets)))
    return found


def shared(holdings: Sequence[HeldBox]) -> dict[Grid, Sharers]:
    """Computes what each group of ranks shares.

    In an order that all its members come to.
    """
    together: dict[Grid, list[int]] = defaultdict(list)
    reserved: dict[Grid, int] = defaultdict(int)
    for number, held in enumerate(holdings):
        if held.same is None or held.same.count == 1 or held.box.volume == 0:
            continue
        if held.sharing == "split":
            together[held.same].append(number)
        else:
            reserved[held.same] += held.box.volume * held.itemsize
    found = {}
    for group, numbers in together.items():
        numbers.sort(key=lambda n: (holdings[n].name, holdings[n].box.offsets))
        shapes = [ShareShape(holdings[n].box.lengths, holdings[n].itemsize) for n in numbers]
        found[group] = Sharers(tuple(numbers), Shares(shapes, group.count, reserved[group]))
    return found


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(tuple(o + c for o, c in zip(box.offsets, by, strict=True)), box.lengths)
