"""Builds a rank's layout from boxes, and stream blocks from a layout.

Called by `state` once the program's structure is known, by the flush (which blocks to hash) and by restore.
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
# Computes block digests: xxh3_64, 8 little-endian bytes each, in stream order. Called by the flush (to build the table)
# and by restore (to verify the bytes it read). The functions keep no state, so any number of threads may hash parts of
# one stream; buffers are read in place.

DIGEST_BYTES = 8


def digest(data: bytes | memoryview) -> str:
    """Computes xxh3_64 as 16 hex digits, for layouts, digest tables and values."""
    return xxh3_64_hexdigest(data)


def block_digests(stream: memoryview, edges: Sequence[int], blocks: range) -> bytes:
    """Computes the digest table of these blocks of a stream.

    `edges[i]` is the stream offset where block i begins, `edges[i + 1]` where it ends.
    """
    return _to_little_endian(_compute_digests(stream, edges[blocks.start : blocks.stop + 1], 0)).tobytes()


def first_bad_block(data: memoryview, edges: Sequence[int], blocks: range, table: bytes) -> int | None:
    """Finds the first of adjacent blocks that does not match `table`.

    None if all match. `table` has the digests of just these blocks. Raises ValueError if `table` or `data` has another
    length: that is the caller's mistake, not a damaged copy.
    """
    bounds = edges[blocks.start : blocks.stop + 1]
    if len(table) != len(blocks) * DIGEST_BYTES or (blocks and len(data) != bounds[-1] - bounds[0]):
        raise ValueError(f"{len(data)} bytes are not those of blocks {blocks.start} to {blocks.stop}")
    if not blocks:
        return None
    digests, expected = _compute_digests(data, bounds, bounds[0]), _to_little_endian(array("Q", table))
    if digests == expected:
        return None
    return next(
        block
        for block, digest, expected_digest in zip(blocks, digests, expected, strict=True)
        if digest != expected_digest
    )


def _compute_digests(data: memoryview, bounds: Sequence[int], origin: int) -> array[int]:
    """Computes the digests of the blocks between these bounds.

    All saved and restored bytes pass this loop, so it does nothing else.
    """
    digest_of = xxh3_64_intdigest
    if origin:
        return array("Q", [digest_of(data[a - origin : b - origin]) for a, b in pairwise(bounds)])
    return array("Q", [digest_of(data[a:b]) for a, b in pairwise(bounds)])


def _to_little_endian(table: array[int]) -> array[int]:
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
    """Returns the bytes of one element; raises StateMismatch for a type that cannot be saved."""
    size = ITEMSIZE.get(dtype)
    if size is None:
        raise StateMismatch(
            f"element type {dtype!r} cannot be saved: convert the tensor, or keep it out of the checkpoint"
        )
    return size


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorParts:
    """Describes a tensor's global shape and the boxes of it that this rank saves, possibly none."""

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
    """Builds the layout of a rank that saves these tensors, given in any order.

    Tensors are listed by name; `spread` numbers them in that order. In the stream, pieces are sorted by falling item
    size, so that each is aligned without padding and can be copied from a typed view. Within one item size, tensors of
    at least one chunk come first: small changing tensors between frozen weights would otherwise change every chunk of
    those weights from save to save.
    """
    tensors_by_name = sorted(tensors, key=lambda t: t.name)
    position = 0
    tilings: list[Tiling] = []
    pieces: dict[str, list[Piece]] = {tensor.name: [] for tensor in tensors_by_name}
    if len(pieces) != len(tensors_by_name):
        duplicate = next(a.name for a, b in pairwise(tensors_by_name) if a.name == b.name)
        raise ValueError(f"two tensors are called {duplicate!r}: names must differ")
    for tensor in sorted(tensors_by_name, key=_stream_order):
        size = itemsize(tensor.dtype)
        for box in tensor.boxes:
            is_whole = box.lengths == tensor.shape and not any(box.offsets)
            if not is_whole and not Box.whole(tensor.shape).contains(box):
                raise ValueError(f"box {box} is not inside tensor {tensor.name} of shape {tensor.shape}")
            tiling, size_bytes, _ = _tiling_of(box.lengths, None, size)
            pieces[tensor.name].append(Piece(box.offsets, box.lengths, tiling.tile, position))
            tilings.append(tiling)
            position += size_bytes
    return Layout(
        tensors=tuple(TensorLayout(t.name, t.dtype, t.shape, tuple(pieces[t.name])) for t in tensors_by_name),
        chunk_starts=chunk_starts(tilings),
        stream_bytes=position,
        spread=spread,
    )


