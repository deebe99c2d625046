"""Describes how a tensor is sharded or replicated over a grid.

Pure. The same arithmetic answers both ways: which boxes a rank holds, and which ranks hold a box. The second is what
lets a reader of a large checkpoint look at the few ranks that it needs and at no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from surefoot.geometry.box import Box
from surefoot.geometry.grids import Grid
from surefoot.geometry.shares import chunked

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

    def holders(self, shape: tuple[int, ...], wanted: Box) -> Iterator[Grid]:
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
            for deeper in self._reaching(_taken(spans, parts, cut[1], c), rest, wanted):
                yield {grid_dimension: c, **deeper}

    def _spans(self, shape: tuple[int, ...], rank: int) -> list[list[Span]]:
        coordinate = self._coordinate(rank)
        found: list[list[Span]] = [[(0, n)] for n in shape]
        for d, cut in enumerate(self.cuts):
            if cut is not None:
                found[cut[0]] = _taken(found[cut[0]], self.grid.sizes[d], cut[1], coordinate[d])
        return found

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        coordinate = self.grid.coordinate(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not one of {self.grid}")
        return coordinate


def _taken(spans: list[Span], parts: int, factor: int, index: int) -> list[Span]:
    """Part `index` of each of `factor` equal stretches of what the spans hold."""
    total = sum(n for _, n in spans)
    found: list[Span] = []
    for stretch in range(factor):
        begin, length = chunked(total, factor, stretch)
        start, size = chunked(length, parts, index)
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
        begin, length = chunked(total, factor, stretch)
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
