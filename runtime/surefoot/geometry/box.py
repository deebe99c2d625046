"""Defines an n-dimensional box of elements inside a tensor.

Pure; the rest of this package builds on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, Piece


@dataclass(frozen=True, slots=True)
class Box:
    """Describes a box of a tensor.

    `offsets` and `lengths` have one entry per dimension, in elements. A 0-d tensor is `Box((), ())`, with one element.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(f"a box has {len(self.offsets)} offsets and {len(self.lengths)} lengths: give one of each")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Returns the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last element, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Returns the elements in both boxes; None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(a, b) for a, b in zip(self.stops, other.stops, strict=True))
        lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, lengths) if all(n > 0 for n in lengths) else None

    def contains(self, other: Box) -> bool:
        """Returns whether every element of `other` is in this box."""
        return other.volume == 0 or self.intersect(other) == other

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Returns the same elements, counted from `origin` (the offsets of an enclosing box)."""
        return Box(tuple(o - begin for o, begin in zip(self.offsets, origin, strict=True)), self.lengths)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def box_of(piece: Piece) -> Box:
    """Returns the box of a saved piece in its tensor."""
    return Box(piece.offsets, piece.lengths)


# ---- tiling ----------------------------------------------------------------------------------------------------------
# Cuts a box into blocks, the units that are hashed and verified. Tiles as in chunked array formats (HDF5, Zarr): a
# reshard verifies and reads only the blocks that it needs. Blocks are in row-major order of tiles; the elements of a
# block are row-major; tiles at the far edges are clipped. So a row of blocks along the last dimension is one contiguous
# run of bytes, and a byte's block, a block's bytes and a box's blocks all follow by division, without a table.

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are one block; flat pieces are cut into blocks of it."""

WIDE_ROW_BYTES = 16 * 1024
"""Rows wider than this get tiles of 32 KiB instead of 16 KiB: the waste at an edge matters less, the digests more."""

TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Locates contiguous blocks of a tiling, `first` to `first + count`.

    `start` and `stop` are the bytes that they occupy within the piece.
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
        """Number of blocks: 0 for an empty piece, 1 for a 0-d one."""
        return prod(self.tiles)

    @property
    def size_bytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    def block_box(self, index: int) -> Box:
        """Returns the elements of a block, counted from the piece's own corner."""
        return self._tile_box(self._coordinates(index))

    def block_start(self, index: int) -> int:
        """Returns the byte of the piece at which a block begins.

        For the block after the last it is the piece's size.
        """
        if index == self.blocks:
            return self.size_bytes
        element_count, height = 0, 1
        for d, (t, extent) in enumerate(zip(self._coordinates(index), self.tile, strict=True)):
            element_count += height * t * extent * prod(self.lengths[d + 1 :])
            height *= min(extent, self.lengths[d] - t * extent)
        return element_count * self.itemsize

    def block_bytes(self, index: int) -> int:
        return self.block_box(index).volume * self.itemsize

    def block_at(self, byte: int) -> int:
        """Returns the block that contains byte `byte` of the piece."""
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

        This is cheap for millions of blocks, since whole bands repeat.
        """
        return self._sizes_below(0, self.itemsize)

    def runs(self, wanted: Box) -> list[BlockRun]:
        """Finds the blocks that touch a box.

        `wanted` is counted from the piece's corner. Returns the fewest contiguous runs.
        """
        clipped = wanted.intersect(Box.whole(self.lengths))
        if clipped is None:
            return []
        # dimensions after `split` are covered completely, so that runs along `split` are contiguous
        counts = self.tiles
        low = [o // t for o, t in zip(clipped.offsets, self.tile, strict=True)]
        high = [ceil(stop / t) for stop, t in zip(clipped.stops, self.tile, strict=True)]
        split = max((d for d, n in enumerate(counts) if (low[d], high[d]) != (0, n)), default=0)
        blocks_per_step = prod(counts[split + 1 :])
        width = (high[split] - low[split]) * blocks_per_step if counts else 1
        block_runs = []
        for leading in product(*(range(low[d], high[d]) for d in range(split))):
            first = 0
            for t, n in zip((*leading, *low[split : split + 1]), counts, strict=False):
                first = first * n + t
            first *= blocks_per_step
            block_runs.append(BlockRun(first, width, self.block_start(first), self.block_start(first + width)))
        return block_runs

    def _sizes_below(self, dimension: int, scale: int) -> list[int]:
        if dimension == len(self.lengths):
            return [scale]
        n, extent = self.lengths[dimension], self.tile[dimension]
        whole_tiles, rest = divmod(n, extent)
        sizes = self._sizes_below(dimension + 1, scale * extent) * whole_tiles if whole_tiles else []
        return sizes + self._sizes_below(dimension + 1, scale * rest) if rest else sizes

    def _coordinates(self, index: int) -> tuple[int, ...]:
        if not 0 <= index < self.blocks:
            raise ValueError(f"block {index} is not one of {self.blocks}")
        coordinates: list[int] = []
        for n in reversed(self.tiles):
            index, t = divmod(index, n)
            coordinates.append(t)
        return tuple(reversed(coordinates))

    def _tile_box(self, coordinates: tuple[int, ...]) -> Box:
        offsets = tuple(t * extent for t, extent in zip(coordinates, self.tile, strict=True))
        lengths = tuple(min(e, n - o) for e, n, o in zip(self.tile, self.lengths, offsets, strict=True))
        return Box(offsets, lengths)


def block_shape(lengths: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chooses the default tile of a piece: 16 to 64 KiB, compact along every dimension.

    A compact tile keeps reads small however the tensor is resharded. Small pieces are one block. Flat pieces get tiles
    of 64 KiB, matrices 32 rows × 512 bytes (1 KiB for very wide rows); rows narrower than that are not cut.
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
            limit, cut = target, d  # the run is long enough; outer dimensions count rows
    tile[cut] = min(lengths[cut], tile[cut] * max(1, target // size))  # too few rows: a longer run instead
    return tuple(tile)


# ---- packing ---------------------------------------------------------------------------------------------------------
# Cuts a stream of pieces into chunks. No block straddles a chunk, so every block can be read and verified from one
# place.


def chunk_starts(tilings: Iterable[Tiling], limit: int = MAX_CHUNK_BYTES) -> tuple[int, ...]:
    """Cuts consecutive pieces into chunks.

    Returns:
        Stream offsets in bytes at which chunks begin; each chunk has at most `limit` bytes.
    """
    starts: list[int] = []
    free_bytes, position = 0, 0
    for tiling in tilings:
        done_bytes = 0
        while done_bytes < tiling.size_bytes:
            if tiling.size_bytes - done_bytes <= free_bytes:
                free_bytes -= tiling.size_bytes - done_bytes
                done_bytes = tiling.size_bytes
                continue
            fitting_bytes = (
                tiling.block_start(tiling.block_at(done_bytes + free_bytes)) - done_bytes
            )  # whole blocks that still go in
            if fitting_bytes > 0:
                done_bytes += fitting_bytes
            elif free_bytes == limit:
                largest = tiling.block_bytes(tiling.block_at(done_bytes))
                raise ValueError(f"a block of {largest} bytes is larger than a chunk of {limit}: use smaller tiles")
            starts.append(position + done_bytes)
            free_bytes = limit
        position += tiling.size_bytes
    return tuple(starts)


# ---- flat parameters -------------------------------------------------------------------------------------------------
# Converts ranges of a flattened tensor into boxes. Flat parameters and optimizer partitions consist of such ranges. A
# run of row-major elements is at most 2n − 1 boxes of n dimensions (the end of a row, whole rows, the beginning of a
# row, and so on inwards). Each box is contiguous in the flattened tensor, so a rank names its part without the others.


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Converts elements `start` to `stop` of the flattened tensor to boxes, in order."""
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row_elements = prod(shape[1:])
    first_row, head_start = divmod(start, row_elements)
    last_row, tail_stop = divmod(stop, row_elements)
    if first_row == last_row:
        return _row_boxes(shape, first_row, head_start, tail_stop)
    boxes = _row_boxes(shape, first_row, head_start, row_elements) if head_start else []
    first_whole_row = first_row + (head_start > 0)
    if first_whole_row < last_row:
        boxes.append(Box((first_whole_row, *(0,) * (len(shape) - 1)), (last_row - first_whole_row, *shape[1:])))
    return boxes + _row_boxes(shape, last_row, 0, tail_stop) if tail_stop else boxes


def _row_boxes(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    inner = flat_boxes(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.lengths)) for box in inner]


def flat_hull(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Returns the smallest flat range (start, stop) that contains all of a box.

    The box must not be empty.
    """
    first = last = 0
    for n, offset, length in zip(shape, box.offsets, box.lengths, strict=True):
        first, last = first * n + offset, last * n + offset + length - 1
    return first, last + 1
