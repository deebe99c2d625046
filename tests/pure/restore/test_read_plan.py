"""Reads for any reshard: against a brute-force oracle over generated layouts, with every byte verified on the way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.fake_tiers import MemoryPlace
from support.saves import arrays, put_save, split, stream_of
from surefoot.errors import StateMismatch
from surefoot.format.layouts import Stream, TensorParts, build_layout
from surefoot.geometry import Box
from surefoot.protocol.identities import Checkpoint, RankSave
from surefoot.restore import CheckpointReader, Destination, ReadOptions, SaveSource, read_catalogue
from surefoot.restore.read_plan import WantedBox, balance_reads, order_copies, plan_reads

ITEMSIZES = {"float32": 4, "float64": 8, "uint8": 1, "int16": 2}


def source(place: MemoryPlace) -> SaveSource:
    return SaveSource(place.name, "memory", place.tier)


def destination(name: str, array: np.ndarray, shape: tuple[int, ...], box: Box) -> Destination:
    flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    return Destination(name, array.dtype.name, shape, box, memoryview(flat))


def cuts(draw: st.DrawFn, length: int, parts: int) -> list[tuple[int, int]]:
    """`length` cut into `parts` stretches, some of them empty."""
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *inner], [*inner, length], strict=True))


def shares(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[tuple[Box, ...]]:
    """Each rank's box: the tensor cut along one dimension, or (0-d, or by chance) whole on one rank."""
    if not shape or (draw(st.booleans()) and draw(st.booleans())):
        owner = draw(st.integers(0, ranks - 1))
        return [(Box.whole(shape),) if rank == owner else () for rank in range(ranks)]
    d = draw(st.integers(0, len(shape) - 1))
    return [
        (Box((*[0] * d, a, *[0] * (len(shape) - d - 1)), (*shape[:d], b - a, *shape[d + 1 :])),) if b > a else ()
        for a, b in cuts(draw, shape[d], ranks)
    ]


@pytest.mark.gate_only
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_reshard_gives_every_rank_exactly_its_elements(data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw  # type: ignore[assignment]  # a DataObject's draw takes the same strategies
    before, after = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    dims = st.sampled_from([1, 2, 3, 31, 33, 64, 130, 300])
    shapes = {f"t{i}": tuple(draw(st.lists(dims, max_size=3))) for i in range(draw(st.integers(1, 3)))}
    tensors = {name: array.astype(dtype) for name, array in arrays(draw(st.integers(0, 99)), shapes, "float64").items()}
    saved = {name: shares(draw, shape, before) for name, shape in shapes.items()}
    wanted = {name: shares(draw, shape, after) for name, shape in shapes.items()}
    place = MemoryPlace("memory:one")
    for rank in range(before):
        stream, stored = stream_of(tensors, {name: boxes[rank] for name, boxes in saved.items()})
        put_save(place.tier(), RankSave(1, 10, rank), before, stream, stored)
    for rank in range(after):
        boxes = [(name, box) for name, shares_ in wanted.items() for box in shares_[rank]]
        into = [np.zeros(box.lengths, dtype) for _, box in boxes]
        goals = [destination(n, a, shapes[n], b) for (n, b), a in zip(boxes, into, strict=True)]
        with CheckpointReader(
            Checkpoint(1, 10), read_catalogue([source(place)]), ReadOptions(reader_rank=rank, max_threads=2)
        ) as reader:
            reader.read(goals)
        for (name, box), found in zip(boxes, into, strict=True):
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
            assert np.array_equal(found, tensors[name][at]), (name, box)


def streams(shape: tuple[int, ...], ranks: int, dimension: int = 0) -> Mapping[int, Stream]:
    found = {}
    for rank in range(ranks):
        (box,) = split((shape[dimension],), ranks, rank)
        whole = [0] * len(shape)
        lengths = list(shape)
        whole[dimension], lengths[dimension] = box.offsets[0], box.lengths[0]
        parts = [TensorParts("w", "float32", shape, (Box(tuple(whole), tuple(lengths)),))]
        found[rank] = Stream(build_layout(parts))
    return found


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 3), (1, 4), (4, 4)])
def test_a_reshard_along_dimension_0_reads_hardly_more_than_it_needs(before: int, after: int) -> None:
    shape = (4096, 1024)
    saved = streams(shape, before)
    wanted_bytes = read_bytes = 0
    for rank in range(after):
        (box,) = split(shape, after, rank)
        planned = plan_reads([WantedBox("w", "float32", shape, box, 4)], saved)
        wanted_bytes += planned.wanted_bytes
        read_bytes += planned.read_bytes
    assert wanted_bytes == 4096 * 1024 * 4
    assert read_bytes / wanted_bytes < 1.05


