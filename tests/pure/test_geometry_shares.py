"""Shares, shards and reads of another world size against a brute-force oracle that visits every element."""

from collections import Counter
from itertools import product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from surefoot.geometry.box import Box, box_of
from surefoot.geometry.reads import reads
from surefoot.geometry.shares import SPLIT_BYTES, Shape, chunked, near_equal, shard_box, split_replicated
from surefoot.geometry.tiling import Tiling, block_shape
from surefoot.protocol.records import Piece


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
    for cut in (chunked, near_equal):
        position = 0
        for index in range(parts):
            start, size = cut(length, parts, index)
            assert start == position
            assert size >= 0
            position += size
        assert position == length
    sizes = {near_equal(length, parts, i)[1] for i in range(parts)}
    assert max(sizes) - min(sizes) <= 1


def test_shards_are_those_of_torch_chunk() -> None:
    assert [shard_box((7, 3), 0, 3, i) for i in range(3)] == [
        Box((0, 0), (3, 3)),
        Box((3, 0), (3, 3)),
        Box((6, 0), (1, 3)),
    ]
    assert [shard_box((4, 5), 1, 4, i).lengths for i in range(4)] == [(4, 2), (4, 2), (4, 1), (4, 0)]


shapes = st.lists(st.lists(st.sampled_from((0, 1, 2, 5, 33, 700)), max_size=3).map(tuple), max_size=12)


@given(shapes, st.integers(1, 6), st.randoms(use_true_random=False))
def test_replicas_together_save_every_element_once(many: list[tuple[int, ...]], ranks: int, shuffle: Random) -> None:
    tensors = [Shape(f"t{i}", shape, 4) for i, shape in enumerate(many)]
    shares = [split_replicated(tensors, ranks, index) for index in range(ranks)]
    other_order = tensors.copy()
    shuffle.shuffle(other_order)
    assert shares == [split_replicated(other_order, ranks, index) for index in range(ranks)]
    for tensor in tensors:
        parts = [share[tensor.name] for share in shares if tensor.name in share]
        assert sum(part.volume for part in parts) * 4 == tensor.size_bytes
        assert all(a.intersect(b) is None for i, a in enumerate(parts) for b in parts[:i])
        assert all(Box.whole(tensor.shape).contains(part) and part.volume for part in parts)
    loads = [sum(box.volume * 4 for box in share.values()) for share in shares]
    rows = max((t.size_bytes // t.shape[0] for t in tensors if t.size_bytes >= SPLIT_BYTES), default=0)
    whole = [t.size_bytes for t in tensors if t.size_bytes < SPLIT_BYTES or t.shape[0] < ranks]
    assert max(loads) - min(loads) <= max(whole, default=0) + rows * len(tensors)


def test_large_replicas_are_cut_by_rows_and_the_extra_rows_take_turns() -> None:
    tensors = [Shape("a", (1001, 1024), 4), Shape("b", (1001, 1024), 4)]
    shares = [split_replicated(tensors, 2, index) for index in range(2)]
    assert [sum(box.lengths[0] for box in share.values()) for share in shares] == [1001, 1001]


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
