"""Builds a rank's layout from boxes, and stream blocks from a layout.

Called by `state` when the program's structure is known, by the drain (which blocks to hash) and by restore.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from math import prod

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from surefoot.errors import Corrupt, ProtocolError, StateMismatch
from surefoot.geometry.box import Box, Tiling, block_shape, chunk_starts
from surefoot.geometry.sharding import Grid, HeldBox, ShardingRule, Sharers, Sharing, saved_boxes, shared
from surefoot.protocol.checkpoints.records import (
    MAX_CHUNK_BYTES,
    Layout,
    Piece,
    Spread,
    SpreadRule,
    TensorLayout,
    encode_tensor,
)

# ---- digests ---------------------------------------------------------------------------------------------------------
# Computes block digests: xxh3_64, 8 little-endian bytes each, in stream order. Called by the drain (to make the table)
# and by restore (to check what it read). Nothing here keeps state, so any number of threads may hash parts of one
# stream; buffers are read where they lie.

DIGEST_BYTES = 8


def digest(data: bytes | memoryview) -> str:
    """xxh3_64 as 16 hex digits: of layouts, digest tables and values."""
    return xxh3_64_hexdigest(data)


def block_digests(stream: memoryview, edges: Sequence[int], blocks: range) -> bytes:
    """Computes the digest table of these blocks of a stream.

    `edges[i]` is where block i begins, `edges[i + 1]` where it ends.
    """
    return _little_endian(_digests(stream, edges[blocks.start : blocks.stop + 1], 0)).tobytes()


def first_bad_block(data: memoryview, edges: Sequence[int], blocks: range, table: bytes) -> int | None:
    """Finds the first of adjacent blocks that does not match `table`.

    None if all match. `table` holds the digests of just these blocks. Raises ValueError if it has another number of
    them, or `data` another length: that is the caller's mistake, not a damaged copy.
    """
    bounds = edges[blocks.start : blocks.stop + 1]
    if len(table) != len(blocks) * DIGEST_BYTES or (blocks and len(data) != bounds[-1] - bounds[0]):
        raise ValueError(f"{len(data)} bytes are not those of blocks {blocks.start} to {blocks.stop}")
    if not blocks:
        return None
    found, wanted = _digests(data, bounds, bounds[0]), _little_endian(array("Q", table))
    if found == wanted:
        return None
    return next(number for number, one, other in zip(blocks, found, wanted, strict=True) if one != other)


def _digests(data: memoryview, bounds: Sequence[int], origin: int) -> array[int]:
    """Digests the blocks between these bounds; the loop that everything saved and restored goes through, so it is
    short."""
    one = xxh3_64_intdigest
    if origin:
        return array("Q", [one(data[a - origin : b - origin]) for a, b in pairwise(bounds)])
    return array("Q", [one(data[a:b]) for a, b in pairwise(bounds)])


def _little_endian(table: array[int]) -> array[int]:
    if sys.byteorder == "big":
        table.byteswap()
    return table


# ---- dtypes ----------------------------------------------------------------------------------------------------------
# Maps names of element types to their sizes, without importing torch.

ITEMSIZE = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element; StateMismatch for a type that is not saved."""
    size = ITEMSIZE.get(dtype)
    if size is None:
        raise StateMismatch(
            f"element type {dtype!r} cannot be saved: convert the tensor, or keep it out of the checkpoint"
        )
    return size