def test_a_reshard_across_dimensions_reads_at_most_a_third_more() -> None:
    shape = (2048, 1024)
    saved = streams(shape, 3)
    boxes = [Box((0, 0), (2048, 341)), Box((0, 341), (2048, 341)), Box((0, 682), (2048, 342))]
    plans = [plan_reads([WantedBox("w", "float32", shape, box, 4)], saved) for box in boxes]
    assert sum(p.read_bytes for p in plans) / sum(p.wanted_bytes for p in plans) < 1.33


def test_ranges_never_leave_their_chunk_and_touching_ones_are_one_request() -> None:
    shape = (8192, 1024)
    saved = streams(shape, 2)
    planned = plan_reads([WantedBox("w", "float32", shape, Box.whole(shape), 4)], saved)
    chunks = sum(len(stream.layout.chunk_starts) for stream in saved.values())
    assert len(planned.ranges) == chunks
    for r in planned.ranges:
        assert r.offset + r.length <= saved[r.rank].layout.chunk_lengths()[r.chunk]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (WantedBox("other", "float32", (8, 8), Box.whole((8, 8)), 4), "tensor other is not in the checkpoint"),
        (WantedBox("w", "float32", (8, 9), Box.whole((8, 9)), 4), r"float32 \[8, 9\] in the program"),
        (WantedBox("w", "float64", (8, 8), Box.whole((8, 8)), 8), "float64"),
    ],
)
def test_a_tensor_that_is_not_there_as_wanted_is_refused_by_name(wanted: WantedBox, text: str) -> None:
    with pytest.raises(StateMismatch, match=text):
        plan_reads([wanted], streams((8, 8), 2))


def test_the_local_copy_is_preferred_and_the_others_share_the_rest_and_the_persistent_tier_is_last() -> None:
    copies = dict.fromkeys(range(4), (0, 1, 2, 3))
    sizes = dict.fromkeys(range(4), 100)
    local = order_copies(copies, frozenset({1}), frozenset({3}), sizes, seed=0)
    assert {order[0] for order in local.values()} == {1}
    balanced = order_copies(copies, frozenset(), frozenset({3}), sizes, seed=0)
    assert {order[0] for order in balanced.values()} == {0, 1, 2}
    assert {order[-1] for order in balanced.values()} == {3}
    first = {seed: order_copies({0: (0, 1, 2)}, frozenset(), frozenset(), {0: 1}, seed)[0][0] for seed in range(3)}
    assert set(first.values()) == {0, 1, 2}, "readers begin at different sources"


def test_reads_of_one_rank_save_begin_at_each_of_its_copies_in_memory_in_turn_and_keep_the_others_for_later() -> None:
    having = {0: (0, 1, 3), 1: (2, 0, 3)}
    reads = [(0, 100), (0, 100), (0, 50), (0, 50), (1, 10)]
    orders = balance_reads(reads, having, frozenset({3}))
    assert [order[0] for order in orders] == [0, 1, 0, 1, 2]
    assert all(
        order[-1] == 3 and sorted(order) == sorted(having[rank]) for order, (rank, _) in zip(orders, reads, strict=True)
    )
    assert balance_reads([(7, 1)], having, frozenset()) == [()], "a rank nobody has"


@pytest.mark.parametrize("width", [1024, 768, 1000, 96])
def test_a_chunk_of_a_matrix_is_placed_by_a_few_copies(width: int) -> None:
    saved = streams((4096, width), 1)
    planned = plan_reads([WantedBox("w", "float32", (4096, width), Box.whole((4096, width)), 4)], saved)
    assert planned.read_bytes == planned.wanted_bytes
    segments = [len(r.segments) for r in planned.ranges]
    # clipped tiles at the edge of each row keep rows apart
    assert max(segments) <= (4 if width != 1000 else 3 * 4096)