def _stream_order(tensor: TensorParts) -> tuple[int, bool]:
    """Returns the sort key of a tensor in the stream.

    It uses only facts that every rank knows, because each rank derives the others' streams.
    """
    size = itemsize(tensor.dtype)
    return -size, prod(tensor.shape) * size < MAX_CHUNK_BYTES


@lru_cache(maxsize=4096)
def _tiling_of(lengths: tuple[int, ...], tile: tuple[int, ...] | None, itemsize: int) -> tuple[Tiling, int, int]:
    """Returns a piece's tiling (`tile` None: the default one), its bytes and its number of blocks.

    Cached, because a model has many tensors of one shape.
    """
    tiling = Tiling(lengths, block_shape(lengths, itemsize) if tile is None else tile, itemsize)
    return tiling, tiling.size_bytes, tiling.blocks


def layout_digest(text: str) -> str:
    """Returns the name of a layout record: the digest of its canonical JSON."""
    return digest(text.encode())


def read_layout(name: str, text: str) -> Stream:
    """Parses the layout record called `name`.

    Raises Corrupt if its digest differs, ProtocolError if its chunks are impossible.
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
    """Locates a layout's pieces and blocks; immutable, created once per layout."""

    def __init__(self, layout: Layout, text: str | None = None) -> None:
        """`text`: the record's JSON, if known. Raises ProtocolError if the pieces do not fill the stream."""
        self.layout = layout
        self._text = text
        self.pieces = _place_pieces(layout)

    @cached_property
    def text(self) -> str:
        """The layout record, as JSON."""
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
        """Returns the numbers of the blocks in a chunk; no block is in two chunks."""
        starts = self.layout.chunk_starts
        stop = starts[number + 1] if number + 1 < len(starts) else self.layout.stream_bytes
        return range(bisect_left(self.edges, starts[number]), bisect_left(self.edges, stop))


def _place_pieces(layout: Layout) -> tuple[PlacedPiece, ...]:
    """Places the pieces in stream order and numbers their blocks."""
    placed: list[PlacedPiece] = []
    position = blocks = 0
    # an empty piece begins where the next one does: it must come first
    entries = [(p.stream_offset, 0 not in p.lengths, t, p) for t in layout.tensors for p in t.pieces]
    for start, _, tensor, piece in sorted(entries, key=lambda entry: entry[:2]):
        tiling, size_bytes, count = _tiling_of(piece.lengths, piece.tile, itemsize(tensor.dtype))
        if start != position:
            raise ProtocolError(f"a layout leaves bytes {position} to {start} unused or used twice, at {tensor.name}")
        placed.append(PlacedPiece(tensor, piece, tiling, blocks))
        position += size_bytes
        blocks += count
    if position != layout.stream_bytes:
        raise ProtocolError(f"a layout's pieces end at byte {position}, its stream at {layout.stream_bytes}")
    return tuple(placed)


# ---- families of tensors ---------------------------------------------------------------------------------------------
# Derives the layouts of all ranks from the layout of one. A layout record describes how each tensor is sharded over the
# ranks. So a reader needs one record instead of one per rank: it computes which ranks saved a box, and their streams.
# Each result is checked against the digest in that rank's manifest; if it differs (another version, other
# tensors), the rank's own record is read.

