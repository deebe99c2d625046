"""Cuts a box into blocks, the units that are hashed and verified.

Pure. Tiles as in chunked array formats (HDF5, Zarr): a reshard verifies and reads only the blocks that it needs. Blocks
are in row-major order of tiles; the elements of a block are row-major; tiles at the far edges are clipped. So a row of
blocks along the last dimension is one contiguous run of bytes, and a byte's block, a block's bytes and a box's blocks
all follow by division, without a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from surefoot.geometry.box import Box

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are one block; flat pieces are cut into blocks of it."""

WIDE_ROW_BYTES = 16 * 1024
"""Rows wider than this get tiles of 32 KiB instead of 16 KiB: the waste at an edge matters less, the digests more."""

TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Names contiguous blocks of a tiling.

    `first` to `first + count`; contiguous in bytes, from `start` to `stop` within the piece.
    """

    first: int
    count: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Cuts a piece of a tensor into tiles.

    `lengths` and `tile` are in elements, `itemsize` is one element in bytes.
    """

    lengths: tuple[int, ...]
    tile: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.tile) or any(t < 1 for t in self.tile) or self.itemsize < 1:
            raise ValueError(
                f"lengths {self.lengths} cannot be cut into tiles {self.tile} of {self.itemsize}-byte items:"
                " give one tile length of at least 1 per dimension"
            )

    @property
    def tiles(self) -> tuple[int, ...]:
        """Number of tiles along each dimension."""
        return tuple(ceil(n / t) for n, t in zip(self.lengths, self.tile, strict=True))

    @property
    def blocks(self) -> int:
        """Counts blocks: none of an empty piece, one of 0-d."""
        return prod(self.tiles)

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    def block_box(self, index: int) -> Box:
        """The elements of a block, counted from the piece's own corner."""
        return self._tile_box(self._coordinates(index))

    def block_start(self, index: int) -> int:
        """Returns the byte at which a block begins.

        Within the piece; the piece's size for the block after the last.
        """
        if index == self.blocks:
            return self.size_bytes
        before, height = 0, 1
        for d, (t, extent) in enumerate(zip(self._coordinates(index), self.tile, strict=True)):
            before += height * t * extent * prod(self.lengths[d + 1 :])
            height *= min(extent, self.lengths[d] - t * extent)
        return before * self.itemsize

    def block_bytes(self, index: int) -> int:
        return self.block_box(index).volume * self.itemsize

    def block_at(self, byte: int) -> int:
        """The block that holds byte `byte` of the piece."""
        if not 0 <= byte < self.size_bytes:
            raise ValueError(f"byte {byte} is not in a piece of {self.size_bytes} bytes")
        element, height, index = byte // self.itemsize, 1, 0
        for d, (n, extent, count) in enumerate(zip(self.lengths, self.tile, self.tiles, strict=True)):
            band = height * prod(self.lengths[d + 1 :])  # elements per unit of this dimension
            t = element // (band * extent)
            element -= t * band * extent
            height *= min(extent, n - t * extent)
            index = index * count + t
        return index

    def block_sizes(self) -> Sequence[int]:
        """Lists the bytes of each block in order.

        Cheap for millions of them, since whole bands repeat.
        """
        return self._sizes(0, self.itemsize)

    def runs(self, wanted: Box) -> list[BlockRun]:
        """Finds the blocks that touch a box.

        `wanted` is counted from the piece's corner; as few contiguous runs as there are.
        """
        inside = wanted.intersect(Box.whole(self.lengths))
        if inside is None:
            return []
        counts = self.tiles
        low = [o // t for o, t in zip(inside.offsets, self.tile, strict=True)]
        high = [ceil(stop / t) for stop, t in zip(inside.stops, self.tile, strict=True)]
        split = max((d for d, n in enumerate(counts) if (low[d], high[d]) != (0, n)), default=0)
        behind = prod(counts[split + 1 :])
        width = (high[split] - low[split]) * behind if counts else 1
        found = []
        for lead in product(*(range(low[d], high[d]) for d in range(split))):
            first = 0
            for t, n in zip((*lead, *low[split : split + 1]), counts, strict=False):
                first = first * n + t
            first *= behind
            found.append(BlockRun(first, width, self.block_start(first), self.block_start(first + width)))
        return found

    def _sizes(self, dimension: int, scale: int) -> list[int]:
        if dimension == len(self.lengths):
            return [scale]
        n, extent = self.lengths[dimension], self.tile[dimension]
        whole, rest = divmod(n, extent)
        sizes = self._sizes(dimension + 1, scale * extent) * whole if whole else []
        return sizes + self._sizes(dimension + 1, scale * rest) if rest else sizes

    def _coordinates(self, index: int) -> tuple[int, ...]:
        if not 0 <= index < self.blocks:
            raise ValueError(f"block {index} is not one of {self.blocks}")
        found: list[int] = []
        for n in reversed(self.tiles):
            index, t = divmod(index, n)
            found.append(t)
        return tuple(reversed(found))

    def _tile_box(self, coordinates: tuple[int, ...]) -> Box:
        offsets = tuple(t * extent for t, extent in zip(coordinates, self.tile, strict=True))
        lengths = tuple(min(e, n - o) for e, n, o in zip(self.tile, self.lengths, offsets, strict=True))
        return Box(offsets, lengths)


def block_shape(lengths: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chooses the default tile of a piece.

    16 to 64 KiB that stay compact along every dimension it may be cut along later.

    Small pieces are one block, flat ones 64 KiB, matrices 32 rows × 512 bytes (1 KiB where rows are very wide), and
    rows narrower than that stay whole.
    """
    if prod(lengths) * itemsize <= SMALL_BYTES:
        return tuple(max(1, n) for n in lengths)
    if len(lengths) == 1:
        return (SMALL_BYTES // itemsize,)
    run = 1024 if lengths[-1] * itemsize > WIDE_ROW_BYTES else 512
    target = run * TILE_ROWS
    tile, size, limit, cut = [1] * len(lengths), itemsize, run, 0
    for d in reversed(range(len(lengths))):
        tile[d] = min(lengths[d], max(1, (limit if d else target) // size))
        size *= tile[d]
        if limit == run and tile[d] < lengths[d]:
            limit, cut = target, d  # the run is long enough; what stands outside it are rows
    tile[cut] = min(lengths[cut], tile[cut] * max(1, target // size))  # too few rows: a longer run instead
    return tuple(tile)
