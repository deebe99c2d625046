"""Tests of `geometry.box`."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.reads import reads
from surefoot.geometry.box import SMALL_BYTES, Box, Tiling, block_shape, box_of, chunk_starts, flat_boxes, flat_hull
from surefoot.geometry.sharding import WHOLE_BYTES, Shares, ShareShape, shard_box, torch_chunk_range
from surefoot.protocol.checkpoints.records import MAX_CHUNK_BYTES, Piece

# ---- shares ----------------------------------------------------------------------------------------------------------
# Shares, shards and reads of another world size against a brute-force oracle that visits every element.


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))))


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=3).map(
    lambda spans: Box(tuple(o for o, _ in spans), tuple(n for _, n in spans))
)


@given(st.data())
def test_intersection_is_the_common_elements(data: st.DataObject) -> None:
    a = data.draw(boxes)
    b = data.draw(boxes.filter(lambda box: len(box.lengths) == len(a.lengths)))
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert a.contains(b) == (elements(b) <= elements(a))
    assert len(elements(a)) == a.volume


@given(st.integers(0, 200), st.integers(1, 40))
def test_parts_cover_a_length_once_and_in_order(length: int, parts: int) -> None:
    position = 0
    for index in range(parts):
        start, size = torch_chunk_range(length, parts, index)
        assert start == position
        assert size >= 0
        position += size
    assert position == length


def test_shards_are_those_of_torch_chunk() -> None:
    assert [shard_box((7, 3), 0, 3, i) for i in range(3)] == [
        Box((0, 0), (3, 3)),
        Box((3, 0), (3, 3)),
        Box((6, 0), (1, 3)),
    ]
    assert [shard_box((4, 5), 1, 4, i).lengths for i in range(4)] == [(4, 2), (4, 2), (4, 1), (4, 0)]


shapes = st.lists(st.lists(st.sampled_from((0, 1, 2, 5, 33, 700)), max_size=3).map(tuple), max_size=12)


@given(shapes, st.integers(1, 9), st.sampled_from((0, 1, 5000, 10**7)))
def test_replicas_together_save_every_element_once_and_alike_many_bytes(
    many: list[tuple[int, ...]], ranks: int, reserved: int
) -> None:
    tensors = [ShareShape(shape, 4) for shape in many]
    shares = Shares(tensors, ranks, reserved)
    parts = [shares.of(member) for member in range(ranks)]
    for number, tensor in enumerate(tensors):
        boxes = [box for mine in parts for n, box in mine if n == number]
        assert sum(box.volume for box in boxes) * 4 == tensor.size_bytes
        assert all(a.intersect(b) is None for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(Box.whole(tensor.lengths).contains(box) and box.volume for box in boxes)
    loads = [sum(box.volume * 4 for _, box in mine) for mine in parts]
    if reserved < (sum(loads) + reserved) // ranks:
        loads[0] += reserved
    else:
        assert loads[0] == 0 or ranks == 1
        loads = loads[1:] or loads
    assert max(loads) - min(loads) <= 2 * WHOLE_BYTES


@given(shapes.filter(bool), st.integers(1, 70), st.data())
def test_whoever_saves_part_of_a_box_is_found(many: list[tuple[int, ...]], ranks: int, data: st.DataObject) -> None:
    shares = Shares([ShareShape(shape, 400) for shape in many], ranks)
    number = data.draw(st.integers(0, len(many) - 1))
    offsets = tuple(data.draw(st.integers(0, n)) for n in many[number])
    lengths = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(many[number], offsets, strict=True))
    box = Box(offsets, lengths)
    if not box.volume:
        return
    saving = {
        member
        for member in range(ranks)
        for n, part in shares.of(member)
        if n == number and part.intersect(box) is not None
    }
    assert saving <= set(shares.members(number, box))


def test_one_long_row_is_shared_too() -> None:
    shares = Shares([ShareShape((1, 10_000_000), 4), ShareShape((3, 7), 4)], 8)
    loads = [sum(box.volume for _, box in shares.of(member)) for member in range(8)]
    assert max(loads) / min(loads) < 1.02


def test_thousands_of_replicas_share_only_what_is_worth_sharing() -> None:
    shares = Shares([ShareShape((4096, 4096), 4)] * 120, 16384)
    saving = [member for member in range(16384) if shares.of(member)]
    assert len(saving) == shares.sharers == 120
    assert max(b - a for a, b in pairwise(saving)) < 140, "spread over all of them"


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.data())
def test_a_range_of_a_flattened_tensor_is_few_boxes_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = list(product(*(range(n) for n in shape)))
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order)))
    boxes = flat_boxes(shape, start, stop)
    inside = [e for box in boxes for e in sorted(elements(box))]
    assert inside == order[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        low, high = flat_hull(shape, box)
        assert sorted(elements(box)) == order[low:high]


@given(st.data())
def test_reads_of_another_world_cover_what_is_wanted_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    itemsize, parts = 2, data.draw(st.integers(1, 4))
    pieces, position = [], 0
    for index in range(parts if shape else 1):
        box = shard_box(shape, 0, parts, index) if shape else Box((), ())
        tile = tuple(data.draw(st.integers(1, 4)) for _ in shape)
        pieces.append(Piece(box.offsets, box.lengths, tile, position))
        position += box.volume * itemsize
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    wanted = Box(offsets, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))
    count: Counter[tuple[int, ...]] = Counter()
    for read in reads(wanted, pieces, itemsize):
        count.update(elements(read.box))
        tiling = Tiling(read.piece.lengths, read.piece.tile, itemsize)
        there = {
            tuple(o + e for o, e in zip(read.piece.offsets, element, strict=True))
            for run in read.runs
            for index in range(run.first, run.first + run.count)
            for element in elements(tiling.block_box(index))
        }
        assert elements(read.box) <= there <= elements(box_of(read.piece))
        assert read.size_bytes == len(there) * itemsize
    assert count == Counter(dict.fromkeys(elements(wanted), 1))


def test_reading_a_matrix_along_either_dimension_wastes_little() -> None:
    lengths, itemsize = (4096, 1024), 4
    piece = Piece((0, 0), lengths, block_shape(lengths, itemsize), 0)
    for wanted in (Box((1365, 0), (1366, 1024)), Box((0, 341), (4096, 342))):
        (read,) = reads(wanted, [piece], itemsize)
        assert read.size_bytes < 1.5 * wanted.volume * itemsize


# ---- tiling ----------------------------------------------------------------------------------------------------------
# Tilings, packing and block shapes against a brute-force oracle that visits every element.


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    lengths = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    tile = tuple(draw(st.integers(1, 7)) for _ in lengths)
    return Tiling(lengths, tile, draw(st.sampled_from((1, 2, 4, 8))))


def elements_tiling(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))))


def oracle(tiling: Tiling) -> list[list[tuple[int, ...]]]:
    """Each block as the list of its elements, in stream order, found by looking at every tile."""
    grid = product(*(range(0, n, t) for n, t in zip(tiling.lengths, tiling.tile, strict=True)))
    blocks = []
    for corner in grid:
        spans = zip(corner, tiling.tile, tiling.lengths, strict=True)
        blocks.append(list(product(*(range(o, min(o + t, n)) for o, t, n in spans))))
    return [block for block in blocks if block] if prod(tiling.lengths) else []


@given(tilings())
def test_blocks_hold_the_elements_and_bytes_that_the_oracle_finds(tiling: Tiling) -> None:
    expected = oracle(tiling)
    assert tiling.blocks == len(expected)
    position = 0
    for index, block in enumerate(expected):
        assert elements_tiling(tiling.block_box(index)) == block
        assert tiling.block_start(index) == position
        assert tiling.block_bytes(index) == len(block) * tiling.itemsize
        for byte in range(position, position + tiling.block_bytes(index)):
            assert tiling.block_at(byte) == index
        position += tiling.block_bytes(index)
    assert tiling.block_start(tiling.blocks) == position == tiling.size_bytes
    assert list(tiling.block_sizes()) == [len(block) * tiling.itemsize for block in expected]


@given(tilings(), st.data())
def test_runs_are_exactly_the_blocks_that_touch_the_wanted_box(tiling: Tiling, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, n)) for n in tiling.lengths)
    lengths = tuple(data.draw(st.integers(0, n - o + 1)) for n, o in zip(tiling.lengths, offsets, strict=True))
    wanted = set(elements_tiling(Box(offsets, lengths)))
    expected = [i for i, block in enumerate(oracle(tiling)) if wanted & set(block)]
    runs = tiling.runs(Box(offsets, lengths))
    assert [i for run in runs for i in range(run.first, run.first + run.count)] == expected
    assert [(run.start, run.stop) for run in runs] == [
        (tiling.block_start(run.first), tiling.block_start(run.first + run.count)) for run in runs
    ]
    assert all(a.first + a.count < b.first for a, b in pairwise(runs)), "neighbours are one run"


@given(st.lists(tilings(), max_size=5), st.integers(0, 400))
def test_no_block_straddles_a_chunk_and_chunks_are_full(parts: list[Tiling], spare: int) -> None:
    sizes = [size for tiling in parts for size in tiling.block_sizes()]
    limit = max([1, *sizes]) + spare
    starts = chunk_starts(parts, limit)
    total = sum(sizes)
    assert bool(starts) == bool(total)
    ends = [*starts[1:], total] if starts else []
    assert all(0 < end - start <= limit for start, end in zip(starts, ends, strict=True))
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert set(starts) <= set(edges)
    for end in ends[:-1]:
        start, following = starts[ends.index(end)], min(edge for edge in edges if edge > end)
        assert following - start > limit, "one more block would have fitted"


def test_a_block_larger_than_a_chunk_is_refused_by_size() -> None:
    with pytest.raises(ValueError, match="a block of 32 bytes is larger than a chunk of 16"):
        chunk_starts([Tiling((8,), (8,), 4)], limit=16)


@given(st.lists(st.integers(0, 3000), max_size=4).map(tuple), st.sampled_from((1, 2, 4, 8, 16)))
def test_default_blocks_are_never_larger_than_a_small_piece(lengths: tuple[int, ...], itemsize: int) -> None:
    tile = block_shape(lengths, itemsize)
    assert len(tile) == len(lengths)
    assert prod(min(t, n) for t, n in zip(tile, lengths, strict=True)) * itemsize <= SMALL_BYTES < MAX_CHUNK_BYTES
    if prod(lengths) * itemsize > 16 * SMALL_BYTES and max(lengths) >= 64:
        tiling = Tiling(lengths, tile, itemsize)
        assert tiling.blocks <= tiling.size_bytes // 2048, "blocks are not so small that digests outweigh data"


@pytest.mark.parametrize(
    ("lengths", "itemsize", "tile"),
    [
        ((), 4, ()),
        ((0, 7), 4, (1, 7)),
        ((100, 100), 4, (100, 100)),
        ((1_000_000,), 4, (16384,)),
        ((4096, 1024), 4, (32, 128)),
        ((4096, 1024), 2, (32, 256)),
        ((4096, 4096), 4, (32, 128)),
        ((4096, 8192), 4, (32, 256)),
        ((1_000_000, 4), 4, (1024, 4)),
        ((512, 512, 3, 3), 4, (32, 14, 3, 3)),
        ((2, 3, 1_000_000), 4, (2, 3, 1280)),
    ],
)
def test_the_default_block_shape(lengths: tuple[int, ...], itemsize: int, tile: tuple[int, ...]) -> None:
    assert block_shape(lengths, itemsize) == tile