OWN = -1
"""Rule number for a per-rank tensor: every rank has its own, with the rank in its name."""

MAX_KNOWN = 64
"""Limit on cached holdings; beyond it the cache is cleared."""

MAX_BOXES = 4096
"""Limit on boxes whose groups of ranks are cached; beyond it the cache is cleared."""


def spread_rule(rule: ShardingRule) -> SpreadRule:
    """Converts a sharding rule to its form in layout records."""
    return rule.grid.base, rule.grid.sizes, rule.grid.strides, rule.grid.listed, rule.cuts


class LayoutFamily:
    """Derives all ranks' layouts from the layout of rank `of`.

    Raises ValueError for a layout without a Spread.
    """

    def __init__(self, layout: Layout, of: int) -> None:
        if layout.spread is None or len(layout.spread.rule_indices) != len(layout.tensors):
            raise ValueError("this layout does not say how its tensors are spread")
        self.layout = layout
        self._spread, self.of = layout.spread, of
        self._rules = [ShardingRule(Grid(*rule[:4]), rule[4]) for rule in self._spread.rules]
        self._index_by_name = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._lowest = frozenset(self._spread.unshared_tensors)
        self._holdings_by_key: dict[tuple[tuple[Grid, ...], int | None], _Holdings] = {}
        self._groups_by_box: dict[tuple[int, tuple[int, ...], Box], list[tuple[Grid, int | None]]] = {}

    def __contains__(self, name: str) -> bool:
        number = self._index_by_name.get(name)
        return number is not None and self._spread.rule_indices[number] != OWN

    def has(self, rank: int) -> bool:
        """Returns whether a rank is in the grids of all of these tensors."""
        return all(rule.grid.coordinate(rank) is not None for rule in self._rules)

    def everywhere(self, world_size: int) -> bool:
        """Returns whether every rank of a world of this size is in all grids."""
        return all(rule.grid.count >= world_size for rule in self._rules)

    def stream(self, rank: int) -> Stream:
        """Computes the stream of a rank that has exactly these tensors."""
        holdings = self._holdings_of(rank)
        boxes: dict[str, list[Box]] = defaultdict(list)
        for number, box in saved_boxes(holdings.holdings, rank, holdings.groups):
            boxes[holdings.holdings[number].name].append(box)
        parts = []
        for name, own_boxes in boxes.items():
            tensor = holdings.tensors[name]
            parts.append(
                TensorParts(name, tensor.dtype, tensor.shape, tuple(sorted(own_boxes, key=lambda b: b.offsets)))
            )
        return holdings.with_nothing_else(build_layout(parts), self._spread)

    def savers(self, name: str, wanted: Box) -> set[int]:
        """Returns the ranks that saved elements of `wanted`, and perhaps a few neighbours that did not."""
        number = self._index_by_name[name]
        ranks: set[int] = set()
        for group, single_rank in self._groups_with(
            self._spread.rule_indices[number], self.layout.tensors[number].shape, wanted
        ):
            if single_rank is not None or number in self._lowest:
                ranks.add(group.at(0) if single_rank is None else single_rank)
                continue
            holdings = self._holdings_of(group.at(0))
            sharers = holdings.groups[group]
            for position in holdings.name_positions(group)[name]:
                holding = holdings.holdings[sharers.numbers[position]]
                shared_box = wanted.intersect(holding.box)
                if shared_box is not None:
                    members = sharers.shares.members(position, shared_box.relative_to(holding.box.offsets))
                    ranks.update(group.at(member) for member in members)
        return ranks

    def _groups_with(self, rule_number: int, shape: tuple[int, ...], wanted: Box) -> list[tuple[Grid, int | None]]:
        """Returns the groups of ranks with elements of `wanted`, each with its rank if there is only one.

        Cached, because many tensors have the same rule and shape.
        """
        key = (rule_number, shape, wanted)
        if key not in self._groups_by_box:
            if len(self._groups_by_box) >= MAX_BOXES:
                self._groups_by_box.clear()
            groups = self._rules[rule_number].servers(shape, wanted)
            self._groups_by_box[key] = [(group, group.at(0) if group.count == 1 else None) for group in groups]
        return self._groups_by_box[key]

    def _holdings_of(self, rank: int) -> _Holdings:
        """Returns the boxes that a rank has; ranks with the same boxes share one object."""
        same_grids = tuple(rule.same(rank) for rule in self._rules)
        key = (same_grids, rank if OWN in self._spread.rule_indices else None)
        if key not in self._holdings_by_key:
            if len(self._holdings_by_key) >= MAX_KNOWN:
                self._holdings_by_key.clear()
            self._holdings_by_key[key] = self._compute_holdings(rank, same_grids)
        return self._holdings_by_key[key]

    def _compute_holdings(self, rank: int, same_grids: tuple[Grid, ...]) -> _Holdings:
        """Computes the boxes that a rank has of every tensor in the layout."""
        holdings: list[HeldBox] = []
        tensors: dict[str, TensorLayout] = {}
        boxes: dict[tuple[int, tuple[int, ...]], list[Box]] = {}  # many tensors have one shape
        for number, (tensor, rule_number) in enumerate(
            zip(self.layout.tensors, self._spread.rule_indices, strict=True)
        ):
            size = itemsize(tensor.dtype)
            if rule_number == OWN:  # the tensor of another rank has that rank in its name
                name = tensor.name.replace(f"local/{self.of}/", f"local/{rank}/", 1)
                tensors[name] = tensor
                holdings.append(HeldBox(name, Box.whole(tensor.shape), size, Grid.alone(rank), "lowest"))
                continue
            tensors[tensor.name] = tensor
            if (rule_number, tensor.shape) not in boxes:
                boxes[rule_number, tensor.shape] = [
                    part.box for part in self._rules[rule_number].parts(tensor.shape, rank)
                ]
            sharing: Sharing = "lowest" if number in self._lowest else "split"
            holdings += [
                HeldBox(tensor.name, b, size, same_grids[rule_number], sharing)
                for b in boxes[rule_number, tensor.shape]
            ]
        return _Holdings(holdings, tensors, shared(holdings))


