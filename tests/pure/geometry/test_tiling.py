"""Tilings, packing and block shapes against a brute-force oracle that visits every element."""

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.geometry.box import SMALL_BYTES, Box, Tiling, block_shape, chunk_starts
from surefoot.protocol.checkpoints.records import CHUNK_BYTES


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    lengths = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    tile = tuple(draw(st.integers(1, 7)) for _ in lengths)
    return Tiling(lengths, tile, draw(st.sampled_from((1, 2, 4, 8))))


def elements(box: Box) -> list[tuple[int, ...]]:
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
        assert elements(tiling.block_box(index)) == block
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
    wanted = set(elements(Box(offsets, lengths)))
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
    assert prod(min(t, n) for t, n in zip(tile, lengths, strict=True)) * itemsize <= SMALL_BYTES < CHUNK_BYTES
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
