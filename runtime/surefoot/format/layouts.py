"""Builds a rank's layout from boxes, and stream blocks from a layout.

Called by `state` when the program's structure is known, by the drain (which blocks to hash) and by restore.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from math import prod

from surefoot.errors import Corrupt, ProtocolError
from surefoot.format.digests import digest
from surefoot.format.dtypes import itemsize
from surefoot.geometry.box import Box
from surefoot.geometry.packing import chunk_starts
from surefoot.geometry.tiling import Tiling, block_shape
from surefoot.protocol.checkpoints.records import CHUNK_BYTES, Layout, Piece, Spread, TensorLayout


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor's global shape and the boxes this rank saves (maybe none)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece with its tensor, tiling and first block's number.

    Blocks are numbered as in the stream's digest table.
    """

    tensor: TensorLayout
    piece: Piece
    tiling: Tiling
    first_block: int


def build_layout(tensors: Iterable[TensorParts], spread: Spread | None = None) -> Layout:
    """Builds the layout of a rank that saves these, in any order.

    `spread` numbers the tensors by name. Tensors are listed by name. Their pieces follow each other in the stream by
    falling item size, so that each is aligned to its items without padding and can be copied to from a typed view. Of
    one item size tensors of a chunk and more come first: adapters, norms and counters between frozen weights would
    leave none of those weights' chunks unchanged from save to save.
    """
    named = sorted(tensors, key=lambda t: t.name)
    position = 0
    tilings: list[Tiling] = []
    pieces: dict[str, list[Piece]] = {tensor.name: [] for tensor in named}
    if len(pieces) != len(named):
        twice = next(a.name for a, b in pairwise(named) if a.name == b.name)
        raise ValueError(f"two tensors are called {twice!r}: names must differ")
    for tensor in sorted(named, key=_stream_order):
        size = itemsize(tensor.dtype)
        for box in tensor.boxes:
            whole = box.lengths == tensor.shape and not any(box.offsets)
            if not whole and not Box.whole(tensor.shape).contains(box):
                raise ValueError(f"box {box} is not inside tensor {tensor.name} of shape {tensor.shape}")
            tiling, size_bytes, _ = _tiled(box.lengths, None, size)
            pieces[tensor.name].append(Piece(box.offsets, box.lengths, tiling.tile, position))
            tilings.append(tiling)
            position += size_bytes
    return Layout(
        tensors=tuple(TensorLayout(t.name, t.dtype, t.shape, tuple(pieces[t.name])) for t in named),
        chunk_starts=chunk_starts(tilings),
        stream_bytes=position,
        spread=spread,
    )


def _stream_order(tensor: TensorParts) -> tuple[int, bool]:
    """Of what every rank knows of a tensor: each derives the others' streams."""
    size = itemsize(tensor.dtype)
    return -size, prod(tensor.shape) * size < CHUNK_BYTES


@lru_cache(maxsize=4096)
def _tiled(lengths: tuple[int, ...], tile: tuple[int, ...] | None, itemsize: int) -> tuple[Tiling, int, int]:
    """How a piece is cut, or is to be cut (None); its bytes and blocks. A model has many tensors of one shape."""
    tiling = Tiling(lengths, block_shape(lengths, itemsize) if tile is None else tile, itemsize)
    return tiling, tiling.size_bytes, tiling.blocks


def layout_digest(text: str) -> str:
    """The name of a layout record: the digest of its canonical JSON."""
    return digest(text.encode())


def read_layout(name: str, text: str) -> Stream:
    """Parses the layout record called `name`.

    Raises Corrupt if its digest differs, ProtocolError if its chunks cannot be.
    """
    if layout_digest(text) != name:
        raise Corrupt(f"layout record {name} does not match its digest; another copy is needed")
    stream = Stream(Layout.from_json(text))
    lengths = stream.layout.chunk_lengths()
    if sum(lengths) != stream.layout.stream_bytes or any(not 0 < length <= CHUNK_BYTES for length in lengths):
        raise ProtocolError(
            f"layout record {name} has chunks that do not fill its stream, or of over {CHUNK_BYTES} bytes"
        )
    return stream


class Stream:
    """Locates a layout's pieces and blocks; immutable, made once per layout."""

    def __init__(self, layout: Layout, text: str | None = None) -> None:
        """`text`: the record, if it is known. Raises ProtocolError where the pieces do not fill the stream."""
        self.layout = layout
        self._text = text
        self.pieces = _placed(layout)

    @cached_property
    def text(self) -> str:
        """The layout record."""
        return self.layout.to_json() if self._text is None else self._text

    @cached_property
    def digest(self) -> str:
        """The name of the layout record."""
        return layout_digest(self.text)

    @cached_property
    def edges(self) -> array[int]:
        """Stream offsets where blocks begin, then the end of the last."""
        sizes = chain.from_iterable(part.tiling.block_sizes() for part in self.pieces)
        return array("Q", list(accumulate(sizes, initial=0)))

    @property
    def blocks(self) -> int:
        """Number of blocks, and of entries in the digest table."""
        last = self.pieces[-1] if self.pieces else None
        return last.first_block + last.tiling.blocks if last else 0

    def blocks_of_chunk(self, number: int) -> range:
        """Numbers of the blocks in a chunk; no block is in two."""
        starts = self.layout.chunk_starts
        stop = starts[number + 1] if number + 1 < len(starts) else self.layout.stream_bytes
        return range(bisect_left(self.edges, starts[number]), bisect_left(self.edges, stop))


def _placed(layout: Layout) -> tuple[PlacedPiece, ...]:
    """The pieces in the order of the stream."""
    found: list[PlacedPiece] = []
    position = blocks = 0
    # an empty piece begins where the next one does: it must come first
    every = [(p.stream_offset, 0 not in p.lengths, t, p) for t in layout.tensors for p in t.pieces]
    for start, _, tensor, piece in sorted(every, key=lambda entry: entry[:2]):
        tiling, size_bytes, count = _tiled(piece.lengths, piece.tile, itemsize(tensor.dtype))
        if start != position:
            raise ProtocolError(f"a layout leaves bytes {position} to {start} unused or used twice, at {tensor.name}")
        found.append(PlacedPiece(tensor, piece, tiling, blocks))
        position += size_bytes
        blocks += count
    if position != layout.stream_bytes:
        raise ProtocolError(f"a layout's pieces end at byte {position}, its stream at {layout.stream_bytes}")
    return tuple(found)