class _Holdings:
    """Contains the boxes of one rank, and of all ranks that have the same ones."""

    def __init__(self, holdings: list[HeldBox], tensors: dict[str, TensorLayout], groups: dict[Grid, Sharers]) -> None:
        self.holdings, self.tensors, self.groups = holdings, tensors, groups
        self._positions_by_group: dict[Grid, dict[str, list[int]]] = {}
        names = sorted(tensors)
        self._index_by_name = {name: i for i, name in enumerate(names)}
        self._empty = [TensorLayout(name, tensors[name].dtype, tensors[name].shape, ()) for name in names]
        self._tensor_texts = [encode_tensor(tensor) for tensor in self._empty]

    def with_nothing_else(self, nonempty: Layout, spread: Spread) -> Stream:
        """Completes a layout with all tensors of which the rank saves nothing.

        Most tensors have no piece on most ranks: their JSON is computed once.
        """
        tensors, texts = self._empty.copy(), self._tensor_texts.copy()
        for tensor in nonempty.tensors:
            number = self._index_by_name[tensor.name]
            tensors[number], texts[number] = tensor, encode_tensor(tensor)
        layout = Layout(tuple(tensors), nonempty.chunk_starts, nonempty.stream_bytes, spread)
        return Stream(layout, layout.to_json(texts))

    def name_positions(self, group: Grid) -> dict[str, list[int]]:
        """Maps each name to its positions among the boxes that the group shares."""
        if group not in self._positions_by_group:
            positions: dict[str, list[int]] = defaultdict(list)
            for position, number in enumerate(self.groups[group].numbers):
                positions[self.holdings[number].name].append(position)
            self._positions_by_group[group] = positions
        return self._positions_by_group[group]