# ---- layouts ---------------------------------------------------------------------------------------------------------


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
    return -size, prod(tensor.shape) * size < MAX_CHUNK_BYTES


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
    if sum(lengths) != stream.layout.stream_bytes or any(not 0 < length <= MAX_CHUNK_BYTES for length in lengths):
        raise ProtocolError(
            f"layout record {name} has chunks that do not fill its stream, or of over {MAX_CHUNK_BYTES} bytes"
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


# ---- families of tensors ---------------------------------------------------------------------------------------------
# Derives the layouts of all ranks from the layout of one. A layout record says how each tensor is spread over the
# ranks. So a reader needs one record, not one of each rank: it asks here which ranks saved a box, and what those ranks'
# streams look like. Each answer is checked by the digest in that rank's manifest; where it differs (another version,
# other tensors) the record itself is read.

OWN = -1
"""In place of a rule: every rank has such a tensor of its own, with the rank in its name."""

MAX_KNOWN = 64
"""How many different holdings are remembered."""

MAX_BOXES = 4096
"""Of how many boxes of different tensors the holders are."""


def spread_rule(rule: ShardingRule) -> SpreadRule:
    """A rule as records have it."""
    return rule.grid.base, rule.grid.sizes, rule.grid.strides, rule.grid.listed, rule.cuts


class LayoutFamily:
    """Derives all ranks' layouts from the layout of rank `of`.

    ValueError for a layout without a Spread.
    """

    def __init__(self, layout: Layout, of: int) -> None:
        if layout.spread is None or len(layout.spread.rule_indices) != len(layout.tensors):
            raise ValueError("this layout does not say how its tensors are spread")
        self.layout = layout
        self._spread, self.of = layout.spread, of
        self._rules = [ShardingRule(Grid(*rule[:4]), rule[4]) for rule in self._spread.rules]
        self._number = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._lowest = frozenset(self._spread.unshared_tensors)
        self._cache: dict[tuple[tuple[Grid, ...], int | None], _Held] = {}
        self._servers: dict[tuple[int, tuple[int, ...], Box], list[tuple[Grid, int | None]]] = {}

    def __contains__(self, name: str) -> bool:
        number = self._number.get(name)
        return number is not None and self._spread.rule_indices[number] != OWN

    def has(self, rank: int) -> bool:
        """Whether that rank may hold all of these tensors."""
        return all(rule.grid.coordinate(rank) is not None for rule in self._rules)

    def everywhere(self, world_size: int) -> bool:
        """Whether that is so of every rank of a world."""
        return all(rule.grid.count >= world_size for rule in self._rules)

    def stream(self, rank: int) -> Stream:
        """The stream of a rank that holds these tensors and no others."""
        held = self._holdings_of(rank)
        boxes: dict[str, list[Box]] = defaultdict(list)
        for number, box in saved_boxes(held.holdings, rank, held.groups):
            boxes[held.holdings[number].name].append(box)
        parts = []
        for name, mine in boxes.items():
            tensor = held.tensors[name]
            parts.append(TensorParts(name, tensor.dtype, tensor.shape, tuple(sorted(mine, key=lambda b: b.offsets))))
        return held.with_nothing_else(build_layout(parts), self._spread)

    def savers(self, name: str, wanted: Box) -> set[int]:
        """Ranks that saved elements of `wanted` (and perhaps a few neighbours that did not)."""
        number = self._number[name]
        found: set[int] = set()
        for group, alone in self._groups_holding(
            self._spread.rule_indices[number], self.layout.tensors[number].shape, wanted
        ):
            if alone is not None or number in self._lowest:
                found.add(group.at(0) if alone is None else alone)
                continue
            held = self._holdings_of(group.at(0))
            sharers = held.groups[group]
            for place in held.name_positions(group)[name]:
                holding = held.holdings[sharers.numbers[place]]
                shared_box = wanted.intersect(holding.box)
                if shared_box is not None:
                    members = sharers.shares.members(place, shared_box.relative_to(holding.box.offsets))
                    found.update(group.at(member) for member in members)
        return found

    def _groups_holding(self, which: int, shape: tuple[int, ...], wanted: Box) -> list[tuple[Grid, int | None]]:
        """Groups of ranks that hold elements of `wanted`, and the rank of those that are one; many tensors are alike."""
        key = (which, shape, wanted)
        if key not in self._servers:
            if len(self._servers) >= MAX_BOXES:
                self._servers.clear()
            groups = self._rules[which].servers(shape, wanted)
            self._servers[key] = [(group, group.at(0) if group.count == 1 else None) for group in groups]
        return self._servers[key]

    def _holdings_of(self, rank: int) -> _Held:
        """What a rank holds; ranks that hold the same share one object."""
        sames = tuple(rule.same(rank) for rule in self._rules)
        key = (sames, rank if OWN in self._spread.rule_indices else None)
        if key not in self._cache:
            if len(self._cache) >= MAX_KNOWN:
                self._cache.clear()
            self._cache[key] = self._work_out(rank, sames)
        return self._cache[key]

    def _work_out(self, rank: int, sames: tuple[Grid, ...]) -> _Held:
        holdings: list[HeldBox] = []
        tensors: dict[str, TensorLayout] = {}
        boxes: dict[tuple[int, tuple[int, ...]], list[Box]] = {}  # many tensors have one shape
        for number, (tensor, which) in enumerate(zip(self.layout.tensors, self._spread.rule_indices, strict=True)):
            size = itemsize(tensor.dtype)
            if which == OWN:
                name = tensor.name.replace(f"local/{self.of}/", f"local/{rank}/", 1)
                tensors[name] = tensor
                holdings.append(HeldBox(name, Box.whole(tensor.shape), size, Grid.alone(rank), "lowest"))
                continue
            tensors[tensor.name] = tensor
            if (which, tensor.shape) not in boxes:
                boxes[which, tensor.shape] = [part.box for part in self._rules[which].parts(tensor.shape, rank)]
            sharing: Sharing = "lowest" if number in self._lowest else "split"
            holdings += [HeldBox(tensor.name, b, size, sames[which], sharing) for b in boxes[which, tensor.shape]]
        return _Held(holdings, tensors, shared(holdings))


class _Held:
    """The holdings of one rank, and of all that hold the same."""

    def __init__(self, holdings: list[HeldBox], tensors: dict[str, TensorLayout], groups: dict[Grid, Sharers]) -> None:
        self.holdings, self.tensors, self.groups = holdings, tensors, groups
        self._places: dict[Grid, dict[str, list[int]]] = {}
        names = sorted(tensors)
        self._number = {name: i for i, name in enumerate(names)}
        self._empty = [TensorLayout(name, tensors[name].dtype, tensors[name].shape, ()) for name in names]
        self._texts = [encode_tensor(tensor) for tensor in self._empty]

    def with_nothing_else(self, some: Layout, spread: Spread) -> Stream:
        """The layout of a rank that saves this much. Most tensors have no piece on most ranks: those are written once."""
        tensors, texts = self._empty.copy(), self._texts.copy()
        for tensor in some.tensors:
            number = self._number[tensor.name]
            tensors[number], texts[number] = tensor, encode_tensor(tensor)
        layout = Layout(tuple(tensors), some.chunk_starts, some.stream_bytes, spread)
        return Stream(layout, layout.to_json(texts))

    def name_positions(self, group: Grid) -> dict[str, list[int]]:
        """Where each name stands among what the group shares."""
        if group not in self._places:
            found: dict[str, list[int]] = defaultdict(list)
            for place, number in enumerate(self.groups[group].numbers):
                found[self.holdings[number].name].append(place)
            self._places[group] = found
        return self._places[group]
