"""Grids of ranks and how tensors lie on them: both ways against a brute-force oracle, and against torch's own answer."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.geometry import Box
from surefoot.geometry.sharding import Cut, Grid, ShardingRule


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Regular ones (a block of a larger world, its dimensions in any order), and lists of any ranks."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if draw(st.booleans()):
        ranks = draw(st.lists(st.integers(0, 30), min_size=prod(sizes), max_size=prod(sizes), unique=True))
        return Grid.of(ranks, sizes)
    order = draw(st.sampled_from(list(permutations(range(len(sizes))))))
    world = np.arange(prod(sizes) * 2).reshape(*sizes, 2)[..., draw(st.integers(0, 1))].transpose(order)
    return Grid.of(world.flatten().tolist(), world.shape)


@given(grids())
def test_a_grid_finds_its_ranks_again(grid: Grid) -> None:
    ranks = list(grid.ranks())
    assert len(set(ranks)) == grid.count
    for number, rank in enumerate(ranks):
        coordinate = grid.coordinate(rank)
        assert coordinate is not None
        assert (grid.rank(coordinate), grid.at(number), grid.number(rank)) == (rank, rank, number)
    for stranger in set(range(-2, 70)) - set(ranks):
        assert grid.coordinate(stranger) is None


@given(grids(), st.data())
def test_part_of_a_grid_is_a_grid_of_those_ranks(grid: Grid, data: st.DataObject) -> None:
    fixed = {d: data.draw(st.integers(0, n - 1)) for d, n in enumerate(grid.sizes) if data.draw(st.booleans())}
    kept = [r for r in grid.ranks() if all((grid.coordinate(r) or ())[d] == c for d, c in fixed.items())]
    assert list(grid.only(fixed).ranks()) == kept


def test_large_regular_meshes_stay_small() -> None:
    mesh = np.arange(16384).reshape(2, 1024, 8)
    grid = Grid.of(mesh.flatten().tolist(), mesh.shape)
    assert (grid.strides, grid.listed) == ((8192, 8, 1), ())
    assert grid.only({}) == Grid.world(16384)
    assert grid.only({2: 3}) == Grid(3, (2048,), (8,))


@st.composite
def rules(draw: st.DrawFn) -> tuple[ShardingRule, tuple[int, ...]]:
    grid = draw(grids())
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    cuts: list[Cut | None] = []
    for _ in grid.sizes:
        kind = draw(st.sampled_from(("same", "shard", "strided")))
        dimension = draw(st.integers(0, len(shape) - 1))
        cuts.append(None if kind == "same" else (dimension, draw(st.integers(1, 4)) if kind == "strided" else 1))
    return ShardingRule(grid, tuple(cuts)), shape


def held(rule: ShardingRule, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Numbers of the elements that a rank holds, by cutting an array of all of them."""
    whole = np.arange(prod(shape)).reshape(shape)
    coordinate = rule.grid.coordinate(rank)
    assert coordinate is not None
    for d, cut in enumerate(rule.cuts):
        if cut is None:
            continue
        dimension, factor = cut
        taken = []
        for stretch in chunks(list(range(whole.shape[dimension])), factor):
            taken += chunks(stretch, rule.grid.sizes[d])[coordinate[d]]
        whole = whole.take(taken, dimension)
    return whole


def chunks(items: list[int], parts: int) -> list[list[int]]:
    size = max(1, -(-len(items) // parts))
    return [items[i * size : (i + 1) * size] for i in range(parts)]


@given(rules())
def test_the_parts_of_a_rank_are_what_cutting_the_tensor_leaves(
    given_rule: tuple[ShardingRule, tuple[int, ...]],
) -> None:
    rule, shape = given_rule
    whole = np.arange(prod(shape)).reshape(shape)
    for rank in rule.grid.ranks():
        wanted = held(rule, shape, rank)
        assert rule.local_shape(shape, rank) == wanted.shape
        found = np.full(wanted.shape, -1)
        for part in rule.parts(shape, rank):
            place = tuple(slice(o, o + n) for o, n in zip(part.local, part.box.lengths, strict=True))
            source = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.lengths, strict=True))
            found[place] = whole[source]
        assert np.array_equal(found, wanted)
        for other in rule.same(rank).ranks():
            assert np.array_equal(held(rule, shape, other), wanted)


@given(rules(), st.data())
def test_holders_are_those_who_hold_something_of_the_box(
    given_rule: tuple[ShardingRule, tuple[int, ...]], data: st.DataObject
) -> None:
    rule, shape = given_rule
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    lengths = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    wanted = set(
        np.arange(prod(shape))
        .reshape(shape)[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        .flatten()
        .tolist()
    )
    having = {r for r in rule.grid.ranks() if wanted & set(held(rule, shape, r).flatten().tolist())}
    groups = list(rule.holders(shape, Box(offsets, lengths)))
    named = [rank for group in groups for rank in group.ranks()]
    assert len(named) == len(set(named))
    assert set(named) == having


@given(st.data())
def test_torch_says_the_same(data: st.DataObject) -> None:
    pytest.importorskip("torch")
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    cuts: list[Cut | None] = []
    placements = []
    for _ in sizes:
        kind, dimension = data.draw(st.sampled_from("rst")), data.draw(st.integers(0, len(shape) - 1))
        factor = data.draw(st.integers(2, 3))
        cuts.append({"r": None, "s": (dimension, 1), "t": (dimension, factor)}[kind])
        placements.append(
            {"r": Replicate(), "s": Shard(dimension), "t": _StridedShard(dimension, split_factor=factor)}[kind]
        )
    rule = ShardingRule(Grid.of(list(range(prod(sizes))), sizes), tuple(cuts))
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        lengths, offsets = _compute_local_shape_and_global_offset(shape, tuple(sizes), list(coordinate), placements)
        assert rule.local_shape(shape, rank) == tuple(lengths)
        if prod(lengths):
            assert rule.parts(shape, rank)[0].box.offsets == tuple(offsets)


def test_a_stranger_to_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 9 is not one of"):
        ShardingRule.replicated(Grid.world(4)).same(9)
