"""Describes sets of ranks as grids, small for any number of ranks.

Pure. A device mesh and a data-parallel group are grids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


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
    def world(cls, size: int) -> Grid:
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
